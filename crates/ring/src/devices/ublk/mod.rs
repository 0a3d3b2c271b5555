//! ublk: block devices of this host that user space serves (Linux 6.5 and later).
//!
//! ```text
//!   abi       the driver's constants and structures
//!   control   /dev/ublk-control: add, start, stop, recover, resize
//!   queue     a queue on an executor: fetch, commit
//!   vacant    queues that a killed takeover left without a server
//!   driver    a driver in this process, for tests
//! ```
//!
//! In: commands about devices; results of requests. Out: requests. What must hold: see the modules.
//! They use `unsafe` only to pass memory to the kernel.

pub mod abi;
mod control;
mod driver;
mod queue;
mod vacant;

pub use control::{CLASS, Control, NumberLock, block_device, character_device};
pub use driver::{Done, Driver};
pub use queue::{Device, Fetch, Queue, QueueError, Tag};
pub use vacant::fill_vacant;
