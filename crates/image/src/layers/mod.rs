//! Layers: the images of a chain, as one reactor uses them together.
//!
//! ```text
//!   format         the formats of images
//!   meta           what reactors share of one image, of any format
//!   layer          one image, of any format
//!   lookup_cache   the last lookups
//!   layout_scan    layers that are mostly holes; block status
//!   long           bounds the work of long requests
//!   image          the disk: reads, writes, discards, zeroes and flushes
//! ```
//!
//! In: requests at offsets of the disk. Out: operations on the formats below.

pub mod format;
pub mod image;
pub mod layer;
pub mod layout_scan;
mod long;
mod lookup_cache;
pub mod meta;
