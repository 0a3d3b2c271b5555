//! qcow2, versions 2 and 3: clusters with reference counts, allocated when they are first written.
//!
//! ```text
//!   encoding   what lies in the file: header, entries, refcounts
//!   state      what reactors share of an open image
//!   reading    a reactor's view of it: lookups and reads
//!   check      counts the references; repairs refcounts
//!   closed     changes of a closed image: snapshots, bitmaps, size, options
//!   recovery   the journal's mark in the image; the journal of a server that died
//!   writing    writes, zeroes, allocation, write-back
//!   open       opens an image
//!   create     creates an image
//! ```
//!
//! Each module uses only modules above it. `state`, `reading` and `writing` are on the request
//! path. The others run once, or on a closed image.

pub mod check;
mod closed;
mod create;
mod encoding;
mod open;
mod reading;
mod recovery;
mod state;
mod writing;

pub use check::rebuild_refcounts;
pub use closed::{amend, backing, bitmap, empty, resize, snapshot};
pub use create::{CreateOptions, Preallocation, create};
pub use encoding::compression::{pack, unpack};
pub use encoding::header::{BitmapsExtension, Compression, Extension, Header};
pub use encoding::{bitmap_directory, entry, header, refblock, snapshot_table};
pub use open::{L2_CACHE_LIMIT, Qcow2Options};
pub use reading::view::Qcow2;
pub use state::shared::Shared;
pub use writing::partial::IncompleteCluster;
