//! The storage under images: files and block devices of this host, exports of NBD servers, and the
//! simulated disk.
//!
//! ```text
//!   storage      the trait `Storage`, alignment, capabilities
//!   schemes      the table of schemes; opens an image by its name
//!   scheme       what a scheme must be able to do
//!   image_file   an open image file on any storage
//!   store        the storage of an image on one reactor
//!   opened       what an open takes and returns
//!   boxed        any storage behind a pointer
//!   file         files and block devices: opening, lock, records of snapshots
//!   nbd          exports of NBD servers
//!   targets      disks of the library's user: code or another program decides their contents
//!   sim          the simulated disk; journals for power cuts
//!   forward      a macro that forwards methods of `Storage`
//!   error        why a name cannot be opened
//!   cache        cache modes
//!   size         sizes of disks that are parts of names
//!   range_lock   locks for read-modify-write
//! ```
//!
//! In: a name (a path or a URI). Out: an [`ImageFile`], which may be sent to any thread; and
//! [`Store`], which is the same on one reactor.
//!
//! Each part imports only parts below it: the table is at the top, the types of `opened` at the
//! bottom. To add a storage, add a file with three types and a line of `schemes.rs`. A
//! [`StorageScheme`] opens a name and returns an [`Opened`], which returns a [`Storage`] for each
//! reactor. A layer that wraps a storage (encryption, a cache, a journal) is a `Storage` over a
//! `Storage`. It implements the methods that it changes and forwards the others: see
//! [`sim::Recorded`].

// `print!` and `eprint!` panic if the stream cannot be written. `blockyard_program::output` and the
// log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod forward;

mod boxed;
mod cache;
pub mod error;
pub mod file;
mod image_file;
pub mod nbd;
mod opened;
mod range_lock;
mod scheme;
mod schemes;
pub mod sim;
mod size;
mod storage;
mod store;
pub mod targets;

pub use blockyard_ring::host::Geometry;
pub use boxed::{AnyStorage, AnyStore};
pub use cache::{CacheMode, UnknownCacheMode};
pub use error::{ErrorKind, StorageError};
pub use file::{FileId, HostFile, path_of};
pub use image_file::ImageFile;
pub use opened::{OpenError, OpenOptions, Opened, Overlaid, Program};
pub use range_lock::{RangeGuard, RangeLock};
pub use scheme::{Scheme, StorageScheme};
pub use schemes::{SCHEMES, scheme_of};
pub use size::{SizeError, disk_size};
pub use storage::{Alignment, Capabilities, LookupFigures, Storage};
pub use store::Store;

/// Size of a sector in bytes: the unit of virtio and of an image's capacity.
pub const SECTOR: u64 = 512;
