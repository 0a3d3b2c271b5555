//! qcow2, versions 2 and 3: clusters with reference counts, allocated when they are first written.
//!
//! ```text
//!   view      lookup, read
//!   tables    cache of L2 tables
//!   write     in place, or to new clusters
//!   partial   new clusters of which the rest is copied later
//!   zero      zeroes, discards, copy-up
//!   mapping   changes of entries in memory
//!   flush     write-back: the order of metadata
//!   alloc     reserved clusters, refcounts
//!   reserve   reserves more clusters
//!   shared    what reactors share of an open image
//!   packing   compressed clusters, one after another
//!   buffers   bounds the memory of requests
//!   session   the mark of a journal in the image; replay: the journal of a server that died
//! ```
//!
//! The other modules are off the request path: they run once, or on a closed image. They hold the
//! header, the encoding of table entries and refcounts, and the commands.

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
mod mapping;
mod open;
mod packing;
mod partial;
mod preallocate;
pub mod refblock;
mod replay;
mod reserve;
pub mod resize;
mod rewrite;
mod session;
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
pub use partial::IncompleteCluster;
pub use shared::Shared;
pub use view::{LookupFigures, Qcow2};
