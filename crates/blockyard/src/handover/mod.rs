//! Hands the disks over to another server, which is started with `--takeover` or by `ctl upgrade`.
//!
//! ```text
//!   new server                                    old server
//!   Hello ────────────────────────────────────►   checks the format, and that no job runs
//!             ◄──────────────────── Welcome, and its sockets (API, metrics, control)
//!   Take(disk) ───────────────────────────────►   drains the disk, closes its image
//!             ◄──────────────────── Given, and a parcel for each export
//!   opens the image, starts the rings
//!   Took(disk) ───────────────────────────────►   (the disk's pause ends)
//!   ... the next disk ...
//!   Ready ────────────────────────────────────►
//!             ◄──────────────────── Commit
//!   Serves ───────────────────────────────────►   exits
//!   reads messages, accepts clients
//! ```
//! `old` and `new` are the two sides. `launcher` starts the new server for one in a sandbox.
//!
//! What must hold
//! - Until `Serves` the old server has copies of all that it has given. If the new one fails, hangs
//!   or dies before, the old one waits for its end (or kills it), opens the images again and goes
//!   on. Requests that the new one has not answered are in the in-flight regions; changed metadata
//!   are in the journals.
//! - Each wait has a limit.
//! - Each message is a parcel of JSON and descriptors. `Hello` and `Refused` never change.

pub mod launcher;
mod new;
mod old;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_export::vhost_user::Before;
use blockyard_ring::parcel::{self, Parcel};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::Table;

pub use new::{Takeover, inherited_connection};
pub use old::{Control, HandOvers, own_binary, upgrade};

/// Version of the messages. A change that the other side would misread needs a new number.
const FORMAT: u32 = 1;
/// Name of a listening socket of NBD, before its address.
const NBD: &str = "nbd ";
/// Longest wait for a message of the other server. Opening an image on a slow server may take long.
const MESSAGE_TIME: Duration = Duration::from_secs(30);

/// A message of the new server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromNew {
    Hello { format: u32, version: String },
    Take { disk: String },
    Took { disk: String },
    Ready,
    Serves,
    Failed { what: String },
}

/// A message of the old server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromOld {
    Refused { what: String },
    Welcome { version: String, disks: Vec<Offered>, sockets: Vec<String> },
    Given { exports: Vec<String> },
    Commit,
}

/// A disk that the old server serves.
#[derive(Debug, Deserialize, Serialize)]
struct Offered {
    name: String,
    /// No configuration file has the disk.
    by_api: bool,
    keys: Table,
}

/// The connection to the other server.
struct Peer(UnixStream);

impl Peer {
    fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        parcel::send(&self.0, &bytes, &[], Instant::now() + MESSAGE_TIME)
    }

    fn send_parcel(&self, parcel: &Parcel) -> io::Result<()> {
        let fds: Vec<_> = parcel.fds.iter().map(AsFd::as_fd).collect();
        parcel::send(&self.0, &parcel.bytes, &fds, Instant::now() + MESSAGE_TIME)
    }

    fn receive_parcel(&self) -> io::Result<Parcel> {
        let received = parcel::receive(&self.0, Instant::now() + MESSAGE_TIME)?;
        received.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended"))
    }

    fn receive<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(serde_json::from_slice(&self.receive_parcel()?.bytes)?)
    }
}

/// Exports of another server, by disk, until this server continues them.
#[derive(Default)]
pub struct HandedExports(Mutex<HashMap<(String, String), (Parcel, Before)>>);

impl HandedExports {
    pub fn put(&self, disk: &str, kind: &str, parcel: Parcel, before: Before) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((disk.into(), kind.into()), (parcel, before));
    }

    /// Returns the parcel of an export of this kind, once.
    pub fn take(&self, disk: &str, kind: &str) -> Option<(Parcel, Before)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&(disk.into(), kind.into()))
    }
}
