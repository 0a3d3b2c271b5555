//! The simulated counterpart of [`crate::file`]: `Storage` over a disk in memory that can lose
//! power.
//!
//! ```text
//!   disk      `SimDisk`: operations in flight, latency, faults, the power cut
//!   media     which data are durable, and which are cached
//!   runner    `Sim`: polls tasks in seeded order, without ring and clock
//!   power     counts events, and cuts the power
//!   oracle    `Oracle`: what a disk may hold after a power cut; checks any disk
//!   fault     errors to inject
//!   liar      `Liar`: a disk with a defect, for tests of tests
//!   files     `SimFiles`: simulated disks for the data of files of this host
//!   journal   records operations on real files, to simulate power cuts afterwards
//! ```
//!
//! In: a [`SimImage`] (what a disk holds without power) and a seed. Out: answers as from a real
//! write-back disk, and, after [`SimDisk::power_cut`], again a `SimImage`.
//!
//! What must hold: the same seed and the same calls give the same answers in the same order, and
//! the same image after the power cut. Whatever a real disk may do under the promises of
//! [`crate::Storage`], some seed does here. No seed does anything else.
//!
//! Time is virtual: each poll of a waiting operation advances the disk by one step and requests
//! another poll. So it runs under any executor that honours wakers. Under [`Sim`] a hundred
//! operations take well under a millisecond.
//!
//! The disk's rules:
//! - A write reaches the disk sector by sector ([`SimImage::atomic`] bytes each) between its start
//!   and its answer. A read returns what has reached the disk when it is answered. Concurrent
//!   operations reach the disk in any order, with their sectors interleaved.
//! - Data on the disk are volatile until a `sync` that began after the answer, or until the answer
//!   of a `durable` write. A sync may make more data durable, but never less.
//! - After a power cut each sector holds its last durable version or any later one, of an answered
//!   write or of one in flight.
//! - `discard` and `zero` are writes of zeroes. Changes of length (by `set_len`, and by writes past
//!   the end) form a journal in order. A power cut keeps a prefix of those that are not durable.
//!   Truncation and the loss of the truncated data happen together or not at all. Data beyond the
//!   length are lost. A `sync` and a `durable` write commit the journal up to then.
//! - A failed `sync` behaves as on Linux. Each sector that it covers becomes durable or is silently
//!   lost. A lost sector may still be read for a while. The next `sync` returns Ok all the same,
//!   and so does a concurrent one. So a caller with two concurrent syncs must treat the failure of
//!   one as the failure of both.

mod disk;
mod fault;
mod files;
mod journal;
mod liar;
mod media;
mod oracle;
mod power;
mod rng;
mod runner;
#[cfg(test)]
mod tests;
mod trace;

pub use disk::{Latency, SimConfig, SimDisk};
pub use fault::{Fault, FaultError};
pub use files::SimFiles;
pub use journal::{Journal, LeftFile, Recorded, Replay};
pub use liar::{Liar, Lie};
pub use media::SimImage;
pub use oracle::{FlushToken, Mismatch, Oracle, ReadToken, WriteToken, pattern};
pub use power::Power;
pub use rng::Rng;
pub use runner::{Join, Sim, SimHandle, Stalled, yield_now};
pub use trace::{OpKind, Phase, Trace};

/// Size of a sector in bytes: the oracle's unit, and the unit at which a write tears, unless an
/// image has another one.
pub const SECTOR: usize = 512;
