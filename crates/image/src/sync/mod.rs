//! What reactors that share an image wait for: clusters that are being written, and those who may
//! still read freed ones.

pub mod clusters_held;
pub mod epoch;
