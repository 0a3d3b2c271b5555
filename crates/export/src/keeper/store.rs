//! systemd's store of descriptors (sd_notify(3), `FDSTORE=1`) as the keeper of parcels.
//!
//! ```text
//!   parcel ─► message in the queue of a socket ─► FDSTORE=1, FDNAME=blockyard-TIME, the socket
//!   this server dies ─► systemd starts the next one, with the sockets as inherited descriptors
//! ```
//! In: parcels, by key. Out: the same parcels in the next server.
//!
//! What must hold
//! - A parcel is one descriptor of the store: a socket with one message in its queue. systemd drops
//!   a descriptor that it has already, and cannot exchange several at once. A new socket is never
//!   one that it has.
//! - The new parcel of a key is stored before the old one is removed, if there is room. So a death
//!   at any moment leaves one of them or both, and the later one counts.
//! - systemd drops a descriptor without an error if the store is full. So the server counts. With a
//!   full store the old parcel of a key is removed first, and a new key is not kept.
//! - Reading leaves the message in its queue, for another server if this one dies soon.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;

use blockyard_ring::Clock;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use super::{Left, Received, SEND_TIME, receive, send};

/// Begin of the names in the store. The rest is a time in hexadecimal digits, so that the names of
/// a boot are in the order of their parcels.
const PREFIX: &str = "blockyard-";

/// The store of this service.
pub struct Store {
    /// Connected to the notification socket.
    manager: UnixDatagram,
    /// What the service manager has passed to this process, by name.
    inherited: Vec<(String, OwnedFd)>,
    /// Names in the store by key.
    names: HashMap<String, String>,
    /// Number of descriptors that the store takes.
    most: usize,
    /// Keys for which the log says that they are not kept.
    without_room: HashSet<String>,
    /// Time in the name that was used last.
    last: u64,
}

impl Store {
    /// `manager`: a socket that is connected to the service manager. `inherited`: descriptors with
    /// names for which [`Store::is_name`] is true. `most`: number of descriptors that the store
    /// takes.
    pub fn new(
        manager: UnixDatagram,
        inherited: Vec<(String, OwnedFd)>,
        most: usize,
    ) -> io::Result<Self> {
        sockopt::set_socket_timeout(&manager, sockopt::Timeout::Send, Some(SEND_TIME))?;
        let (names, without_room) = (HashMap::new(), HashSet::new());
        Ok(Store { manager, inherited, names, most, without_room, last: 0 })
    }

    /// Returns whether an inherited descriptor with this name is a kept parcel.
    pub fn is_name(name: &str) -> bool {
        name.strip_prefix(PREFIX).is_some_and(|time| u64::from_str_radix(time, 16).is_ok())
    }

    pub(super) fn name(&self, key: &str) -> Option<String> {
        self.names.get(key).cloned()
    }

    pub(super) fn adopt(&mut self, key: String, name: String) {
        self.names.insert(key, name);
    }

    /// Stores the parcel of a key. Returns false if there is no room.
    pub(super) fn keep(
        &mut self,
        key: &str,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<bool> {
        if !self.has_room(key)? {
            return Ok(false);
        }
        // The queue of a datagram socket stays readable without a peer, and shows no hang-up.
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let (from, to) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        send(from, message, fds)?;
        let name = self.next_name();
        self.notify(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), &[to.as_fd()])?;
        if let Some(old) = self.names.insert(key.into(), name) {
            self.remove(&old)?;
        }
        Ok(true)
    }

    /// Makes room for a new parcel in a full store. Returns false if there is none.
    fn has_room(&mut self, key: &str) -> io::Result<bool> {
        if self.names.len() < self.most {
            return Ok(true);
        }
        if let Some(old) = self.names.remove(key) {
            self.remove(&old)?;
            return Ok(self.names.len() < self.most);
        }
        if self.without_room.insert(key.into()) {
            tracing::warn!(
                "{key}: systemd's store of descriptors is full ({} of {}): its front end is lost \
                 if this server dies; raise FileDescriptorStoreMax= and FDSTORE=",
                self.names.len(),
                self.most
            );
        }
        Ok(false)
    }

    pub(super) fn forget(&mut self, key: &str) -> io::Result<()> {
        self.names.remove(key).map_or(Ok(()), |name| self.remove(&name))
    }

    /// Returns the last parcel of each key.
    pub(super) fn left_behind(&mut self) -> Vec<Left> {
        let (mut all, mut inherited) = (HashMap::new(), std::mem::take(&mut self.inherited));
        inherited.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (name, socket) in inherited {
            match receive(socket, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok(Received::Kept(left)) => {
                    let old = self.names.insert(left.key.clone(), name);
                    all.insert(left.key.clone(), left);
                    if let Some(old) = old {
                        self.remove_or_warn(&old);
                    }
                }
                Ok(Received::End) => self.remove_or_warn(&name),
                Err(e) => {
                    tracing::warn!("cannot read the stored descriptor {name}: {e}");
                    self.remove_or_warn(&name);
                }
            }
        }
        all.into_values().collect()
    }

    fn next_name(&mut self) -> String {
        let now = Clock::Monotonic.read().as_nanos() as u64;
        self.last = now.max(self.last + 1);
        format!("{PREFIX}{:016x}", self.last)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
    }

    fn remove_or_warn(&self, name: &str) {
        if let Err(e) = self.remove(name) {
            tracing::warn!("cannot remove the stored descriptor {name}: {e}");
        }
    }

    fn notify(&self, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.manager, text.as_bytes(), fds)
    }
}
