//! A negotiated connection to a server, over which a reactor sends its requests.
//!
//! In: a URI, and a time limit for the whole handshake. Out: a [`Dialed`]. It blocks, so reactors
//! run it on a worker thread.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use blockyard_nbd::negotiate::{self, Terms};
use blockyard_nbd::tls;
use blockyard_nbd::uri::{Host, Uri};
use blockyard_nbd::wire;
use blockyard_nbd::{NbdError, NbdErrorKind};

/// Time after which the kernel probes an idle connection, and the time between two probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of probes without an answer that end a connection.
const KEEPALIVE_PROBES: u32 = 3;
/// Shortest timeout. Zero would mean no timeout.
const SHORTEST: Duration = Duration::from_millis(1);

/// A negotiated connection without a request in flight. It may be sent to another thread.
#[derive(Debug)]
pub struct Dialed {
    pub fd: OwnedFd,
    /// The TLS session.
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
            let terms = terms.map_err(|what| tls_alert_or(&mut tls, &mut stream, what))?;
            session = Some(rustls::Connection::Client(tls));
            terms
        }
    };
    set_timeouts(&fd, None)
        .map_err(|e| NbdError::of(NbdErrorKind::Io, e).about("setting up its socket"))?;
    Ok(Dialed { fd, session, terms })
}

/// Starts TLS. Data received before TLS is not trusted afterwards.
fn secure(uri: &Uri, stream: &mut Timed) -> Result<rustls::ClientConnection, NbdError> {
    let folder = uri.tls_certificates.as_ref();
    let folder = folder.ok_or_else(|| {
        tls_error("certificates are missing: add tls-certificates=FOLDER".to_string())
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
                NbdError::new(NbdErrorKind::Closed, "the server closed the connection").about("TLS")
            }
            _ => tls_error(e),
        })?;
    }
    Ok(session)
}

/// Returns the server's TLS alert, if there is one, instead of `error`. A server that rejects the
/// client's certificate sends an alert after the client has finished the handshake, and closes the
/// connection. The client's write may fail before it has read that alert.
fn tls_alert_or(
    tls: &mut rustls::ClientConnection,
    stream: &mut Timed,
    error: NbdError,
) -> NbdError {
    match error.kind {
        NbdErrorKind::Closed => {}
        NbdErrorKind::Io => return error.about("TLS"),
        _ => return error,
    }
    while tls.read_tls(stream).is_ok_and(|n| n > 0) {
        if let Err(e) = tls.process_new_packets() {
            return tls_error(e);
        }
    }
    tls_error(format!("the server rejects this client or its certificate ({error})"))
}

fn tls_error(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> NbdError {
    NbdError::of(NbdErrorKind::Tls, what).about("TLS")
}

impl Dialed {
    /// Sends NBD_CMD_DISC. The server does not answer it, and no harm is done if it gets lost.
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
                NbdError::of(NbdErrorKind::Io, e).about(format!("connecting to {}", path.display()))
            };
            let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
                .map_err(|e| failed(e.into()))?;
            blockyard_ring::rights::refuse(&fd);
            // A full backlog makes connect() block, at most for the send timeout.
            set_timeouts(&fd, Some(deadline)).map_err(failed)?;
            rustix::net::connect(&fd, &address).map_err(|e| failed(e.into()))?;
            Ok(fd)
        }
        Host::Tcp(name, port) => {
            let failed = |e: io::Error| {
                NbdError::of(NbdErrorKind::Io, e).about(format!("connecting to {name} port {port}"))
            };
            let addresses = (name.as_str(), *port).to_socket_addrs().map_err(failed)?;
            let addresses: Vec<SocketAddr> = addresses.collect();
            connect_to_any(&addresses, deadline).map_err(failed)
        }
    }
}

/// Connects to the first of the addresses that answers.
fn connect_to_any(addresses: &[SocketAddr], deadline: Instant) -> io::Result<OwnedFd> {
    let stream = first_answer(addresses, || left(deadline), TcpStream::connect_timeout)?;
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream.into())
}

/// Returns what `connect` returns for the first of the addresses that answers. Each address gets an
/// equal share of the time that is left, so that one that does not answer leaves time for the
/// others.
fn first_answer<T>(
    addresses: &[SocketAddr],
    left: impl Fn() -> io::Result<Duration>,
    connect: impl Fn(&SocketAddr, Duration) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::Error::other("the name has no address");
    for (at, address) in addresses.iter().enumerate() {
        let share = left()? / (addresses.len() - at) as u32;
        match connect(address, share.max(SHORTEST)) {
            Ok(connection) => return Ok(connection),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Makes the kernel probe an idle connection. The probes detect a host that has vanished, also
/// without requests. They also keep the connection in the tables of routers (NAT), some of which
/// forget connections that are idle for a few minutes.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?)
}

/// Returns the time until `deadline`. Never zero, which would mean no timeout.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.max(SHORTEST)) }
}

fn set_timeouts(fd: &OwnedFd, deadline: Option<Instant>) -> io::Result<()> {
    let time = deadline.map(left).transpose()?;
    sockopt::set_socket_timeout(fd, sockopt::Timeout::Send, time)?;
    Ok(sockopt::set_socket_timeout(fd, sockopt::Timeout::Recv, time)?)
}

/// A blocking socket. Each operation ends at the deadline.
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::{Ipv4Addr, TcpListener};

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_others() {
        let addresses: [SocketAddr; 3] = [1, 2, 3].map(|port| (Ipv4Addr::LOCALHOST, port).into());
        let [silent, refused, good] = addresses;
        let time = Cell::new(Duration::from_secs(60));
        let connect = |address: &SocketAddr, share: Duration| {
            if *address == silent {
                time.set(time.get() - share);
                return Err(io::ErrorKind::TimedOut.into());
            }
            if *address == good { Ok(share) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
        };
        let left = || Ok(time.get());
        let share = first_answer(&addresses, left, connect).unwrap();
        assert_eq!(share, Duration::from_secs(40), "the silent one has had 20 s of 60 s");
        let error = first_answer(&[refused, silent], left, connect).unwrap_err();
        assert_eq!((error.kind(), time.get()), (io::ErrorKind::TimedOut, Duration::ZERO));
    }

    #[test]
    fn connecting_to_an_address_that_does_not_answer_ends_at_the_deadline() {
        // The queue of this listener has room for one connection.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let _first = TcpStream::connect(address).unwrap();
        let mut queue = [PollFd::new(&listener, PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = rustix::event::poll(&mut queue, Some(&limit)).unwrap();
        assert_eq!(ready, 1, "the first connection does not arrive");
        let deadline = Instant::now() + Duration::from_millis(50);
        let error = connect_to_any(&[address], deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn an_idle_connection_is_probed_soon() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let name = format!("nbd://{}/x", listener.local_addr().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        let fd = connect(&Uri::parse(&name).unwrap(), deadline).unwrap();
        assert!(sockopt::socket_keepalive(&fd).unwrap());
        let idle = sockopt::tcp_keepidle(&fd).unwrap();
        let probes = sockopt::tcp_keepintvl(&fd).unwrap() * sockopt::tcp_keepcnt(&fd).unwrap();
        assert_eq!((idle, probes), (Duration::from_secs(30), Duration::from_secs(30)));
    }
}
