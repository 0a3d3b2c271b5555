//! Check and repair: follows and counts all references, and compares the counts with the refcounts.
//!
//! In: an image without other writers. Out: a [`Report`]. A pass runs these modules:
//!
//! ```text
//!   walk      follows L1, L2, snapshot and bitmap tables; counts the references
//!             (bounded memory: clusters beyond the bound wait for another pass)
//!   stored    compares refcount blocks with the counts; repairs refcounts in place
//!   flags     checks the active tables in guest order; repairs COPIED flags in place
//!   rebuild   writes new refcount structures from the counts, if the old ones cannot be used
//! ```
//!
//! Invariants of a repair, at every power cut: references are the truth and are never changed. A
//! repair neither overwrites a referenced cluster nor lowers its refcount below its references. New
//! structures lie behind everything else, become durable, and are then switched to by a write of
//! one sector. So an interrupted repair can be run again.

mod counts;
mod flags;
mod rebuild;
mod report;
pub(super) mod stored;
mod walk;

use blockyard_storage::Storage;

use self::counts::Counts;
use self::flags::{ClearCopied, Flags};
use self::rebuild::Builder;
pub(super) use self::report::Tally;
pub use self::report::{Finding, FindingKind, Repair, Report};
use self::stored::{Compare, Refcounts};
use self::walk::Walk;
use super::encoding::bytes::LastHole;
use super::encoding::entry::EntryFormat;
use super::encoding::header::{
    AUTOCLEAR_JOURNAL, AUTOCLEAR_KNOWN, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY,
};
use crate::error::{ErrorKind, ImageError};
use crate::qcow2::encoding::file::flush;
use crate::raw::Raw;

const HEADER: &str = "qcow2 header";

/// Limits of one pass. The defaults suffice for many terabytes in less than 512 MiB of memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum memory for the reference counts, in bytes.
    pub memory: usize,
    /// Maximum number of L2 tables that the check remembers. The default is the number that the
    /// active L1 table may name.
    pub tables: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 256 << 20, tables: 4 << 20 }
    }
}

/// Changes that a pass makes.
#[derive(Clone, Copy)]
struct RepairPlan<'a> {
    /// Result of an earlier pass that changed nothing.
    known: &'a Tally,
    refcounts: stored::RefcountRepair,
    flags: flags::FlagRepair,
}

/// Checks an image, and repairs it if requested. `data_file_len`: length of the external data file
/// in bytes, if it is open.
pub async fn check(
    file: &Raw,
    data_file_len: Option<u64>,
    repair: Repair,
) -> Result<Report, ImageError> {
    check_within(file, data_file_len, repair, Limits::default()).await
}

/// Like [`check`], with limits: counts beyond them take further passes over the image.
pub async fn check_within(
    file: &Raw,
    data_file_len: Option<u64>,
    repair: Repair,
    limits: Limits,
) -> Result<Report, ImageError> {
    let mut header = Header::read_for_check(file).await?;
    if repair != Repair::No {
        // Make the data that are read below durable first: a power cut must not undo what the
        // repair relies on.
        flush(file).await?;
    }
    let mut headers = [header.clone()];
    let found = pass(file, &headers, data_file_len, None, limits).await?;
    if repair == Repair::No {
        return Ok(Report {
            mended_by_opening: mended_by_opening(&header, &found),
            ..found.report
        });
    }
    let wanted =
        if repair == Repair::All { !found.report.is_clean() } else { found.report.leaks > 0 };
    let left = if wanted {
        mend(file, &mut headers, data_file_len, &found, (repair, true), limits).await?;
        [header] = headers.clone();
        &pass(file, &headers, data_file_len, None, limits).await?
    } else {
        &found
    };
    let (mended_by_opening, left) = (mended_by_opening(&header, left), left.report.clone());
    if left.corruptions == 0 && left.check_errors == 0 {
        clear_bits(file, &mut header, INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT).await?;
    }
    Ok(Report {
        corruptions_fixed: found.report.corruptions.saturating_sub(left.corruptions),
        leaks_fixed: found.report.leaks.saturating_sub(left.leaks),
        findings: found.report.findings,
        findings_left_off: found.report.findings_left_off,
        mended_by_opening,
        ..left
    })
}

/// Returns how many of the corruptions the next open for writing repairs: those that the dirty bit
/// stands for, and clear COPIED flags. (An interrupted command leaves such flags in images of
/// version 2, which has no dirty bit.)
fn mended_by_opening(header: &Header, found: &Tally) -> u64 {
    let report = &found.report;
    let is_known = found.severe.is_none() && !found.incomplete && report.check_errors == 0;
    if header.has_corrupt() || !is_known || found.most > header.refcount_width().max() {
        return 0;
    }
    if header.has_dirty() {
        return report.corruptions - report.harmless;
    }
    if report.is_safe() { report.unset_flags } else { 0 }
}

/// Does the repair that the dirty bit demands before writes: recomputes refcounts and COPIED flags
/// from the tables, and clears the bit. Returns the header as written. Fails without a write if
/// anything else is wrong.
pub async fn rebuild_refcounts(file: &Raw) -> Result<Header, ImageError> {
    rebuild_with(file, true).await
}

/// Like [`rebuild_refcounts`]. `deallocate`: whether clusters that become free lose their data.
pub(super) async fn rebuild_with(file: &Raw, deallocate: bool) -> Result<Header, ImageError> {
    let header = Header::read(file).await?;
    flush(file).await?;
    let mut headers = [header];
    let found = inspect(file, &headers[0]).await?;
    recount(file, &mut headers, &found, deallocate).await?;
    let [mut header] = headers;
    clear_bits(file, &mut header, INCOMPATIBLE_DIRTY).await?;
    Ok(header)
}

/// Follows and counts all references. Fails if anything is wrong that a recount does not repair.
pub(super) async fn inspect(file: &Raw, header: &Header) -> Result<Tally, ImageError> {
    let found = pass(file, std::slice::from_ref(header), None, None, Limits::default()).await?;
    if let Some(finding) = &found.severe {
        let what =
            format!("{}; `blockyard image check` shows details, and may repair it", finding.text);
        return Err(ImageError::invalid(finding.structure.clone(), finding.offset, what));
    }
    if found.incomplete {
        return Err(ImageError::new(
            ErrorKind::Io,
            "qcow2 image",
            None,
            "its tables could not all be read",
        ));
    }
    let max = header.refcount_width().max();
    if found.most > max {
        let what = format!(
            "a cluster would have {} references, and the refcounts' width allows {max}",
            found.most
        );
        return Err(ImageError::refused("qcow2 refcounts", what));
    }
    Ok(found)
}

/// Corrects refcounts and flags after [`inspect`], durably. Returns the offset of the image's end.
pub(super) async fn recount(
    file: &Raw,
    headers: &mut [Header; 1],
    found: &Tally,
    deallocate: bool,
) -> Result<u64, ImageError> {
    if found.report.is_clean() {
        return Ok(found.report.image_end_offset);
    }
    mend(file, headers, None, found, (Repair::All, deallocate), Limits::default()).await
}

/// Clears flags and raises refcounts until both of two states of an image are safe. Durable on
/// return. The first header is the one in the file.
pub(super) async fn cover(file: &Raw, headers: &mut [Header; 2]) -> Result<(), ImageError> {
    let limits = Limits::default();
    let mut known = pass(file, headers, None, None, limits).await?;
    if known.rebuild {
        rebuild(file, headers, &known, limits).await?;
        known = pass(file, headers, None, None, limits).await?;
    }
    // A missing COPIED flag with refcount 1 is safe; a set flag with refcount 2 is not. So clear
    // flags before raising refcounts.
    for (raise, clear) in [(false, ClearCopied::Shared), (true, ClearCopied::None)] {
        let refcounts = stored::RefcountRepair { raise, lower: false, deallocate: true };
        let changes =
            RepairPlan { known: &known, refcounts, flags: flags::FlagRepair { set: false, clear } };
        pass(file, headers, None, Some(changes), limits).await?;
        flush(file).await?;
    }
    Ok(())
}

/// Repairs the findings, durably. Returns the offset of the image's end.
async fn mend(
    file: &Raw,
    headers: &mut [Header; 1],
    data_file_len: Option<u64>,
    found: &Tally,
    (repair, deallocate): (Repair, bool),
    limits: Limits,
) -> Result<u64, ImageError> {
    let (all, complete) = (repair == Repair::All, !found.incomplete);
    if !all && (found.incomplete || found.rebuild) {
        return Ok(found.report.image_end_offset);
    }
    // The mark of a journal stays: an open that replays the journal repairs refcounts too.
    const KEPT: u64 = AUTOCLEAR_KNOWN | AUTOCLEAR_JOURNAL;
    if headers[0].autoclear & !KEPT != 0 {
        headers[0].autoclear &= KEPT;
        headers[0].write_fixed(file).await?;
        flush(file).await?;
    }
    let again;
    let mut known = found;
    if found.rebuild {
        rebuild(file, headers, found, limits).await?;
        // What overlapped the old refcount structures does not overlap the new ones.
        again = pass(file, headers, data_file_len, None, limits).await?;
        known = &again;
    }
    let mut changes = RepairPlan {
        known,
        refcounts: stored::RefcountRepair { raise: all, lower: complete, deallocate },
        flags: flags::FlagRepair {
            set: false,
            clear: if all { ClearCopied::Wrong } else { ClearCopied::None },
        },
    };
    let counted = pass(file, headers, data_file_len, Some(changes), limits).await?;
    flush(file).await?;
    if complete && counted.report.unset_flags > 0 {
        // Set COPIED flags only after the refcounts are durable.
        changes.flags.set = true;
        pass(file, headers, data_file_len, Some(changes), limits).await?;
        flush(file).await?;
    }
    Ok(counted.report.image_end_offset)
}

/// Clears incompatible bits, if set, after everything else is durable.
pub(super) async fn clear_bits(
    file: &Raw,
    header: &mut Header,
    bits: u64,
) -> Result<(), ImageError> {
    if header.incompatible & bits == 0 {
        return Ok(());
    }
    flush(file).await?;
    header.incompatible &= !bits;
    header.write_fixed(file).await?;
    flush(file).await
}

/// Goes through the whole image, several times if the counts do not fit the memory.
async fn pass(
    file: &Raw,
    headers: &[Header],
    data_file_len: Option<u64>,
    changes: Option<RepairPlan<'_>>,
    limits: Limits,
) -> Result<Tally, ImageError> {
    let header = &headers[0];
    let file_len = file
        .storage()
        .len()
        .await
        .map_err(|e| ImageError::io(HEADER, 0, "finding the file's length", e))?;
    let mut tally = Tally::default();
    tally.report.total_clusters = header.size.div_ceil(header.cluster_size());
    let refcounts = Refcounts::load(file, header, &mut tally).await?;
    let mut start = 0;
    loop {
        let mut counts = count(file, headers, Some(&refcounts), start, &mut tally, limits).await?;
        if let Some(changes) = changes {
            still_complete(&tally, changes.known)?;
        }
        let repair = changes.map(|changes| changes.refcounts);
        let (tally_ref, hole) = (&mut tally, LastHole::default());
        Compare {
            file,
            refcounts: &refcounts,
            counts: &mut counts,
            tally: tally_ref,
            file_len,
            repair,
            hole,
        }
        .run()
        .await?;
        if let Some(changes) = changes {
            still_complete(&tally, changes.known)?;
        }
        for header in headers {
            let layout = EntryFormat::of(header);
            let repair = changes.map(|changes| (changes.known, changes.flags));
            let (counts, tally) = (&counts, &mut tally);
            Flags {
                file,
                header,
                layout,
                file_len,
                data_file_len,
                counts,
                tally,
                repair,
                next_offset: 0,
            }
            .run()
            .await?;
        }
        if let Some(changes) = changes {
            still_complete(&tally, changes.known)?;
        }
        start = counts.window().end;
        if start == u64::MAX {
            return Ok(tally);
        }
        tally.later_pass = true;
    }
}

/// Fails if a second pass could read less than the first pass. The clusters that it could not count
/// would look free, and damage that it could not repair would look sound.
fn still_complete(now: &Tally, before: &Tally) -> Result<(), ImageError> {
    if now.incomplete && !before.incomplete || now.report.check_errors > before.report.check_errors
    {
        let what = "some of its tables could not be read a second time, so it is not repaired";
        return Err(ImageError::new(ErrorKind::Io, "qcow2 image", None, what));
    }
    Ok(())
}

/// Counts the references to clusters from `start` on, as far as the memory allows. With several
/// headers, takes the largest count of each cluster in these states of the image.
async fn count(
    file: &Raw,
    headers: &[Header],
    refcounts: Option<&Refcounts>,
    start: u64,
    tally: &mut Tally,
    limits: Limits,
) -> Result<Counts, ImageError> {
    let file_len = file
        .storage()
        .len()
        .await
        .map_err(|e| ImageError::io(HEADER, 0, "finding the file's length", e))?;
    let mut merged: Option<Counts> = None;
    for header in headers {
        let end = merged.as_ref().map_or(u64::MAX, |counts| counts.window().end);
        let mut counts = Counts::new(start..end, limits.memory);
        let layout = EntryFormat::of(header);
        let (tables_at_once, counts_ref, tally) = (limits.tables, &mut counts, &mut *tally);
        let hole = LastHole::default();
        Walk { file, header, layout, file_len, counts: counts_ref, tally, tables_at_once, hole }
            .count(refcounts)
            .await;
        match &mut merged {
            None => merged = Some(counts),
            Some(merged) => merged.merge_larger(counts),
        }
    }
    Ok(merged.expect("there is a header"))
}

/// Writes new refcount structures behind everything that was found, and switches the image to them.
/// If the counts are incomplete, no readable refcount is lowered.
async fn rebuild(
    file: &Raw,
    headers: &mut [Header],
    found: &Tally,
    limits: Limits,
) -> Result<(), ImageError> {
    let mut tally = Tally::default();
    let old = Refcounts::load(file, &headers[0], &mut tally).await?;
    let mut counts = count(file, headers, None, 0, &mut tally, limits).await?;
    still_complete(&tally, found)?;
    let file_len = file
        .storage()
        .len()
        .await
        .map_err(|e| ImageError::io(HEADER, 0, "finding the file's length", e))?;
    let end = if file.is_device() { found.report.image_end_offset } else { file_len };
    let mut builder = Builder::new(file, &headers[0], end.max(found.beyond));
    let max = headers[0].refcount_width().max();
    loop {
        if found.incomplete {
            keep_stored(file, &old, &mut counts, file_len).await?;
        }
        for cluster in counts.clusters() {
            builder.put(cluster, counts.get(cluster).references.min(max)).await?;
        }
        match counts.window().end {
            u64::MAX => break,
            start => counts = count(file, headers, None, start, &mut tally, limits).await?,
        }
        still_complete(&tally, found)?;
    }
    let (offset, clusters) = builder.finish().await?;
    flush(file).await?;
    for header in &mut *headers {
        (header.refcount_table_offset, header.refcount_table_clusters) = (offset, clusters);
    }
    headers[0].write_fixed(file).await?;
    flush(file).await
}

/// Raises counts to the refcounts that can be read.
async fn keep_stored(
    file: &Raw,
    old: &Refcounts,
    counts: &mut Counts,
    file_len: u64,
) -> Result<(), ImageError> {
    let mut hole = LastHole::default();
    for (index, at) in old.blocks() {
        let (first, window) = (index * old.per_block(), counts.window());
        let end = (first + old.per_block())
            .min(window.end)
            .min(file_len.div_ceil(1 << old.cluster_bits()));
        if first.max(window.start) >= end {
            continue;
        }
        // The refcounts in a hole are 0.
        if hole.covers(file, at, 1 << old.cluster_bits(), file_len).await {
            continue;
        }
        let block = old.read_block(file, at).await?;
        for cluster in first.max(window.start)..end {
            let (stored, counted) =
                (old.width.get(&block, (cluster - first) as usize), counts.get(cluster).references);
            if stored > counted {
                counts.add(cluster, stored - counted, false);
            }
        }
    }
    Ok(())
}
