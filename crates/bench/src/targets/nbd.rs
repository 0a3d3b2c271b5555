//! An NBD server, one request at a time.
//!
//! In: an NBD URI without TLS. Out: a [`Target`]. The client negotiates simple replies only,
//! because it has one request in flight. What must hold: a server that hangs ends the run.

use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockyard_nbd::Uri;
use blockyard_nbd::negotiate::{self, Terms};
use blockyard_nbd::uri::Host;
use blockyard_nbd::wire::{Headers, Request, SimpleReply, cmd, export, flag};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{Access, SECTOR, Target};

/// Longest wait for a connection with its negotiation, and for a part of an answer.
const LIMIT: Duration = Duration::from_secs(60);
/// Shortest timeout of a socket. Zero would mean no timeout.
const SHORTEST: Duration = Duration::from_millis(1);

/// A TCP or Unix socket.
pub trait Stream: Read + Write + AsFd + Send {}
impl<T: Read + Write + AsFd + Send> Stream for T {}

pub struct Nbd {
    stream: BufReader<Box<dyn Stream>>,
    terms: Terms,
    cookie: u64,
}

/// Parses the address of an export.
pub fn parse(text: &str) -> Result<Uri> {
    let uri = Uri::parse(text).map_err(anyhow::Error::msg)?;
    anyhow::ensure!(!uri.tls, "{text}: this command measures without TLS (nbd, nbd+unix)");
    Ok(uri)
}

/// Connects to a server, and negotiates simple replies, within `limit`. Only the kernel limits the
/// time to find the address of a host name.
pub fn connect(uri: &Uri, limit: Duration) -> Result<(Box<dyn Stream>, Terms)> {
    let deadline = Instant::now() + limit;
    let mut stream: Box<dyn Stream> = match &uri.host {
        Host::Unix(path) => Box::new(connect_unix(path, deadline)?),
        Host::Tcp(name, port) => Box::new(connect_tcp(name, *port, deadline)?),
    };
    let mut timed = Timed { stream: &mut stream, deadline };
    let terms = negotiate::greet(&mut timed).and_then(|()| negotiate::go(&mut timed, &uri.export));
    let terms = terms.map_err(anyhow::Error::msg).context("negotiating")?;
    set_timeouts(&stream, LIMIT)?;
    Ok((stream, terms))
}

fn connect_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // A server that accepts no connection makes connect() wait, at most for the send timeout.
    set_timeouts(&socket, left(deadline)?)?;
    rustix::net::connect(&socket, &address).map_err(|e| late(e.into()))?;
    Ok(socket.into())
}

fn connect_tcp(name: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for address in (name, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return stream.set_nodelay(true).map(|()| stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Returns the time until `deadline`, or an error if it has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late(ErrorKind::TimedOut.into())) } else { Ok(left.max(SHORTEST)) }
}

/// Returns the error of a call with a timeout, for a person.
fn late(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            io::Error::new(ErrorKind::TimedOut, "the server does not answer in time")
        }
        _ => error,
    }
}

fn set_timeouts(socket: &impl AsFd, time: Duration) -> io::Result<()> {
    sockopt::set_socket_timeout(socket, Timeout::Recv, Some(time))?;
    Ok(sockopt::set_socket_timeout(socket, Timeout::Send, Some(time))?)
}

/// A stream on which all calls together end at a deadline.
struct Timed<'a> {
    stream: &'a mut Box<dyn Stream>,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        set_timeouts(self.stream, left(self.deadline)?)?;
        self.stream.read(bytes).map_err(late)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        set_timeouts(self.stream, left(self.deadline)?)?;
        self.stream.write(bytes).map_err(late)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Nbd {
    pub fn open(uri: &Uri, access: Access) -> Result<Self> {
        let (stream, terms) = connect(uri, LIMIT)?;
        let most = u64::from(terms.maximum);
        anyhow::ensure!(
            access.largest <= most,
            "requests may have {most} bytes, not {}",
            access.largest
        );
        anyhow::ensure!(
            !(access.writes && terms.has(export::READ_ONLY)),
            "the export is read-only"
        );
        Ok(Nbd { stream: BufReader::new(stream), terms, cookie: 0 })
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: usize) -> Result<()> {
        self.cookie += 1;
        let mut header = Vec::with_capacity(28);
        let request = Request { flags, command, cookie: self.cookie, offset, len: len as u64 };
        request.put(Headers::Simple, &mut header);
        Ok(self.stream.get_mut().write_all(&header)?)
    }

    fn answered(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        let mut header = [0; SimpleReply::BYTES];
        self.stream.read_exact(&mut header)?;
        let reply = SimpleReply::parse(&header).ok().filter(|reply| reply.cookie == self.cookie);
        let reply = reply.context("the server's answer is none to this request")?;
        anyhow::ensure!(
            reply.error == 0,
            "{}: the server answers with error {}",
            what(),
            reply.error
        );
        Ok(())
    }
}

impl Target for Nbd {
    fn size(&self) -> u64 {
        self.terms.size
    }

    fn block(&self) -> u64 {
        u64::from(self.terms.minimum).max(SECTOR)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.ask(cmd::READ, 0, offset, bytes.len())?;
        self.answered(|| format!("reading {} bytes at offset {offset}", bytes.len()))?;
        Ok(self.stream.read_exact(bytes)?)
    }

    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()> {
        let fua = durable && self.terms.has(export::SEND_FUA);
        self.ask(cmd::WRITE, if fua { flag::FUA } else { 0 }, offset, bytes.len())?;
        self.stream.get_mut().write_all(bytes)?;
        self.answered(|| format!("writing {} bytes at offset {offset}", bytes.len()))?;
        if durable && !fua && self.terms.has(export::SEND_FLUSH) {
            self.ask(cmd::FLUSH, 0, 0, 0)?;
            self.answered(|| "flushing".into())?;
        }
        Ok(())
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // NBD_CMD_DISC has no reply.
        let _ = self.ask(cmd::DISC, 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::scratch::until;

    /// A socket in a folder of its own, and its address.
    fn listen(name: &str) -> (UnixListener, std::path::PathBuf, Uri) {
        let name = format!("blockyard-bench-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let uri = parse(&format!("nbd+unix:///x?socket={}", path.display())).unwrap();
        (UnixListener::bind(&path).unwrap(), path, uri)
    }

    const SHORT: Duration = Duration::from_millis(50);

    /// A client that is given `SHORT` does not wait for `LIMIT`, which is also the limit of a test
    /// that hangs.
    fn fails_in_time(uri: &Uri) {
        let start = Instant::now();
        let error = format!("{:#}", connect(uri, SHORT).err().unwrap());
        assert!(error.contains("the server does not answer"), "{error}");
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
    }

    #[test]
    fn a_server_that_says_nothing_ends_the_negotiation_in_time() {
        let (_listener, path, uri) = listen("silent");
        fails_in_time(&uri);
        std::fs::remove_file(path).unwrap();
    }

    /// Each byte comes in time.
    #[test]
    fn a_server_that_sends_single_bytes_ends_the_negotiation_in_time() {
        let (listener, path, uri) = listen("slow");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(SHORT / 8)).unwrap();
            let (greeting, start) = (b"NBDMAGICIHAVEOPT\0\x03", Instant::now());
            for byte in greeting.iter().chain(std::iter::repeat(&0)) {
                // A client that waits sends nothing.
                let closed = matches!(stream.read(&mut [0]), Ok(0));
                if closed || stream.write_all(&[*byte]).is_err() {
                    return;
                }
                assert!(start.elapsed() < LIMIT, "the client still waits after {LIMIT:?}");
            }
        });
        fails_in_time(&uri);
        until("the server sees the end of the connection", || server.is_finished());
        server.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    /// The queue of the listener is full.
    #[test]
    fn a_server_that_accepts_no_client_is_given_up_in_time() {
        let (listener, path, uri) = listen("full");
        rustix::net::listen(&listener, 0).unwrap();
        let _first = UnixStream::connect(&path).unwrap();
        fails_in_time(&uri);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn exports_under_tls_are_refused() {
        assert_eq!(parse("nbd+unix:///x?socket=/run/s").unwrap().export, "x");
        assert!(parse("nbds://host/x").unwrap_err().to_string().contains("without TLS"));
    }
}
