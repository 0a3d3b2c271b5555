//! A look at each message before the `vhost` crate reads it.
//!
//! Two messages are taken here, because the crate does not know them or keeps what they bring to itself: a kick by message,
//! and the descriptor of the back channel. All others are left on the socket.

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

const SET_LOG_BASE: u32 = 6;
const GET_VRING_BASE: u32 = 11;
const GET_INFLIGHT_FD: u32 = 31;
pub const SET_BACKEND_REQ_FD: u32 = 21;
pub const VRING_KICK: u32 = 35;
const HEADER: usize = 12;
const NEED_REPLY: u32 = 1 << 3;
const REPLY: u32 = 1 << 2;
const VERSION: u32 = 1;

/// What comes next on a connection.
pub enum Next {
    Gone,
    /// Taken here: a kick by message.
    Kick {
        index: u32,
        reply: bool,
    },
    /// Taken here: the back channel's descriptor.
    BackChannel {
        fd: Option<OwnedFd>,
        reply: bool,
    },
    /// Still on the socket.
    Other {
        request: u32,
    },
}

/// Messages that are answered by something else than a status: that cannot say no.
pub fn is_question(request: u32) -> bool {
    [SET_LOG_BASE, GET_VRING_BASE, GET_INFLIGHT_FD].contains(&request)
}

/// Looks at the next message; waits for it.
pub fn next(stream: &UnixStream) -> io::Result<Next> {
    let mut header = [0; HEADER];
    // Descriptors that come with a message are not touched by a look without ancillary room.
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
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (request, reply, size) = (word(0), word(4) & NEED_REPLY != 0, word(8) as usize);
    match (request, size) {
        (VRING_KICK, 8) => {
            let mut message = [0; HEADER + 8];
            take(stream, &mut message)?;
            let [.., i0, i1, i2, i3, _, _, _, _] = message;
            Ok(Next::Kick { index: u32::from_ne_bytes([i0, i1, i2, i3]), reply })
        }
        (SET_BACKEND_REQ_FD, size) if size <= 8 => {
            let mut message = [0; HEADER + 8];
            let fd = take(stream, &mut message[..HEADER + size])?;
            Ok(Next::BackChannel { fd, reply })
        }
        _ => Ok(Next::Other { request }),
    }
}

/// Receives a message of known length, and the descriptor that comes with it.
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

/// Answers a message that asked for it: 0 is success.
pub fn acknowledge(mut stream: &UnixStream, request: u32, good: bool) -> io::Result<()> {
    let mut reply = Vec::with_capacity(HEADER + 8);
    for word in [request, VERSION | REPLY, 8] {
        reply.extend(word.to_ne_bytes());
    }
    reply.extend(u64::from(!good).to_ne_bytes());
    stream.write_all(&reply)
}
