//! Findings of a check.

use std::fmt;

/// Which repairs are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    No,
    /// Frees clusters that nothing references.
    Leaks,
    All,
}

/// Kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// A cluster has more references than its refcount: it may be overwritten.
    RefcountTooLow,
    /// A cluster has fewer references than its refcount: it is never freed.
    Leak,
    /// A COPIED flag and the refcount contradict each other.
    Copied,
    /// An entry of an L1 or L2 table is invalid.
    BadEntry,
    /// A reference points beyond the end of the file.
    OutOfRange,
    /// Metadata shares its clusters with something else.
    Overlap,
    /// A table cannot be followed.
    BadTable,
    /// The refcount table or a refcount block cannot be used.
    RefcountStructure,
    /// A violation of the format that is harmless, because all references are known.
    Harmless,
    /// The host failed to read a structure.
    Unreadable,
}

impl FindingKind {
    /// Returns true for inconsistencies that a crash with lazy refcounts may leave. A recount
    /// detects and repairs them.
    pub(super) fn is_derived(self) -> bool {
        matches!(self, FindingKind::RefcountTooLow | FindingKind::Leak | FindingKind::Copied)
    }
}

/// Something that is wrong with an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub structure: String,
    /// Offset of the structure in the file, in bytes.
    pub offset: u64,
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at offset {}: {}", self.structure, self.offset, self.text)
    }
}

/// Result of a check. The numbers describe the image after the repair, the findings the image
/// before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub corruptions: u64,
    /// Number of corruptions that are COPIED flags which are clear but could be set. They are
    /// harmless: a write copies more than necessary.
    pub unset_flags: u64,
    /// Number of corruptions that are harmless violations of the format.
    pub harmless: u64,
    /// Number of corruptions that an open for writing repairs. They are harmless.
    pub mended_by_opening: u64,
    pub leaks: u64,
    pub corruptions_fixed: u64,
    pub leaks_fixed: u64,
    /// Number of structures that could not be checked because the host failed to read them.
    pub check_errors: u64,
    pub image_end_offset: u64,
    pub total_clusters: u64,
    pub allocated_clusters: u64,
    pub fragmented_clusters: u64,
    pub compressed_clusters: u64,
    /// The first findings; `findings_left_off` more were only counted.
    pub findings: Vec<Finding>,
    pub findings_left_off: u64,
}

impl Report {
    /// Returns true if nothing is wrong, not even a leak.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }

    /// Returns true if no cluster in use can be taken for free or for exclusive.
    pub fn is_safe(&self) -> bool {
        self.corruptions == self.unset_flags + self.harmless && self.check_errors == 0
    }
}

const MAX_FINDINGS: usize = 1000;

/// A report in progress, and what a repair needs in addition.
#[derive(Default)]
pub(in crate::qcow2) struct Tally {
    pub report: Report,
    /// Whether the refcount table or blocks must be rebuilt.
    pub rebuild: bool,
    /// Whether some structure could not be followed, so that counts may be incomplete.
    pub incomplete: bool,
    /// The first finding that is neither [derived](FindingKind::is_derived) nor harmless.
    pub severe: Option<Finding>,
    /// End of the highest reference beyond the end of the file.
    pub beyond: u64,
    /// Clusters of overlapping metadata, which must not be written in place; a bounded number.
    pub overlaps: Vec<u64>,
    /// The largest number of references to one cluster.
    pub most: u64,
    /// Whether this is a later pass. It reads the same tables again, so their findings must not be
    /// counted twice.
    pub(super) later_pass: bool,
}

impl Tally {
    /// Adds a finding.
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

    /// Records that some structure or data in use end at this offset.
    pub(super) fn end_at(&mut self, offset: u64) {
        self.report.image_end_offset = self.report.image_end_offset.max(offset);
    }

    /// Records metadata that share their cluster.
    pub(super) fn overlap(&mut self, cluster: u64) {
        if self.overlaps.len() < MAX_FINDINGS {
            self.overlaps.push(cluster);
        }
    }

    /// Returns true if a table may be changed in place.
    pub(super) fn may_write(&self, cluster: u64) -> bool {
        self.overlaps.len() < MAX_FINDINGS && !self.overlaps.contains(&cluster)
    }
}
