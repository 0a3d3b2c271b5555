//! Safe wrappers of everything that needs system calls or `unsafe`: io_uring, memory, sockets.
//!
//! ```text
//!   executor   one thread, one io_uring, many tasks     remote    work submitted by other threads
//!   inbox      wake-ups and calls from other threads    operation one operation in the kernel
//!   wake       watched descriptors, signals             join      several operations in one task
//!   enter      the system call that submits and waits
//!   file       files and block devices over io_uring    policy    which writes bypass io_uring
//!   file_slot  a file's descriptor on one ring
//!   socket     connected sockets over io_uring          ublk      ublk devices: control, queues
//!   rights     descriptors received over Unix sockets (SCM_RIGHTS)
//!   parcel     bytes and descriptors for the next server
//!   memory     guest memory: regions, slices, bounds    segments  an iovec, and its memory's owner
//!   buffers    a ring's table of registered memory      fault     SIGBUS in shared memory
//!   registration  the guest memory of a front end in this table
//!   mapper     which files of front ends are mapped     quota     limits on the mapped bytes
//!   mapping    memory of other processes, unmapped by a thread if it is large
//!   memory_file  what such a file is stored in      silence   workers that complete nothing
//!   dirty_log  marks guest memory that was written, for live migration
//!   nbd_device the kernel's NBD client                  xen       xenstore, event channels, grants
//!   pool       bounded threads for work that may block  workers   calls that an executor awaits
//!   compute    long computations                        pulse     an executor's state (watchdog)
//!   clock      clocks of the kernel
//!   semaphore  limits how many operations or bytes are in progress
//!   doorbell   signals to eventfds of other processes, without blocking
//!   words      shared memory that outlives the process
//!   host       file locks, device geometry, block-device ioctls, socket options
//!   topology   the block device under a file
//!   small_file files that an operator names: configuration, certificates
//!   inherited  listening sockets passed at start (socket activation)
//!   sandbox    files and system calls of a server   threads   starts threads in a sandbox
//!   holder     a process that keeps descriptors for a server, and starts it again
//!   witness    a process outside the sandbox        holders   processes that have locked a file
//!   log_budget limits log lines that peers cause
//!   user       the user that a server runs as      child     processes that signals do not end
//! ```
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

mod block_device;
pub mod buffers;
pub mod child;
mod clock;
mod compute;
mod dirty_log;
pub mod doorbell;
mod enter;
pub mod executor;
mod fault;
pub mod file;
mod file_slot;
pub mod holder;
pub mod holders;
pub mod host;
mod inbox;
pub mod inherited;
pub mod join;
mod locals;
pub mod log_budget;
mod mapper;
mod mapping;
pub mod memory;
mod memory_file;
mod meter;
pub mod nbd_device;
mod operation;
#[cfg(test)]
mod own_process;
pub mod parcel;
mod policy;
pub mod pool;
pub mod probe;
mod pulse;
mod quota;
mod registration;
pub mod remote;
pub mod resident;
pub mod rights;
pub mod sandbox;
pub mod segments;
pub mod semaphore;
mod silence;
pub mod small_file;
mod socket;
pub mod text;
pub mod threads;
mod topology;
pub mod ublk;
mod uring;
pub mod user;
mod wake;
pub mod witness;
mod words;
mod workers;
pub mod xen;

pub use buffers::{Outcome, Refusal};
pub use clock::Clock;
pub use compute::THREADS as COMPUTING_THREADS;
pub use dirty_log::{DirtyLog, LOG_PAGE, log_covers};
pub use executor::{Executor, Handle};
pub use fault::MemoryAlarm;
pub use fault::install as survive_lost_memory;
pub use file::{LockedFile, OpenMode, UringFile, write_back_rate};
pub use mapper::Mapper;
pub use memory::{GuestMemory, MemoryError, Region, SharedSlice};
pub use memory_file::MemoryFile;
pub use meter::Meter;
pub use policy::slow_calls::{CallMode, SlowCallCounters, SlowCallFigures, SlowCalls};
pub use policy::{Latest, WriteFigures, later};
pub use pulse::{Pulse, Watcher};
pub use quota::{Exceeded, MEMORY_SLOTS};
pub use registration::Registration;
pub use remote::{NoReply, PendingReply, Remote, Reply};
pub use segments::{AlignedBuf, Lent, Loan, Segments};
pub use socket::{MOST_PIECES, Socket, is_canceled, write_rest};
pub use uring::TaskId;
pub use wake::{Signal, Watch, park};
pub use words::SharedWords;
