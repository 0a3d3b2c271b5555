//! Rates, latencies and shares in real time: `make perf`, on a quiet machine. `make test` and CI do
//! not run this, because other load on the machine changes the figures. Tests in `sched`, `disk`
//! and `export` check the calculations in simulated time.
//!
//! Each test prints a table of its figures, and fails if one is outside its range.

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../daemon/disks.rs"]
mod disks;
mod exchange;
mod figures;
// The module has more functions than these tests use.
#[allow(dead_code)]
#[path = "../daemon/guest.rs"]
mod guest;
mod limits;
// The module has more functions than this test uses.
#[allow(dead_code)]
#[path = "../nbd/fixture.rs"]
mod nbd_server;
mod polling;
mod reactors;
mod statistics;
mod ublk;
// The module has more functions than this test uses.
#[allow(dead_code)]
#[path = "../ublk/fixture.rs"]
mod ublk_guest;
