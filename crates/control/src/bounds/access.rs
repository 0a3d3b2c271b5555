//! Who may use the API: the kernel says who is at the other end of a connection.

use std::fmt;
use std::io;

use tokio::net::UnixStream;

/// A process that has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub uid: u32,
    /// None: the process is in another PID namespace.
    pub pid: Option<i32>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of user {}", self.uid),
            None => write!(f, "a process of user {}", self.uid),
        }
    }
}

/// Why a process may not use the API.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccessError {
    #[error("an unknown process: {0}")]
    Unknown(#[source] io::Error),
    #[error("{0}")]
    Peer(Peer),
}

/// The users that may connect, besides root.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// The server's own user.
    pub user: u32,
    /// Members of this group may connect.
    pub group: Option<u32>,
}

impl Access {
    /// Returns the peer, or an error for the log if it may not connect.
    pub(crate) fn check(&self, stream: &UnixStream) -> Result<Peer, AccessError> {
        let credentials = stream.peer_cred().map_err(AccessError::Unknown)?;
        let peer = Peer { uid: credentials.uid(), pid: credentials.pid() };
        let is_member = |group: u32| {
            credentials.gid() == group || blockyard_ring::host::peer_groups(stream).contains(&group)
        };
        if peer.uid == 0 || peer.uid == self.user || self.group.is_some_and(is_member) {
            Ok(peer)
        } else {
            Err(AccessError::Peer(peer))
        }
    }
}
