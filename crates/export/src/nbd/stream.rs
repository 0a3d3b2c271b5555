//! The byte stream of a connection, plain or TLS.

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use blockyard_disk::Disk;
use blockyard_nbd::{Link, ServerTls};
use blockyard_ring::{Handle, Segments, SlowCallCounters, Socket, is_canceled, write_rest};
use rustix::io::Errno;

use super::buffers::Buffers;
use super::quota::Usage;
use super::spool::Spool;
use crate::{Client, budget, connections};

/// Minimum number of bytes that a client must transfer within the time limit if it holds `held`
/// bytes of the quota. A client that transfers less is stalled. The more a client holds, the more
/// it must transfer.
fn progress(held: usize) -> usize {
    (held / 8).max(64 << 10)
}

/// Longest time without progress while the client reads the replies from before a hand-over.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// Requested size of the socket's send buffer in bytes. The kernel may allow less.
const SENT_AHEAD: usize = 256 << 10;

/// A connection's socket, plain or with TLS.
pub struct Stream {
    plain: Link,
    /// Set when TLS begins.
    secure: OnceCell<Link>,
    handle: Handle,
    client: Client,
    /// The buffer memory that the client's requests hold.
    pub usage: Rc<Usage>,
    /// Time since which the client has read less than [`progress`] of the data that the server is
    /// sending.
    sending_since: Cell<Option<Instant>>,
    /// Time since which the client has sent less than [`progress`] of a payload that already has a
    /// buffer.
    payload_since: Cell<Option<Instant>>,
    /// Bytes of the payload that the client has sent since `payload_since`.
    payload_received: Cell<usize>,
    /// Bytes that a previous server has received and not handled. They come before the socket's.
    unread: RefCell<Option<Spool>>,
    /// Replies that the client has not read before a hand-over.
    unsent: RefCell<Option<Spool>>,
    /// Reading needs a look at `unread` and `leaving`.
    is_special: Cell<bool>,
    /// Another server continues the connection, so this one reads nothing any more.
    leaving: Cell<bool>,
    /// Replies go to `unsent` instead of the socket.
    collects: Cell<bool>,
    /// The replies in `unsent` are being sent.
    carries: Cell<bool>,
    /// Both directions of the socket are shut down.
    is_shut: Cell<bool>,
}

/// Bytes that are handed over with a connection.
#[derive(Debug, Default)]
pub struct Remains {
    /// Received, and not handled.
    pub unread: Option<Spool>,
    /// Replies that were not sent.
    pub unsent: Option<Spool>,
}

impl Stream {
    pub fn new(handle: &Handle, fd: impl AsFd + Send + Sync + 'static) -> io::Result<Self> {
        connections::prepare(&fd);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&fd, SENT_AHEAD);
        let client = Client::connected(&fd);
        let (usage, sending_since, payload_since, payload_received) = Default::default();
        let (unread, unsent, is_special, leaving, collects, carries) = Default::default();
        let is_shut = Cell::default();
        let (plain, secure) = (Link::new(Socket::new(handle, fd)?, None), OnceCell::new());
        Ok(Stream {
            plain,
            secure,
            handle: handle.clone(),
            client,
            usage,
            sending_since,
            payload_since,
            payload_received,
            unread,
            unsent,
            is_special,
            leaving,
            collects,
            carries,
            is_shut,
        })
    }

    /// Continues a connection of another server, which connected at `since`.
    pub fn continued(
        handle: &Handle,
        fd: impl AsFd + Send + Sync + 'static,
        since: Option<SystemTime>,
        Remains { unread, unsent }: Remains,
    ) -> io::Result<Self> {
        let mut stream = Self::new(handle, fd)?;
        stream.client.since = since;
        stream.is_special = Cell::new(unread.is_some());
        (stream.unread, stream.unsent) = (RefCell::new(unread), RefCell::new(unsent));
        Ok(stream)
    }

    /// See [`Link::count_slow_calls`].
    pub fn count_slow_calls(&self, counters: Rc<SlowCallCounters>) {
        self.plain.count_slow_calls(counters);
    }

    /// Counts the memory of the client's requests for this disk.
    pub fn chose(&self, disk: &Arc<Disk>) {
        self.usage.set_disk(self.handle.local::<Buffers>().of_disk(disk));
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Describes the client, for the log.
    pub fn from(&self) -> &str {
        &self.client.description
    }

    #[inline]
    fn link(&self) -> &Link {
        self.secure.get().unwrap_or(&self.plain)
    }

    /// Starts TLS. All later bytes are encrypted. Returns the names in the client's certificate, if
    /// the client has sent one.
    pub async fn start_tls(&self, tls: &ServerTls) -> io::Result<Vec<String>> {
        let session = tls.session().map_err(io::Error::other)?;
        let secure = self.secure.get_or_init(|| self.plain.under_tls(session));
        secure.handshake(async || budget::long_turn(&self.handle).await).await
    }

    /// Waits before a further part of the option phase, if this iteration has lasted too long.
    pub async fn option_turn(&self) {
        if budget::is_over(self.handle.now(), Instant::now()) {
            budget::long_turn(&self.handle).await;
        }
    }

    /// Reads at least one byte. Returns 0 if the client has ended the connection.
    #[inline]
    pub async fn read(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        if self.is_special.get()
            && let Some(read) = self.read_unread(&segments)
        {
            return (segments, read);
        }
        self.link().read(segments).await
    }

    #[cold]
    fn read_unread(&self, segments: &Segments) -> Option<io::Result<usize>> {
        if self.leaving.get() {
            return Some(Err(Errno::CANCELED.into()));
        }
        let mut unread = self.unread.borrow_mut();
        if let Some(spool) = unread.as_mut().filter(|spool| !spool.is_empty()) {
            return Some(spool.read(segments));
        }
        *unread = None;
        self.is_special.set(false);
        None
    }

    /// Returns whether reading has failed with `error` because another server continues the
    /// connection.
    pub fn has_left(&self, error: &io::Error) -> bool {
        self.leaving.get() && is_canceled(error)
    }

    /// Returns whether another server continues the connection.
    pub fn is_leaving(&self) -> bool {
        self.leaving.get()
    }

    pub fn is_tls(&self) -> bool {
        self.secure.get().is_some()
    }

    /// Reads nothing any more, because another server continues the connection. Replies are still
    /// sent.
    pub fn leave(&self) {
        self.leaving.set(true);
        self.is_special.set(true);
        self.link().cancel();
        self.handle.local::<Buffers>().end(&self.usage);
    }

    /// Keeps the replies for the next server, because the client reads them too slowly.
    pub fn collect(&self) {
        if !self.collects.replace(true) {
            self.link().cancel();
        }
    }

    fn keep_unsent(&self, segments: &Segments, from: usize) -> io::Result<()> {
        let mut unsent = self.unsent.borrow_mut();
        let spool = match &mut *unsent {
            Some(spool) => spool,
            None => unsent.insert(Spool::new()?),
        };
        spool.push_segments(segments, from, segments.len() - from)
    }

    /// Sends the replies that the client has not read before a hand-over.
    pub async fn send_unsent(&self) -> io::Result<()> {
        let Some(mut spool) = self.unsent.take() else { return Ok(()) };
        self.carries.set(true);
        let sent = self.send_spool(&mut spool).await;
        self.carries.set(false);
        self.sending_since.set(None);
        if sent.is_err() {
            self.unsent.replace(spool.unless_empty());
        }
        sent
    }

    async fn send_spool(&self, spool: &mut Spool) -> io::Result<()> {
        let room = Segments::buffer(SENT_AHEAD);
        while !spool.is_empty() {
            if self.leaving.get() {
                return Err(Errno::CANCELED.into());
            }
            let n = spool.peek(&room)?;
            self.sending_since.set(Some(self.handle.now()));
            spool.from += self.link().write(room.slice(0, n), 0).await.1? as u64;
        }
        Ok(())
    }

    /// Returns whether the client has still to read replies from before a hand-over.
    pub fn carries(&self) -> bool {
        self.carries.get()
    }

    /// Returns the connection for another server. No operation may be in flight, or start later.
    pub fn keep(&self) -> io::Result<(OwnedFd, Option<Spool>)> {
        Ok((self.plain.keep()?.0, self.unsent.take()))
    }

    /// Returns the bytes of a previous server that were not read.
    pub fn take_unread(&self) -> Option<Spool> {
        self.unread.take().and_then(Spool::unless_empty)
    }

    /// Like [`Stream::read`], for a payload that already has a buffer. Tracks the client's
    /// progress.
    pub async fn read_payload(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        if self.payload_since.get().is_none() {
            self.payload_since.set(Some(self.handle.now()));
        }
        let (segments, read) = self.read(segments).await;
        self.payload_received.set(self.payload_received.get() + read.as_ref().unwrap_or(&0));
        if self.payload_received.get() >= progress(self.usage.held()) {
            self.payload_received.set(0);
            self.payload_since.set(Some(self.handle.now()));
        }
        (segments, read)
    }

    /// Ends the tracking of progress, because the payload is complete.
    pub fn payload_complete(&self) {
        self.payload_since.set(None);
        self.payload_received.set(0);
    }

    /// Sends all of `segments`.
    #[inline]
    pub async fn write(&self, segments: Segments) -> (Segments, io::Result<()>) {
        if self.collects.get() {
            let kept = self.keep_unsent(&segments, 0);
            return (segments, kept);
        }
        let done = match self.link().write_now(&segments) {
            Ok(n) if n == segments.len() => return (segments, Ok(())),
            Ok(n) => n,
            Err(e) => return (segments, Err(e)),
        };
        self.sending_since.set(Some(self.handle.now()));
        let (mut noted, reached) = (done, Cell::new(done));
        let sent = write_rest(segments, done, async |segments, done| {
            reached.set(done);
            if done - noted >= progress(self.usage.held()) {
                noted = done;
                self.sending_since.set(Some(self.handle.now()));
            }
            match self.link().write(segments, done).await {
                // The cancellation was meant for a read.
                (segments, Err(e)) if is_canceled(&e) && !self.collects.get() => (segments, Ok(0)),
                written => written,
            }
        });
        let (segments, mut sent) = sent.await;
        self.sending_since.set(None);
        if self.collects.get() && sent.as_ref().is_err_and(is_canceled) {
            sent = self.keep_unsent(&segments, reached.get());
        }
        (segments, sent)
    }

    /// Returns whether the client holds shared bytes of the quota, and has made no progress for
    /// longer than `limit`.
    pub fn stalls(&self, limit: Duration) -> bool {
        let since = [self.sending_since.get(), self.payload_since.get()];
        self.usage.shares() && since.iter().flatten().any(|since| since.elapsed() > limit)
    }

    /// Returns whether the client reads the replies from before a hand-over too slowly. They take
    /// memory beyond the quota.
    pub fn stalls_next(&self) -> bool {
        let is_late = |since: Instant| since.elapsed() > MOST_WAIT;
        self.carries.get() && self.sending_since.get().is_some_and(is_late)
    }

    /// Ends TLS, if the connection uses it.
    pub fn close(&self) {
        self.link().close();
    }

    /// Shuts both directions of the socket down. The connection waits for no memory any more.
    pub fn shutdown(&self) {
        self.is_shut.set(true);
        self.plain.shutdown();
        self.handle.local::<Buffers>().end(&self.usage);
    }

    /// Returns whether [`Stream::shutdown`] was called.
    pub fn is_shut(&self) -> bool {
        self.is_shut.get()
    }

    /// Shuts the receiving direction of the socket down.
    pub fn shutdown_read(&self) {
        self.plain.shutdown_read();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_holds_more_must_transfer_more() {
        assert_eq!(progress(256 << 10), 64 << 10);
        assert_eq!(progress(32 << 20), 4 << 20);
        assert_eq!(progress(64 << 20), 8 << 20);
    }
}
