//! Inspection: what disks and images contain. Nothing here writes.
//!
//! ```text
//!   map       lists extents
//!   details   lists snapshots and bitmaps
//!   measure   computes the size of a new image
//!   compare   compares two disks
//! ```

pub mod compare;
pub mod details;
pub mod map;
pub mod measure;
