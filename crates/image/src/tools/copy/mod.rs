//! Copies of ranges of disks to another disk.
//!
//! ```text
//!   source     ranges of disks, concatenated
//!   compress   writes compressed clusters
//!   convert    copies a source to a new disk
//!   backup     copies a disk in use to a new image
//! ```

pub mod backup;
pub mod compress;
pub mod convert;
pub mod source;
