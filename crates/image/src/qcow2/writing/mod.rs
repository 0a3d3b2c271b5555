//! Writing: what requests and flushes change of an open image. The methods are those of a reactor's
//! view.
//!
//! ```text
//!   reserve       reserves clusters, writes their refcounts
//!   mapping       changes entries in memory
//!   write         in place, or to new clusters
//!   partial       new clusters of which the rest is copied later
//!   zero          zeroes, discards, copy-up
//!   packing       compressed clusters, one after another
//!   preallocate   clusters without data
//!   flush         write-back: the order of metadata
//! ```

mod flush;
mod mapping;
mod packing;
pub mod partial;
mod preallocate;
mod reserve;
#[cfg(test)]
mod tests;
mod write;
mod zero;
