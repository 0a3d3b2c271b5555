//! What a check finds.

use std::fmt;

/// What may be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    No,
    /// Clusters that nothing references become free.
    Leaks,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// A cluster is referenced more often than its refcount says: it may be overwritten.
    RefcountTooLow,
    /// A cluster is referenced less often than its refcount says: it is never free.
    Leak,
    /// A COPIED flag and the refcount contradict each other.
    Copied,
    /// An entry of an L1 or L2 table is not what the format allows.
    BadEntry,
    /// Something lies beyond the end of the file.
    OutOfRange,
    /// Metadata shares its clusters with something else.
    Overlap,
    /// A table cannot be followed.
    BadTable,
    /// The refcount table or a refcount block cannot be used.
    RefcountStructure,
    /// The format does not allow it, and nothing is in danger: all references are known.
    Harmless,
    /// The host could not read it.
    Unreadable,
}

impl FindingKind {
    /// What a clean program may leave when it dies under lazy refcounts: told by counting, and
    /// repaired by it.
    pub(super) fn is_derived(self) -> bool {
        matches!(self, FindingKind::RefcountTooLow | FindingKind::Leak | FindingKind::Copied)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub structure: String,
    /// Where the structure lies in the file.
    pub offset: u64,
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at offset {}: {}", self.structure, self.offset, self.text)
    }
}

/// The numbers are what is left after the repair; the findings are what there was before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub corruptions: u64,
    /// Of the corruptions: COPIED flags that are not set and might be. Nothing is in danger; a
    /// write copies more than it must.
    pub unset_flags: u64,
    /// Of the corruptions: what the format does not allow although it endangers nothing.
    pub harmless: u64,
    /// Of the corruptions: what is mended as soon as the image is opened for writing. Nothing is in
    /// danger.
    pub mended_by_opening: u64,
    pub leaks: u64,
    pub corruptions_fixed: u64,
    pub leaks_fixed: u64,
    /// What could not be checked, because the host could not read it.
    pub check_errors: u64,
    pub image_end_offset: u64,
    pub total_clusters: u64,
    pub allocated_clusters: u64,
    pub fragmented_clusters: u64,
    pub compressed_clusters: u64,
    /// The first so many; `findings_left_off` more were only counted.
    pub findings: Vec<Finding>,
    pub findings_left_off: u64,
}

impl Report {
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }

    /// Nothing that is in use can be taken for free, or for one's own.
    pub fn is_safe(&self) -> bool {
        self.corruptions == self.unset_flags + self.harmless && self.check_errors == 0
    }
}

const MAX_FINDINGS: usize = 1000;

/// A report in the making, and what a repair needs to know besides.
#[derive(Default)]
pub(in crate::qcow2) struct Tally {
    pub report: Report,
    /// The refcount table or blocks are to be made anew.
    pub rebuild: bool,
    /// Something could not be followed, so that no count is known to be complete.
    pub incomplete: bool,
    /// The first finding that is neither [derived](FindingKind::is_derived) nor harmless.
    pub severe: Option<Finding>,
    /// Where the highest reference beyond the end of the file ends.
    pub beyond: u64,
    /// Clusters of metadata that is not to be written in place, as it overlaps; the first so many.
    pub overlaps: Vec<u64>,
    /// The largest count.
    pub most: u64,
    /// Later passes see the same tables again: what is found in them is counted once.
    pub(super) later_pass: bool,
}

impl Tally {
    pub(super) fn find(
        &mut self,
        kind: FindingKind,
        structure: fmt::Arguments<'_>,
        offset: u64,
        text: fmt::Arguments<'_>,
    ) {
        let first_unreadable = kind == FindingKind::Unreadable && self.report.check_errors == 0;
        let by_window = kind.is_derived() || kind == FindingKind::Overlap || first_unreadable;
        if self.later_pass && !by_window {
            return;
        }
        match kind {
            FindingKind::Leak => self.report.leaks += 1,
            FindingKind::Unreadable => self.report.check_errors += 1,
            FindingKind::Harmless => {
                self.report.corruptions += 1;
                self.report.harmless += 1;
            }
            _ => self.report.corruptions += 1,
        }
        let is_severe = !kind.is_derived() && kind != FindingKind::Harmless;
        if self.report.findings.len() >= MAX_FINDINGS && (!is_severe || self.severe.is_some()) {
            self.report.findings_left_off += 1;
            return;
        }
        let finding =
            Finding { kind, structure: structure.to_string(), offset, text: text.to_string() };
        if is_severe && self.severe.is_none() {
            self.severe = Some(finding.clone());
        }
        if self.report.findings.len() < MAX_FINDINGS {
            self.report.findings.push(finding);
        } else {
            self.report.findings_left_off += 1;
        }
    }

    /// Something that is in use ends here.
    pub(super) fn end_at(&mut self, offset: u64) {
        self.report.image_end_offset = self.report.image_end_offset.max(offset);
    }

    pub(super) fn overlap(&mut self, cluster: u64) {
        if self.overlaps.len() < MAX_FINDINGS {
            self.overlaps.push(cluster);
        }
    }

    /// Whether a table may be changed in place.
    pub(super) fn may_write(&self, cluster: u64) -> bool {
        self.overlaps.len() < MAX_FINDINGS && !self.overlaps.contains(&cluster)
    }
}
