//! A connection to a server, negotiated: what a reactor then sends its requests over.
//!
//! In: a URI, and the time that it may take in all, however the server spreads its answers. Out: a [`Dialed`]. It blocks: on
//! a reactor it is a matter for a thread of its own.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::negotiate::{self, Terms};
use super::uri::{Host, Uri};
use super::wire;

/// A negotiated connection without any request on its way; may be sent to whoever is to use it.
#[derive(Debug)]
pub struct Dialed {
    pub fd: OwnedFd,
    pub terms: Terms,
}

/// Connects and negotiates within `limit`.
pub fn dial(uri: &Uri, limit: Duration) -> Result<Dialed, String> {
    let deadline = Instant::now() + limit;
    let fd = connect(uri, deadline)?;
    let mut stream = Timed { fd: &fd, deadline };
    negotiate::greet(&mut stream)?;
    let terms = negotiate::agree(&mut stream, &uri.export)?;
    set_timeouts(&fd, None).map_err(|e| format!("setting up its socket: {e}"))?;
    Ok(Dialed { fd, terms })
}

impl Dialed {
    /// Tells the server that this was all; there is no answer to it, and no harm if it does not arrive.
    pub fn end(self) {
        let mut bytes = Vec::new();
        let end = wire::Request { flags: 0, command: wire::cmd::DISC, cookie: 0, offset: 0, len: 0 };
        end.put(self.terms.headers, &mut bytes);
        let _ =
            rustix::net::send(&self.fd, &bytes, rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL);
    }
}

fn connect(uri: &Uri, deadline: Instant) -> Result<OwnedFd, String> {
    match &uri.host {
        Host::Unix(path) => {
            let failed = |e: rustix::io::Errno| format!("connecting to {}: {}", path.display(), io::Error::from(e));
            let address = SocketAddrUnix::new(path).map_err(failed)?;
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).map_err(failed)?;
            // A full backlog makes connect() wait; it waits no longer than sending may.
            set_timeouts(&fd, Some(deadline)).map_err(|e| e.to_string())?;
            rustix::net::connect(&fd, &address).map_err(failed)?;
            Ok(fd)
        }
        Host::Tcp(name, port) => {
            let failed = |e: io::Error| format!("connecting to {name} port {port}: {e}");
            let addresses = (name.as_str(), *port).to_socket_addrs().map_err(failed)?;
            let mut last = io::Error::other("the name has no address");
            for address in addresses {
                let left = left(deadline).map_err(failed)?;
                match TcpStream::connect_timeout(&address, left) {
                    Ok(stream) => {
                        stream.set_nodelay(true).map_err(failed)?;
                        // A host that is gone without a word is noticed also where nothing is asked for long.
                        sockopt::set_socket_keepalive(&stream, true).map_err(|e| failed(e.into()))?;
                        return Ok(stream.into());
                    }
                    Err(e) => last = e,
                }
            }
            Err(failed(last))
        }
    }
}

/// What is left until `deadline`; never zero, which would mean for ever.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.max(Duration::from_millis(1))) }
}

fn set_timeouts(fd: &OwnedFd, deadline: Option<Instant>) -> io::Result<()> {
    let time = deadline.map(left).transpose()?;
    sockopt::set_socket_timeout(fd, sockopt::Timeout::Send, time)?;
    Ok(sockopt::set_socket_timeout(fd, sockopt::Timeout::Recv, time)?)
}

/// A blocking socket, each of whose operations ends at the deadline.
struct Timed<'a> {
    fd: &'a OwnedFd,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        set_timeouts(self.fd, Some(self.deadline))?;
        Ok(rustix::io::read(self.fd, buf)?)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        set_timeouts(self.fd, Some(self.deadline))?;
        Ok(rustix::net::send(self.fd, buf, rustix::net::SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
