//! Copying between the images of a chain: down (commit), up (stream), and the sweep over a disk
//! that both make.

pub mod commit;
pub mod stream;
pub mod sweep;
