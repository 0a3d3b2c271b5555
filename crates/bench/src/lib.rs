//! Load generators and their statistics.
//!
//! ```text
//!   client   `blockyard bench client`: load on a vhost-user-blk back end (or a host file), measured and verified
//!   driver   the vhost-user-blk front end and virtqueue driver under it; tests use it by itself
//! ```

pub mod client;
pub mod driver;
