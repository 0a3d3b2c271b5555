//! Fair shares of a backing device, and limits: pure arithmetic, time is passed in.
//!
//! ```text
//!   knobs    what an operator says of a disk or a group: weight, reservation, limits, latency target
//!   limit    rates that are never exceeded            reserve   rates that come first
//!   debt     what drained queues let pass, and until when it is paid
//!   host     devices, group  ─► share   a disk's account: limits, then its share of the device
//!              device   who may begin, who waits ─► board   those that wait, in order
//!                ├ cost     what an operation costs, in nanoseconds of the device's time
//!                ├ alone    what it takes without neighbours
//!                └ window   how much may be on the way
//! ```
//! In: who asks for what, and when. Out: whether it may begin, or until when it waits. Nothing here
//! reads a clock, sleeps, or does I/O; the floor above does. docs/design/fair-shares.md has the
//! reasons and the sources. What must hold: an operation of a disk inside its limits and its
//! share takes no lock; whoever waits is let in.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod baseline;
mod cost;
mod debt;
mod device;
mod group;
mod host;
mod in_flight_window;
mod knobs;
mod limit;
mod reserve;
mod share;
mod wait_list;

pub use cost::{Calibration, Costs, Operation, OperationKind};
pub use device::{Device, Grant};
pub use group::Group;
pub use host::{DeviceProfile, Host};
pub use in_flight_window::DeviceClass;
pub use knobs::{KnobError, Knobs, Limit, Limits, parse_rate};
pub use limit::{Flow, Limiter};
pub use share::{Figures, Share};
pub use wait_list::WaitToken;

/// Nanoseconds since a beginning that the caller chooses; of a clock that does not go back.
pub type Time = u64;
