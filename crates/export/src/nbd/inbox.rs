//! The receive buffer of a connection.
//!
//! In: a connection's bytes, as they arrive. Out: headers, copied once, and payloads. Of a payload,
//! only the part that arrived together with its header is copied. The rest is read into its own
//! buffer.

use std::io;
use std::ops::Range;

use blockyard_ring::Segments;

use super::spool::Spool;
use super::stream::Stream;

/// Size of the buffer, and therefore the maximum size of a read, in bytes.
const SIZE: usize = 128 << 10;

/// The received bytes that are not parsed yet.
pub struct Inbox {
    buffer: Segments,
    start: usize,
    end: usize,
    /// The header of a request during the receipt of its payload.
    header: ([u8; 32], usize),
    /// The request that had a part of its payload when the connection was handed over.
    begun: Option<Spool>,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox {
            buffer: Segments::buffer(SIZE),
            start: 0,
            end: 0,
            header: ([0; 32], 0),
            begun: None,
        }
    }
}

impl Inbox {
    /// Returns the next `len` bytes if they have arrived.
    #[inline]
    pub fn take<const N: usize>(&mut self, len: usize) -> Option<[u8; N]> {
        if self.end - self.start < len {
            return None;
        }
        let mut bytes = [0; N];
        self.buffer.copy_out(self.start, &mut bytes[..len]);
        self.start += len;
        Some(bytes)
    }

    /// Notes the header of a request, until its payload is complete.
    #[inline]
    pub fn begin(&mut self, header: &[u8; 32], len: usize) {
        self.header = (*header, len);
    }

    /// Keeps the header and a part of the payload, if the reading ended because another server
    /// continues the connection.
    fn keep(
        &mut self,
        stream: &Stream,
        error: io::Error,
        payload: impl FnOnce(&mut Spool) -> io::Result<()>,
    ) -> io::Error {
        if !stream.has_left(&error) {
            return error;
        }
        let (header, len) = self.header;
        let keep = || {
            let mut spool = Spool::new()?;
            spool.push(&header[..len])?;
            payload(&mut spool)?;
            io::Result::Ok(spool)
        };
        match keep() {
            Ok(spool) => self.begun = Some(spool),
            Err(e) => return e,
        }
        error
    }

    /// Returns all bytes that were received and not handled, behind those of `first`.
    pub fn into_unread(mut self, stream: &Stream, first: &[u8]) -> io::Result<Option<Spool>> {
        let mut spool = Spool::new()?;
        spool.push(first)?;
        if let Some(begun) = self.begun.take() {
            spool.push_spool(begun)?;
        }
        spool.push_segments(&self.buffer, self.start, self.end - self.start)?;
        if let Some(later) = stream.take_unread() {
            spool.push_spool(later)?;
        }
        Ok(spool.unless_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Reads more bytes. Returns false if the client has ended the connection.
    pub async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        let left = self.end - self.start;
        if left > 0 && self.start > 0 {
            self.buffer.copy_from(0, &self.buffer, self.start, left);
        }
        (self.start, self.end) = (0, left);
        let n = stream.read(self.buffer.slice(left, SIZE - left)).await.1?;
        self.end += n;
        Ok(n > 0)
    }

    /// Returns the next `len` bytes. If the connection ends before these bytes, that is an error.
    pub async fn exactly(&mut self, stream: &Stream, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let here = (self.end - self.start).min(len - done);
            self.buffer.copy_out(self.start, &mut bytes[done..done + here]);
            self.start += here;
            done += here;
            if done == len {
                break;
            }
            match self.fill(stream).await {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(e) => return Err(self.keep(stream, e, |spool| spool.push(&bytes[..done]))),
            }
        }
        Ok(bytes)
    }

    /// Fills `range` of `payload` with the next bytes. The read that completes the payload may also
    /// receive bytes that follow the payload. The inbox keeps those bytes.
    pub async fn payload(
        &mut self,
        stream: &Stream,
        payload: &Segments,
        range: Range<usize>,
    ) -> io::Result<()> {
        let Range { start, end } = range;
        let mut done = start + (self.end - self.start).min(end - start);
        payload.copy_from(start, &self.buffer, self.start, done - start);
        self.start += done - start;
        while done < end {
            let mut target = Segments::default();
            target.gather(payload, done, end - done);
            if end == payload.len() {
                target.gather(&self.buffer, 0, SIZE);
            }
            let n = match stream.read_payload(target).await.1 {
                Ok(n) => n,
                Err(e) => {
                    // A long payload arrives in several ranges of the same buffer.
                    let all = |spool: &mut Spool| spool.push_segments(payload, 0, done);
                    return Err(self.keep(stream, e, all));
                }
            };
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = n.min(end - done);
            done += here;
            (self.start, self.end) = (0, n - here);
        }
        stream.payload_complete();
        Ok(())
    }

    /// Skips `len` bytes.
    pub async fn skip(&mut self, stream: &Stream, mut len: u64) -> io::Result<()> {
        let all = len;
        loop {
            let here = len.min((self.end - self.start) as u64);
            self.start += here as usize;
            len -= here;
            if len == 0 {
                return Ok(());
            }
            match self.fill(stream).await {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // The next server skips the payload too, so its bytes do not matter.
                Err(e) => return Err(self.keep(stream, e, |spool| spool.push_zeroes(all - len))),
            }
        }
    }
}
