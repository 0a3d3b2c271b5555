//! The daemon as its users meet it, without a virtual machine: the guest is the front end of
//! `blockyard_driver`.
//!
//! ```text
//!   mistakes     options, configuration files, images, sockets: one clear line and an exit status
//!   hosts        what the host may lack: O_DIRECT, io_uring, permission
//!   locks        one writer; the lock of a killed daemon
//!   ending       SIGTERM drains; kill -9 loses nothing
//!   reload       SIGHUP: disks come, go, change, grow
//!   activation   sockets of systemd, and what it is told
//!   idle         what a disk costs that nobody uses, and what a thousand connections leave behind
//!   cache        write cache: what the guest is told, and what is durable when
//!   requests     the last sector, ranges, serial, status codes, a read-only disk
//!   pin          guest memory registered with io_uring: pinned while its front end is there
//!   chains       qcow2 and backing images
//!   exchange     front ends that come, go and die while the image below them is exchanged
//!   load         queues over reactors, filters, statistics
//!   remote       images on an NBD server, which dies and comes back
//!   second       a front end that connects while another one is served
//!   bench        `blockyard bench` becomes another program
//!   shares       limits, groups, and their change at run time
//!   streams      standard output and error that fail or are not read
//!   tls          NBD under TLS: who may have what, and the same bytes
//!   renewal      certificates, their revocation, and limits of NBD clients, changed at run time
//! ```

#[path = "../common/mod.rs"]
mod common;
mod disks;
mod guest;

mod activation;
mod bench;
mod cache;
mod chains;
mod ending;
mod exchange;
mod hosts;
mod idle;
mod load;
mod locks;
mod mistakes;
mod pin;
mod reload;
mod remote;
mod renewal;
mod requests;
mod second;
mod shares;
mod streams;
mod tls;
