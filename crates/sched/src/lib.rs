//! Fair shares of a backing device, and limits: pure arithmetic, time is passed in.
//!
//! ```text
//!   knobs   what an operator says of a disk or a group: weight, reservation, limits, latency target
//!   cost    what an operation costs a device, in nanoseconds of the device's time
//!   limit   rates that are never exceeded, and bursts
//! ```
//! In: who asks for what, and when. Out: whether it may begin, or until when it waits. Nothing here reads a clock, sleeps, or
//! does I/O; the floor above does. See docs/fair-share.md for why it is as it is, and for the sources.

mod cost;
mod knobs;
mod limit;

pub use cost::{Costs, Kind, Operation};
pub use knobs::{KnobError, Knobs, Limit, Limits, parse_rate};
pub use limit::Limiter;

/// Nanoseconds since a beginning that the caller chooses; of a clock that does not go back.
pub type Time = u64;
