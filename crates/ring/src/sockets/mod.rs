//! Stream sockets.
//!
//! ```text
//!   socket  connected sockets over io_uring
//!   rights  descriptors received over Unix sockets (SCM_RIGHTS)
//! ```

pub mod rights;
pub(crate) mod socket;
