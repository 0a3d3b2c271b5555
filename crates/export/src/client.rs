//! Who uses a disk: a process of this host, another machine, or a guest.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::SystemTime;

use blockyard_disk::ClientId;
use blockyard_ring::host;

/// A client of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The client for people: `pid 4711`, `192.0.2.7:40312`, `domain 3`.
    pub description: String,
    /// Process number, user and program of a client on a Unix socket.
    pub pid: Option<i32>,
    pub uid: Option<u32>,
    pub program: Option<String>,
    /// Address of a client on a TCP socket.
    pub address: Option<String>,
    /// The features of virtio that the driver has accepted.
    pub features: Option<u64>,
    /// When the client connected.
    pub since: Option<SystemTime>,
}

impl Client {
    /// Returns the client that has just connected to this socket.
    pub(crate) fn connected(socket: impl AsFd) -> Self {
        let name = rustix::net::getpeername(socket.as_fd()).ok().flatten();
        let address = name.and_then(|name| SocketAddr::try_from(name).ok());
        let peer = host::peer(socket);
        let pid = peer.and_then(|peer| peer.process);
        let description = match (&address, pid) {
            (Some(address), _) => address.to_string(),
            (None, Some(pid)) => format!("pid {pid}"),
            (None, None) => "a process of another PID namespace".into(),
        };
        Client {
            pid,
            uid: peer.map(|peer| peer.user),
            program: pid.and_then(host::program_of),
            address: address.map(|address| address.to_string()),
            since: Some(SystemTime::now()),
            ..Client::described(description)
        }
    }

    /// Returns a client of which only a description is known.
    pub fn described(description: String) -> Self {
        let (pid, uid, program, address, features, since) = Default::default();
        Client { description, pid, uid, program, address, features, since }
    }

    /// Returns what reports say about the client.
    pub(crate) fn id(&self) -> ClientId {
        let Client { description, pid, program, .. } = self;
        ClientId { description: description.clone(), pid: *pid, program: program.clone() }
    }
}
