//! One thread, one io_uring, many tasks: the reactor, and what its tasks wait for.
//!
//! ```text
//!   executor      runs the tasks       remote     work submitted by other threads
//!   operation     one operation in the kernel     wake       watched descriptors, signals
//!   registration  the guest memory of a front end in the ring's table
//!   inbox         wake-ups and calls from other threads
//!   join          several operations in one task
//!   semaphore     limits how many operations or bytes are in progress
//!   pulse         an executor's state (watchdog)  meter      counts the operations of a handle
//!   clock         clocks of the kernel
//! ```

pub(crate) mod clock;
pub mod executor;
pub(crate) mod inbox;
pub mod join;
pub(crate) mod meter;
pub(crate) mod operation;
pub(crate) mod pulse;
pub(crate) mod registration;
pub mod remote;
pub mod semaphore;
pub(crate) mod wake;
