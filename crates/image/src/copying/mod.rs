//! Copies between the images of a chain: down (commit) and up (stream). Both use the sweep.

pub mod commit;
pub mod stream;
pub mod sweep;
