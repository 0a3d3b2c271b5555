//! The NBD server, judged by clients that we did not write, and by bad ones that we did.
//!
//! ```text
//!   info       nbdinfo: what is listed and told, maps beside those of qemu-nbd
//!   copy       nbdcopy, qemu-img, nbdfuse: whole disks in and out
//!   shell      libnbd scripts (libnbd/): every option, command and error
//!   zeroes     fast zeroes: of long ranges, and of disks that lie on another server
//!   kit        nbdkit's nbd plugin in front, with filters that fail, wait, flip bits and try again
//!   load       fio's nbd engine, verified
//!   durable    several connections of one disk, kill -9, and what a flush has covered
//!   names      several exports on one address; sizes that change
//!   pages      the commands of the pages in docs/
//!   iotests    QEMU's own tests, with Blockyard for qemu-nbd
//!   kernel     the kernel's driver, in a User Mode Linux guest
//!   idle       clients that ask for nothing: when it sleeps, when it looks
//!   hostile    half-open handshakes, floods, lies about lengths, clients that vanish and that do not read
//! ```

#[path = "../common/mod.rs"]
mod common;
mod fixture;

mod copy;
mod durable;
mod hostile;
mod idle;
mod info;
mod iotests;
mod kernel;
mod kit;
mod load;
mod names;
mod pages;
mod shell;
mod zeroes;
