//! Answers: from the disk's status to the bytes that a client reads.
//!
//! In: answered requests. Out: as many as are there in one write, headers and data side by side. What must hold: an answer
//! goes out whole, or the connection ends; what its request held is given back afterwards.

use std::rc::Rc;

use blockyard_disk::{Failure, Op, Status, Token};
use blockyard_nbd::wire::{self, Chunk, Headers, SimpleReply, chunk, cmd, errno, flag};
use blockyard_ring::{MOST_PIECES, Segments};

use super::connection::{Connection, is_heavy};

/// Bytes of headers (and block status) that go out at a time.
const HEADERS: usize = 64 << 10;

pub struct Reply {
    request: wire::Request,
    status: Result<(), u32>,
    body: Body,
}

pub enum Body {
    None,
    /// A read's. (A write's buffer comes back this way, too.)
    Buffer(Segments),
    /// Payloads of chunks of block status.
    Chunks(Vec<Vec<u8>>),
}

/// The debt to a client.
pub struct Owed {
    pub connection: Rc<Connection>,
    pub request: wire::Request,
}

impl Token for Owed {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        let Owed { connection, request } = self;
        let op = match request.command {
            cmd::WRITE => Op::Write { fua: false },
            cmd::WRITE_ZEROES => {
                Op::WriteZeroes { unmap: false, fua: false, fast: request.flags & flag::FAST_ZERO != 0 }
            }
            _ => Op::Read,
        };
        let status = status.map_err(|failure| error_of(failure, op));
        let body = match request.command {
            cmd::READ | cmd::WRITE => Body::Buffer(segments),
            _ => Body::None,
        };
        connection.reply(&request, status, body);
    }
}

/// The protocol's error for a failure.
pub fn error_of(failure: Failure, op: Op) -> u32 {
    match failure {
        Failure::Io | Failure::Poisoned => errno::EIO,
        Failure::NoSpace => errno::ENOSPC,
        Failure::ReadOnly => errno::EPERM,
        Failure::OutOfRange if op == Op::Read => errno::EINVAL,
        Failure::OutOfRange => errno::ENOSPC,
        // Only who asks for fast zeroes takes it for an answer.
        Failure::Unsupported if matches!(op, Op::WriteZeroes { fast: true, .. }) => errno::ENOTSUP,
        Failure::Unsupported => errno::EIO,
    }
}

fn reason(error: u32) -> &'static str {
    match error {
        errno::EPERM => "the export is read-only",
        errno::EINVAL => "the request is not valid: its range, its flags or its command",
        errno::ENOSPC => "there is no space, or it lies beyond the end",
        errno::ENOTSUP => "not supported here",
        _ => "the disk failed: see the server's log",
    }
}

impl Connection {
    #[inline]
    pub fn reply(&self, request: &wire::Request, status: Result<(), u32>, body: Body) {
        let reply = Reply { request: *request, status, body };
        self.unsent.set(self.unsent.get() + reply.data_bytes());
        self.unanswered.set(self.unanswered.get() - 1);
        self.replies.borrow_mut().push(reply);
        self.to_send.ring();
    }

    /// Sends answers until the last one.
    pub async fn send(self: Rc<Self>) {
        let room = Segments::buffer(HEADERS);
        let (mut batch, mut text, mut out) = (Vec::new(), Vec::with_capacity(HEADERS), Segments::default());
        loop {
            self.to_send.clear();
            if self.replies.borrow().is_empty() {
                if self.ended.get() && self.in_flight.get() == 0 {
                    return;
                }
                self.idle.look(|| self.replies.borrow().is_empty() && !self.ended.get()).await;
                self.to_send.wait().await;
                continue;
            }
            std::mem::swap(&mut batch, &mut *self.replies.borrow_mut());
            let mut from = 0;
            while from < batch.len() {
                let to = self.gather(&batch[from..], &room, &mut text, &mut out).await + from;
                if !self.broken.get() && !out.is_empty() {
                    let sent;
                    (out, sent) = self.stream.write(out).await;
                    if sent.is_err() {
                        self.give_up();
                    }
                }
                out.release();
                for reply in &mut batch[from..to] {
                    self.forget(reply);
                }
                self.sent.ring();
                from = to;
            }
            batch.clear();
        }
    }

    /// Puts as many replies into `out` as go in one write; how many. One whose text is long goes by itself, in parts.
    async fn gather(&self, replies: &[Reply], room: &Segments, text: &mut Vec<u8>, out: &mut Segments) -> usize {
        let mut count = 0;
        text.clear();
        for reply in replies {
            let before = text.len();
            reply.put(self.terms.headers, text);
            if text.len() > HEADERS && count == 0 {
                self.send_long(text, room).await;
                return 1;
            }
            if text.len() > HEADERS || out.count() + 3 > MOST_PIECES {
                text.truncate(before);
                break;
            }
            room.copy_in(before, &text[before..]);
            out.gather(room, before, text.len() - before);
            if let (cmd::READ, Ok(()), Body::Buffer(data)) = (reply.request.command, reply.status, &reply.body) {
                out.gather(data, 0, data.len());
            }
            count += 1;
        }
        count
    }

    async fn send_long(&self, text: &[u8], room: &Segments) {
        for part in text.chunks(HEADERS) {
            room.copy_in(0, part);
            if !self.broken.get() && self.stream.write(room.slice(0, part.len())).await.1.is_err() {
                self.give_up();
            }
        }
    }

    /// The client does not listen: nothing more is sent, nor taken.
    fn give_up(&self) {
        self.broken.set(true);
        self.stream.shutdown();
    }

    fn forget(&self, reply: &mut Reply) {
        self.unsent.set(self.unsent.get() - reply.data_bytes());
        if is_heavy(&reply.request) {
            self.heavy.set(false);
        }
        if let Body::Buffer(segments) = std::mem::replace(&mut reply.body, Body::None) {
            self.give_back(segments, reply.request.len as usize);
        }
        self.went();
    }
}

impl Reply {
    /// Bytes that were read for it.
    fn data_bytes(&self) -> u64 {
        match &self.body {
            Body::Buffer(data) if self.request.command == cmd::READ => data.len() as u64,
            _ => 0,
        }
    }

    /// All but the data of a read.
    fn put(&self, headers: Headers, out: &mut Vec<u8>) {
        let wire::Request { cookie, offset, .. } = self.request;
        let header = |kind, len: usize, last| {
            let flags = if last { chunk::DONE } else { 0 };
            Chunk { flags, kind, cookie, offset, len: len as u64 }
        };
        match (headers, self.status, &self.body) {
            // A client without structured replies is told nothing else.
            (Headers::Simple, status, _) => SimpleReply { error: status.err().unwrap_or(0), cookie }.put(out),
            (Headers::Structured, Ok(()), Body::None) => SimpleReply { error: 0, cookie }.put(out),
            (_, Err(error), _) => {
                let text = reason(error).as_bytes();
                header(chunk::ERROR, 6 + text.len(), true).put(headers, out);
                out.extend(error.to_be_bytes());
                out.extend((text.len() as u16).to_be_bytes());
                out.extend(text);
            }
            (_, Ok(()), Body::Buffer(data)) if self.request.command == cmd::READ && !data.is_empty() => {
                header(chunk::OFFSET_DATA, 8 + data.len(), true).put(headers, out);
                out.extend(offset.to_be_bytes());
            }
            (_, Ok(()), Body::Chunks(chunks)) => {
                let kind = block_status_kind(headers);
                for (at, payload) in chunks.iter().enumerate() {
                    header(kind, payload.len(), at + 1 == chunks.len()).put(headers, out);
                    out.extend(payload);
                }
            }
            (Headers::Structured, Ok(()), _) if self.request.command != cmd::READ => {
                SimpleReply { error: 0, cookie }.put(out);
            }
            (_, Ok(()), _) => header(chunk::NONE, 0, true).put(headers, out),
        }
    }
}

fn block_status_kind(headers: Headers) -> u16 {
    if headers == Headers::Extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client without the flag would take it for a server that cannot write zeroes at all.
    #[test]
    fn not_supported_is_an_answer_to_fast_zeroes_only() {
        let zeroes = |fast| Op::WriteZeroes { unmap: true, fua: false, fast };
        assert_eq!(error_of(Failure::Unsupported, zeroes(true)), errno::ENOTSUP);
        for op in [zeroes(false), Op::Discard, Op::Read] {
            assert_eq!(error_of(Failure::Unsupported, op), errno::EIO);
        }
        assert_eq!(error_of(Failure::OutOfRange, zeroes(false)), errno::ENOSPC);
    }
}
