//! Copies of ranges of disks to another disk.
//!
//! ```text
//!   source     ranges of disks, concatenated
//!   compress   writes compressed clusters
//!   convert    copies a source to a new disk
//! ```

pub mod compress;
pub mod convert;
pub mod source;
