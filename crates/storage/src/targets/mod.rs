//! Disks of targets. A target decides the contents of its disk. It is code of the library's user,
//! or another program.
//!
//! ```text
//!   shape     the size of a disk, and how files are opened
//!   map       the trait `Map`: where each range of a disk lies
//!   device    the trait `Device`: reads, writes and flushes of a disk
//!   file      the files that a target uses itself
//!   lock      a mutex for methods of a target
//!   worker    the thread on which a target runs
//!   promise   a result that one thread passes to another, with a limit in time
//!   patience  ends the waits for a target that is silent
//!   cache     what was mapped, for all reactors
//!   in_use    which requests use old answers of a map
//!   ahead     allocates space of data files ahead of new places
//!   answer    checks the answers of a map
//!   ask       how a disk asks its map
//!   mapped    `Storage` over a map: the data path
//!   free      discards and zeroes of a map's disk
//!   passed    `Storage` over a device: memory of requests is lent to the target's thread
//!   shared    what all reactors share of a target's disk
//!   target    a target before it is opened, and an open one
//!   exec      a map in another program
//! ```
//!
//! In: requests of a raw image. Out: operations on files of this host, and questions to the target.
//!
//! What must hold
//! - A target runs on a thread of its own. A reactor never runs its code and never waits for it.
//! - A target that panics, hangs, answers nonsense or ends costs its own disk I/O errors, bounded
//!   memory and one line in the log for each kind of fault. Other disks go on.
//! - A write that was placed anew is reported to the map as durable only after its data are.

#![deny(missing_docs)]

mod ahead;
mod answer;
mod ask;
mod cache;
mod device;
pub mod exec;
mod file;
mod free;
mod in_use;
mod lock;
mod map;
mod mapped;
mod passed;
mod patience;
mod promise;
mod shape;
mod shared;
mod target;
mod worker;

pub use ask::{Ask, Direct};
pub use blockyard_ring::Lent;
pub use device::Device;
pub use file::{Files, OwnFile};
pub use lock::{Lock, Locked};
pub use map::{Discard, Extent, Fill, Map, Place, Question};
pub use mapped::Mapped;
pub use passed::Passed;
pub use shape::{Access, Shape};
pub use shared::AskWorker;
use target::ProgramCalls;
pub use target::{Figures, Handle, Limits, OpenTarget, Target, TargetError, TargetErrorKind};
pub use worker::TargetEnd;
