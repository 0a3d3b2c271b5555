//! What holds a disk's data: an image file, a chain of images, memory, or nothing.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::{
    BlockStatus, Chain, ChainError, ChainOptions, Format, Geometry, Image, ImageFile,
    LookupFigures, OpenError, OpenOptions, Opener, Raw, SECTOR, Store,
};
use blockyard_ring::{GuestMemory, Handle, MemoryError, Region, Segments};
use blockyard_storage::Storage;

use crate::request::Op;
use crate::statistics::OpKind;

mod delay;
mod ram;

use delay::Below;
pub use delay::{Delay, Model, ModelError};
pub use ram::Ram;

/// An open back end before a reactor uses it. All reactors may share it.
#[derive(Clone, Debug)]
pub enum Source {
    /// A raw image: offsets in the file are the guest's offsets.
    File(Arc<ImageFile>),
    /// An image of another format, and its backing images.
    Chain(Arc<Chain>),
    /// Reads leave the guest's buffer as it is, and writes are discarded. Use this to measure the
    /// cost of everything above the image.
    Null {
        size: u64,
    },
    /// Like Null or File, but requests take as long as on a modelled device.
    Delay {
        size: u64,
        model: Arc<Model>,
        file: Option<Arc<ImageFile>>,
    },
    Ram(Arc<GuestMemory>),
    /// No image is open, because no guest uses the disk.
    Inactive(Arc<InactiveImage>),
    /// The image was lost during an exchange: every request fails.
    Gone {
        size: u64,
        why: String,
    },
}

/// What clients see of an image that is not open at the moment.
#[derive(Debug)]
pub struct InactiveImage {
    size: u64,
    geometry: Geometry,
    logical_block: u32,
    discard_unit: u32,
}

impl InactiveImage {
    pub(crate) fn of(source: &Source) -> Self {
        InactiveImage {
            size: source.capacity(),
            geometry: source.geometry(),
            logical_block: source.logical_block(),
            discard_unit: source.discard_unit(),
        }
    }
}

/// Error of [`Source::open`].
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(
        "{name}: a size is a number of bytes with an optional suffix k, M, G or T \
         (powers of 1024), at least 512"
    )]
    Size { name: String },
    #[error("{name}: {error}")]
    Delay { name: String, error: ModelError },
    #[error("{name}: not enough memory for a disk of this size: choose a smaller one")]
    Memory { name: String, source: MemoryError },
}

impl SourceError {
    /// Returns whether another process has locked an image.
    pub fn is_locked(&self) -> bool {
        matches!(
            self,
            SourceError::Open(OpenError::Locked { .. })
                | SourceError::Chain(ChainError::Open(OpenError::Locked { .. }))
        )
    }
}

impl Source {
    /// Opens an image by path, or `null:SIZE`, `ram:SIZE` or `delay:SIZE,...`. Without a given
    /// format the file name decides; the default is raw.
    pub fn open(options: &ChainOptions) -> Result<Self, SourceError> {
        Source::open_by(&Opener::default(), options)
    }

    /// Like [`Source::open`], with the ring of `opener` if metadata must be read.
    pub fn open_by(opener: &Opener, options: &ChainOptions) -> Result<Self, SourceError> {
        let name = options.path.to_string_lossy();
        let size = |text: &str| {
            let size = parse_size(text).filter(|s| *s >= SECTOR && *s < 1 << 62);
            size.map(|s| s & !(SECTOR - 1))
                .ok_or_else(|| SourceError::Size { name: name.to_string() })
        };
        if let Some(text) = name.strip_prefix("null:") {
            return Ok(Source::Null { size: size(text)? });
        }
        if let Some(text) = name.strip_prefix("delay:") {
            let opened = Model::open(text)
                .map_err(|error| SourceError::Delay { name: name.to_string(), error });
            return match opened? {
                (Below::Nothing { size }, model) => Ok(Source::Delay { size, model, file: None }),
                (Below::File(path), model) => {
                    let ChainOptions { read_only, cache, nbd, overlaid, journal, .. } =
                        options.clone();
                    let open = OpenOptions {
                        nbd,
                        overlaid,
                        journal,
                        ..OpenOptions::new(path, read_only, cache)
                    };
                    let file = Arc::new(ImageFile::open(&open)?);
                    Ok(Source::Delay { size: file.size(), model, file: Some(file) })
                }
            };
        }
        if let Some(text) = name.strip_prefix("ram:") {
            let region =
                Region::memfd("blockyard-ram", 0, 0, size(text)?).map(|(region, _)| region);
            let memory = region.and_then(|r| GuestMemory::default().with(r));
            let memory =
                memory.map_err(|source| SourceError::Memory { name: name.to_string(), source })?;
            return Ok(Source::Ram(Arc::new(memory)));
        }
        match options.format.or_else(|| Format::of_name(&options.path)).unwrap_or(Format::Raw) {
            Format::Raw => {
                let ChainOptions {
                    path,
                    read_only,
                    cache,
                    force_share,
                    nbd,
                    overlaid,
                    journal,
                    given,
                    ..
                } = options.clone();
                let open = OpenOptions {
                    given,
                    force_share,
                    nbd,
                    overlaid,
                    journal,
                    ..OpenOptions::new(path, read_only, cache)
                };
                Ok(Source::File(Arc::new(ImageFile::open(&open)?)))
            }
            format => {
                let options = ChainOptions { format: Some(format), ..options.clone() };
                Ok(Source::Chain(Arc::new(Chain::open_by(opener, &options)?)))
            }
        }
    }

    /// Returns the bytes that a guest may address: whole sectors. If the file ends within the last
    /// sector, the rest of the sector reads as zeroes.
    pub fn capacity(&self) -> u64 {
        match self {
            Source::File(file) | Source::Delay { file: Some(file), .. } => {
                file.size().next_multiple_of(SECTOR)
            }
            Source::Chain(chain) => chain.size(),
            Source::Inactive(image) => image.size,
            Source::Null { size } | Source::Delay { size, .. } | Source::Gone { size, .. } => *size,
            Source::Ram(memory) => memory.regions().iter().map(|r| r.size()).sum(),
        }
    }

    /// Returns the block sizes that the guest should use, in bytes.
    pub fn geometry(&self) -> Geometry {
        match self {
            Source::File(file) | Source::Delay { file: Some(file), .. } => file.geometry(),
            Source::Chain(chain) => of_chain(chain),
            Source::Inactive(image) => image.geometry,
            Source::Null { .. } | Source::Delay { .. } | Source::Ram(_) | Source::Gone { .. } => {
                Geometry::default()
            }
        }
    }

    /// Returns the smallest unit that a guest should use, in bytes: what O_DIRECT accepts without
    /// read-modify-write. For a chain it is a sector, so that its images may be moved to any
    /// device.
    pub fn logical_block(&self) -> u32 {
        if let Source::Inactive(image) = self {
            return image.logical_block;
        }
        match self.file() {
            Some(file) if file.direct() => file
                .geometry()
                .direct_offset
                .clamp(SECTOR as u32, 4096)
                .max(file.geometry().logical_block.min(4096)),
            _ => SECTOR as u32,
        }
    }

    /// Returns the smallest unit of a discard that frees space, in bytes.
    pub fn discard_unit(&self) -> u32 {
        match self {
            Source::Chain(chain) => chain.units().0 as u32,
            Source::Inactive(image) => image.discard_unit,
            _ => self.geometry().physical_block.max(self.logical_block()),
        }
    }

    /// Returns the device that holds the data: its name, and whether it is rotational. For a chain,
    /// this is the device of the topmost image. None: there is no device, or no other disk can
    /// share it.
    pub fn device(&self) -> io::Result<Option<(String, bool)>> {
        let file = match self {
            Source::Delay { model, .. } => {
                return Ok(model.name().map(|name| (format!("delay:{name}"), false)));
            }
            Source::Chain(chain) => &chain.top().file,
            _ => match self.file() {
                Some(file) => file,
                None => return Ok(None),
            },
        };
        file.device()
    }

    /// Returns the raw image, if the back end is one, or is a modelled device with one.
    pub fn file(&self) -> Option<&Arc<ImageFile>> {
        match self {
            Source::File(file) | Source::Delay { file: Some(file), .. } => Some(file),
            _ => None,
        }
    }

    /// Returns the chain of images, if the back end is one.
    pub fn chain(&self) -> Option<&Arc<Chain>> {
        match self {
            Source::Chain(chain) => Some(chain),
            _ => None,
        }
    }
}

/// Returns the geometry that the guest sees of a chain. The chain's images may be on several
/// devices, so the geometry follows the chain's allocation units, not the devices' preferred sizes.
fn of_chain(chain: &Chain) -> Geometry {
    let device = chain.top().file.geometry();
    let (unit, cluster) = chain.units();
    let minimum_io = device.minimum_io.max(unit as u32);
    Geometry {
        logical_block: SECTOR as u32,
        physical_block: device.physical_block.max(4096),
        minimum_io,
        optimal_io: device.optimal_io.max(cluster as u32).next_multiple_of(minimum_io),
        alignment_offset: 0,
        ..device
    }
}

/// Parses a number of bytes with an optional suffix (powers of 1024).
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// A back end on one reactor. Rare operations have boxed futures, so that those of reads and writes
/// stay small.
pub enum Backend<S> {
    Raw(Raw<S>),
    Image(Image<S>),
    Null,
    Delay(Delay<S>),
    Ram(Ram),
    /// See [`Source::Gone`].
    Gone(String),
}

impl Backend<Store> {
    /// Opens the back end on one reactor.
    pub fn open(handle: &Handle, source: &Source) -> io::Result<Self> {
        let raw = |file: &Arc<ImageFile>| Raw::open(file, handle);
        Ok(match source {
            Source::File(file) => Backend::Raw(raw(file)?),
            Source::Chain(chain) => Backend::Image(chain.image(handle)?),
            Source::Null { .. } => Backend::Null,
            Source::Delay { model, file, .. } => {
                Backend::Delay(Delay::new(handle, model, file.as_ref().map(raw).transpose()?))
            }
            Source::Ram(memory) => Backend::Ram(Ram::new(handle, memory)),
            Source::Inactive(_) => Backend::Gone("no guest uses the disk".into()),
            Source::Gone { why, .. } => Backend::Gone(why.clone()),
        })
    }
}

fn gone<T>(why: &str) -> io::Result<T> {
    Err(io::Error::other(why.to_string()))
}

impl<S: Storage> Backend<S> {
    /// Reads `segments.len()` bytes from `offset`. Returns the segments.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        match self {
            Backend::Raw(raw) => raw.read(segments, offset).await,
            Backend::Image(image) => image.read(segments, offset).await,
            Backend::Null => (segments, Ok(())),
            Backend::Delay(delay) => Box::pin(delay.read(segments, offset)).await,
            Backend::Gone(why) => (segments, gone(why)),
            Backend::Ram(ram) => {
                let copy = |ram: &Segments, at| segments.copy_from(at, ram, 0, ram.len());
                let result = ram.in_pieces(offset, segments.len(), copy).await;
                (segments, result)
            }
        }
    }

    /// Writes at `offset`. `durable`: the data are on stable storage before the call returns.
    /// Images ignore this, because their metadata need a flush; see [`Backend::flushes_whole`].
    #[inline]
    pub async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        match self {
            Backend::Raw(raw) => raw.write(segments, offset, durable).await,
            Backend::Image(image) => image.write(segments, offset).await,
            Backend::Null => (segments, Ok(())),
            Backend::Delay(delay) => Box::pin(delay.write(segments, offset, durable)).await,
            Backend::Gone(why) => (segments, gone(why)),
            Backend::Ram(ram) => {
                let copy = |ram: &Segments, at| ram.copy_from(0, &segments, at, ram.len());
                let result = ram.in_pieces(offset, segments.len(), copy).await;
                (segments, result)
            }
        }
    }

    /// Returns whether only a flush makes a write durable. It does for images, because a flush
    /// writes in order the metadata that lead to the data.
    #[inline]
    pub fn flushes_whole(&self) -> bool {
        matches!(self, Backend::Image(_))
    }

    /// Returns the error if a sync has failed that the image made on its own, and not for a flush
    /// of the disk. Earlier writes may then be lost.
    pub fn lost(&self) -> Option<io::Error> {
        match self {
            Backend::Raw(raw) => raw.storage().lost(),
            Backend::Image(image) => image.lost(),
            _ => None,
        }
    }

    /// Returns whether the image still has all metadata that a failed flush could not write, and no
    /// sync of it has failed. Then a later flush can make all writes durable.
    pub fn keeps_metadata(&self) -> bool {
        matches!(self, Backend::Image(image) if image.keeps_metadata())
    }

    /// Returns whether an operation may last much longer than the device works for it, because it
    /// changes many entries of an image.
    #[inline]
    pub(crate) fn is_long(&self, op: Op, len: u64) -> bool {
        match (self, op) {
            (Backend::Image(image), Op::Discard | Op::WriteZeroes { .. }) => image.is_long(len),
            _ => false,
        }
    }

    /// Stops the discards in progress; see [`Image::stop_discards`].
    pub(crate) fn stop_discards(&self) {
        if let Backend::Image(image) = self {
            image.stop_discards();
        }
    }

    /// See [`Image::end_long_requests`].
    pub(crate) fn end_long_requests(&self, at: Option<Instant>) {
        if let Backend::Image(image) = self {
            image.end_long_requests(at);
        }
    }

    /// Returns how lookups of L2 entries ended. Zero for images without L2 tables.
    pub fn lookups(&self) -> LookupFigures {
        match self {
            Backend::Image(image) => image.lookups(),
            _ => LookupFigures::default(),
        }
    }

    /// Makes all writes durable that completed before this call.
    pub async fn flush(&self) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.flush().await,
            Backend::Image(image) => Box::pin(image.flush()).await,
            Backend::Null | Backend::Ram(_) => Ok(()),
            Backend::Delay(delay) => {
                Box::pin(delay.other(OpKind::Flush, async |raw| raw.flush().await)).await
            }
            Backend::Gone(why) => gone(why),
        }
    }

    /// Flushes, and leaves the image marked as cleanly closed. Call it when the disk is closed, on
    /// one reactor, after the last request has ended.
    pub async fn close(&self) -> io::Result<()> {
        match self {
            Backend::Image(image) => image.close().await,
            _ => Ok(()),
        }
    }

    /// Like [`Backend::close`], for an image that another process of this host opens next.
    pub async fn leave(&self) -> io::Result<()> {
        match self {
            Backend::Image(image) => image.leave().await,
            _ => Ok(()),
        }
    }

    /// Discards a range. Offset and length are in bytes.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.discard(offset, len).await,
            Backend::Image(image) => Box::pin(image.discard(offset, len)).await,
            Backend::Null => Ok(()),
            Backend::Delay(delay) => {
                Box::pin(delay.other(OpKind::Discard, async |raw| raw.discard(offset, len).await))
                    .await
            }
            Backend::Gone(why) => gone(why),
            Backend::Ram(ram) => ram.zero(offset, len as usize).await,
        }
    }

    /// Zeroes a range; durable after a flush. `fast`: fails with Unsupported if zeroes would have
    /// to be written.
    pub async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        unmap: bool,
        fast: bool,
    ) -> io::Result<()> {
        match self {
            Backend::Raw(raw) if fast => raw.write_zeroes_fast(offset, len, unmap).await,
            Backend::Raw(raw) => raw.write_zeroes(offset, len, unmap).await,
            Backend::Image(image) if fast => {
                Box::pin(image.write_zeroes_fast(offset, len, unmap)).await
            }
            Backend::Image(image) => Box::pin(image.write_zeroes(offset, len, unmap)).await,
            Backend::Null => Ok(()),
            Backend::Delay(delay) => {
                let below = async |raw: &Raw<S>| match fast {
                    true => raw.write_zeroes_fast(offset, len, unmap).await,
                    false => raw.write_zeroes(offset, len, unmap).await,
                };
                Box::pin(delay.other(OpKind::WriteZeroes, below)).await
            }
            Backend::Gone(why) => gone(why),
            Backend::Ram(ram) => ram.zero(offset, len as usize).await,
        }
    }
}

impl<S: Storage> Backend<S> {
    /// Returns Unsupported if fast zeroes would fail, as far as this can be known without writing
    /// zeroes.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Backend::Raw(raw) => raw.may_zero_fast(offset, len),
            Backend::Image(image) => Box::pin(image.may_zero_fast(offset, len, unmap)).await,
            Backend::Null | Backend::Ram(_) | Backend::Delay(_) | Backend::Gone(_) => Ok(()),
        }
    }

    /// Returns the block status from `offset` on: the longest range of one status within `len`
    /// bytes. Reads no data.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        match self {
            Backend::Raw(raw) => raw.status(offset, len).await,
            Backend::Image(image) => image.status(offset, len).await,
            Backend::Null | Backend::Ram(_) | Backend::Delay(_) => Ok(BlockStatus::data(len)),
            Backend::Gone(why) => gone(why),
        }
    }
}
