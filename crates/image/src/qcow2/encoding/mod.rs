//! Encoding: what lies in an image's file, and how its bytes are read and written.
//!
//! ```text
//!   bytes              big-endian numbers
//!   file               reads and syncs, with errors that name the structure
//!   refblock           refcounts
//!   header             the header and its extensions
//!   rewrite            replaces the header
//!   entry              L1 and L2 entries
//!   compression        compressed clusters
//!   snapshot_table     the snapshots
//!   bitmap_directory   the bitmaps
//! ```
//!
//! In: bytes of the file. Out: values that were checked against the format's limits, or errors.

pub mod bitmap_directory;
pub mod bytes;
pub mod compression;
pub mod entry;
pub mod file;
pub mod header;
pub mod refblock;
pub mod rewrite;
pub mod snapshot_table;
