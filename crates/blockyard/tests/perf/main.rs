//! Rates, latencies and shares on the real clock: `make perf`, on a quiet machine. Neither `make
//! test` nor CI runs this, because what else the machine does changes the figures. Their arithmetic
//! is tested on a simulated clock in `sched` and `disk`.
//!
//! Each test prints a table of its figures, and fails if one is outside its range.

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../daemon/disks.rs"]
mod disks;
mod figures;
// It has more than what is measured here.
#[allow(dead_code)]
#[path = "../daemon/guest.rs"]
mod guest;
mod limits;
