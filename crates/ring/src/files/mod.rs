//! Files and block devices of the host.
//!
//! ```text
//!   file        files and block devices over io_uring     block_device  requests to a device
//!   host        file locks, device geometry, block-device ioctls, socket options
//!   topology    the block device under a file
//!   small_file  files that an operator names: configuration, certificates
//! ```

pub(crate) mod block_device;
pub mod file;
pub mod host;
pub mod small_file;
pub(crate) mod topology;
