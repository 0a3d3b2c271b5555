//! Copies a disk in use, as it was at one moment, to a new image.
//!
//! ```text
//!   target   a new image, which has no name yet
//!   copy     range ─► known to be zeroes: not read
//!                 └► read ─► the source may change there ─► write what is not zero
//! ```
//!
//! In: a chain that guests use, and ranges of it in any order. Out: the same disk in the target.
//! What must hold: the source is only read. The caller lets nothing change a range before it was
//! read. The target has its name only when it is complete and durable.

use std::cell::Cell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_ring::{Handle, Segments};
use blockyard_storage::{CacheMode, ImageFile};

use crate::SECTOR;
use crate::chain::{Chain, ChainError, ChainOptions};
use crate::copying::sweep::Progress;
use crate::error::ImageError;
use crate::layers::format::Format;
use crate::layers::image::Image;
use crate::layers::layer::Layer;
use crate::qcow2::{CreateOptions, Preallocation};
use crate::tools::create::{NewImage, create};
use crate::tools::unnamed::UnnamedFile;

/// Maximum size of one read, in bytes.
const PIECE: usize = 1 << 20;
/// Granularity in bytes in which zeroes are left out of raw files.
const HOLE: u64 = 4096;

const TARGET: &str = "backup";
const SOURCE: &str = "the disk";

/// A new image for a copy. It has no name before [`BackupTarget::publish`]. Dropping it removes it.
pub struct BackupTarget {
    file: UnnamedFile,
    chain: Chain,
}

impl BackupTarget {
    /// Creates an image of `size` bytes for `path`, where no file may exist. The calls of the host
    /// may block.
    pub fn create(path: &Path, format: Format, size: u64) -> Result<Self, ChainError> {
        let new = match format {
            Format::Raw => NewImage::Raw { size, preallocation: Preallocation::Off },
            Format::Qcow2 => NewImage::Qcow2 { options: CreateOptions::new(size), data: None },
            Format::Cow => {
                let error = ImageError::refused(TARGET, "its format must be raw or qcow2");
                return Err(ChainError::Image { path: path.into(), error });
            }
        };
        let file = UnnamedFile::create(path)?;
        create(path, &file.files(), new)?;
        // A large copy must not take the page cache from others. The image of an unnamed file has
        // no journal, and no syncs between its metadata (`OpenedFiles`).
        let (cache, files) = (CacheMode::None, file.files());
        let options =
            ChainOptions { format: Some(format), cache, files, ..ChainOptions::new(path) };
        Ok(BackupTarget { chain: Chain::open(&options)?, file })
    }

    /// Returns the image, which is open and locked.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Gives the image its name, durably, after [`BackupCopy::finish`]. It gets the mode and, if
    /// possible, the owner and group of `base`. At the end this sets `decided`; if that is set
    /// already, it removes the image. The calls of the host may block.
    pub fn publish(self, base: &ImageFile, decided: &AtomicBool) -> Result<(), ChainError> {
        // The chain keeps its lock until the image has its name.
        self.file.publish(base, decided)
    }
}

/// A copy of a disk on one reactor.
pub struct BackupCopy {
    source: Named,
    target: Named,
    /// Granularity in bytes in which the target is written or left out.
    grain: u64,
    progress: Arc<Progress>,
    /// What each kind of lookup has last learned of the source: a range, and whether it reads as
    /// zeroes. To ask a file for the end of a long run of data is expensive: once for each run is
    /// enough. It stays true, because nothing changes what is not copied yet.
    known: [Cell<(Range<u64>, bool)>; 2],
}

/// How a copy finds parts that are known to read as zeroes. Each kind remembers what it has found,
/// because the next range of the same kind is mostly near.
#[derive(Clone, Copy, Debug)]
pub enum Lookup {
    InOrder,
    /// For a range that is copied before its turn.
    Urgent,
}

/// An image, and its path for errors.
struct Named {
    image: Image,
    path: PathBuf,
}

impl Named {
    fn of(chain: &Chain, handle: &Handle) -> Result<Self, ChainError> {
        let path = chain.options().path.clone();
        match chain.image(handle) {
            // Copy-on-read would copy all data of the backing images into the source.
            Ok(image) => Ok(Named { image: Image::new(image.into_layers(), false), path }),
            Err(e) => {
                let error = ImageError::io("file", None, "opening it for io_uring", e);
                Err(ChainError::Image { path, error })
            }
        }
    }

    fn failed(&self, error: ImageError) -> ChainError {
        ChainError::Image { path: self.path.clone(), error }
    }
}

impl BackupCopy {
    /// Returns a copy of `source` to `target` on a reactor.
    pub fn of(
        source: &Chain,
        target: &Chain,
        handle: &Handle,
        progress: Arc<Progress>,
    ) -> Result<Self, ChainError> {
        Ok(Self::between(Named::of(source, handle)?, Named::of(target, handle)?, progress))
    }

    /// Like [`BackupCopy::of`], with images and their paths.
    pub fn new(
        source: (Image, PathBuf),
        target: (Image, PathBuf),
        progress: Arc<Progress>,
    ) -> Self {
        let named = |(image, path)| Named { image, path };
        Self::between(named(source), named(target), progress)
    }

    fn between(source: Named, target: Named, progress: Arc<Progress>) -> Self {
        let grain = match &target.image.layers()[0] {
            Layer::Qcow2(image) => image.shared().shape().unit,
            Layer::Raw { .. } | Layer::Cow(_) => HOLE,
        };
        BackupCopy { source, target, grain, progress, known: Default::default() }
    }

    /// Returns a buffer for [`BackupCopy::copy`].
    pub fn buffer() -> Segments {
        Segments::buffer(PIECE)
    }

    /// Adds `bytes` to what the progress expects.
    pub fn expect(&self, bytes: u64) {
        self.progress.expect(bytes);
    }

    /// Copies a range, which begins at a multiple of 64 KiB. Calls `has_read` once, as soon as the
    /// source may change there. `lookup`: first asks the source which part of the range is known to
    /// read as zeroes. The buffer is for this copy only.
    pub async fn copy(
        &self,
        range: Range<u64>,
        lookup: Option<Lookup>,
        buffer: &Segments,
        has_read: impl Fn(),
    ) -> Result<(), ChainError> {
        let mut at = match lookup {
            Some(lookup) => self.first_data(lookup, &range).await,
            None => range.start,
        };
        if at >= range.end {
            has_read();
        }
        while at < range.end {
            let len = (range.end - at).min(PIECE as u64);
            let (bytes, read) = self.source.image.read(buffer.slice(0, len as usize), at).await;
            let failed = |e| self.source.failed(ImageError::io(SOURCE, at, "reading", e));
            read.map_err(failed)?;
            if at + len >= range.end {
                has_read();
            }
            self.write(&bytes, at).await?;
            at += len;
        }
        self.progress.add(range.end - range.start);
        Ok(())
    }

    /// Returns the offset up to which the range is known to read as zeroes, rounded down to a whole
    /// grain.
    async fn first_data(&self, lookup: Lookup, range: &Range<u64>) -> u64 {
        let mut at = range.start;
        while at < range.end {
            let (until, zero) = self.status(lookup, at).await;
            if !zero {
                return at - at % self.grain;
            }
            at = until;
        }
        range.end
    }

    /// Returns the end of the bytes at `offset` that are alike, and whether they read as zeroes.
    /// Bytes without a status are read; a fault of the image fails the read.
    async fn status(&self, lookup: Lookup, offset: u64) -> (u64, bool) {
        let known = &self.known[lookup as usize];
        let (range, zero) = known.take();
        let (range, zero) = if range.contains(&offset) {
            (range, zero)
        } else {
            let size = self.source.image.size().next_multiple_of(SECTOR);
            let rest = size.saturating_sub(offset);
            match self.source.image.status(offset, rest).await {
                Ok(found) if found.len > 0 => (offset..offset + found.len, found.zero),
                _ => (offset..offset + 1, false),
            }
        };
        known.set((range.clone(), zero));
        (range.end, zero)
    }

    /// Writes the grains that are not all zeroes, because the target reads as zeroes. `offset` is a
    /// multiple of the grain.
    async fn write(&self, bytes: &Segments, offset: u64) -> Result<(), ChainError> {
        let mut from = 0;
        while let Some(run) = self.next_data(bytes, from) {
            let at = offset + run.start as u64;
            let written = self.target.image.write(bytes.slice(run.start, run.len()), at).await.1;
            let failed = |e| self.target.failed(ImageError::io(TARGET, at, "writing", e));
            written.map_err(failed)?;
            from = run.end;
        }
        Ok(())
    }

    /// Returns the next run of grains that are not all zeroes. `from` is a multiple of the grain,
    /// or the end.
    fn next_data(&self, bytes: &Segments, from: usize) -> Option<Range<usize>> {
        let grain = self.grain as usize;
        let first = from + bytes.find_nonzero(from, bytes.len() - from)?;
        let (start, mut end) = (first - first % grain, first);
        loop {
            end = (end - end % grain + grain).min(bytes.len());
            let next = grain.min(bytes.len() - end);
            if bytes.find_nonzero(end, next).is_none() {
                return Some(start..end);
            }
        }
    }

    /// Makes the target durable, and marks it as closed. All ranges were copied.
    pub async fn finish(&self) -> Result<(), ChainError> {
        let closed = self.target.image.close().await;
        closed.map_err(|e| self.target.failed(ImageError::io(TARGET, None, "syncing", e)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use blockyard_storage::Alignment;
    use blockyard_storage::sim::{OpKind, Phase, Sim, SimConfig, SimDisk, SimImage, Trace};

    use super::*;
    use crate::raw::Raw;

    const SIZE: u64 = (3 << 20) + 512;

    fn raw(disk: &SimDisk) -> (Image, PathBuf) {
        let raw = Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
        (Image::new(vec![Layer::Raw { raw, size: SIZE }], false), "image".into())
    }

    fn new_disk() -> SimDisk {
        SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(1))
    }

    /// Returns the operations of a kind that the disk has begun.
    fn begun(disk: &SimDisk, kind: OpKind) -> Vec<Trace> {
        let is_begun = |trace: &Trace| trace.kind == kind && trace.phase == Phase::Started;
        disk.trace().into_iter().filter(is_begun).collect()
    }

    /// Fills a disk with data at these ranges.
    async fn fill(disk: &SimDisk, ranges: &[Range<u64>]) {
        let (image, _) = raw(disk);
        for range in ranges {
            let bytes = vec![range.start as u8 | 1; (range.end - range.start) as usize];
            image.write(Segments::from_bytes(&bytes), range.start).await.1.unwrap();
        }
    }

    #[test]
    fn only_what_is_not_zero_is_written() {
        let all = async {
            let (source, target) = (new_disk(), new_disk());
            // Within a grain, over two of them, at the end of a piece, and the partial last sector.
            let data = [700..800, 12287..12289, (1 << 20) - 1..1 << 20, SIZE - 512..SIZE];
            fill(&source, &data).await;
            let progress = Arc::<Progress>::default();
            let copy = BackupCopy::new(raw(&source), raw(&target), progress.clone());
            let (buffer, reads) = (BackupCopy::buffer(), AtomicU64::new(0));
            copy.expect(SIZE);
            for range in [0..1 << 20, 1 << 20..2 << 20, 2 << 20..SIZE] {
                let has_read = || {
                    reads.fetch_add(1, Ordering::Relaxed);
                };
                copy.copy(range, Some(Lookup::InOrder), &buffer, has_read).await.unwrap();
            }
            copy.finish().await.unwrap();
            assert!(source.contents() == target.contents(), "the copy differs");
            assert_eq!(reads.into_inner(), 3);
            assert_eq!((progress.done(), progress.total()), (SIZE, SIZE));
            let writes = begun(&target, OpKind::Write).into_iter();
            let writes: Vec<_> = writes.map(|write| (write.offset, write.len)).collect();
            let last = ((1 << 20) - HOLE, HOLE);
            assert_eq!(writes, [(0, HOLE), (2 * HOLE, 2 * HOLE), last, (SIZE - 512, 512)]);
        };
        Sim::new(1).block_on(all).unwrap();
    }

    #[test]
    fn the_source_may_change_as_soon_as_it_is_read() {
        let all = async {
            let (source, target) = (new_disk(), new_disk());
            fill(&source, std::slice::from_ref(&(0..SIZE))).await;
            let copy = BackupCopy::new(raw(&source), raw(&target), Arc::default());
            let has_read = || {
                assert!(!begun(&source, OpKind::Read).is_empty());
                assert!(begun(&target, OpKind::Write).is_empty());
            };
            copy.copy(0..65536, None, &BackupCopy::buffer(), has_read).await.unwrap();
            assert!(target.contents()[..65536] == source.contents()[..65536]);
        };
        Sim::new(1).block_on(all).unwrap();
    }
}
