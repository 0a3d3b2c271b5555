//! Tests of images as programs use them. All are in one program, because each program would compile
//! the images again.
//!
//! ```text
//!   raw_files    raw images on the host's files and block devices
//!   qcow2        images in use, written here and by QEMU, read by the other
//!   qcow2_cold   commands on closed images, verified by QEMU's tools
//!   cow_peers    COW files, compared with the programs of User Mode Linux
//!   power_cuts   chains on simulated disks, with power cuts at any event
//!   cow_cuts     the same for COW files
//!   fuzzed       the corpora of the fuzz targets
//!   compared     bytes that were read, compared with those expected
//!   lives        runs simulations by their seeds, on all processors
//!   tools        other programs and long work, each with a limit
//! ```

mod compared;
mod cow_cuts;
mod cow_peers;
mod fuzzed;
mod lives;
// The scripted NBD server. Not all of it is used here.
#[allow(dead_code)]
#[path = "../../../storage/tests/remote/server.rs"]
mod nbd_server;
mod power_cuts;
mod qcow2;
mod qcow2_cold;
mod raw_files;
mod tools;
