//! The bytes of a connection, whatever carries them.

use std::cell::{Cell, OnceCell};
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockyard_nbd::{Link, ServerTls};
use blockyard_ring::{Handle, Segments, Socket, write_rest};

use super::room::Account;

/// Bytes that a client which holds `held` bytes of room must move, again and again, not to be taken
/// for one that has stopped. In proportion: a client that moves little must not hold much.
fn progress(held: usize) -> usize {
    (held / 8).max(64 << 10)
}

/// Bytes of answers that the kernel may keep for a client, as far as it allows it.
const SENT_AHEAD: usize = 256 << 10;

pub struct Stream {
    plain: Link,
    /// Since TLS was begun.
    secure: OnceCell<Link>,
    handle: Handle,
    /// Where the client comes from, for the log.
    from: String,
    /// The room that the client's requests hold.
    pub account: Rc<Account>,
    /// Since when the client has made no [`progress`] in taking what is being sent.
    sending_since: Cell<Option<Instant>>,
    /// Since when the client owes a payload, and has made no [`progress`] in sending it.
    owed_since: Cell<Option<Instant>>,
    /// What it has sent of it since then.
    paid: Cell<usize>,
}

impl Stream {
    pub fn new(handle: &Handle, fd: impl AsFd + Send + Sync + 'static) -> io::Result<Self> {
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&fd, SENT_AHEAD);
        // A client whose machine is gone is noticed, in the end.
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        let from = crate::listener::peer(&fd);
        let (account, sending_since, owed_since, paid) = Default::default();
        let (plain, secure) = (Link::new(Socket::new(handle, fd)?, None), OnceCell::new());
        Ok(Stream {
            plain,
            secure,
            handle: handle.clone(),
            from,
            account,
            sending_since,
            owed_since,
            paid,
        })
    }

    pub fn from(&self) -> &str {
        &self.from
    }

    #[inline]
    fn link(&self) -> &Link {
        self.secure.get().unwrap_or(&self.plain)
    }

    /// From here on all bytes are TLS's. The names that the client's certificate has, if it has
    /// shown one.
    pub async fn start_tls(&self, tls: &ServerTls) -> io::Result<Vec<String>> {
        let session = tls.session().map_err(io::Error::other)?;
        self.secure.get_or_init(|| self.plain.under_tls(session)).handshake().await
    }

    /// Reads what is there, at least one byte; 0: the client has ended.
    #[inline]
    pub async fn read(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        self.link().read(segments).await
    }

    /// Reads as [`Stream::read`] does, of a payload that the client owes and a buffer waits for.
    pub async fn read_owed(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        if self.owed_since.get().is_none() {
            self.owed_since.set(Some(self.handle.now()));
        }
        let (segments, read) = self.read(segments).await;
        self.paid.set(self.paid.get() + read.as_ref().unwrap_or(&0));
        if self.paid.get() >= progress(self.account.held()) {
            self.paid.set(0);
            self.owed_since.set(Some(self.handle.now()));
        }
        (segments, read)
    }

    /// The client has paid.
    pub fn nothing_owed(&self) {
        self.owed_since.set(None);
        self.paid.set(0);
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
            if done - noted >= progress(self.account.held()) {
                noted = done;
                self.sending_since.set(Some(self.handle.now()));
            }
            self.link().write(segments, done).await
        });
        let sent = sent.await;
        self.sending_since.set(None);
        sent
    }

    /// Whether the client holds room that others could have, and has kept an answer or a payload
    /// waiting for so long.
    pub fn stalls(&self, limit: Duration) -> bool {
        let since = [self.sending_since.get(), self.owed_since.get()];
        self.account.shares() && since.iter().flatten().any(|since| since.elapsed() > limit)
    }

    /// All is said: ends TLS, if it is in use.
    pub fn close(&self) {
        self.link().close();
    }

    pub fn shutdown(&self) {
        self.plain.shutdown();
    }

    pub fn shutdown_read(&self) {
        self.plain.shutdown_read();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_holds_much_must_move_much() {
        assert_eq!(progress(256 << 10), 64 << 10);
        assert_eq!(progress(32 << 20), 4 << 20);
        assert_eq!(progress(64 << 20), 8 << 20);
    }
}
