//! qcow2, versions 2 and 3: clusters that are allocated as they are written, with reference counts.
//!
//! ```text
//!   view   lookup, read      write   in place, or to new clusters     flush     the order of metadata on their way
//!   tables L2 in memory      zero    zeroes, discards, copying up     alloc     reserved clusters, refcounts
//!   shared what reactors share of an open image                       reserve   getting more clusters
//!   packing  compressed clusters, one after another                   buffers   how much memory requests take
//! ```
//! What is read once, or by one at a time on a closed image, is in the cold modules: the header and
//! the encoding of table entries and refcounts.

mod alloc;
pub mod amend;
pub mod backing;
pub mod bitmap;
mod buffers;
mod bytes;
mod change;
pub mod check;
mod compressed;
pub mod create;
pub mod empty;
pub mod entry;
mod flush;
pub mod header;
mod open;
mod packing;
mod preallocate;
pub mod refblock;
mod reserve;
pub mod resize;
mod rewrite;
mod shared;
pub mod snapshot;
mod tables;
mod view;
mod write;
mod zero;

pub use check::rebuild_refcounts;
pub use compressed::{pack, unpack};
pub use create::{CreateOptions, Preallocation, create};
pub use header::{BitmapsExtension, Compression, Extension, Header};
pub use open::{L2_CACHE_LIMIT, Qcow2Options};
pub use shared::Shared;
pub use view::Qcow2;
