//! ublk: block devices of this host that user space serves (Linux 6.0 and later).
//!
//! ```text
//!   abi       the driver's numbers and structures     control   /dev/ublk-control: add, start, stop, recover, resize
//!   queue     a queue on an executor: fetch, commit   data      a request's data that stay with the kernel
//!   vacant    queues that a killed takeover left
//! ```
//! In: commands about devices; answers to requests. Out: requests.
//! What must hold: see the parts; `unsafe` is in them only as far as memory is named to the kernel.

pub mod abi;
mod control;
mod data;
mod queue;
mod vacant;

pub use control::{CLASS, Control, NumberLock, block_device, character_device};
pub(crate) use data::RequestData;
pub(crate) use queue::Command;
pub use queue::{Device, Fetch, Queue, QueueError, Tag};
pub use vacant::fill_vacant;
