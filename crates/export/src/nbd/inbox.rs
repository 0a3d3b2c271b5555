//! What has come from a client and was not looked at yet.
//!
//! In: a connection's bytes, as they come. Out: headers, copied once; and payloads, of which only
//! what came along with a header is copied: the rest is read to where it goes.

use std::io;
use std::ops::Range;

use blockyard_ring::Segments;

use super::stream::Stream;

/// Bytes that are asked for at a time.
const ROOM: usize = 128 << 10;

pub struct Inbox {
    room: Segments,
    start: usize,
    end: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox { room: Segments::buffer(ROOM), start: 0, end: 0 }
    }
}

impl Inbox {
    /// The next bytes, if they are there.
    #[inline]
    pub fn take<const N: usize>(&mut self, len: usize) -> Option<[u8; N]> {
        if self.end - self.start < len {
            return None;
        }
        let mut bytes = [0; N];
        self.room.copy_out(self.start, &mut bytes[..len]);
        self.start += len;
        Some(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Reads more; false: the client has ended.
    pub async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        let left = self.end - self.start;
        if left > 0 && self.start > 0 {
            self.room.copy_from(0, &self.room, self.start, left);
        }
        (self.start, self.end) = (0, left);
        let n = stream.read(self.room.slice(left, ROOM - left)).await.1?;
        self.end += n;
        Ok(n > 0)
    }

    /// The next `len` bytes, which the client owes; an end before that is an error.
    pub async fn exactly(&mut self, stream: &Stream, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let here = (self.end - self.start).min(len - done);
            self.room.copy_out(self.start, &mut bytes[done..done + here]);
            self.start += here;
            done += here;
            if done < len && !self.fill(stream).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(bytes)
    }

    /// Fills the bytes `range` of `payload` with what comes next. What comes behind the whole
    /// payload in the same read is kept.
    pub async fn payload(
        &mut self,
        stream: &Stream,
        payload: &Segments,
        range: Range<usize>,
    ) -> io::Result<()> {
        let Range { start, end } = range;
        let mut done = start + (self.end - self.start).min(end - start);
        payload.copy_from(start, &self.room, self.start, done - start);
        self.start += done - start;
        while done < end {
            let mut target = Segments::default();
            target.gather(payload, done, end - done);
            if end == payload.len() {
                target.gather(&self.room, 0, ROOM);
            }
            let n = stream.read_owed(target).await.1?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = n.min(end - done);
            done += here;
            (self.start, self.end) = (0, n - here);
        }
        stream.nothing_owed();
        Ok(())
    }

    /// Passes over `len` bytes.
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
