//! Passes the disks of a yard on to the yard of another process, and back if that fails.
//!
//! ```text
//!   next process                                  this process
//!   Hello ────────────────────────────────────►
//!             ◄──────────────────── Welcome, and the listening sockets of NBD
//!   Take(disk) ───────────────────────────────►   drains the disk, flushes it, ends its target
//!             ◄──────────────────── Given, and a parcel for each export
//!   opens the target, starts the rings
//!   Took(disk) ───────────────────────────────►   (the disk's pause ends)
//!   ... the next disk ...
//!   Ready ────────────────────────────────────►
//!             ◄──────────────────── Commit
//!   Serves ───────────────────────────────────►
//!   reads messages, accepts clients
//! ```
//! `next` and `this` are the two sides.
//!
//! What must hold
//! - Until `Serves` this process has copies of all that it has given. If the next one fails or dies
//!   before, this one serves the disks again after the next one has closed them, or has ended.
//! - A target is open in one process at a time.
//! - The program of an `exec:` image notices nothing: its connection and its process move. It
//!   answers one process at a time, the next one after `Serves`.
//! - Each wait has a limit, but for the end of a process that was killed, and for requests in
//!   flight at a disk that is served again.

mod next;
mod this;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockyard_export::vhost_user::{self, Before, HandedSocket};
use blockyard_export::{Handed, Listener, Peer, ublk};
use blockyard_ring::parcel::Parcel;
use serde::{Deserialize, Serialize};

use crate::disk::{Disk, Export};

/// Version of the messages. A change that the other side would misread needs a new number.
const FORMAT: u32 = 2;
/// Kind of the parcel that has what the disk itself carries over.
const CARRIED: &str = "carried";
/// Kind of the parcel that has the program of an `exec:` image.
const PROGRAM: &str = "program";
/// Longest wait for a message of the other process. Opening a target may take long.
const MESSAGE_TIME: Duration = Duration::from_secs(60);

/// A message of the next process.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromNext {
    Hello {
        format: u32,
        process: u32,
    },
    Take {
        disk: String,
    },
    Took {
        disk: String,
    },
    Ready,
    Serves,
    /// It has closed all disks.
    Failed {
        what: String,
    },
}

/// A message of the process that has the disks.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromThis {
    Refused { what: String },
    Welcome { disks: Vec<String>, sockets: Vec<String> },
    Given { exports: Vec<String> },
    Commit,
}

/// Returns an error for a message that does not fit.
fn unexpected(message: &impl std::fmt::Debug) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the other process sent {message:?}"))
}

/// What another process has handed over, until an export of this one continues with it.
#[derive(Default)]
pub(crate) struct Inherited {
    /// By disk and kind of export, in the order of the exports.
    exports: HashMap<(String, String), VecDeque<(Parcel, Before)>>,
    /// Listening sockets of NBD, by address.
    sockets: HashMap<String, Parcel>,
}

/// [`Inherited`], for all exports of a yard.
#[derive(Clone, Default)]
pub(crate) struct Inheritance(Arc<Mutex<Inherited>>);

impl Inheritance {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inherited> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, disk: &str, kind: &str, parcel: Parcel, before: Before) {
        let mut all = self.lock();
        all.exports.entry((disk.into(), kind.into())).or_default().push_back((parcel, before));
    }

    /// Returns the next parcel of an export of this kind, once.
    pub(crate) fn take(&self, disk: &str, kind: &str) -> Option<(Parcel, Before)> {
        self.lock().exports.get_mut(&(disk.to_string(), kind.to_string()))?.pop_front()
    }

    /// Returns the listening socket of an NBD address, once.
    pub(crate) fn take_socket(&self, address: &str) -> Option<Parcel> {
        self.lock().sockets.remove(address)
    }

    /// Closes what no export has continued with.
    fn clear(&self) {
        let Inherited { exports, sockets } = std::mem::take(&mut *self.lock());
        for ((_, kind), parcels) in exports {
            // A listener removes the file of its socket.
            parcels.into_iter().filter(|_| kind == vhost_user::KIND).for_each(
                |(parcel, before)| {
                    drop(HandedSocket::unpack(parcel, before));
                },
            );
        }
        sockets.into_values().for_each(|parcel| drop(Listener::from_parcel(parcel)));
    }
}

/// Returns an error if a disk has lost an export that the host uses: a device that no process
/// serves hangs, with the file system on it.
fn check_exports<'a>(disk: &Disk, kinds: impl IntoIterator<Item = &'a str>) -> io::Result<()> {
    let has_ublk = disk.exports.iter().any(|export| matches!(export, Export::Ublk(_)));
    if has_ublk || kinds.into_iter().all(|kind| kind != ublk::PARCELS) {
        return Ok(());
    }
    let what = format!("disk \"{}\" has a ublk device, and its description has none", disk.name);
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Returns the kinds of parcels.
fn kinds(exports: &[Handed]) -> Vec<String> {
    exports.iter().map(|handed| handed.kind.to_string()).collect()
}
