//! Persistent bitmaps: what a writer owes to those that it does not keep up to date.

pub mod directory;
