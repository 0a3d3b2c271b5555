//! The bytes of a connection, plain or by TLS.
//!
//! In: segments to fill, or to send. Out: the same results as those of a [`Socket`]. TLS copies the
//! bytes. One task sends at a time, and one receives. What must hold: a TLS record that does not
//! verify ends the connection.

use std::cell::{Cell, RefCell};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use blockyard_ring::{Handle, Segments, SlowCallCounters, Socket, Watch, write_rest};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustls::Connection;

use crate::{NbdError, NbdErrorKind};

/// Reasons to end a connection.
pub const CLOSED: &str = "the server closed the connection";
pub const UNASKED: &str = "the server has sent bytes without a request";

/// Maximum number of TLS control records that are read in a row. A server that sends more is
/// disconnected.
const MOST_TICKETS: usize = 16;
/// Number of bytes that are encrypted or received at a time.
const AT_A_TIME: usize = 64 << 10;

#[derive(Clone)]
pub enum Link {
    Plain(Socket),
    Tls(Rc<Secure>),
}

/// A socket with a TLS session.
pub struct Secure {
    socket: Socket,
    /// The TLS session. `None`: [`Link::keep`] has given it away.
    session: RefCell<Option<Connection>>,
    /// Received bytes. The session has taken the first `used` of them.
    received: RefCell<Vec<u8>>,
    used: Cell<usize>,
}

impl Link {
    /// Creates a link. The handshake of `session` is done, or [`Link::handshake`] does it.
    pub fn new(socket: Socket, session: Option<Connection>) -> Self {
        match session {
            None => Link::Plain(socket),
            Some(session) => {
                let (received, used) = Default::default();
                Link::Tls(Rc::new(Secure {
                    socket,
                    session: RefCell::new(Some(session)),
                    received,
                    used,
                }))
            }
        }
    }

    fn socket(&self) -> &Socket {
        match self {
            Link::Plain(socket) => socket,
            Link::Tls(secure) => &secure.socket,
        }
    }

    /// Reads at least one byte. Returns 0 if the peer has closed the connection.
    #[inline]
    pub async fn read(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        match self {
            Link::Plain(socket) => socket.read(segments).await,
            Link::Tls(secure) => {
                let read = Box::pin(secure.read(&segments)).await;
                (segments, read)
            }
        }
    }

    /// Returns the reason to end an idle connection: the peer has closed it, or has sent bytes
    /// without a request. No read may be in progress.
    pub fn has_ended(&self) -> Option<NbdError> {
        match self {
            Link::Plain(socket) => {
                match recv(socket.fd(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => Some(closed()),
                    Ok(_) => Some(NbdError::protocol(UNASKED)),
                    Err(Errno::AGAIN | Errno::INTR) => None,
                    Err(e) => Some(receiving(e.into())),
                }
            }
            Link::Tls(secure) => secure.has_ended(),
        }
    }

    /// See [`Handle::watch`].
    pub fn watch(&self, handle: &Handle) -> io::Result<Watch> {
        Ok(handle.watch(self.socket().fd().try_clone_to_owned()?))
    }

    /// Starts TLS on this connection.
    pub fn under_tls(&self, session: Connection) -> Link {
        Link::new(self.socket().clone(), Some(session))
    }

    /// Sends as many bytes as the socket takes without waiting. Sends none under TLS.
    #[inline]
    pub fn write_now(&self, segments: &Segments) -> io::Result<usize> {
        match self {
            Link::Plain(socket) => socket.write_now(segments),
            Link::Tls(_) => Ok(0),
        }
    }

    /// Sends some of `segments` from `offset`. Returns the number of bytes that the socket took.
    #[inline]
    pub async fn write(&self, segments: Segments, offset: usize) -> (Segments, io::Result<usize>) {
        match self {
            Link::Plain(socket) => socket.write(segments, offset).await,
            Link::Tls(secure) => {
                let sent = Box::pin(secure.write(&segments, offset)).await;
                (segments, sent)
            }
        }
    }

    /// Sends all of `segments`.
    pub async fn write_full(&self, segments: Segments) -> (Segments, io::Result<()>) {
        match self.write_now(&segments) {
            Ok(done) => {
                write_rest(segments, done, async |segments, done| self.write(segments, done).await)
                    .await
            }
            Err(e) => (segments, Err(e)),
        }
    }

    /// Ends TLS before the socket is closed, if that needs no wait. No send may be in progress.
    pub fn close(&self) {
        if let Link::Tls(secure) = self {
            secure.close();
        }
    }

    /// See [`Socket::count_slow_calls`].
    pub fn count_slow_calls(&self, counters: Rc<SlowCallCounters>) {
        self.socket().count_slow_calls(counters);
    }

    /// See [`Socket::cancel`].
    pub fn cancel(&self) {
        self.socket().cancel();
    }

    pub fn shutdown(&self) {
        self.socket().shutdown();
    }

    pub fn shutdown_read(&self) {
        self.socket().shutdown_read();
    }

    /// Returns the connection's descriptor and its TLS session, for another owner. No send or read
    /// may be in progress, and none may follow.
    pub fn keep(&self) -> io::Result<(OwnedFd, Option<Connection>)> {
        let session = match self {
            Link::Plain(_) => None,
            Link::Tls(secure) if secure.used.get() < secure.received.borrow().len() => {
                return Err(io::Error::other("there is more to be read"));
            }
            Link::Tls(secure) => secure.session.take(),
        };
        Ok((self.socket().keep()?, session))
    }

    /// Does a server's handshake. Returns the names of the client, if it has a certificate. Waits
    /// for `turn` before each part, because a part may take milliseconds (a signature).
    pub async fn handshake(&self, turn: impl AsyncFn()) -> io::Result<Vec<String>> {
        let Link::Tls(secure) = self else { return Ok(Vec::new()) };
        loop {
            secure.send_records().await?;
            if !secure.with(|session| session.is_handshaking())? {
                return secure.with(|session| crate::tls::names(session));
            }
            if !secure.is_empty() {
                turn().await;
            }
            if let Err(e) = secure.take_records() {
                // Sends the TLS alert, which names the reason.
                let _ = secure.send_records().await;
                return Err(e);
            }
            if secure.is_empty()
                && secure.with(|session| session.is_handshaking() && !session.wants_write())?
                && !secure.receive().await?
            {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn closed() -> NbdError {
    NbdError::new(NbdErrorKind::Closed, CLOSED)
}

fn receiving(e: io::Error) -> NbdError {
    NbdError { what: format!("receiving: {e}"), ..NbdError::of(NbdErrorKind::Io, e) }
}

impl Secure {
    fn with<T>(&self, work: impl FnOnce(&mut Connection) -> T) -> io::Result<T> {
        let mut session = self.session.borrow_mut();
        session
            .as_mut()
            .map(work)
            .ok_or_else(|| io::Error::other("the TLS session has another owner"))
    }

    fn is_empty(&self) -> bool {
        self.used.get() == self.received.borrow().len()
    }

    async fn read(&self, segments: &Segments) -> io::Result<usize> {
        let mut plain = vec![0; segments.len().min(AT_A_TIME)];
        loop {
            match self.with(|session| session.reader().read(&mut plain))? {
                Ok(n) => {
                    segments.copy_in(0, &plain[..n]);
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            if !self.is_empty() {
                self.take_records()?;
            } else if !self.receive().await? {
                return Ok(0);
            }
        }
    }

    /// Returns the reason to end an idle connection, or `None`. Bytes that arrive without a request
    /// are either TLS's own records (session tickets), which are skipped, or a reason.
    fn has_ended(&self) -> Option<NbdError> {
        let (mut bytes, room) = ([0; 4096], Segments::buffer(4096));
        for _ in 0..MOST_TICKETS {
            let n = match self.socket.read_now(&room) {
                Ok(Some(0)) => return Some(closed()),
                Ok(Some(n)) => n,
                Ok(None) => return None,
                Err(e) => return Some(receiving(e)),
            };
            room.copy_out(0, &mut bytes[..n]);
            let left = self.received.borrow_mut().split_off(self.used.replace(0));
            *self.received.borrow_mut() = [&left, &bytes[..n]].concat();
            while !self.is_empty() {
                let taken = self
                    .take_records()
                    .and_then(|()| self.with(|session| session.reader().read(&mut [0; 1])));
                match taken {
                    Ok(Ok(0)) => return Some(closed()),
                    Ok(Ok(_)) => return Some(NbdError::protocol(UNASKED)),
                    Ok(Err(e)) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Ok(Err(e)) | Err(e) => return Some(receiving(e)),
                }
            }
        }
        Some(NbdError::protocol(UNASKED))
    }

    /// Passes some of the received bytes to the session.
    fn take_records(&self) -> io::Result<()> {
        let received = self.received.borrow();
        let mut rest = &received[self.used.get()..];
        if rest.is_empty() {
            return Ok(());
        }
        self.with(|session| {
            session.read_tls(&mut rest)?;
            session
                .process_new_packets()
                .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {e}")))
        })??;
        self.used.set(received.len() - rest.len());
        Ok(())
    }

    /// Receives more bytes. Returns false if the peer has closed the connection.
    async fn receive(&self) -> io::Result<bool> {
        let (segments, n) = self.socket.read(Segments::buffer(AT_A_TIME)).await;
        let mut received = self.received.borrow_mut();
        received.clear();
        received.resize(n?, 0);
        segments.copy_out(0, &mut received);
        self.used.set(0);
        Ok(!received.is_empty())
    }

    async fn write(&self, segments: &Segments, offset: usize) -> io::Result<usize> {
        let mut plain = vec![0; (segments.len() - offset).min(AT_A_TIME)];
        segments.slice(offset, plain.len()).copy_out(0, &mut plain);
        let taken = self.with(|session| session.writer().write(&plain))??;
        self.send_records().await?;
        Ok(taken)
    }

    fn close(&self) {
        let mut records = Vec::new();
        let _ = self.with(|session| {
            session.send_close_notify();
            while session.wants_write() && session.write_tls(&mut records).is_ok() {}
        });
        let _ = self.socket.write_now(&Segments::from_bytes(&records));
    }

    async fn send_records(&self) -> io::Result<()> {
        let mut records = Vec::new();
        self.with(|session| {
            while session.wants_write() {
                session.write_tls(&mut records)?;
            }
            io::Result::Ok(())
        })??;
        if records.is_empty() {
            return Ok(());
        }
        self.socket.write_full(Segments::from_bytes(&records)).await.1
    }
}
