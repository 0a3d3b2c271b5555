//! qcow2, versions 2 and 3: clusters that are allocated as they are written, with reference counts.
//!
//! What is read once, or by one at a time on a closed image, is here in the cold modules: the header and the encoding of
//! table entries and refcounts.

mod bytes;
pub mod entry;
pub mod header;
pub mod refblock;

pub use header::{BitmapsExtension, Compression, Extension, Header};
