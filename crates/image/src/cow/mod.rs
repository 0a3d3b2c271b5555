//! COW files of User Mode Linux (UML): an overlay of a raw backing file. A bitmap says which
//! sectors are stored in the overlay.
//!
//! ```text
//!   header   the four layouts, checked
//!   bitmap   cached bitmap pages, shared by reactors
//!   flush    the order: data, then bits
//!   create   new files; replaces the backing file
//!   check    checks and repairs a file
//!   empty    clears all bits
//!   merge    overlay and backing file into a new image
//!   session  the mark of a journal in the file
//! ```
//!
//! In: reads, writes, discards, zeroes and flushes at offsets of the guest's disk, in whole
//! sectors. Out: operations on the file. A lookup returns whether a range is stored in the overlay
//! or in the backing layer. A sector's place in the file is fixed: a write is one operation, and a
//! newly allocated sector sets one bit.
//!
//! Invariants:
//! - A bit becomes durable only after its sector's data (`flush`).
//! - No bit is cleared while the file is open.
//! - An inconsistent header or a truncated file is refused before anything is written.
//! - If the device writes 512-byte sectors atomically, so does a COW file with data at a multiple
//!   of 512. Version 3 allows other alignments; with those a power cut can tear sectors.
//!
//! Memory: the bitmap has 1/4096 of the disk's size, 256 MiB for 1 TiB. At most
//! [`CowOptions::bitmap_memory`] bytes of it are cached, in pages of 4 KiB that are read on first
//! use. A page describes 16 MiB of the disk. A lookup takes no lock.

mod bitmap;
mod check;
#[cfg(test)]
mod cold_tests;
mod create;
mod empty;
mod flush;
mod header;
mod merge;
mod session;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use crate::SECTOR;
use crate::error::ImageError;
use crate::extent::{Extent, Place};
use crate::journal::{ImageSafety, Journal, pending};
use crate::raw::Raw;
use bitmap::{PAGE, PAGE_SECTORS, SectorBitmap};
use blockyard_ring::semaphore::Semaphore;
use blockyard_storage::RangeLock;
pub use check::{Repair, Report, check, info};
pub use create::{CreateOptions, create, set_backing};
pub use empty::make_empty;
pub use header::{Backing, Header};
pub use merge::merge;
pub use session::{clear_mark, read_mark};

const BITMAP: &str = "cow bitmap";

/// Number of bitmap pages that `prime` reads at a time.
const PRIME: u64 = 64;

#[derive(Clone, Debug)]
pub struct CowOptions {
    pub read_only: bool,
    /// Maximum memory of the bitmap cache, in bytes.
    pub bitmap_memory: u64,
    /// Whether to only log a warning if the backing file's size or mtime differs from the header.
    pub accept_changed_backing: bool,
    /// As in [`crate::qcow2::Qcow2Options`].
    pub is_below_writer: bool,
    /// How changed bits survive a death of the process.
    pub safety: ImageSafety,
}

impl Default for CowOptions {
    /// Returns the default memory: enough for the whole bitmap of disks up to 256 GiB.
    fn default() -> Self {
        CowOptions {
            read_only: false,
            bitmap_memory: 64 << 20,
            accept_changed_backing: false,
            is_below_writer: false,
            safety: ImageSafety::default(),
        }
    }
}

/// State of an open COW file that all reactors share.
pub struct Shared {
    header: Header,
    options: CowOptions,
    bitmap: SectorBitmap,
    /// Locks the bitmap pages (by number) that are being read.
    loading: RangeLock,
    /// Admits one flush at a time.
    flushing: Semaphore,
    /// Admits one task that begins the journal.
    marking: Semaphore,
    journal: Arc<Journal>,
    /// Whether a sync has failed. If so, earlier writes may be lost.
    failed: AtomicBool,
}

/// One reactor's handle of an open COW file.
pub struct Cow {
    shared: Arc<Shared>,
    file: Raw,
}

impl Cow {
    pub async fn open(file: Raw, options: &CowOptions) -> Result<Self, ImageError> {
        let header = read_header(&file).await?;
        if !options.read_only {
            header.may_be_written()?;
            check::check_spare_bits(&file, &header).await?;
        }
        let mut recovered = None;
        if options.read_only {
            let marked = session::read_mark(&file, &header).await?;
            pending(marked.as_ref(), options.is_below_writer, &options.safety)?;
        } else {
            recovered = session::recover(&file, &header, &options.safety).await?;
        }
        let (log, records) = recovered.unzip();
        let safety =
            if options.read_only { ImageSafety::default() } else { options.safety.clone() };
        let journal = Journal::new(safety, log);
        let shared = Shared {
            bitmap: SectorBitmap::new(header.bitmap_len, options.bitmap_memory, journal.clone()),
            header,
            options: options.clone(),
            loading: RangeLock::default(),
            flushing: Semaphore::new(1),
            marking: Semaphore::new(1),
            journal,
            failed: AtomicBool::new(false),
        };
        let cow = Cow { shared: Arc::new(shared), file };
        if let Some(records) = records {
            cow.replay(records).await?;
        }
        Ok(cow)
    }

    /// Opens the same file on another reactor; `file` is that reactor's storage.
    pub fn view(shared: Arc<Shared>, file: Raw) -> Self {
        Cow { shared, file }
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub fn header(&self) -> &Header {
        &self.shared.header
    }

    /// Returns the size of the guest's disk in bytes, rounded up to whole sectors.
    pub fn size(&self) -> u64 {
        self.shared.size()
    }

    /// Checks that the backing file still has the size (bytes) and mtime (seconds since 1970) that
    /// the header stores. If the backing file changed, the overlay's sectors may not match its
    /// contents.
    pub fn check_backing(&self, size: u64, mtime: i64) -> Result<(), ImageError> {
        let header = self.header();
        let result = header.matches(size, mtime);
        match result {
            Err(e) if self.shared.options.accept_changed_backing => {
                tracing::warn!("{e}");
                Ok(())
            }
            result => result,
        }
    }

    /// Returns where the bytes from `offset` on are stored, up to `len` of them. None: their bitmap
    /// page is not cached; call [`Cow::load`] first.
    #[inline]
    pub fn try_lookup(&self, offset: u64, len: u64) -> Option<Extent> {
        self.shared.lookup(offset, len)
    }

    /// Reads the bitmap page that describes `offset` into the cache.
    pub async fn load(&self, offset: u64) -> io::Result<()> {
        self.load_page(offset / SECTOR / PAGE_SECTORS).await
    }

    /// Reads as many bitmap pages as fit into the cache.
    pub async fn prime(&self) -> io::Result<()> {
        let pages = self.shared.header.bitmap_len.div_ceil(PAGE as u64);
        let mut first = 0;
        while first < pages.min(self.shared.bitmap.frames() as u64) {
            let last = pages.min(first + PRIME);
            let _guard = self.shared.loading.hold(first..last).await;
            // Do not insert a page that is already cached: the cached copy may be newer than the
            // file. It may also be written back and evicted while this read is in flight.
            let bitmap = &self.shared.bitmap;
            let absent: Vec<_> =
                (first..last).filter(|&page| !bitmap.has(page) && bitmap.has_room(page)).collect();
            if !absent.is_empty() {
                let bytes = self.read_pages(first..last).await?;
                for page in absent.into_iter().filter(|&page| bitmap.has_room(page)) {
                    bitmap.insert(page, &bytes[(page - first) as usize * PAGE..][..PAGE]);
                }
            }
            first = last;
        }
        Ok(())
    }

    /// Reads from `host`, an offset in the file that a lookup returned as [`Place::Data`].
    #[inline]
    pub async fn read(&self, segments: Segments, host: u64) -> (Segments, io::Result<()>) {
        self.file.read(segments, host).await
    }

    /// Writes whole sectors at `offset`.
    pub async fn write(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let len = segments.len() as u64;
        if let Err(e) = self.shared.may_change(offset, len) {
            return (segments, Err(e));
        }
        let (segments, mut result) =
            self.file.write(segments, self.shared.host(offset), false).await;
        if result.is_ok() {
            result = self.mark(offset, len).await;
        }
        (segments, result)
    }

    /// Zeroes whole sectors. With `unmap`, the host may deallocate their blocks.
    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.shared.may_change(offset, len)?;
        self.file.write_zeroes(self.shared.host(offset), len, unmap).await?;
        self.mark(offset, len).await
    }

    /// Like [`Cow::write_zeroes`], but returns Unsupported, and changes nothing, if the host would
    /// have to write zeroes.
    pub async fn write_zeroes_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.shared.may_change(offset, len)?;
        self.file.write_zeroes_fast(self.shared.host(offset), len, unmap).await?;
        self.mark(offset, len).await
    }

    /// Deallocates the blocks of whole sectors. Sectors stored in this file may read as zeroes
    /// afterwards; others are unchanged. The bits stay set: clearing one would expose the backing
    /// file's old data.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.may_change(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let Some(extent) = self.try_lookup(at, end - at) else {
                self.load(at).await?;
                continue;
            };
            if let Place::Data(host) = extent.place {
                self.file.discard(host, extent.len).await?;
            }
            at += extent.len;
        }
        Ok(())
    }

    /// Sets the bits of sectors that have been written.
    async fn mark(&self, offset: u64, len: u64) -> io::Result<()> {
        let (mut at, end) = (offset / SECTOR, (offset + len) / SECTOR);
        if self.shared.journal.must_begin()
            && self.shared.bitmap.run(at, end - at) != Some((true, end - at))
        {
            self.begin_journal().await;
        }
        while at < end {
            let page = at / PAGE_SECTORS;
            let stop = end.min((page + 1) * PAGE_SECTORS);
            while !self.shared.bitmap.set(at, stop - at) {
                self.load_page(page).await?;
            }
            at = stop;
        }
        self.bound_dirty().await
    }

    async fn load_page(&self, page: u64) -> io::Result<()> {
        // One load of a page at a time: inserting a copy that was read earlier would lose bits that
        // were set in between.
        let _guard = self.shared.loading.hold(page..page + 1).await;
        if self.shared.bitmap.has(page) || page * PAGE as u64 >= self.shared.header.bitmap_len {
            return Ok(());
        }
        let bytes = self.read_pages(page..page + 1).await?;
        while !self.shared.bitmap.insert(page, &bytes) {
            self.write_back().await?;
        }
        Ok(())
    }

    /// Reads whole bitmap pages from the file, filled up with zeroes behind the bitmap's end.
    async fn read_pages(&self, pages: Range<u64>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (pages.end - pages.start) as usize * PAGE];
        let start = pages.start * PAGE as u64;
        let want = (bitmap_end(self.header()).saturating_sub(start) as usize).min(bytes.len());
        let at = self.shared.header.bitmap_offset + start;
        let (segments, result) = self.file.read(Segments::buffer(want), at).await;
        result.map_err(|e| ImageError::io(BITMAP, at, "reading", e))?;
        segments.copy_out(0, &mut bytes[..want]);
        Ok(bytes)
    }
}

impl Header {
    /// Refuses writes if some sectors have no bit.
    fn may_be_written(&self) -> Result<(), ImageError> {
        if self.unrecorded() == 0 {
            return Ok(());
        }
        let what = format!(
            "version {} has no bits for the last {} sectors of this disk: it can be read or \
             merged, not written",
            self.version(),
            self.unrecorded()
        );
        Err(ImageError::unsupported(BITMAP, what))
    }

    /// Compares a backing file's size and mtime with those that the header stores.
    pub fn matches(&self, size: u64, mtime: i64) -> Result<(), ImageError> {
        let (name, mut changes) = (&self.backing, Vec::new());
        if size != self.backing_size {
            changes.push(format!("has {size} bytes, and had {}", self.backing_size));
        }
        if mtime as u32 != self.backing_mtime {
            changes.push(format!(
                "was last written at {mtime} (seconds since 1970), and had been at {}",
                self.backing_mtime
            ));
        }
        if changes.is_empty() {
            return Ok(());
        }
        let what = format!(
            "the backing file {name} has changed since this file was made: it {}. Restore the old \
             one; or, if its contents are the same, run: blockyard image rebase --unsafe -b {name}",
            changes.join("; it ")
        );
        Err(ImageError::invalid(header::HEADER, None, what))
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("header", &self.header)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn size(&self) -> u64 {
        self.header.sectors() * SECTOR
    }

    /// Returns whether the bitmap in memory differs from the file, or the file has a journal.
    pub(crate) fn has_changes(&self) -> bool {
        self.bitmap.dirty_pages() > 0 || self.journal.has_log()
    }

    fn host(&self, offset: u64) -> u64 {
        self.header.data_offset + offset
    }

    #[inline]
    fn lookup(&self, offset: u64, len: u64) -> Option<Extent> {
        let size = self.size();
        if offset >= size {
            return Some(Extent { len, place: Place::Zero });
        }
        let len = len.min(size - offset);
        let (first, into) = (offset / SECTOR, offset % SECTOR);
        let recorded = self.header.bitmap_len * 8;
        if first >= recorded {
            return Some(Extent { len, place: Place::Absent });
        }
        let sectors = (into + len).div_ceil(SECTOR).min(recorded - first);
        let (own, run) = self.bitmap.run(first, sectors)?;
        let place = if own { Place::Data(self.host(offset)) } else { Place::Absent };
        Some(Extent { len: (run * SECTOR - into).min(len), place })
    }

    /// Checks that a range may be written now: writable, whole sectors, inside the disk, no failed
    /// sync.
    fn may_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.options.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        if !(offset | len).is_multiple_of(SECTOR)
            || offset.checked_add(len).is_none_or(|end| end > self.size())
        {
            let what =
                format!("{len} bytes at {offset}: only whole sectors of the disk can be changed");
            return Err(ImageError::refused("cow data", what).into());
        }
        self.still_trusted()
    }
}

/// Returns where writes of the bitmap end, relative to the bitmap's start. Writes cover whole
/// sectors, unless the data begin inside the last sector of the bitmap.
fn bitmap_end(header: &Header) -> u64 {
    let room = header.data_offset - header.bitmap_offset;
    header.bitmap_len.next_multiple_of(SECTOR).min(room)
}

/// Reads the header, and the file's length in bytes.
async fn read_header_and_len(file: &Raw) -> Result<(Header, u64), ImageError> {
    let failed = |operation: &'static str| move |e| ImageError::io(header::HEADER, 0, operation, e);
    let len = file.storage().len().await.map_err(failed("finding the file's length"))?;
    let (segments, result) = file.read(Segments::buffer(header::HEADER_MAX), 0).await;
    result.map_err(failed("reading"))?;
    let mut bytes = vec![0; header::HEADER_MAX.min(len.try_into().unwrap_or(usize::MAX))];
    segments.copy_out(0, &mut bytes);
    Ok((Header::decode(&bytes)?, len))
}

/// Reads the header; fails if the file is shorter than the header requires.
pub async fn read_header(file: &Raw) -> Result<Header, ImageError> {
    let (header, len) = read_header_and_len(file).await?;
    if len < header.file_len() {
        let what = format!(
            "the file ends after {len} bytes, and should have {}: data behind its end are lost. \
             `blockyard image check --repair all` extends it with zeroes",
            header.file_len()
        );
        return Err(ImageError::invalid(header::HEADER, len, what));
    }
    Ok(header)
}
