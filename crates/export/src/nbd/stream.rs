//! The byte stream of a connection, plain or TLS.

use std::cell::{Cell, OnceCell};
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockyard_nbd::{Link, ServerTls};
use blockyard_ring::{Handle, Segments, Socket, write_rest};

use super::quota::Usage;
use crate::Client;

/// Minimum number of bytes that a client must transfer within the time limit if it holds `held`
/// bytes of the quota. A client that transfers less is stalled. The more a client holds, the more
/// it must transfer.
fn progress(held: usize) -> usize {
    (held / 8).max(64 << 10)
}

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
}

impl Stream {
    pub fn new(handle: &Handle, fd: impl AsFd + Send + Sync + 'static) -> io::Result<Self> {
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&fd, SENT_AHEAD);
        // If the client's machine is gone, keepalive ends the connection after some time.
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        let client = Client::connected(&fd);
        let (usage, sending_since, payload_since, payload_received) = Default::default();
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
        })
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
        self.secure.get_or_init(|| self.plain.under_tls(session)).handshake().await
    }

    /// Reads at least one byte. Returns 0 if the client has ended the connection.
    #[inline]
    pub async fn read(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        self.link().read(segments).await
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
        let done = match self.link().write_now(&segments) {
            Ok(n) if n == segments.len() => return (segments, Ok(())),
            Ok(n) => n,
            Err(e) => return (segments, Err(e)),
        };
        self.sending_since.set(Some(self.handle.now()));
        let mut noted = done;
        let sent = write_rest(segments, done, async |segments, done| {
            if done - noted >= progress(self.usage.held()) {
                noted = done;
                self.sending_since.set(Some(self.handle.now()));
            }
            self.link().write(segments, done).await
        });
        let sent = sent.await;
        self.sending_since.set(None);
        sent
    }

    /// Returns whether the client holds shared bytes of the quota, and has made no progress for
    /// longer than `limit`.
    pub fn stalls(&self, limit: Duration) -> bool {
        let since = [self.sending_since.get(), self.payload_since.get()];
        self.usage.shares() && since.iter().flatten().any(|since| since.elapsed() > limit)
    }

    /// Ends TLS, if the connection uses it.
    pub fn close(&self) {
        self.link().close();
    }

    /// Shuts both directions of the socket down.
    pub fn shutdown(&self) {
        self.plain.shutdown();
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
