//! Hands the disks over to another server, which is started with `--takeover` or by `ctl upgrade`.
//!
//! ```text
//!   new server                                    old server
//!   Hello ────────────────────────────────────►   checks the format, and that no job runs
//!             ◄──────────────────── Welcome, and its sockets (API, metrics, control)
//!   Take(disk) ───────────────────────────────►   drains the disk, leaves its image
//!             ◄──────────────────── Given, and a parcel for each export
//!   opens the image, starts the rings
//!   Took(disk) ───────────────────────────────►   (the disk's pause ends)
//!   ... the next disk ...
//!   Ready ────────────────────────────────────►
//!             ◄──────────────────── Commit
//!   Serves ───────────────────────────────────►   exits
//!   reads messages, accepts clients
//! ```
//! `old` and `new` are the two sides. `alone` is what an old server excludes meanwhile. `settings`
//! keeps what calls have set. `away` is a disk on its way. `control` waits for new servers that
//! something else has started. `holder` keeps sessions for the server after one that dies.
//! `process/launcher.rs` starts the new server for one in a sandbox.
//!
//! What must hold
//! - Until `Serves` the old server has copies of all that it has given. If the new one fails, hangs
//!   or dies before, the old one waits for its end (or kills it), opens the images again and goes
//!   on. Requests that the new one has not answered are in the in-flight regions; changed metadata
//!   are in the journals.
//! - Each wait has a limit.
//! - `Serves` decides which server goes on. The old one reads it, or the new one's call to send it
//!   fails ([`Peer::receive_last`]). Until the new server knows that it is sent, it is not the
//!   owner.
//! - A disk that is still being opened delays no hand-over. The old server does not begin to serve
//!   it meanwhile, and the new one opens it after `Serves`. It also opens a disk that an error has
//!   ended, with the connections that the old server keeps for it.
//! - The program of an `exec:` image notices nothing: its connection and its process move.
//! - What calls have set, added and removed goes on, unless the configuration file has another
//!   value than the old server has read.
//! - A disk's counters go on, and its limits hold across the hand-over (`blockyard_disk::Carried`).
//! - Each message is a parcel of JSON and descriptors. `Hello` and `Refused` never change.

mod alone;
mod away;
mod control;
pub mod holder;
mod new;
mod old;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use blockyard_control::types::KeyChange;
use blockyard_disk::Carried;
use blockyard_export::Peer;
use serde::{Deserialize, Serialize};
use toml::Table;

use crate::config::files::Missing;
use crate::disks::book::SetKeys;
use crate::exports::HandedExports;

pub use control::Control;
pub use new::{Takeover, report};
pub use old::upgrade;
pub use settings::Wanted;

/// Version of the messages. A change that the other side would misread needs a new number.
const FORMAT: u32 = 1;
/// Kind of the parcel that has what the disk itself carries over, [`Carried`]. A server that does
/// not know it ignores it. A change that another server would misread needs a new name.
const CARRIED: &str = "carried";
/// Kind of the parcel with the program of an `exec:` image.
const PROGRAM: &str = "program";
/// Kind of the parcel with the names of a disk's exports in systemd's store, by key, and with their
/// descriptions.
const KEPT: &str = "kept";
/// Name of a listening socket of NBD, before its address.
const NBD: &str = "nbd ";
/// Longest wait for a message of the other server. Opening an image on a slow server may take long.
const MESSAGE_TIME: Duration = Duration::from_secs(30);

/// A message of the new server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromNew {
    Hello {
        format: u32,
        version: String,
    },
    Take {
        disk: String,
        /// Whether the new server can continue the program of an `exec:` image.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        programs: bool,
        /// Whether the new server opens a disk by itself that the old one has not opened yet.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unopened: bool,
    },
    Took {
        disk: String,
        /// What the configuration file has changed.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        changed: Vec<KeyChange>,
    },
    Ready,
    Serves,
    Failed {
        what: String,
    },
}

/// A message of the old server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum FromOld {
    Refused {
        what: String,
    },
    Welcome {
        version: String,
        disks: Vec<Offered>,
        sockets: Vec<String>,
        /// The folder of the journals. None: it has none, or the version does not send it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        state_folder: Option<PathBuf>,
        /// Disks that calls have removed, with their keys in the configuration file.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        removed: BTreeMap<String, Table>,
        /// The folder of its configuration, and what it does not have. None: there is none, or the
        /// version does not send it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        files: Option<(PathBuf, Missing)>,
    },
    Given {
        exports: Vec<String>,
        /// The old server has not opened the disk. The new one opens it after the hand-over, and
        /// sends no `Took`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unopened: bool,
    },
    Commit,
}

/// A disk that the old server has.
#[derive(Debug, Deserialize, Serialize)]
struct Offered {
    name: String,
    /// No configuration file has the disk.
    by_api: bool,
    keys: Table,
    /// What calls have set of these keys.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    set: SetKeys,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    program: Option<OfferedProgram>,
    /// The configuration has the disk, and it could not be opened. Its keys are not known. The old
    /// server only has what the disk continues of an earlier server.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_closed: bool,
}

impl Offered {
    fn closed(name: String) -> Self {
        let (by_api, keys, set, program) = Default::default();
        Offered { name, by_api, keys, set, program, is_closed: true }
    }
}

/// The program of an `exec:` image.
#[derive(Debug, Deserialize, Serialize)]
struct OfferedProgram {
    image: String,
    /// The data files.
    files: Vec<PathBuf>,
}

impl HandedExports {
    /// Returns what the disk itself carries over, once. None: another server has sent nothing.
    pub fn take_carried(&self, disk: &str) -> anyhow::Result<Option<Arc<Carried>>> {
        let Some((parcel, _)) = self.take(disk, CARRIED) else { return Ok(None) };
        let carried = serde_json::from_slice(&parcel.bytes).with_context(|| {
            format!("disk \"{disk}\": its statistics and limits from the old server")
        })?;
        Ok(Some(Arc::new(carried)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use blockyard_export::vhost_user::Before;
    use blockyard_ring::parcel::Parcel;

    use super::*;

    fn taken(bytes: &[u8]) -> anyhow::Result<Option<Arc<Carried>>> {
        let handed = HandedExports::default();
        let parcel = Parcel { bytes: bytes.to_vec(), fds: Vec::new() };
        handed.put("a", CARRIED, parcel, Before::Drained);
        assert!(handed.take_carried("b").unwrap().is_none());
        let taken = handed.take_carried("a");
        assert!(handed.take_carried("a").unwrap().is_none(), "a parcel is used once");
        taken
    }

    /// Messages of format 1, in their order. If a test with them fails, a server with that format
    /// cannot be upgraded: the format needs a new number, and the old one needs a reader.
    #[test]
    fn recorded_messages_are_understood() {
        let all: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("recorded/messages-1.json")).unwrap();
        let (new, old): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|message| serde_json::from_value::<FromNew>(message.clone()).is_ok());
        assert_eq!((new.len(), old.len()), (5, 3));
        for (recorded, ours) in new.iter().zip([
            FromNew::Hello { format: FORMAT, version: "0.2.0".into() },
            FromNew::Take { disk: "web".into(), programs: false, unopened: false },
            FromNew::Took { disk: "web".into(), changed: Vec::new() },
            FromNew::Ready,
            FromNew::Serves,
        ]) {
            assert_eq!(*recorded, serde_json::to_value(ours).unwrap());
        }
        let keys = Table::new();
        let (set, program, removed) = Default::default();
        let (name, by_api, is_closed) = ("web".into(), false, false);
        let web = Offered { name, by_api, keys, set, program, is_closed };
        let (disks, state_folder, files) = (vec![web], None, None);
        let sockets = ["API", "control", "nbd unix:/run/n"].map(String::from).into();
        let exports = ["vhost-user", "nbd", "carried"].map(String::from).into();
        for (recorded, ours) in old.into_iter().zip([
            FromOld::Welcome {
                version: "0.2.0".into(),
                disks,
                sockets,
                state_folder,
                removed,
                files,
            },
            FromOld::Given { exports, unopened: false },
            FromOld::Commit,
        ]) {
            assert_eq!(recorded, serde_json::to_value(ours).unwrap());
            serde_json::from_value::<FromOld>(recorded).unwrap();
        }
    }

    fn peers() -> (Peer, Peer) {
        let (one, other) = UnixStream::pair().unwrap();
        (Peer::new(one, MESSAGE_TIME), Peer::new(other, MESSAGE_TIME))
    }

    /// The time of the wait is over in each case.
    #[test]
    fn both_servers_know_whether_the_last_message_has_arrived() {
        let last = |old: &Peer| old.receive_last::<FromNew>(Duration::ZERO);
        let (old, new) = peers();
        new.send(&FromNew::Serves).unwrap();
        assert!(matches!(last(&old), Ok(FromNew::Serves)));
        let (old, new) = peers();
        last(&old).unwrap_err();
        new.send(&FromNew::Serves).unwrap_err();
        // The new server is stopped in the middle of the message.
        let (old, new) = peers();
        let body = serde_json::to_vec(&FromNew::Serves).unwrap();
        let header = [&(body.len() as u32).to_le_bytes()[..], &[0; 4]].concat();
        new.stream().write_all(&header).unwrap();
        last(&old).unwrap_err();
        new.stream().write_all(&body).unwrap_err();
        // What the old server says then still arrives.
        old.send(&FromOld::Refused { what: "late".into() }).unwrap();
        assert!(matches!(new.receive(), Ok(FromOld::Refused { .. })));
    }

    #[test]
    fn recorded_figures_of_a_disk_are_understood() {
        let carried = taken(include_bytes!("recorded/carried.json")).unwrap().unwrap();
        assert!(carried.flushes == 2 && carried.statistics != Carried::default().statistics);
        let again = serde_json::to_value(&*carried).unwrap();
        let recorded: serde_json::Value =
            serde_json::from_str(include_str!("recorded/carried.json")).unwrap();
        assert_eq!(again["share"], recorded["share"]);
        let read = |value: &serde_json::Value| value["statistics"]["kinds"]["read"].clone();
        assert_eq!(read(&again), read(&recorded));
    }

    #[test]
    fn a_parcel_of_a_disk_is_checked() {
        let carried = Carried { flushes: 3, ..Carried::default() };
        let bytes = serde_json::to_vec(&carried).unwrap();
        assert_eq!(taken(&bytes).unwrap().as_deref(), Some(&carried));
        assert_eq!(taken(b"{\"newer\": 1}").unwrap().as_deref(), Some(&Carried::default()));
        for bytes in [&b""[..], b"nonsense", b"{\"flushes\": -1}", b"{\"share\": 7}"] {
            let error = taken(bytes).unwrap_err();
            assert!(format!("{error:#}").contains("disk \"a\""), "{error:#}");
        }
    }
}
