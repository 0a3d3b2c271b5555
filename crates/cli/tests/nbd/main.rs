//! The NBD server, tested by clients of other projects, and by hostile clients of our own.
//!
//! ```text
//!   info       nbdinfo: lists, properties, block status compared with qemu-nbd
//!   copy       nbdcopy, qemu-img, nbdfuse: copies of whole disks
//!   shell      libnbd scripts (libnbd/): every option, command and error
//!   zeroes     NBD_CMD_FLAG_FAST_ZERO: on long ranges, and on disks of another NBD server
//!   kit        nbdkit's nbd plugin in front, with filters that fail, delay, flip bits and retry
//!   load       fio's nbd engine with verification
//!   durable    several connections of one disk, kill -9, and what a flush covers
//!   kills      a client that connects again, and a server that is killed 50 times
//!   names      several exports on one address; sizes that change
//!   pages      the commands of the pages in docs/
//!   iotests    QEMU's own tests, with Blockyard instead of qemu-nbd
//!   kernel     the kernel's driver, in a User Mode Linux guest
//!   idle       clients without requests: when the server sleeps, when it busy-polls
//!   hostile    half-open handshakes, floods, wrong lengths, clients that disconnect or do not read
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
mod kills;
mod kit;
mod load;
mod names;
mod pages;
mod shell;
mod zeroes;
