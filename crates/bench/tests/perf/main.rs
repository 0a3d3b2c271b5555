//! Rates and latencies of devices and delays with known figures, and the clocks of guests, on the
//! real clock: `make perf`, on a quiet machine. Limits are measured by the target `perf` of the
//! server's package.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;
#[path = "../../../cli/tests/perf/figures.rs"]
mod figures;
mod model;
mod shares;
