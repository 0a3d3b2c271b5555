//! The bytes of a connection, whatever carries them.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use blockyard_ring::{Handle, Segments, Socket};

pub struct Stream {
    socket: Socket,
    handle: Handle,
    /// When what is being sent now was begun.
    sending_since: Cell<Option<Instant>>,
}

impl Stream {
    pub fn new(handle: &Handle, fd: OwnedFd) -> io::Result<Self> {
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        // A client whose machine is gone is noticed, in the end.
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        Ok(Stream { socket: Socket::new(handle, fd)?, handle: handle.clone(), sending_since: Cell::new(None) })
    }

    /// Reads what is there, at least one byte; 0: the client has ended.
    #[inline]
    pub async fn read(&self, segments: Segments) -> (Segments, io::Result<usize>) {
        self.socket.read(segments).await
    }

    /// Sends all of `segments`.
    #[inline]
    pub async fn write(&self, segments: Segments) -> (Segments, io::Result<()>) {
        self.sending_since.set(Some(self.handle.now()));
        let sent = self.socket.write_full(segments).await;
        self.sending_since.set(None);
        sent
    }

    pub fn sending_since(&self) -> Option<Instant> {
        self.sending_since.get()
    }

    pub fn shutdown(&self) {
        self.socket.shutdown();
    }

    pub fn shutdown_read(&self) {
        self.socket.shutdown_read();
    }
}
