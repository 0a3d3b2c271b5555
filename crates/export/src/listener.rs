//! Listening sockets of exports: Unix sockets, TCP addresses, and sockets that another process has
//! opened (systemd).
//! In: an address. Out: connected sockets. What must hold: a Unix socket on which no server listens
//! any more is replaced. A file that is no socket is never replaced. On drop, a listener removes
//! the socket file that it has created.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use blockyard_ring::inherited::Claim;
use blockyard_ring::rights;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Reasons why the server cannot listen on a socket or address.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "socket {}: its path has {len} bytes, at most 107 are possible: use a shorter one",
        path.display()
    )]
    TooLong { path: PathBuf, len: usize },
    #[error("socket {} is in use: another server listens on it", path.display())]
    Taken { path: PathBuf },
    #[error(
        "socket {}: a file that is no socket has this name: remove it, or use another name",
        path.display()
    )]
    NotASocket { path: PathBuf },
    #[error(
        "socket {}: its folder {} does not exist: create it first",
        path.display(), folder.display()
    )]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("socket {}: cannot listen on it", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("address {address}: cannot listen on it")]
    Address { address: String, source: io::Error },
}

/// A listening socket, or several listening sockets for one address.
pub struct Listener {
    sockets: Vec<OwnedFd>,
    /// Path of the socket file that this server has created, and its device and inode numbers.
    made: Option<(PathBuf, (u64, u64))>,
    /// The claim on an inherited socket, held until drop.
    _claim: Option<Claim>,
}

impl Listener {
    /// Listens at `path`. If a socket file exists but no server listens on it, because its server
    /// was killed, replaces the file.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let owned = || path.to_path_buf();
        let len = path.as_os_str().len();
        if len > 107 {
            return Err(SocketError::TooLong { path: owned(), len });
        }
        if let Ok(meta) = std::fs::symlink_metadata(path) {
            if !std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) {
                return Err(SocketError::NotASocket { path: owned() });
            }
            match UnixStream::connect(path) {
                Ok(_) => return Err(SocketError::Taken { path: owned() }),
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    drop(std::fs::remove_file(path))
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // Without permission to connect, this process cannot know whether a server listens.
                Err(source) => return Err(SocketError::Listen { path: owned(), source }),
            }
        }
        let listener = UnixListener::bind(path).map_err(|source| match path.parent() {
            Some(folder) if source.kind() == io::ErrorKind::NotFound && !folder.exists() => {
                SocketError::NoFolder { path: owned(), folder: folder.into() }
            }
            _ => SocketError::Listen { path: owned(), source },
        })?;
        let made = identity(path).map(|file| (owned(), file));
        Ok(Listener { sockets: vec![listener.into()], made, _claim: None })
    }

    /// Listens on TCP, on every address of the host name `host`. An empty name or `*` means all
    /// addresses of this machine.
    pub fn bind_tcp(host: &str, port: u16) -> Result<Self, SocketError> {
        let wrong = |source| SocketError::Address { address: format!("{host}:{port}"), source };
        if matches!(host, "" | "*") {
            // The IPv6 socket accepts IPv4 too, but a machine may have no IPv6.
            let any = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port));
            let any =
                any.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))).map_err(wrong)?;
            return Ok(Listener { sockets: vec![any.into()], made: None, _claim: None });
        }
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(wrong)?.collect();
        let mut sockets = Vec::new();
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match TcpListener::bind(address) {
                Ok(listener) => sockets.push(listener.into()),
                Err(e) => {
                    tracing::warn!("address {address}: cannot listen on it: {e}");
                    failed = e;
                }
            }
        }
        if sockets.is_empty() {
            Err(wrong(failed))
        } else {
            Ok(Listener { sockets, made: None, _claim: None })
        }
    }

    /// Listens on a socket that another process (systemd) has created and keeps.
    pub fn inherited((fd, claim): (OwnedFd, Claim)) -> Self {
        // Another process may accept a client first, so `accept` must not block.
        let _ = rustix::io::ioctl_fionbio(&fd, true);
        Listener { sockets: vec![fd], made: None, _claim: Some(claim) }
    }

    /// Returns the listening sockets.
    pub(crate) fn sockets(&self) -> &[OwnedFd] {
        &self.sockets
    }

    /// Makes new connections refuse file descriptors, if the kernel supports that (Linux 6.16).
    pub fn refuse_descriptors(&self) {
        for socket in &self.sockets {
            rights::refuse(socket);
        }
    }

    /// Waits for a connection. Returns `None` if `wake` was signalled, or if the client has
    /// disconnected already.
    pub fn accept(&self, wake: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
        self.accept_or(Some(PollFd::from_borrowed_fd(wake, PollFlags::IN)), None)
    }

    /// Accepts a connection without waiting. Returns `None` if there is none, or if the client has
    /// disconnected already.
    pub fn accept_now(&self) -> io::Result<Option<OwnedFd>> {
        self.accept_or(None, Some(&Timespec::default()))
    }

    fn accept_or(
        &self,
        wake: Option<PollFd<'_>>,
        limit: Option<&Timespec>,
    ) -> io::Result<Option<OwnedFd>> {
        let sockets = self.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN));
        let mut fds: Vec<_> = sockets.chain(wake).collect();
        match rustix::event::poll(&mut fds, limit) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let Some(at) =
            fds[..self.sockets.len()].iter().position(|fd| fd.revents().contains(PollFlags::IN))
        else {
            return Ok(None);
        };
        match rustix::net::accept_with(self.sockets[at].as_fd(), SocketFlags::CLOEXEC) {
            Ok(stream) => {
                rustix::io::ioctl_fionbio(&stream, false)?;
                Ok(Some(stream))
            }
            // The client has disconnected already.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns a second descriptor of the Unix socket, for a caller that accepts by itself.
    pub fn unix(&self) -> io::Result<UnixListener> {
        let socket = self.sockets.first().ok_or(io::ErrorKind::NotConnected)?;
        Ok(socket.try_clone()?.into())
    }

    /// Returns the TCP port, or `None` for other sockets.
    pub fn port(&self) -> Option<u16> {
        let address = rustix::net::getsockname(self.sockets.first()?).ok()?;
        SocketAddr::try_from(address).ok().map(|address| address.port())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another server may have replaced the file already.
        if let Some((path, file)) = &self.made
            && identity(path) == Some(*file)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns device and inode numbers of the file at `path`.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
