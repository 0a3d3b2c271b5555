//! Replies: read, checked, and copied to their requests.
//!
//! In: the server's bytes. Out: answered requests, with data in their segments. Headers and small
//! data are read into a buffer, many at a time. Large data go directly to the request's memory,
//! together with what follows them. If the kernel cannot write to that memory because a front end
//! has truncated it, the data go by the buffer: the server is not at fault, and other requests need
//! its connection.
//!
//! What must hold: each chunk answers a request in flight and lies within it. All bytes of a
//! request arrive, once. A malformed answer ends the connection. No allocation depends on an
//! unchecked length.

use std::io;

use blockyard_ring::Segments;
use rustix::io::Errno;

use super::slots::{Ask, Piece};
use super::state::{Inner, PIECES, SENT_AT_A_TIME};
use blockyard_nbd::link::{CLOSED, Link, UNASKED};
use blockyard_nbd::negotiate::{Terms, printable};
use blockyard_nbd::wire::{self, Chunk, Headers, SimpleReply, chunk, cmd, errno};
use blockyard_nbd::{NbdError, NbdErrorKind};

/// Size of the buffer for received bytes whose request is not known yet, in bytes.
const BUFFER: usize = 16 << 10;
/// Longest accepted block status chunk, and longest accepted error chunk, in bytes.
const MAX_STATUS: u64 = 2 << 20;
const MAX_ERROR: u64 = 4096 + 64;
/// Maximum number of data chunks in the reply to one read.
const MAX_PARTS: usize = 4096;

pub(super) struct Receiver<'a> {
    client: &'a Inner,
    socket: &'a Link,
    terms: &'a Terms,
    buffer: Segments,
    /// The part of the buffer that holds unused bytes.
    from: usize,
    to: usize,
    /// Number of bytes received since progress was last recorded.
    moved: usize,
}

impl<'a> Receiver<'a> {
    pub fn new(client: &'a Inner, socket: &'a Link, terms: &'a Terms) -> Self {
        Receiver {
            client,
            socket,
            terms,
            buffer: Segments::buffer(BUFFER),
            from: 0,
            to: 0,
            moved: 0,
        }
    }

    /// Receives replies until the connection is lost. Returns the reason.
    pub async fn run(mut self) -> NbdError {
        loop {
            if self.client.is_broken() {
                return NbdError::new(NbdErrorKind::Closed, CLOSED);
            }
            if self.client.slots.borrow().busy() == 0 {
                if self.from < self.to {
                    return NbdError::protocol(UNASKED);
                }
                self.client.receive.wait().await;
                continue;
            }
            if let Err(why) = self.reply().await {
                return why;
            }
        }
    }

    async fn reply(&mut self) -> Result<(), NbdError> {
        self.have(SimpleReply::BYTES).await?;
        let magic = wire::u32_at(&self.peek::<4>(), 0);
        if magic != SimpleReply::MAGIC {
            return self.chunk().await;
        }
        let bytes = self.take::<{ SimpleReply::BYTES }>();
        let reply = SimpleReply::parse(&bytes).map_err(not_a_reply)?;
        let (index, ask) = self.request(reply.cookie)?;
        let reads = ask.command == cmd::READ;
        if self.terms.headers == Headers::Extended
            || reads && self.terms.headers == Headers::Structured
        {
            return Err(NbdError::protocol(
                "the server sent a simple reply where the protocol requires chunks",
            ));
        }
        if reply.error != 0 {
            self.fail(index, reply.error, "");
        } else if reads {
            self.fill(index, 0, ask.len as usize).await?;
        }
        self.client.answered(index);
        Ok(())
    }

    async fn chunk(&mut self) -> Result<(), NbdError> {
        let headers = self.terms.headers;
        let size = headers.chunk_bytes();
        self.have(size).await?;
        let bytes = self.take::<32>();
        self.from -= 32 - size;
        if headers == Headers::Simple {
            return Err(not_a_reply(wire::u32_at(&bytes, 0)));
        }
        let chunk = Chunk::parse(headers, &bytes[..size]).map_err(not_a_reply)?;
        let (index, ask) = self.request(chunk.cookie)?;
        if headers == Headers::Extended && chunk.offset != ask.offset {
            return Err(NbdError::protocol(format!(
                "the answer to a request at {} names {}",
                ask.offset, chunk.offset
            )));
        }
        match chunk.kind {
            chunk::NONE if chunk.len == 0 => {}
            chunk::OFFSET_DATA if ask.command == cmd::READ => {
                self.data(index, ask, chunk.len).await?
            }
            chunk::OFFSET_HOLE if ask.command == cmd::READ && chunk.len == 12 => {
                self.have(12).await?;
                let bytes = self.take::<12>();
                let at = self.inside(
                    index,
                    ask,
                    wire::u64_at(&bytes, 0),
                    wire::u32_at(&bytes, 8).into(),
                )?;
                let mut slots = self.client.slots.borrow_mut();
                slots.get(index).segments.zero(at, wire::u32_at(&bytes, 8) as usize);
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT if ask.command == cmd::BLOCK_STATUS => {
                self.status(index, ask, &chunk).await?;
            }
            kind if kind & chunk::IS_ERROR != 0 => self.error(index, &chunk).await?,
            kind => {
                return Err(NbdError::protocol(format!(
                    "a chunk of kind {kind} with {} bytes does not answer this request",
                    chunk.len
                )));
            }
        }
        if chunk.flags & chunk::DONE != 0 {
            self.done(index, ask)?;
        }
        Ok(())
    }

    fn request(&self, cookie: u64) -> Result<(u32, Ask), NbdError> {
        let mut slots = self.client.slots.borrow_mut();
        let found = slots.of_cookie(cookie).map(|(index, ask, _)| (index, ask));
        found.ok_or_else(|| {
            NbdError::protocol(format!(
                "the server answers a request that was not sent (cookie {cookie:#x})"
            ))
        })
    }

    /// Returns the position of a chunk of `len` bytes at `offset` in the request's segments, and
    /// counts the chunk as received.
    fn inside(&self, index: u32, ask: Ask, offset: u64, len: u64) -> Result<usize, NbdError> {
        let wrong = || {
            NbdError::protocol(format!(
                "{len} bytes at {offset} do not answer a request of {} at {}",
                ask.len, ask.offset
            ))
        };
        let at = offset.checked_sub(ask.offset).ok_or_else(wrong)?;
        let mut slots = self.client.slots.borrow_mut();
        let slot = slots.get(index);
        if len == 0 || at >= ask.len || len > ask.len - at {
            return Err(wrong());
        }
        if len < ask.len {
            // Bytes that arrive twice would stand for others that never arrive, whose memory holds
            // old data.
            if slot.parts.iter().any(|(start, end)| at < *end && *start < at + len)
                || slot.parts.len() >= MAX_PARTS
            {
                return Err(wrong());
            }
            slot.parts.push((at, at + len));
        } else if slot.got > 0 {
            return Err(wrong());
        }
        slot.got += len;
        Ok(at as usize)
    }

    async fn data(&mut self, index: u32, ask: Ask, len: u64) -> Result<(), NbdError> {
        if len <= 8 || len > ask.len + 8 {
            return Err(NbdError::protocol(format!(
                "a chunk of {len} bytes answers a request of {}",
                ask.len
            )));
        }
        self.have(8).await?;
        let offset = wire::u64_at(&self.take::<8>(), 0);
        let at = self.inside(index, ask, offset, len - 8)?;
        self.fill(index, at, (len - 8) as usize).await
    }

    async fn error(&mut self, index: u32, chunk: &Chunk) -> Result<(), NbdError> {
        if !(6..=MAX_ERROR).contains(&chunk.len) {
            return Err(NbdError::protocol(format!(
                "an error of {} bytes has a wrong size",
                chunk.len
            )));
        }
        let bytes = self.bytes(chunk.len as usize).await?;
        let said = usize::from(u16::from_be_bytes([bytes[4], bytes[5]]));
        let too_long = || NbdError::protocol("an error's message is longer than the error");
        let message = bytes[6..].get(..said).ok_or_else(too_long)?;
        self.fail(index, wire::u32_at(&bytes, 0), &printable(message));
        Ok(())
    }

    async fn status(&mut self, index: u32, ask: Ask, chunk: &Chunk) -> Result<(), NbdError> {
        let extended = self.terms.headers == Headers::Extended;
        let (kind, head, each) =
            if extended { (chunk::BLOCK_STATUS_EXT, 8, 16) } else { (chunk::BLOCK_STATUS, 4, 8) };
        let whole = chunk.len >= head + each && (chunk.len - head).is_multiple_of(each);
        if chunk.kind != kind || !whole || chunk.len > MAX_STATUS {
            return Err(NbdError::protocol(format!(
                "a block status chunk of {} bytes has a wrong size",
                chunk.len
            )));
        }
        let bytes = self.bytes(chunk.len as usize).await?;
        if Some(wire::u32_at(&bytes, 0)) != self.terms.allocation {
            return Err(NbdError::protocol(format!(
                "the server sent the status of meta context {}, which was not requested",
                wire::u32_at(&bytes, 0)
            )));
        }
        let (mut pieces, mut left) = (Vec::<Piece>::new(), ask.len);
        for piece in bytes[head as usize..].chunks_exact(each as usize) {
            let (len, flags) = match extended {
                true => (wire::u64_at(piece, 0), wire::u64_at(piece, 8) as u32),
                false => (wire::u32_at(piece, 0).into(), wire::u32_at(piece, 4)),
            };
            if len == 0 || left == 0 {
                return Err(NbdError::protocol(
                    "a block status has an empty extent, or one after the end of the request",
                ));
            }
            // The last piece may extend beyond the request.
            pieces.push((len.min(left), flags));
            left -= len.min(left);
        }
        self.client.slots.borrow_mut().get(index).pieces = pieces;
        Ok(())
    }

    /// Ends a request after its last chunk. The answer must be complete, or an error.
    fn done(&self, index: u32, ask: Ask) -> Result<(), NbdError> {
        {
            let mut slots = self.client.slots.borrow_mut();
            let slot = slots.get(index);
            let whole = match ask.command {
                cmd::READ => slot.got == ask.len,
                cmd::BLOCK_STATUS => !slot.pieces.is_empty(),
                _ => true,
            };
            if slot.error.is_none() && !whole {
                return Err(NbdError::protocol(format!(
                    "an answer ends after {} of {} bytes",
                    slot.got, ask.len
                )));
            }
        }
        self.client.answered(index);
        Ok(())
    }

    fn fail(&self, index: u32, error: u32, message: &str) {
        let mut slots = self.client.slots.borrow_mut();
        let slot = slots.get(index);
        if slot.error.is_none() {
            slot.error = Some(of_server(error, message));
        }
    }

    fn peek<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        let there = N.min(BUFFER - self.from);
        self.buffer.copy_out(self.from, &mut bytes[..there]);
        bytes
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let bytes = self.peek();
        self.from += N;
        bytes
    }

    /// Reads until the buffer holds `len` bytes. `len` must be small.
    async fn have(&mut self, len: usize) -> Result<(), NbdError> {
        while self.to - self.from < len {
            if self.from == self.to {
                (self.from, self.to) = (0, 0);
            } else if BUFFER - self.from < 64 {
                let rest = self.to - self.from;
                let mut bytes = [0; 64];
                self.buffer.copy_out(self.from, &mut bytes[..rest]);
                self.buffer.copy_in(0, &bytes[..rest]);
                (self.from, self.to) = (0, rest);
            }
            let room = self.buffer.slice(self.to, BUFFER - self.to);
            self.to += self.read(room).await?;
        }
        Ok(())
    }

    /// Reads available bytes.
    async fn read(&mut self, into: Segments) -> Result<usize, NbdError> {
        match self.socket.read(into).await.1 {
            Ok(0) => Err(NbdError::new(NbdErrorKind::Closed, CLOSED)),
            Ok(n) => {
                self.moved += n;
                if self.moved >= SENT_AT_A_TIME {
                    self.moved = 0;
                    self.client.note_progress();
                }
                Ok(n)
            }
            Err(e) => {
                let what = format!("receiving: {e}");
                Err(NbdError { what, ..NbdError::of(NbdErrorKind::Io, e) })
            }
        }
    }

    /// Returns the next `len` bytes. The caller has checked that `len` is small.
    async fn bytes(&mut self, len: usize) -> Result<Vec<u8>, NbdError> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            self.have(1).await?;
            let here = (self.to - self.from).min(len - done);
            self.buffer.copy_out(self.from, &mut bytes[done..done + here]);
            self.from += here;
            done += here;
        }
        Ok(bytes)
    }

    /// Copies the next `len` bytes to the request's segments, from `at` on.
    async fn fill(&mut self, index: u32, at: usize, len: usize) -> Result<(), NbdError> {
        let (mut done, mut direct) = (0, true);
        loop {
            let here = (self.to - self.from).min(len - done);
            if here > 0 {
                let mut slots = self.client.slots.borrow_mut();
                slots.get(index).segments.copy_from(at + done, &self.buffer, self.from, here);
                self.from += here;
                done += here;
            }
            if done == len {
                return Ok(());
            }
            (self.from, self.to) = (0, 0);
            let mut into = Segments::default();
            let straight = {
                let mut slots = self.client.slots.borrow_mut();
                let segments = &slots.get(index).segments;
                // Do not gather the segments of a ublk request, because `gather` would copy them.
                let fits = direct && segments.count() <= PIECES && !segments.is_request();
                let straight = if fits { len - done } else { 0 };
                into.gather(segments, at + done, straight);
                straight
            };
            into.gather(&self.buffer, 0, BUFFER);
            match self.read(into).await {
                // The kernel has received nothing. A copy to lost memory does not fail (see the
                // ring's `fault`), and it tells the front end's session that the memory is lost.
                Err(e) if straight > 0 && is_memory_fault(&e) => direct = false,
                received => {
                    let n = received?;
                    done += n.min(straight);
                    self.to = n.saturating_sub(straight);
                }
            }
        }
    }
}

/// Returns whether the kernel could not write to the memory that was to be filled.
fn is_memory_fault(error: &NbdError) -> bool {
    let source = error.source.as_ref().and_then(|source| source.downcast_ref::<io::Error>());
    source.and_then(Errno::from_io_error) == Some(Errno::FAULT)
}

fn not_a_reply(magic: u32) -> NbdError {
    NbdError::protocol(format!(
        "the server sent something that is no reply (it begins with {magic:#x})"
    ))
}

/// Converts an NBD error to an I/O error.
fn of_server(error: u32, message: &str) -> io::Error {
    let (kind, what) = match error {
        errno::EPERM => (io::ErrorKind::PermissionDenied, "not permitted"),
        errno::ENOMEM => (io::ErrorKind::OutOfMemory, "out of memory"),
        errno::EINVAL => (io::ErrorKind::InvalidInput, "invalid argument"),
        errno::ENOSPC => (io::ErrorKind::StorageFull, "no space left"),
        errno::ENOTSUP => (io::ErrorKind::Unsupported, "not supported"),
        errno::ESHUTDOWN => (io::ErrorKind::Other, "it is shutting down"),
        errno::EIO => (io::ErrorKind::Other, "I/O error"),
        _ => (io::ErrorKind::Other, "an unknown error"),
    };
    let message = if message.is_empty() { String::new() } else { format!(" (\"{message}\")") };
    io::Error::new(kind, format!("the NBD server answers: {what}{message}"))
}
