//! Load generators, the systems that they are compared on, and what comes of it. `main.rs` is their
//! command line.
//!
//! ```text
//!   client   `bench client`: load on a vhost-user-blk back end (or a host file), measured and verified
//!   rate     `bench rate`: one operation at a time, of random size and place, each timed
//!   target   what it measures: files, devices, vhost-user and NBD servers
//!   figures  `bench median`, `percentile`: what became of those, by size (samples: the two columns, sorted into bins)
//!   job      `bench job`: loads with names, by fio or by the client's engine
//!   experiment  those that are no load: dd and rm, mounting and copying, booting
//!   compare  `bench compare`: the same work on the host and in guests, in turn
//!   calibrate  `bench calibrate`: what operations cost a device      xen  `bench xen`: back ends compared
//!   neighbours  `bench neighbours`: disks of one device beside one another
//!   process  what goes with its value: processes, interruption
//!   results  all of that as data         report  as a table and a page       draw  `bench plot`
//!   diff     `bench diff`: two sets of results
//!   statistics  quantiles                plot    pictures, as SVG and PNG
//! ```
//! `compare -> results -> {report, draw, diff} -> plot -> statistics`. Nothing points back.

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
pub mod samples;
pub mod statistics;
pub mod target;
pub mod xen;
