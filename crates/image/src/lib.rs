//! Disk images: map a guest's offsets to files on the host.
//!
//! In: reads, writes, discards, zeroes and flushes at offsets in bytes. Out: operations on
//! [`Storage`]. An image uses a [`Store`]: the same code runs on io_uring and on the simulated
//! disk.
//!
//! Crate `storage` opens an [`ImageFile`], which all threads can share. Each reactor makes its own
//! [`Raw`] of it.

// These macros panic if the stream cannot be written. `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod chain;
mod copying;
pub mod cow;
mod error;
mod extent;
pub mod journal;
mod layers;
pub mod qcow2;
mod raw;
mod sync;
pub mod tools;

pub use blockyard_ring::join::all as join_all;
pub use blockyard_storage::{
    Alignment, CacheMode, FileId, Geometry, ImageFile, OpenError, OpenOptions, Overlaid, Program,
    SECTOR, Storage, StorageError, Store, UnknownCacheMode, nbd, scheme_of,
};
pub use chain::{
    Chain, ChainError, ChainLayer, ChainOptions, GrownChain, LeftImage, MAX_DEPTH, OpenedFiles,
    Opener, SharedImages, WritableBacking, names_a_path,
};
pub use copying::commit::CopyDown;
pub use copying::stream::{copy_up, stand_alone};
pub use copying::sweep::Progress;
pub use error::{ErrorKind, ImageError, is_full};
pub use extent::{BackingLayers, BlockStatus, Extent, LookupResult, NoBacking, Place};
pub use layers::format::{Format, UnknownFormat};
pub use layers::image::Image;
pub use layers::layer::{Layer, Layers};
pub use qcow2::IncompleteCluster;
pub use raw::Raw;
pub use sync::epoch::EpochGuard;
