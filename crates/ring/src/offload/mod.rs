//! Work that a reactor leaves to other threads.
//!
//! ```text
//!   threads   starts threads in a sandbox     pool     bounded threads for work that may block
//!   workers   calls that an executor awaits   compute  long computations
//! ```

pub(crate) mod compute;
pub mod pool;
pub mod threads;
pub(crate) mod workers;
