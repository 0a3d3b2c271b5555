//! The connection between two servers during a hand-over.
//!
//! In and out: messages in JSON, and parcels. What must hold: each call ends within the limit of
//! the connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockyard_ring::parcel::{self, Parcel};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The connection to the other server.
pub struct Peer {
    stream: UnixStream,
    limit: Duration,
}

impl Peer {
    /// `limit`: longest wait for a message.
    pub fn new(stream: UnixStream, limit: Duration) -> Self {
        Peer { stream, limit }
    }

    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    pub fn send(&self, message: &impl Serialize) -> io::Result<()> {
        parcel::send(&self.stream, &serde_json::to_vec(message)?, &[], self.deadline())
    }

    pub fn send_parcel(&self, parcel: &Parcel) -> io::Result<()> {
        let fds: Vec<_> = parcel.fds.iter().map(AsFd::as_fd).collect();
        parcel::send(&self.stream, &parcel.bytes, &fds, self.deadline())
    }

    pub fn receive_parcel(&self) -> io::Result<Parcel> {
        parcel::receive(&self.stream, self.deadline())?.ok_or_else(ended)
    }

    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(serde_json::from_slice(&self.receive_parcel()?.bytes)?)
    }

    /// Receives the last message, which decides which server goes on. After an error, the other
    /// server has not sent it, and cannot send it any more: its call fails. (The kernel refuses
    /// bytes after a shutdown, and those before it can still be read.)
    pub fn receive_last<T: DeserializeOwned>(&self, limit: Duration) -> io::Result<T> {
        let received = parcel::receive_until(&self.stream, Instant::now() + limit, || {
            self.stream.shutdown(Shutdown::Read)
        })?;
        Ok(serde_json::from_slice(&received.ok_or_else(ended)?)?)
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other server has ended")
}
