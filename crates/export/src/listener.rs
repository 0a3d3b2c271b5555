//! Listening sockets of exports: Unix sockets, TCP addresses, and sockets that another process has
//! opened (systemd).
//! In: an address. Out: connected sockets. What must hold: a Unix socket on which no server listens
//! any more is replaced. A file that is no socket is never replaced. On drop, a listener removes
//! the socket file that it has created.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_ring::inherited::Claim;
use blockyard_ring::parcel::Parcel;
use blockyard_ring::rights;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::custody;
use crate::packing::{Packed, Unpacked};

/// Reasons why the server cannot listen on a socket or address.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("the path of a socket is empty")]
    Empty,
    #[error("socket {path:?}: its path has a control character: use another path")]
    ControlCharacter { path: PathBuf },
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
    /// Drop leaves the socket file, because another server continues to listen.
    keeps_file: AtomicBool,
}

/// A listener in a parcel for the next server.
#[derive(Serialize, Deserialize)]
pub struct WireListener {
    sockets: Vec<usize>,
    /// Path, device and inode of the socket file that a server has created.
    made: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    /// Adds the sockets to a parcel.
    pub(crate) fn pack(&self, fds: &mut Packed) -> io::Result<WireListener> {
        let sockets =
            self.sockets.iter().map(|socket| fds.put(socket)).collect::<Result<_, _>>()?;
        let made = self.made.as_ref().map(|(path, (dev, ino))| (path.clone(), *dev, *ino));
        Ok(WireListener { sockets, made })
    }

    /// Continues to listen on the sockets of another server.
    pub(crate) fn unpack(wire: WireListener, fds: &mut Unpacked) -> io::Result<Self> {
        let sockets = wire.sockets.into_iter().map(|place| fds.take(place));
        let made = wire.made.map(|(path, dev, ino)| (path, (dev, ino)));
        Ok(Self::of(sockets.collect::<Result<_, _>>()?, made, None))
    }

    /// Returns a parcel with this listener alone.
    pub fn to_parcel(&self) -> io::Result<Parcel> {
        let mut fds = Packed::default();
        let wire = self.pack(&mut fds)?;
        fds.seal(&wire)
    }

    /// Reads a parcel of [`Listener::to_parcel`].
    pub fn from_parcel(parcel: Parcel) -> io::Result<Self> {
        Self::unpack(serde_json::from_slice(&parcel.bytes)?, &mut Unpacked::new(parcel.fds))
    }

    /// Makes this process the peer that clients see of a socket of another server. (The peer is the
    /// process that called listen last.)
    pub fn become_peer(&self) -> io::Result<()> {
        // -1: the longest queue that the kernel allows.
        self.sockets.iter().try_for_each(|socket| Ok(rustix::net::listen(socket, -1)?))
    }

    /// Makes drop leave the socket file, because another server continues to listen.
    pub(crate) fn keep_file(&self) {
        self.keeps_file.store(true, Ordering::Relaxed);
    }

    /// Makes drop remove the socket file again.
    pub(crate) fn remove_file(&self) {
        self.keeps_file.store(false, Ordering::Relaxed);
    }

    /// Removes the socket file now, and not on drop.
    pub fn remove_socket(&self) {
        // Another server may have replaced the file already.
        if !self.keeps_file.swap(true, Ordering::Relaxed)
            && custody::is_owner()
            && let Some((path, file)) = &self.made
            && identity(path) == Some(*file)
        {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Returns the path of the socket file, if a server has created it.
    pub fn path(&self) -> Option<&Path> {
        self.made.as_ref().map(|(path, _)| path.as_path())
    }

    /// Opens the socket file, for its attributes only (`O_PATH`). Returns `None` if no server has
    /// created it, or if the path has another file now.
    pub fn open_file(&self) -> Option<OwnedFd> {
        let (path, (dev, ino)) = self.made.as_ref()?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let meta = rustix::fs::fstat(&file).ok()?;
        ((meta.st_dev, meta.st_ino) == (*dev, *ino)).then_some(file)
    }

    fn of(
        sockets: Vec<OwnedFd>,
        made: Option<(PathBuf, (u64, u64))>,
        claim: Option<Claim>,
    ) -> Self {
        Listener { sockets, made, _claim: claim, keeps_file: AtomicBool::new(false) }
    }

    /// Returns an error if no socket can be at `path`.
    pub fn check(path: &Path) -> Result<(), SocketError> {
        let len = path.as_os_str().len();
        if len == 0 {
            return Err(SocketError::Empty);
        }
        if path.to_string_lossy().contains(char::is_control) {
            return Err(SocketError::ControlCharacter { path: path.into() });
        }
        if len > 107 {
            return Err(SocketError::TooLong { path: path.into(), len });
        }
        match std::fs::symlink_metadata(path) {
            Ok(meta) if !std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
                Err(SocketError::NotASocket { path: path.into() })
            }
            _ => Ok(()),
        }
    }

    /// Listens at `path`. If a socket file exists but no server listens on it, because its server
    /// was killed, replaces the file.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let owned = || path.to_path_buf();
        if is_stale(path)? {
            drop(std::fs::remove_file(path));
        }
        let listener = UnixListener::bind(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => no_folder(path, source),
            _ => SocketError::Listen { path: owned(), source },
        })?;
        let made = identity(path).map(|file| (owned(), file));
        Ok(Self::of(vec![listener.into()], made, None))
    }

    /// Returns an error if a server cannot listen at `path` now. Changes nothing.
    pub fn probe(path: &Path) -> Result<(), SocketError> {
        is_stale(path)?;
        let access = Access::WRITE_OK | Access::EXEC_OK;
        match rustix::fs::accessat(CWD, folder_of(path), access, AtFlags::EACCESS) {
            Err(Errno::NOENT) => Err(no_folder(path, Errno::NOENT.into())),
            Err(e) => Err(SocketError::Listen { path: path.into(), source: e.into() }),
            Ok(()) => Ok(()),
        }
    }

    /// Returns an error if a server cannot listen on TCP there now. No client can connect
    /// meanwhile.
    pub fn probe_tcp(host: &str, port: u16) -> Result<(), SocketError> {
        let wrong = |source| SocketError::Address { address: format!("{host}:{port}"), source };
        let addresses: Vec<SocketAddr> = match host {
            "" | "*" => {
                let any: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
                any.map(|ip| SocketAddr::new(ip, port)).into()
            }
            host => (host, port).to_socket_addrs().map_err(wrong)?.collect(),
        };
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match bind_only(address) {
                Ok(()) => return Ok(()),
                Err(e) => failed = e.into(),
            }
        }
        Err(wrong(failed))
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
            return Ok(Self::of(vec![any.into()], None, None));
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
        if sockets.is_empty() { Err(wrong(failed)) } else { Ok(Self::of(sockets, None, None)) }
    }

    /// Listens on a socket that another process (systemd) has created and keeps.
    pub fn inherited((fd, claim): (OwnedFd, Claim)) -> Self {
        // Another process may accept a client first, so `accept` must not block.
        let _ = rustix::io::ioctl_fionbio(&fd, true);
        Self::of(vec![fd], None, Some(claim))
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
        self.accept_unless(&[wake])
    }

    /// Like `accept`, with several descriptors that end the wait.
    pub fn accept_unless(&self, wakes: &[BorrowedFd<'_>]) -> io::Result<Option<OwnedFd>> {
        self.accept_or(wakes, None)
    }

    /// Accepts a connection without waiting. Returns `None` if there is none, or if the client has
    /// disconnected already.
    pub fn accept_now(&self) -> io::Result<Option<OwnedFd>> {
        self.accept_or(&[], Some(&Timespec::default()))
    }

    fn accept_or(
        &self,
        wakes: &[BorrowedFd<'_>],
        limit: Option<&Timespec>,
    ) -> io::Result<Option<OwnedFd>> {
        let sockets = self.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN));
        let wakes = wakes.iter().map(|wake| PollFd::from_borrowed_fd(*wake, PollFlags::IN));
        let mut fds: Vec<_> = sockets.chain(wakes).collect();
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
        self.remove_socket();
    }
}

/// Returns whether a dead server has left a socket at `path`. Returns an error if a server listens
/// there, or no socket can be there.
fn is_stale(path: &Path) -> Result<bool, SocketError> {
    Listener::check(path)?;
    if std::fs::symlink_metadata(path).is_err() {
        return Ok(false);
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::Taken { path: path.into() }),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        // Without permission to connect, this process cannot know whether a server listens.
        Err(source) => Err(SocketError::Listen { path: path.into(), source }),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the error of a socket that cannot be created because something is missing.
fn no_folder(path: &Path, source: io::Error) -> SocketError {
    let (folder, path) = (folder_of(path), path.to_path_buf());
    match folder.exists() {
        true => SocketError::Listen { path, source },
        false => SocketError::NoFolder { path, folder: folder.into() },
    }
}

/// Binds a TCP socket, and closes it. Fails if another socket listens there.
fn bind_only(address: SocketAddr) -> Result<(), Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As for a socket that listens: connections of an earlier one do no harm.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)
}

/// Returns device and inode numbers of the file at `path`.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
