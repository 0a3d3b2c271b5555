//! State of an open image that all reactors share. It is in memory only: nothing here does I/O.
//!
//! ```text
//!   alloc     reserved clusters, refcounts
//!   tables    cache of L2 tables
//!   partial   clusters of which the rest is copied later
//!   packing   where compressed clusters are written
//!   buffers   bounds the memory of requests
//!   shared    all of it, for one image
//! ```

pub mod alloc;
pub mod buffers;
pub mod packing;
pub mod partial;
pub mod shared;
pub mod tables;
