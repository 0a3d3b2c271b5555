//! Fair queueing and rate limits for disks that share a backing device. Pure arithmetic: the caller
//! passes the time in.
//!
//! ```text
//!   knobs    settings of a disk or a group: weight, reservation, limits, latency target
//!   limit    token buckets                     reserve   guaranteed minimum rates (mClock)
//!   debt     cost that a drain admitted too early, and when it is paid
//!   host     the devices and groups of a process
//!   share    one disk's account: its limits, then its share of the device
//!     device   start-time fair queueing: admits operations or makes them wait
//!       ├ wait_list          the operations that wait, lowest start tag first
//!       ├ cost               cost of an operation, in nanoseconds of device time
//!       ├ baseline           service time of an operation without neighbours
//!       ├ in_flight_window   cost that may be in flight on the device
//!       └ probe              moments without the disks over their share
//! ```
//!
//! In: operations, with the time of each. Out: whether an operation may begin, or when to retry.
//! This crate reads no clock, does not sleep and does no I/O; the throttle in crate `disk` does.
//! Sources: start-time fair queueing (Goyal, Vin and Cheng, 1996), the cost model of Linux's
//! blk-iocost, and mClock (Gulati, Merchant and Varman, 2010). docs/design/fair-shares.md explains
//! the choices.
//!
//! What must hold: an operation within its disk's limits and share takes no lock. Every operation
//! that waits is admitted.

// `print!` and `eprint!` panic if the stream cannot be written. `blockyard_program::output` and the
// log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod account;
mod baseline;
mod carried;
mod cost;
mod debt;
mod device;
mod group;
mod host;
mod in_flight_window;
mod knobs;
mod limit;
mod probe;
mod reserve;
mod share;
mod wait_list;

pub use carried::{LimiterState, ShareState};
pub use cost::{Calibration, Costs, Operation, OperationKind};
pub use device::{Device, Grant, Shortfall, Unmet};
pub use group::Group;
pub use host::{DeviceProfile, Host};
pub use in_flight_window::DeviceClass;
pub use knobs::{KnobError, Knobs, Limit, Limits, parse_rate, parse_size};
pub use limit::{Flow, Limiter};
pub use share::{Figures, ReactorShare, Share};
pub use wait_list::WaitToken;

/// Nanoseconds of a monotonic clock, since an origin that the caller chooses.
pub type Time = u64;
