//! Peeks at messages of a front end, and makes answers.
//!
//! In: the front end's socket. Out: messages that are still in the socket, with copies of their
//! descriptors. What must hold: a message leaves the socket only by [`Incoming::consume`], so that
//! another server finds it if this one dies.
//!
//! This module parses a message instead of the `vhost` crate in three cases:
//! - The crate does not know the message (in-band kick).
//! - The crate does not pass on the contents of the message (the back channel's descriptor).
//! - The crate ends the session, although a refusal would be enough.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use vhost::vhost_user::message::VhostUserInflight;

const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const SET_VRING_ADDR: u32 = 9;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const POSTCOPY_ADVISE: u32 = 28;
const POSTCOPY_LISTEN: u32 = 29;
const POSTCOPY_END: u32 = 30;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const VRING_KICK: u32 = 35;
/// GET_VRING_BASE, without waiting for requests that have not begun.
const SKIP_DRAIN: u32 = 45;
/// Messages that can have descriptors: SET_MEM_TABLE, SET_LOG_BASE, SET_LOG_FD, SET_VRING_KICK,
/// SET_VRING_CALL, SET_VRING_ERR, SET_BACKEND_REQ_FD, SET_INFLIGHT_FD, ADD_MEM_REG, REM_MEM_REG,
/// SET_DEVICE_STATE_FD.
const DESCRIBED: [u32; 11] =
    [5, SET_LOG_BASE, SET_LOG_FD, 12, 13, 14, SET_BACKEND_REQ_FD, SET_INFLIGHT_FD, 37, 38, 42];
const HEADER: usize = 12;
const NEED_REPLY: u32 = 1 << 3;
const REPLY: u32 = 1 << 2;
const VERSION: u32 = 1;

/// Length of SET_VRING_ADDR's body in bytes.
const ADDRESSES: usize = 40;
/// Longest body in bytes of a message that the `vhost` crate reads.
const LONGEST: usize = 4096;
/// Length of an in-flight description in bytes. The crate requires four bytes of padding after it,
/// as QEMU sends them.
const INFLIGHT: usize = 20;
/// Maximum number of descriptors of a message. The `vhost` crate accepts as many.
const MOST_FDS: usize = 32;

/// A message of a front end. It is still in the socket.
pub struct Incoming {
    pub request: u32,
    /// The front end asks for an acknowledgement.
    pub reply: bool,
    bytes: Vec<u8>,
    /// Copies of the descriptors.
    fds: Vec<OwnedFd>,
    /// Number of the message's bytes that are still in the socket.
    left: usize,
}

/// An answer to a front end.
pub struct Answer {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// A message that this module parses instead of the crate.
pub enum Message {
    /// An in-band kick.
    Kick { index: u32 },
    /// The back channel's descriptor.
    BackChannel(Option<OwnedFd>),
    /// Addresses of a ring's parts. The crate would end the session if they are not aligned.
    Addresses { index: u32, flags: u32, descriptor: u64, used: u64, available: u64, log: u64 },
    /// The descriptor that is signalled after changes of the log. The crate does not know it.
    LogEvent(Option<OwnedFd>),
    /// Stops a ring without a drain. The crate does not know it.
    SkipDrain { index: u32 },
    /// A message of a postcopy migration, by its name.
    Postcopy(&'static str),
    /// Enables or disables a ring. The crate would end the session if the state is neither 0 nor 1.
    Enable { index: u32, state: u32 },
    /// A request to make an in-flight region, without padding.
    AskInflight(VhostUserInflight),
    /// An in-flight region, described without padding.
    Inflight(VhostUserInflight, Option<OwnedFd>),
}

/// Returns whether the answer to this message carries data, so that it cannot report an error.
pub fn has_data_answer(request: u32) -> bool {
    let answered = [SET_LOG_BASE, GET_VRING_BASE, GET_INFLIGHT_FD, SKIP_DRAIN];
    answered.contains(&request) || (POSTCOPY_ADVISE..=POSTCOPY_END).contains(&request)
}

/// Returns whether a read of the next message ends at once: the message is whole, or the connection
/// or the message is broken. A part of a message stays on the socket, where another server finds
/// it.
pub fn is_whole(stream: &UnixStream) -> io::Result<bool> {
    let mut header = [0; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let got = match rustix::net::recv(stream, &mut header[..], flags) {
        Ok((got, _)) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(false),
        Err(_) => return Ok(true),
    };
    let there = rustix::io::ioctl_fionread(stream)? as usize;
    if got == 0 || (got < HEADER && there >= HEADER) {
        return Ok(true);
    }
    let size = if got < HEADER { 0 } else { word(&header, 8) as usize };
    Ok(size > LONGEST || there >= HEADER + size)
}

/// Waits for the next message, and leaves it in the socket. Returns `None` if the front end has
/// disconnected.
pub fn next(stream: &UnixStream) -> io::Result<Option<Incoming>> {
    let mut header = [0; HEADER];
    // A peek without space for control messages does not copy descriptors.
    let got = loop {
        match rustix::net::recv(stream, &mut header[..], RecvFlags::PEEK | RecvFlags::WAITALL) {
            Ok((got, _)) => break got,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    };
    if got < HEADER {
        return Ok(None);
    }
    let (request, flags, size) = (word(&header, 0), word(&header, 4), word(&header, 8) as usize);
    // The `vhost` crate refuses the header of a longer message.
    let len = HEADER + if size > LONGEST { 0 } else { size };
    // One byte more shows whether another message follows.
    let (mut bytes, mut fds) = (vec![0; len + 1], Vec::new());
    let mut left = len;
    let got = receive(stream, &mut bytes, &mut fds, RecvFlags::PEEK)?;
    bytes.truncate(len);
    if got > len && !fds.is_empty() && !DESCRIBED.contains(&request) {
        // A peek also copies the descriptors of the message that follows one without descriptors.
        fds.clear();
    } else if got < len || (got > len && !fds.is_empty()) {
        // A peek ends after the part that has descriptors. So a message that came in several parts
        // is read from the socket. So is one if its descriptors may be those of the next one.
        (left, fds) = (0, Vec::new());
        let mut read = 0;
        while read < len {
            match receive(stream, &mut bytes[read..], &mut fds, RecvFlags::empty())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => read += got,
            }
            // Each part may have as many.
            if fds.len() > MOST_FDS {
                let what = format!("a message with more than {MOST_FDS} descriptors");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
    }
    Ok(Some(Incoming { request, reply: flags & NEED_REPLY != 0, bytes, fds, left }))
}

impl Incoming {
    /// Returns the parsed message, or `None` if the `vhost` crate parses it.
    pub fn parsed(&mut self) -> Option<Message> {
        let body = &self.bytes[HEADER..];
        let is_ours = match self.request {
            VRING_KICK | SET_VRING_ENABLE | SKIP_DRAIN => body.len() == 8,
            SET_BACKEND_REQ_FD | SET_LOG_FD => body.len() <= 8,
            POSTCOPY_ADVISE | POSTCOPY_LISTEN | POSTCOPY_END => body.len() <= 8,
            SET_VRING_ADDR => body.len() == ADDRESSES,
            GET_INFLIGHT_FD | SET_INFLIGHT_FD => body.len() == INFLIGHT,
            _ => false,
        };
        let mut fds = self.fds.drain(..if is_ours { self.fds.len() } else { 0 });
        is_ours.then(|| message(self.request, body, fds.next()))
    }

    /// Passes the message on to the `vhost` crate.
    pub fn forward(&mut self, to: &UnixStream) -> io::Result<()> {
        send(to, &self.bytes, &std::mem::take(&mut self.fds))
    }

    /// Removes the message from the socket.
    pub fn consume(self, stream: &UnixStream) -> io::Result<()> {
        let (mut bytes, mut left) = (self.bytes, self.left);
        while left > 0 {
            // The kernel closes the descriptors, because there is no space for them.
            match rustix::net::recv(stream, &mut bytes[..left], RecvFlags::empty())? {
                (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
                (got, _) => left -= got,
            }
        }
        Ok(())
    }
}

fn message(request: u32, body: &[u8], fd: Option<OwnedFd>) -> Message {
    match request {
        VRING_KICK => Message::Kick { index: word(body, 0) },
        SET_BACKEND_REQ_FD => Message::BackChannel(fd),
        SET_LOG_FD => Message::LogEvent(fd),
        SKIP_DRAIN => Message::SkipDrain { index: word(body, 0) },
        POSTCOPY_ADVISE => Message::Postcopy("POSTCOPY_ADVISE"),
        POSTCOPY_LISTEN => Message::Postcopy("POSTCOPY_LISTEN"),
        POSTCOPY_END => Message::Postcopy("POSTCOPY_END"),
        SET_VRING_ADDR => Message::Addresses {
            index: word(body, 0),
            flags: word(body, 4),
            descriptor: long(body, 8),
            used: long(body, 16),
            available: long(body, 24),
            log: long(body, 32),
        },
        SET_VRING_ENABLE => Message::Enable { index: word(body, 0), state: word(body, 4) },
        GET_INFLIGHT_FD => Message::AskInflight(inflight(body)),
        _ => Message::Inflight(inflight(body), fd),
    }
}

fn inflight(body: &[u8]) -> VhostUserInflight {
    let half = |at: usize| u16::from_ne_bytes([body[at], body[at + 1]]);
    VhostUserInflight {
        mmap_size: long(body, 0),
        mmap_offset: long(body, 8),
        num_queues: half(16),
        queue_size: half(18),
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut long = [0; 8];
    long.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(long)
}

/// Reads or peeks at bytes, and adds their descriptors to `fds`. Returns the number of bytes.
fn receive(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(got.bytes)
}

impl Answer {
    fn new(request: u32, body: &[u8], fds: Vec<OwnedFd>) -> Self {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        for word in [request, VERSION | REPLY, body.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(body);
        Answer { bytes, fds }
    }

    /// Returns the acknowledgement of a message.
    pub fn acknowledgement(request: u32, good: bool) -> Self {
        Answer::new(request, &u64::from(!good).to_ne_bytes(), Vec::new())
    }

    /// Returns the answer to GET_INFLIGHT_FD, without padding.
    pub fn inflight(inflight: &VhostUserInflight, file: OwnedFd) -> Self {
        let mut body = [0; INFLIGHT];
        body[..8].copy_from_slice(&{ inflight.mmap_size }.to_ne_bytes());
        body[8..16].copy_from_slice(&{ inflight.mmap_offset }.to_ne_bytes());
        body[16..18].copy_from_slice(&{ inflight.num_queues }.to_ne_bytes());
        body[18..].copy_from_slice(&{ inflight.queue_size }.to_ne_bytes());
        Answer::new(GET_INFLIGHT_FD, &body, vec![file])
    }

    /// Returns the answer to GET_VRING_BASE_SKIP_DRAIN.
    pub fn base(index: u32, base: u32) -> Self {
        let mut body = [0; 8];
        body[..4].copy_from_slice(&index.to_ne_bytes());
        body[4..].copy_from_slice(&base.to_ne_bytes());
        Answer::new(SKIP_DRAIN, &body, Vec::new())
    }

    /// Reads the answer that the `vhost` crate has written, if there is one.
    pub fn of_crate(from: &UnixStream) -> io::Result<Option<Self>> {
        let (mut bytes, mut fds) = (vec![0; HEADER + LONGEST], Vec::new());
        match receive(from, &mut bytes, &mut fds, RecvFlags::DONTWAIT) {
            Ok(got) => {
                bytes.truncate(got);
                Ok(Some(Answer { bytes, fds }))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends the answer.
    pub fn send(self, stream: &UnixStream) -> io::Result<()> {
        send(stream, &self.bytes, &self.fds)
    }
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let sent =
        rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    // Each message is far shorter than the socket's buffer.
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
