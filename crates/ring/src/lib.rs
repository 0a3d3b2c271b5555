//! The ground floor: everything that touches the host, behind safe faces.
//!
//! ```text
//!   executor   one thread, one io_uring, many tasks       remote    work handed in from other threads
//!   inbox      wake-ups and calls of other threads       operation one operation in the kernel
//!   wake       watched descriptors, signals               join      several operations in one task
//!   file       files and block devices over io_uring      policy    which writes the reactor makes, or prepares, itself
//!   socket     connected sockets over io_uring            ublk      block devices of this host: control, queues
//!   rights     descriptors that arrive over Unix sockets
//!   memory     guest memory: regions, slices, bounds     segments  what one I/O moves: an iovec and its owner
//!   buffers    guest memory registered with a ring        fault     shared memory that its owner takes away
//!   mapper     which files of front ends are mapped       quota     how much of them
//!   nbd_device the kernel's NBD client                    xen       xenstore, event channels, granted pages
//!   workers    threads for calls that block             pulse     what an executor is at, for a thread that watches
//!   semaphore  limits how many operations or bytes are in progress
//!   doorbell   signals to eventfds of other processes, without waiting
//!   host       locks, geometry, block-device calls, sockets' bits
//!   inherited  listening sockets that the process was started with
//! ```
//!
//! In: bytes' addresses and offsets that somebody above has already given a meaning. Out: results.
//! What must hold: memory handed to the kernel stays alive, and is not reused, until its completion
//! has been reaped. This is the only crate of the workspace that holds `unsafe`; its public
//! functions are all safe.

// These macros panic when the stream cannot be written; `blockyard_program::output` and the log do
// not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod buffers;
pub mod doorbell;
pub mod executor;
mod fault;
pub mod file;
pub mod host;
mod inbox;
pub mod inherited;
pub mod join;
mod locals;
mod mapper;
pub mod memory;
mod meter;
pub mod nbd_device;
mod operation;
mod policy;
mod pulse;
mod quota;
pub mod remote;
pub mod resident;
pub mod rights;
pub mod segments;
pub mod semaphore;
mod socket;
pub mod ublk;
mod uring;
mod wake;
mod workers;
pub mod xen;

pub use buffers::{Outcome, Refusal, Registration};
pub use executor::{Executor, Handle};
pub use file::{LockedFile, OpenMode, UringFile};
pub use mapper::{Mapper, MemoryFile};
pub use memory::{GuestMemory, MemoryError, Region, SharedSlice};
pub use meter::Meter;
pub use policy::WriteFigures;
pub use pulse::{Pulse, Watcher};
pub use quota::{Exceeded, MEMORY_SLOTS};
pub use remote::{Answer, NoAnswer, Remote, Reply};
pub use segments::{AlignedBuf, Segments};
pub use socket::{MOST_PIECES, Socket, write_rest};
pub use uring::TaskId;
pub use wake::{Signal, Watch, park};
