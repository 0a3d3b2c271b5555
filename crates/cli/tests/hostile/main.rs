//! Hostile guests and hostile front ends against a running daemon.
//!
//! ```text
//!   requests   invalid requests on a valid ring        -> an error status, the ring continues
//!   rings      rings that no driver makes              -> that queue stops, one line in the log
//!   moving     memory that changes under the device, kicks in a loop, memory that is removed
//!   messages   wrong vhost-user messages of every kind -> refused, or disconnected
//!   limits     queues that stop and start              -> no more requests than the limits allow
//!   floods     any of these very often                 -> log, memory and descriptors do not grow
//!   beside     a neighbour on the same reactor         -> it is served during the attack
//!   neighbours discards, garbage in flight, sessions, each in a loop -> the neighbour is served
//!   regions    used-up address space, files that can be withheld, in-flight regions after a reset
//!   turns      endless chains, descriptors that block  -> the reactor continues, the daemon ends
//! ```
//! After each attack the other queue, the other disk and (after a reset) the same queue work. The
//! daemon ends with status 0.

mod beside;
#[path = "../common/mod.rs"]
mod common;
mod daemon;
mod floods;
mod guest;
mod limits;
mod messages;
mod moving;
mod neighbours;
mod regions;
mod requests;
mod rings;
mod turns;
