//! The whole program against front ends that we did not write: Linux in whole guests, QEMU's block
//! layer, libblkio.
//!
//! ```text
//!   filesystems   mkfs, fio with checksums, fstrim, fsck, the same bytes on the host       UML, QEMU
//!   flush         a guest's sync is an fdatasync of the image; in writethrough there is none
//!   clients       qemu-img and the blkio crate, without a guest
//!   crash         kill -9 under verified load, 20 times                                    QEMU
//!   device        the guest resets, unbinds and binds the device in mid-load               QEMU
//!   changes       the disk grows, memory is plugged in and out, under load
//!   cow           UML's COW files, written here and by its own driver; what that driver reads wrong       UML
//!   live          snapshot, commit, snapshot, stream, again and again under verified load              UML, QEMU
//!   runner        the guests' runner, told to end while it cleans up                           UML
//!   neighbours    one guest runs out of memory and swaps, the other's data are verified                 UML
//!   xen           a file system in a PV guest of an emulated Xen                          Xen
//! ```
//! Guests cost seconds each, so a script shows as much as fits. Where the host must do something at
//! a certain point the script says `tell WORD`, and goes on when the host has made the disk larger
//! (`GuestFixture::go_on`).

#[path = "../common/mod.rs"]
mod common;

mod changes;
mod clients;
mod cow;
mod crash;
mod device;
mod filesystems;
mod fixture;
mod flush;
mod live;
mod neighbours;
mod qmp;
mod runner;
mod xen;
