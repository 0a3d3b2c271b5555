//! What an image lies on: files and block devices of this host, exports of NBD servers, the
//! simulated disk.
//!
//! ```text
//!   storage   the trait `Storage`, alignment, capabilities     file    files and block devices: opening, lock, records
//!   schemes   the table of all storages, `Store`               nbd     exports of NBD servers
//!   open      an open image file, whatever it lies on          sim     the simulated disk; journals for power cuts
//!   forward   methods of `Storage` that only hand on
//!   error     why a name cannot be opened
//!   cache     cache modes                                      range_lock   read-modify-write, one at a time
//! ```
//! In: a name (a path or a URI). Out: an [`ImageFile`], which may be sent to any thread; and
//! [`Store`], which is the same on one reactor.
//!
//! A further storage is a folder with three types, and a row in `schemes.rs`: a [`Scheme`] opens a
//! name and gives an [`Opened`], which gives a [`Storage`] to each reactor. A layer that wraps a
//! storage (encryption, a cache, a journal) is a `Storage` over a `Storage`; it writes the methods
//! that it changes, and forwards the others: see [`sim::Recorded`].

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod forward;

mod cache;
pub mod error;
pub mod file;
pub mod nbd;
mod open;
mod range_lock;
mod schemes;
pub mod sim;
mod storage;

pub use blockyard_ring::host::Geometry;
pub use cache::{CacheMode, UnknownCacheMode};
pub use error::StorageError;
pub use file::{FileId, HostFile, path_of};
pub use open::{ImageFile, OpenError, OpenOptions, Opened, Overlaid};
pub use range_lock::{RangeGuard, RangeLock};
pub use schemes::{SCHEMES, Scheme, Store, scheme_of};
pub use storage::{Alignment, Capabilities, Storage};

/// The unit of virtio and of an image's capacity, in bytes.
pub const SECTOR: u64 = 512;
