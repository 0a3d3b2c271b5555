//! Memory that the kernel, a guest or another process uses too.
//!
//! ```text
//!   memory       guest memory: regions, slices, bounds
//!   mapper       which files of front ends are mapped     quota     limits on the mapped bytes
//!   mapping      memory of other processes, unmapped by a thread if it is large
//!   memory_file  what such a file is stored in            fault     SIGBUS in shared memory
//!   segments     an iovec, and its memory's owner         buffers   a ring's table of memory
//!   dirty_log    marks guest memory that was written, for live migration
//!   words        shared memory that outlives the process
//!   resident     locks this process's own memory
//! ```

pub mod buffers;
pub(crate) mod dirty_log;
pub(crate) mod fault;
pub(crate) mod mapper;
pub(crate) mod mapping;
pub mod memory;
pub(crate) mod memory_file;
pub(crate) mod quota;
pub mod resident;
pub mod segments;
pub(crate) mod words;
