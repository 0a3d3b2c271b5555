//! The simulated twin of [`crate::file`]: `Storage` over a disk that lives in memory and can lose
//! its power.
//!
//! ```text
//!   disk     `SimDisk`: operations in flight, latency, faults, the cut      media    what is durable, what is cached
//!   runner   `Sim`: tasks polled in seeded order, no ring, no clock         power    events counted, the switch
//!   oracle   `Oracle`: what a disk may hold after a cut; judges any disk    fault    errors to inject
//!   journal  what real files were asked, for cuts afterwards
//! ```
//!
//! In: a [`SimImage`] (what a disk holds with the power off), a seed. Out: answers as from a real
//! write-back disk, and, after [`SimDisk::power_cut`], a `SimImage` again. What must hold: the same
//! seed and the same calls give the same answers, in the same order, and the same image after the
//! cut; whatever a real disk may do under the promises of [`crate::Storage`], some seed does here;
//! what it may not do, no seed does.
//!
//! Time is virtual: a waiting operation that is polled lets the disk make one step and asks to be
//! polled again. So it runs under any executor that honours wakers; under [`Sim`] a hundred
//! operations take well under a millisecond.
//!
//! The disk's rules
//! - A write lands sector by sector ([`SimImage::atomic`] bytes each) between its start and its
//!   answer; a read sees what has landed when it is answered. Operations in flight together land in
//!   any order, sectors interleaved.
//! - What has landed is volatile until a `sync` that began after the answer, or until the answer of
//!   a `durable` write. More may become durable at any sync, less never.
//! - After a cut each sector holds its last durable version, or any later one: of an answered write
//!   or of one in flight.
//! - `discard` and `zero` are writes of zeroes. The length is a journal: changes of length (by
//!   `set_len`, by writes past the end) are kept in order, and a cut keeps a prefix of those not
//!   yet durable. Cutting a file short takes its data with it, both or neither. Bytes beyond the
//!   length that survived are gone. A `sync`, and a `durable` write, commit the journal up to then.
//! - A `sync` that fails is Linux's: of what it covered, each sector is durable or silently lost, a
//!   lost one may still be read for a while, and the next `sync` answers Ok all the same; also one
//!   that is in flight together with it, so who has two at once must take the failure of one for
//!   the failure of both.

mod disk;
mod fault;
mod journal;
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
pub use journal::{Journal, LeftFile, Recorded, Replay};
pub use media::SimImage;
pub use oracle::{FlushToken, Mismatch, Oracle, ReadToken, WriteToken, pattern};
pub use power::Power;
pub use rng::Rng;
pub use runner::{Join, Sim, SimHandle, Stalled, yield_now};
pub use trace::{OpKind, Phase, Trace};

/// Bytes of a sector: what the oracle judges by, and the unit a write tears at unless an image says
/// otherwise.
pub const SECTOR: usize = 512;
