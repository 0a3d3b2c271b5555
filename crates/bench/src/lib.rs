//! Load generators and their statistics.
//!
//! ```text
//!   client   `blockyard bench client`: load on a vhost-user-blk back end (or a host file), measured and verified
//!   driver   the vhost-user-blk front end and virtqueue driver under it; tests use it by itself
//!   rate     `bench rate`: one operation at a time, of random size and place, each timed
//!   target   what it measures: files, devices, vhost-user and NBD servers
//!   figures  `bench median`, `percentile`: what became of those, by size (samples: the two columns, sorted into bins)
//!   statistics  quantiles        plot  pictures, as SVG
//! ```

pub mod client;
pub mod driver;
pub mod figures;
pub mod plot;
pub mod rate;
pub mod samples;
pub mod statistics;
pub mod target;
