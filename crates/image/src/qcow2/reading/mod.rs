//! Reading: one reactor's view of an open image.
//!
//! ```text
//!   decompressed   cache of decompressed clusters
//!   view           lookups, loads of L2 tables, reads
//!   compressed     reads of compressed clusters
//! ```

mod compressed;
mod decompressed;
pub mod view;
