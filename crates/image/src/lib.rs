//! Disk images: what a guest's offset means in a file on the host.
//!
//! In: reads, writes, discards, zeroes and flushes at offsets in bytes. Out: operations on [`Storage`]. An image is
//! generic over its storage, so the same code runs over io_uring and over the simulated disk.
//!
//! `open` makes an [`ImageFile`]: the descriptor, its lock and what the host says about it; it may be sent to any thread.
//! Each reactor then makes its own [`Raw`] of it.

// These macros panic when the stream cannot be written; `blockyard_bench::output` and the log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cache;
mod cache_shares;
mod chain;
mod clusters_held;
mod commit;
pub mod cow;
mod error;
mod extent;
mod file_id;
mod format;
mod image;
mod join;
mod layer;
mod lock;
mod lower;
pub mod nbd;
mod open;
mod overlay;
pub mod qcow2;
mod range_lock;
mod raw;
mod resolved;
mod store;
mod stream;
mod survey;
mod sweep;
pub mod tools;
mod traffic;

pub use blockyard_ring::Storage;
pub use blockyard_ring::host::Geometry;
pub use cache::CacheMode;
pub use chain::{Chain, ChainError, ChainLayer, ChainOptions, MAX_DEPTH};
pub use commit::CopyDown;
pub use error::{ImageError, Kind};
pub use extent::{Below, BlockStatus, Extent, Nothing, Place};
pub use file_id::FileId;
pub use format::Format;
pub use image::Image;
pub use join::all as join_all;
pub use layer::{Found, Layer, Layers};
pub use lower::Lower;
pub use open::{ImageFile, OpenError, OpenOptions, OpenedFiles, Overlaid};
pub use overlay::GrownChain;
pub use raw::{Raw, RawShape};
pub use store::Store;
pub use stream::{copy_up, stand_alone};
pub use sweep::Progress;
pub use traffic::Pass;

/// The unit of virtio and of an image's capacity, in bytes.
pub const SECTOR: u64 = 512;
