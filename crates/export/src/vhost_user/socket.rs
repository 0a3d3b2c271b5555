//! Peeks at each message before the `vhost` crate reads it.
//!
//! This module handles a message itself in three cases:
//! - The crate does not know the message (in-band kick).
//! - The crate does not pass on the contents of the message (the back channel's descriptor).
//! - The crate ends the session, although a refusal would be enough.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
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
const HEADER: usize = 12;
const NEED_REPLY: u32 = 1 << 3;
const REPLY: u32 = 1 << 2;
const VERSION: u32 = 1;

/// Longest body in bytes of a message that this module handles.
const MAX_BODY: usize = 40;
/// Longest body in bytes of a message that the `vhost` crate reads.
const LONGEST: usize = 4096;
/// Length of an in-flight description in bytes. The crate requires four bytes of padding after it,
/// as QEMU sends them.
const INFLIGHT: usize = 20;

/// The next message on a connection.
pub enum Next {
    Gone,
    /// A message that was read from the socket.
    Taken {
        request: u32,
        /// The front end asks for an acknowledgement.
        reply: bool,
        message: Message,
    },
    /// The message is still on the socket.
    Other {
        request: u32,
    },
}

/// A message that this module reads instead of the crate.
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

/// Waits for the next message, and reads it if this module handles it.
pub fn next(stream: &UnixStream) -> io::Result<Next> {
    let mut header = [0; HEADER];
    // A peek without space for control messages leaves descriptors on the socket.
    let got = loop {
        match rustix::net::recv(stream, &mut header[..], RecvFlags::PEEK | RecvFlags::WAITALL) {
            Ok((got, _)) => break got,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(Next::Gone),
            Err(e) => return Err(e.into()),
        }
    };
    if got < HEADER {
        return Ok(Next::Gone);
    }
    let (request, flags, size) = (word(&header, 0), word(&header, 4), word(&header, 8) as usize);
    let is_taken = match request {
        VRING_KICK | SET_VRING_ENABLE | SKIP_DRAIN => size == 8,
        SET_BACKEND_REQ_FD | SET_LOG_FD => size <= 8,
        POSTCOPY_ADVISE | POSTCOPY_LISTEN | POSTCOPY_END => size <= 8,
        SET_VRING_ADDR => size == MAX_BODY,
        GET_INFLIGHT_FD | SET_INFLIGHT_FD => size == INFLIGHT,
        _ => false,
    };
    if !is_taken {
        return Ok(Next::Other { request });
    }
    let mut bytes = [0; HEADER + MAX_BODY];
    let fd = take(stream, &mut bytes[..HEADER + size])?;
    let message = message(request, &bytes[HEADER..], fd);
    Ok(Next::Taken { request, reply: flags & NEED_REPLY != 0, message })
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

/// Reads a message of known length, and the first descriptor that comes with it.
fn take(stream: &UnixStream, message: &mut [u8]) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let want = message.len();
    let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(message)], &mut ancillary, flags)?;
    if got.bytes != want {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut fds = ancillary.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(fds.next().and_then(|mut fds| fds.next()))
}

/// Sends the acknowledgement of a message. 0 means success.
pub fn acknowledge(stream: &UnixStream, request: u32, good: bool) -> io::Result<()> {
    send(stream, request, &u64::from(!good).to_ne_bytes(), &[])
}

/// Answers GET_INFLIGHT_FD with a description without padding.
pub fn give_inflight(
    stream: &UnixStream,
    inflight: &VhostUserInflight,
    file: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut body = [0; INFLIGHT];
    body[..8].copy_from_slice(&{ inflight.mmap_size }.to_ne_bytes());
    body[8..16].copy_from_slice(&{ inflight.mmap_offset }.to_ne_bytes());
    body[16..18].copy_from_slice(&{ inflight.num_queues }.to_ne_bytes());
    body[18..].copy_from_slice(&{ inflight.queue_size }.to_ne_bytes());
    send(stream, GET_INFLIGHT_FD, &body, &[file])
}

/// Answers GET_VRING_BASE_SKIP_DRAIN.
pub fn give_base(stream: &UnixStream, index: u32, base: u32) -> io::Result<()> {
    let mut body = [0; 8];
    body[..4].copy_from_slice(&index.to_ne_bytes());
    body[4..].copy_from_slice(&base.to_ne_bytes());
    send(stream, SKIP_DRAIN, &body, &[])
}

fn send(stream: &UnixStream, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut reply = Vec::with_capacity(HEADER + body.len());
    for word in [request, VERSION | REPLY, body.len() as u32] {
        reply.extend(word.to_ne_bytes());
    }
    reply.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let sent =
        rustix::net::sendmsg(stream, &[IoSlice::new(&reply)], &mut ancillary, SendFlags::NOSIGNAL)?;
    // The reply is far shorter than the socket's buffer.
    if sent == reply.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
