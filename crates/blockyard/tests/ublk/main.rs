//! Block devices of the host by ublk, in whole guests of two kernels: 6.12, where data are copied,
//! and 7.x, where they stay with the kernel.
//!
//! ```text
//!   filesystems   mkfs, fio with checksums, discard, zeroes, resize, read-only, cache modes
//!   crash         kill -9 under verified load, 20 times; a mounted device outlives SIGTERM
//!   takeover      what a server takes over and what it refuses; kills and races meanwhile; many devices
//!   in_use        programs, loop devices, swap and mounts keep their device
//!   overlay       qcow2 overlays: what must be touched is copied, and right
//!   workers       writes are made by the server itself
//!   attach        `attach` and `detach`, their mistakes, users without privileges
//! ```
//! The image lies on ext4 of a disk of the guest, so that O_DIRECT and holes are real. The guest
//! has the program under test as /host/blockyard.

#[path = "../common/mod.rs"]
mod common;

mod attach;
mod crash;
mod filesystems;
mod fixture;
mod in_use;
mod overlay;
mod takeover;
mod workers;
