//! Load generators, the systems that they compare, and reports. `main.rs` is their command line.
//!
//! ```text
//!   client      `bench client`: load on a vhost-user-blk back end, an NBD export or a host file
//!   rate        `bench rate`: times one operation after another, of random size and offset
//!   targets     files, devices, vhost-user and NBD servers for `rate`
//!   figures     `bench median`, `percentile`: durations by operation size (samples: sorts them)
//!   job         `bench job`: named loads, by fio or by the client's engine
//!   experiment  dd and rm, mount and copy, boot
//!   compare     `bench compare`: the same work on the host and in guests, in turn
//!   calibrate   `bench calibrate`: the costs of a device's operations
//!   xen         `bench xen`: the blkif back end beside vhost-user
//!   neighbours  `bench neighbours`: disks of one device beside one another
//!   rounds      interleaved rounds: the loop of compare, calibrate, xen and neighbours
//!   turns       `bench turns`: their order, for scripts
//!   process     processes that end with their owner, interruption
//!   results     all figures as data     report  a table and a page     draw  `bench plot`
//!   diff        `bench diff`: two sets of results
//!   statistics  quantiles               plot    pictures, as SVG and PNG
//! ```
//! Data flows from `compare` to `results`, and from there to `report`, `draw` and `diff`. These use
//! `plot` for pictures and `statistics` for quantiles.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod calibrate;
pub mod client;
pub mod compare;
pub mod diff;
pub mod draw;
pub mod experiment;
pub mod figures;
pub mod job;
pub mod neighbours;
pub mod plot;
pub mod process;
pub mod rate;
pub mod report;
pub mod results;
pub mod rounds;
pub mod samples;
#[cfg(test)]
mod scratch;
pub mod statistics;
pub mod targets;
pub mod turns;
pub mod xen;
