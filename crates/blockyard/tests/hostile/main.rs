//! Hostile guests and hostile front ends against a running daemon.
//!
//! ```text
//!   requests   chains of a sound ring that ask for what cannot be     -> an error status, the ring goes on
//!   rings      rings that no driver makes                             -> that queue stops, one line in the log
//!   moving     memory that changes under the device, kicks without end, memory taken away
//!   messages   vhost-user messages of every wrong kind                -> refused, or the front end is let go
//!   limits     queues that stop and start                    -> no more than the limits allow
//!   floods     anything of this very often                            -> neither log nor memory nor descriptors grow
//!   beside     a neighbour of the same reactor beside each of these   -> it is served while the attack goes on
//!   neighbours discards, garbage in flight, sessions, each without end    -> the neighbour is served meanwhile
//!   regions    address space taken, files that can be withheld, in-flight regions over a reset
//!   turns      chains without end, descriptors that would block       -> the reactor goes on, the daemon ends
//! ```
//! After each: the other queue, the other disk, and (reset) the same queue work; the daemon ends as
//! it should.

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
