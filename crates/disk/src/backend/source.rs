//! An open back end before a reactor uses it: its properties, and why it cannot be opened.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_image::{Chain, ChainError, Geometry, ImageFile, OpenError, SECTOR};
use blockyard_ring::{GuestMemory, MemoryError};
use blockyard_storage::SizeError;

use super::delay::{Model, ModelError};
use crate::layer_files::LayerFiles;
use crate::poison::LostImage;

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
        why: LostImage,
    },
}

/// What clients see of an image that is not open at the moment.
#[derive(Debug)]
pub struct InactiveImage {
    /// Path of the topmost image. None: there is no image.
    path: Option<PathBuf>,
    /// The files of all images when they were last open.
    files: LayerFiles,
    size: u64,
    geometry: Geometry,
    logical_block: u32,
    discard_unit: u32,
}

impl InactiveImage {
    pub(crate) fn of(source: &Source) -> Self {
        InactiveImage {
            path: source.path().map(Path::to_path_buf),
            files: source.layer_files(),
            size: source.capacity(),
            geometry: source.geometry(),
            logical_block: source.logical_block(),
            discard_unit: source.discard_unit(),
        }
    }

    pub(crate) fn files(&self) -> &LayerFiles {
        &self.files
    }
}

/// Error of [`Source::open`].
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error("{name}: {error}")]
    Size { name: String, error: SizeError },
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

    /// Returns whether the host has no space for what the image needs to be opened, such as the
    /// replay of its journal.
    pub fn is_full(&self) -> bool {
        let SourceError::Chain(ChainError::Image { error, .. }) = self else { return false };
        error.io_source().is_some_and(blockyard_image::is_full)
    }
}

impl Source {
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

    /// Returns the path of the topmost image, which need not be open.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Source::Chain(chain) => Some(chain.path()),
            Source::Inactive(image) => image.path.as_deref(),
            _ => self.file().map(|file| file.path()),
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
