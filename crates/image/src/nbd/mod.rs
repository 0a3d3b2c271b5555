//! Images that an NBD server serves.

pub mod wire;
