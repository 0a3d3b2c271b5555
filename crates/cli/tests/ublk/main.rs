//! Block devices of the host by ublk, in guests with two kernels: 6.12, where data is copied, and
//! 7.x, with zero copy. `BLOCKYARD_ALL_KERNELS=1` runs each test of both on both.
//!
//! ```text
//!   filesystems   mkfs, fio with checksums, discard, zeroes, resize, read-only, cache modes
//!   crash         kill -9 under verified load, 20 times; a mounted device survives SIGTERM
//!   takeover      what a server takes over and refuses; kills and races meanwhile; many devices
//!   handover      a device gets another server under verified load
//!   in_use        programs, loop devices, swap and mounts keep their device
//!   interrupted   kills of `attach`, `detach` and their server, at each step
//!   overlay       qcow2 overlays: data that needs processing is copied
//!   target        a program's map: with zero copy, data stay in the kernel
//!   workers       the server itself makes the writes, not io_uring's workers
//!   attach        `attach` and `detach`, their errors, users without privileges
//! ```
//! The image is on ext4 on a disk of the guest, because the tests need O_DIRECT and holes. The
//! guest has the program under test as /host/blockyard.

#[path = "../common/mod.rs"]
mod common;

mod attach;
mod crash;
mod filesystems;
mod fixture;
mod handover;
mod in_use;
mod interrupted;
mod overlay;
mod takeover;
mod target;
mod workers;
