//! The receive buffer of a connection.
//!
//! In: a connection's bytes, as they arrive. Out: headers, copied once, and payloads. Of a payload,
//! only the part that arrived together with its header is copied. The rest is read into its own
//! buffer.

use std::io;
use std::ops::Range;

use blockyard_ring::Segments;

use super::stream::Stream;

/// Size of the buffer, and therefore the maximum size of a read, in bytes.
const SIZE: usize = 128 << 10;

/// The received bytes that are not parsed yet.
pub struct Inbox {
    buffer: Segments,
    start: usize,
    end: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox { buffer: Segments::buffer(SIZE), start: 0, end: 0 }
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
            if done < len && !self.fill(stream).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
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
            let n = stream.read_payload(target).await.1?;
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
        loop {
            let here = len.min((self.end - self.start) as u64);
            self.start += here as usize;
            len -= here;
            if len == 0 {
                return Ok(());
            }
            if !self.fill(stream).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
