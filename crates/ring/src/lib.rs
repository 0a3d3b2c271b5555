//! Safe wrappers of everything that needs system calls or `unsafe`: io_uring, memory, sockets.
//!
//! ```text
//!   tasks      one thread, one io_uring, many tasks; wake-ups and calls from other threads
//!   uring      one ring: its operations, its system calls, its table of files; doorbells
//!   offload    work on other threads: pools, calls that an executor awaits, long computations
//!   mem        memory that the kernel, a guest or another process uses too; limits on it; an iovec
//!   files      files and block devices; calls to the host other than reads and writes
//!   sockets    connected sockets over io_uring; descriptors that arrive over them
//!   devices    ublk, Xen, the kernel's NBD client
//!   policy     which calls bypass io_uring
//!   sandbox    files and system calls of a server
//!   processes  the holder, the witness, parcels and sockets for the next server, users
//!   reports    static probes, log lines and texts that peers cause
//!   testing    waits with a limit, for the tests
//! ```
//!
//! The paths below are the interface. They do not show the folders.
//!
//! In: memory addresses and offsets in bytes, to which the caller has given a meaning. Out:
//! results.
//!
//! What must hold
//! - Memory handed to the kernel stays alive, and is not reused, until its completion is reaped.
//! - This is the only crate of the workspace with `unsafe` code. Its public functions are all safe.

// `print!` and `eprint!` panic if the stream cannot be written. `blockyard_program::output` and the
// log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod devices;
mod files;
mod mem;
mod offload;
mod policy;
mod processes;
mod reports;
pub mod sandbox;
mod sockets;
mod tasks;
#[cfg(test)]
mod testing;
mod uring;

pub use devices::{nbd_device, ublk, xen};
pub use files::{file, host, small_file};
pub use mem::{buffers, memory, resident, segments};
pub use offload::{pool, threads};
pub use processes::{child, holder, holders, inherited, parcel, user, witness};
pub use reports::{log_budget, probe, text};
pub use sockets::rights;
pub use tasks::{executor, join, remote, semaphore};
pub use uring::doorbell;

pub use files::file::{LockedFile, OpenMode, UringFile, write_back_rate};
pub use mem::buffers::{Outcome, Refusal};
pub use mem::dirty_log::{DirtyLog, LOG_PAGE, log_covers};
pub use mem::fault::MemoryAlarm;
pub use mem::fault::install as survive_lost_memory;
pub use mem::mapper::Mapper;
pub use mem::memory::{GuestMemory, MemoryError, Region, SharedSlice};
pub use mem::memory_file::MemoryFile;
pub use mem::quota::{Exceeded, MEMORY_SLOTS};
pub use mem::segments::{AlignedBuf, Lent, Loan, Segments};
pub use mem::words::SharedWords;
pub use offload::compute::THREADS as COMPUTING_THREADS;
pub use policy::slow_calls::{CallMode, SlowCallCounters, SlowCallFigures, SlowCalls};
pub use policy::{Latest, WriteFigures, later};
pub use sockets::socket::{MOST_PIECES, Socket, is_canceled, write_rest};
pub use tasks::clock::Clock;
pub use tasks::executor::{Executor, Handle};
pub use tasks::meter::Meter;
pub use tasks::pulse::{Pulse, Watcher};
pub use tasks::registration::Registration;
pub use tasks::remote::{NoReply, PendingReply, Remote, Reply};
pub use tasks::wake::{Signal, Watch, park};
pub use uring::TaskId;
