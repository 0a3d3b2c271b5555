//! The whole program with front ends of other projects: Linux guests, QEMU's block layer, libblkio.
//!
//! ```text
//!   filesystems   mkfs, fio with checksums, fstrim, fsck, the same bytes on the host     UML, QEMU
//!   flush         a guest's sync is an fdatasync of the image; none in writethrough      UML
//!   clients       qemu-img and the blkio crate, without a guest
//!   crash         kill -9 under verified load, 20 times; the guest unbinds a driver      QEMU
//!   domu          a file system in a PV guest of an emulated Xen                         Xen
//!   holder        kill -9 of a server that the holder starts again                       UML
//!   device        the guest resets itself under load, or binds its driver again          UML, QEMU
//!   changes       the disk grows, memory is plugged in and out, under load               UML, QEMU
//!   cow           UML's COW files, written by this program and by UML's driver           UML
//!   live          snapshot, commit, snapshot, stream in a loop under verified load       UML, QEMU
//!   migration     QEMU moves a guest under load to another QEMU and another server        QEMU
//!   runner        the guests' runner, stopped during its cleanup                         UML
//!   neighbours    one guest runs out of memory and swaps; the data of the other is right UML
//! ```
//! A guest takes seconds to boot, so a script tests as much as possible. If the host must act at a
//! certain point, the script calls `tell WORD`. It continues when the host has grown the disk
//! (`GuestFixture::go_on`).

#[path = "../common/mod.rs"]
mod common;

mod changes;
mod clients;
mod cow;
mod crash;
mod device;
mod domu;
mod filesystems;
mod fixture;
mod flush;
mod holder;
mod live;
mod migration;
mod neighbours;
mod runner;
