//! Block devices that the kernel has for a server: ublk's, Xen's, and those of its NBD client.

pub mod nbd_device;
pub mod ublk;
pub mod xen;
