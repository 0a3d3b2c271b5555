//! A connection to a server, negotiated: what a reactor then sends its requests over.
//!
//! In: a URI, and the time that it may take in all, however the server spreads its answers. Out: a
//! [`Dialed`]. It blocks: on a reactor it is a matter for a thread of its own.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use blockyard_nbd::negotiate::{self, Terms};
use blockyard_nbd::tls;
use blockyard_nbd::uri::{Host, Uri};
use blockyard_nbd::wire;
use blockyard_nbd::{Kind, NbdError};

/// A negotiated connection without any request on its way; may be sent to whoever is to use it.
#[derive(Debug)]
pub struct Dialed {
    pub fd: OwnedFd,
    /// Of TLS.
    pub session: Option<rustls::Connection>,
    pub terms: Terms,
}

/// Connects and negotiates within `limit`.
pub fn dial(uri: &Uri, limit: Duration) -> Result<Dialed, NbdError> {
    let deadline = Instant::now() + limit;
    let fd = connect(uri, deadline)?;
    let mut stream = Timed { fd: &fd, deadline };
    negotiate::greet(&mut stream)?;
    let mut session = None;
    let terms = match uri.tls {
        false => negotiate::agree(&mut stream, &uri.export)?,
        true => {
            let mut tls = secure(uri, &mut stream)?;
            let terms =
                negotiate::agree(&mut rustls::Stream::new(&mut tls, &mut stream), &uri.export);
            let terms = terms.map_err(|what| what_the_server_says(&mut tls, &mut stream, what))?;
            session = Some(rustls::Connection::Client(tls));
            terms
        }
    };
    set_timeouts(&fd, None)
        .map_err(|e| NbdError::of(Kind::Io, e).about("setting up its socket"))?;
    Ok(Dialed { fd, session, terms })
}

/// Nothing that was said before is believed after it.
fn secure(uri: &Uri, stream: &mut Timed) -> Result<rustls::ClientConnection, NbdError> {
    let folder = uri.tls_certificates.as_ref();
    let folder = folder.ok_or_else(|| {
        tls_error("say where certificates are (tls-certificates=FOLDER)".to_string())
    })?;
    let host = match (&uri.tls_hostname, &uri.host) {
        (Some(name), _) => name,
        (None, Host::Tcp(name, _)) => name,
        (None, Host::Unix(_)) => "localhost",
    };
    let mut session = tls::client(folder, host)?;
    negotiate::start_tls(stream)?;
    while session.is_handshaking() {
        session.complete_io(stream).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                NbdError::new(Kind::Closed, "the server closed the connection").about("TLS")
            }
            _ => tls_error(e),
        })?;
    }
    Ok(session)
}

/// A server that does not accept this client's certificate says so when the client takes the
/// handshake for done, and goes: what it has said may be found where writing failed.
fn what_the_server_says(
    tls: &mut rustls::ClientConnection,
    stream: &mut Timed,
    error: NbdError,
) -> NbdError {
    match error.kind {
        Kind::Closed => {}
        Kind::Io => return error.about("TLS"),
        _ => return error,
    }
    while tls.read_tls(stream).is_ok_and(|n| n > 0) {
        if let Err(e) = tls.process_new_packets() {
            return tls_error(e);
        }
    }
    tls_error(format!("the server does not want this client, or its certificate ({error})"))
}

fn tls_error(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> NbdError {
    NbdError::of(Kind::Tls, what).about("TLS")
}

impl Dialed {
    /// Tells the server that this was all; there is no answer to it, and no harm if it does not
    /// arrive.
    pub fn end(mut self) {
        let mut bytes = Vec::new();
        let end =
            wire::Request { flags: 0, command: wire::cmd::DISC, cookie: 0, offset: 0, len: 0 };
        end.put(self.terms.headers, &mut bytes);
        if let Some(session) = &mut self.session {
            let _ = session.writer().write_all(&bytes);
            bytes.clear();
            while session.wants_write() && session.write_tls(&mut bytes).is_ok() {}
        }
        let _ = rustix::net::send(
            &self.fd,
            &bytes,
            rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL,
        );
    }
}

fn connect(uri: &Uri, deadline: Instant) -> Result<OwnedFd, NbdError> {
    match &uri.host {
        Host::Unix(path) => {
            let failed = |e: io::Error| {
                NbdError::of(Kind::Io, e).about(format!("connecting to {}", path.display()))
            };
            let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
                .map_err(|e| failed(e.into()))?;
            blockyard_ring::rights::refuse(&fd);
            // A full backlog makes connect() wait; it waits no longer than sending may.
            set_timeouts(&fd, Some(deadline)).map_err(failed)?;
            rustix::net::connect(&fd, &address).map_err(|e| failed(e.into()))?;
            Ok(fd)
        }
        Host::Tcp(name, port) => {
            let failed = |e: io::Error| {
                NbdError::of(Kind::Io, e).about(format!("connecting to {name} port {port}"))
            };
            let addresses = (name.as_str(), *port).to_socket_addrs().map_err(failed)?;
            let mut last = io::Error::other("the name has no address");
            for address in addresses {
                let left = left(deadline).map_err(failed)?;
                match TcpStream::connect_timeout(&address, left) {
                    Ok(stream) => {
                        stream.set_nodelay(true).map_err(failed)?;
                        // A host that is gone without a word is noticed also where nothing is asked
                        // for long.
                        sockopt::set_socket_keepalive(&stream, true)
                            .map_err(|e| failed(e.into()))?;
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
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(left.max(Duration::from_millis(1)))
    }
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
