//! Opens an image: checks before the first request, and repairs before the first write.
//!
//! Invariant: an inconsistent image is not written to. Before an image is opened for writing all of
//! its references are checked, so that no cluster in use is allocated again. An image that a server
//! takes over from another one was checked by that one.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crate::error::{ErrorKind, ImageError};
use crate::journal::{ImageSafety, Journal, pending};
use crate::raw::Raw;
use crate::sync::epoch::Epoch;
use blockyard_ring::semaphore::Semaphore;

use super::check::{FindingKind, Repair, check, rebuild_with};
use super::closed::bitmap::{drop_unknown_autoclear, prepare_for_writing};
use super::encoding::bytes::{self, LastHole};
use super::encoding::entry::{self, L1Entry};
use super::encoding::file;
use super::encoding::header::{AUTOCLEAR_JOURNAL, AUTOCLEAR_KNOWN, Header};
use super::reading::view::Qcow2;
use super::recovery::session::{self, Resumed};
use super::state::alloc::Allocator;
use super::state::packing::Packing;
use super::state::partial::PartialClusters;
use super::state::shared::{L1, Shape, Shared};
use super::state::tables::L2SliceCache;

/// Maximum size of the cached L2 tables, in bytes. 32 MiB map 256 GiB with clusters of 64 KiB.
pub const L2_CACHE_LIMIT: u64 = 32 << 20;

/// Options of opening an image.
#[derive(Clone, Debug, Default)]
pub struct Qcow2Options {
    pub read_only: bool,
    /// Maximum size of the cached L2 tables, in bytes. None: all tables of the image, up to
    /// [`L2_CACHE_LIMIT`].
    pub l2_cache: Option<u64>,
    /// Size of a reservation of clusters, in bytes. None: the size starts small and grows.
    pub reserve: Option<u64>,
    /// Whether the caller's writes leave the disk's contents unchanged. If so, bitmaps that record
    /// writes stay valid.
    pub keeps_disk: bool,
    /// Whether the file has no name yet, so that a power cut loses it. If so, the order in which
    /// writes become durable does not matter: only flushes and the close sync.
    pub unfinished: bool,
    /// Whether the image was checked and closed by a server of this host, and no other program has
    /// changed it since. If so, it is not checked again.
    pub is_sound: bool,
    /// Whether clusters are partial even if that does not pay. (Tests need many of them.)
    pub always_partial: bool,
    /// Whether an overlay that is open for writing reads this image. Then a pending journal is an
    /// error: if it was replayed later, the disk would change below the overlay.
    pub is_below_writer: bool,
    /// How changed metadata survive a death of the process.
    pub safety: ImageSafety,
}

impl Qcow2 {
    /// Opens the image of `header` (from [`Header::read`]). `data` is the external data file that
    /// it names.
    pub async fn open(
        mut header: Header,
        file: Raw,
        data: Option<Raw>,
        options: &Qcow2Options,
    ) -> Result<Self, ImageError> {
        let (mut safety, mut resumed) = (ImageSafety::default(), None);
        if !options.read_only {
            resumed = session::recover(&file, data.as_ref(), &mut header, &options.safety).await?;
            make_writable(&file, data.as_ref(), &mut header, options, &resumed).await?;
            safety = safety_of(&header, options);
        } else {
            pending(header.session().as_ref(), options.is_below_writer, &options.safety)?;
        }
        let (log, partial) = resumed.map_or((None, Vec::new()), |r| (Some(r.log), r.partial));
        let journal = Journal::new(safety, log);
        let shape = Shape::of(&header);
        let l1 = read_l1(&file, &header).await?;
        let table = read_refcount_table(&file, &header).await?;
        let len = file::length(&file).await?;
        let end = if file.is_device() {
            last_counted(&file, &header, &table, len).await?
        } else {
            len.div_ceil(shape.cluster_size())
        };
        let alloc = Allocator::new(
            header.cluster_bits,
            header.refcount_width(),
            table,
            end,
            options.reserve,
        );
        let slices = header.size.div_ceil(shape.cluster_size()).div_ceil(shape.slice_entries);
        let needed = slices.saturating_mul(shape.slice_bytes());
        let cache = options.l2_cache.unwrap_or(L2_CACHE_LIMIT.min(needed));
        let compression = header.compression;
        let shared = Shared {
            shape,
            size: AtomicU64::new(header.size),
            read_only: options.read_only,
            unfinished: options.unfinished,
            header: Mutex::new(header),
            l1: Mutex::new(l1),
            tables: L2SliceCache::new((cache / shape.slice_bytes()) as usize, journal.clone()),
            alloc,
            held: Default::default(),
            epoch: Arc::new(Epoch::default()),
            touched: std::array::from_fn(|_| AtomicU64::new(0)),
            reserving: Semaphore::new(1),
            new_tables: Semaphore::new(1),
            writing_back: Semaphore::new(1),
            syncing: Semaphore::new(1),
            changing_header: Semaphore::new(1),
            journal,
            lost: Default::default(),
            recompressed: AtomicU64::new(0),
            compression,
            leaving: Mutex::default(),
            packing: Packing::default(),
            partial: PartialClusters::new(options.always_partial),
            buffers: Default::default(),
        };
        let image = Qcow2::view(Arc::new(shared), file, data);
        image.adopt_partial(&partial).await?;
        if partial.is_empty() {
            // The file has all changes of the journal.
            let journal = &image.shared.journal;
            let _ = journal.end_write_back(journal.begin_write_back(), true);
        }
        Ok(image)
    }
}

/// Returns how an image that is written to survives a death of the process.
fn safety_of(header: &Header, options: &Qcow2Options) -> ImageSafety {
    // A file without a name is lost with the process.
    if options.unfinished {
        return ImageSafety::default();
    }
    if options.safety.wants_journal() && !session::can_be_marked(header) {
        tracing::warn!(
            "an image of version 2 has no journal: if the server dies, answered writes since the \
             last flush are lost (--crash-safety flush avoids that, and is slower)"
        );
        return options.safety.clone().without_journal();
    }
    options.safety.clone()
}

/// Checks that the image may be written to. Repairs what a power cut may have left: outdated
/// refcounts (the dirty bit), and leaked clusters.
async fn make_writable(
    file: &Raw,
    data: Option<&Raw>,
    header: &mut Header,
    options: &Qcow2Options,
    resumed: &Option<Resumed>,
) -> Result<(), ImageError> {
    // No entry of the file names the host clusters of partial clusters. Their data must stay.
    let deallocate = resumed.as_ref().is_none_or(|resumed| resumed.partial.is_empty());
    if header.has_corrupt() {
        let what = "it is marked as corrupt: nothing is written to it; `blockyard image check \
            --repair all` may help";
        return Err(ImageError::invalid("qcow2 header", None, what));
    }
    if header.has_dirty() {
        tracing::info!(
            "the qcow2 image was not closed by its last writer: recounting its references"
        );
        *header = rebuild_with(file, deallocate).await?;
    }
    let is_checked = options.is_sound && resumed.is_none();
    if !is_checked && !check_references(file, data).await? {
        *header = rebuild_with(file, deallocate).await?;
    }
    let known =
        if resumed.is_some() { AUTOCLEAR_KNOWN | AUTOCLEAR_JOURNAL } else { AUTOCLEAR_KNOWN };
    if options.keeps_disk {
        drop_unknown_autoclear(file, header, known).await
    } else {
        prepare_for_writing(file, header, known).await
    }
}

/// Checks all references. Returns false if the image must be repaired before it is written to.
async fn check_references(file: &Raw, data: Option<&Raw>) -> Result<bool, ImageError> {
    let data_len = match data {
        Some(data) => Some(file::length(data).await?),
        None => None,
    };
    let found = check(file, data_len, Repair::No).await?;
    if !found.is_safe() {
        let is_wrong = |kind| !matches!(kind, FindingKind::Leak | FindingKind::Harmless);
        let first = found.findings.iter().find(|finding| is_wrong(finding.kind));
        let (structure, at, text) = match first {
            Some(f) => (f.structure.as_str(), Some(f.offset), f.text.as_str()),
            None => ("qcow2 image", None, "it is inconsistent"),
        };
        let what = format!(
            "{text}. {} such findings: it is not opened for writing; see `blockyard image check`, \
             which may repair it, or open it for reading",
            found.corruptions + found.check_errors
        );
        return Err(ImageError::invalid(structure, at, what));
    }
    if found.unset_flags + found.leaks > 0 {
        let (flags, leaks) = (found.unset_flags, found.leaks);
        tracing::info!(
            "repairing the qcow2 image: {leaks} leaked clusters, {flags} COPIED flags \
             not set"
        );
    }
    Ok(found.unset_flags + found.leaks == 0)
}

async fn read_l1(file: &Raw, header: &Header) -> Result<L1, ImageError> {
    let (offset, layout) = (header.l1_offset, entry::EntryFormat::of(header));
    let read = file::read_l1(file, offset, header.l1_size.into()).await?;
    let entries: Vec<u64> = read.chunks_exact(8).map(|b| bytes::be64(b, 0)).collect();
    for (index, &word) in entries.iter().enumerate() {
        L1Entry::decode(word, layout).map_err(|what| {
            ImageError::invalid("qcow2 L1 table entry", offset + index as u64 * 8, what)
        })?;
    }
    Ok(L1 { offset, entries, dirty: Default::default() })
}

async fn read_refcount_table(file: &Raw, header: &Header) -> Result<Vec<u64>, ImageError> {
    let (offset, layout) = (header.refcount_table_offset, entry::EntryFormat::of(header));
    let len = u64::from(header.refcount_table_clusters) * header.cluster_size();
    let read = bytes::read(file, offset, len as usize).await;
    let read = read.map_err(|e| ImageError::io("qcow2 refcount table", offset, "reading", e))?;
    let entry = |(index, word)| {
        let at = offset + index as u64 * 8;
        let block = entry::refcount_block(word, layout);
        block
            .map(|b| b.unwrap_or(0))
            .map_err(|what| ImageError::invalid("qcow2 refcount table entry", at, what))
    };
    let words = bytes::used_words(&read).chunks_exact(8).map(|word| bytes::be64(word, 0));
    let mut table = words.enumerate().map(entry).collect::<Result<Vec<_>, _>>()?;
    table.resize(read.len() / 8, 0);
    Ok(table)
}

/// Returns the number of clusters up to the last one with a refcount, for an image on a block
/// device.
async fn last_counted(
    file: &Raw,
    header: &Header,
    table: &[u64],
    file_len: u64,
) -> Result<u64, ImageError> {
    let width = header.refcount_width();
    let per_block = width.per_block(header.cluster_size());
    let (mut hole, mut seen) = (LastHole::default(), HashSet::new());
    for (block, &offset) in table.iter().enumerate().rev().filter(|(_, offset)| **offset != 0) {
        // The table of a crafted image can name one block a million times.
        if !seen.insert(offset) || hole.covers(file, offset, header.cluster_size(), file_len).await
        {
            continue;
        }
        let read = bytes::read(file, offset, header.cluster_size() as usize).await;
        let counts =
            read.map_err(|e| ImageError::io("qcow2 refcount block", offset, "reading", e))?;
        if let Some(last) = (0..per_block).rev().find(|&n| width.get(&counts, n as usize) != 0) {
            return Ok(block as u64 * per_block + last + 1);
        }
    }
    Err(ImageError::new(
        ErrorKind::Invalid,
        "qcow2 refcount table",
        header.refcount_table_offset,
        "all its refcounts are 0",
    ))
}

#[cfg(test)]
mod tests {
    use blockyard_storage::sim::{OpKind, Phase, Sim, SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::Alignment;
    use crate::qcow2::{CreateOptions, create};

    #[test]
    fn a_refcount_block_that_is_named_often_is_read_once() {
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let test = async move {
            let file = Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
            create(&file, None, &CreateOptions::new(1 << 20)).await.unwrap();
            let header = Header::read(&file).await.unwrap();
            let reads = || {
                let read = |op: &_| matches!(op, (OpKind::Read, Phase::Started));
                disk.trace().iter().map(|op| (op.kind, op.phase)).filter(read).count()
            };
            let before = reads();
            // Behind the end of the file are zeroes.
            let table = vec![1 << 30; 1000];
            let error = last_counted(&file, &header, &table, 1 << 31).await.unwrap_err();
            assert!(error.to_string().contains("all its refcounts are 0"), "{error}");
            assert_eq!(reads() - before, 1);
        };
        Sim::new(1).block_on(test).unwrap();
    }
}
