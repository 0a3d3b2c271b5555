//! Images as programs use them. One program has all of these tests, because each one would compile
//! the images anew.
//!
//! ```text
//!   raw_files        raw images on the host's files and block devices
//!   qcow2            images in use, written here and by QEMU, read by the other
//!   qcow2_cold       what is done to closed images, with QEMU's tools as judges
//!   cow_peers        COW files, against the programs of User Mode Linux
//!   nbd              the NBD client against a server that does what a test says
//!   power_cuts       chains on simulated disks, cut at any moment       cow_cuts   the same for COW files
//!   fuzzed           the corpora of the fuzz targets
//!   lives            runs by their seeds, on all processors
//! ```

mod cow_cuts;
mod cow_peers;
mod fuzzed;
mod lives;
mod nbd;
mod power_cuts;
mod qcow2;
mod qcow2_cold;
mod raw_files;
