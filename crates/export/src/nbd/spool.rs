//! Bytes of a connection in a memory file, for the next server.
//!
//! In: bytes that arrived and were not handled, or replies that the client has not read. Out: the
//! same bytes, in order. What must hold: reading a spool does not change its file, because the
//! server that made it may have to continue with it.

use std::io;
use std::os::fd::OwnedFd;

use blockyard_ring::Segments;
use rustix::fs::MemfdFlags;

/// Number of bytes that are copied at a time.
const AT_A_TIME: usize = 64 << 10;

#[derive(Debug)]
pub struct Spool {
    pub file: OwnedFd,
    /// The range of the file with the bytes.
    pub from: u64,
    pub to: u64,
}

impl Spool {
    pub fn new() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("blockyard-nbd", MemfdFlags::CLOEXEC)?;
        Ok(Spool { file, from: 0, to: 0 })
    }

    pub fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Returns the spool if it has bytes.
    pub fn unless_empty(self) -> Option<Self> {
        (!self.is_empty()).then_some(self)
    }

    pub fn push(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, bytes, self.to))?;
            (self.to, bytes) = (self.to + n as u64, &bytes[n..]);
        }
        Ok(())
    }

    /// Appends `len` bytes of `segments` from `offset`.
    pub fn push_segments(
        &mut self,
        segments: &Segments,
        offset: usize,
        len: usize,
    ) -> io::Result<()> {
        let mut bytes = vec![0; len.min(AT_A_TIME)];
        let mut done = 0;
        while done < len {
            let here = (len - done).min(AT_A_TIME);
            segments.copy_out(offset + done, &mut bytes[..here]);
            self.push(&bytes[..here])?;
            done += here;
        }
        Ok(())
    }

    /// Appends `len` zeroes. They take no memory.
    pub fn push_zeroes(&mut self, len: u64) -> io::Result<()> {
        self.to += len;
        Ok(rustix::fs::ftruncate(&self.file, self.to)?)
    }

    /// Appends the bytes of another spool.
    pub fn push_spool(&mut self, mut other: Spool) -> io::Result<()> {
        let buffer = Segments::buffer(AT_A_TIME);
        while !other.is_empty() {
            let n = other.peek(&buffer)?;
            self.push_segments(&buffer, 0, n)?;
            other.from += n as u64;
        }
        Ok(())
    }

    /// Copies the first bytes to `segments`. Returns their number. Returns an error if the file is
    /// shorter than its range.
    pub fn peek(&self, segments: &Segments) -> io::Result<usize> {
        let len = (self.to - self.from).min(segments.len().min(AT_A_TIME) as u64) as usize;
        let mut bytes = vec![0; len];
        let read = || rustix::io::pread(&self.file, &mut bytes[..], self.from);
        let n = rustix::io::retry_on_intr(read)?;
        if n == 0 && len > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        segments.copy_in(0, &bytes[..n]);
        Ok(n)
    }

    /// Removes the first bytes and copies them to `segments`. Returns their number.
    pub fn read(&mut self, segments: &Segments) -> io::Result<usize> {
        let n = self.peek(segments)?;
        self.from += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut spool: Spool) -> Vec<u8> {
        let (room, mut all) = (Segments::buffer(100_000), Vec::new());
        while !spool.is_empty() {
            let n = spool.read(&room).unwrap();
            let mut bytes = vec![0; n];
            room.copy_out(0, &mut bytes);
            all.extend(bytes);
        }
        all
    }

    #[test]
    fn bytes_come_back_in_order() {
        let long: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
        let mut first = Spool::new().unwrap();
        first.push(b"head").unwrap();
        first.push_zeroes(70_000).unwrap();
        first.push_segments(&Segments::from_bytes(&long), 1, 150_000).unwrap();
        let two = Segments::buffer(2);
        assert_eq!(first.read(&two).unwrap(), 2);
        let mut second = Spool::new().unwrap();
        second.push(b"before").unwrap();
        second.push_spool(first).unwrap();
        let expected = [b"beforead", &vec![0; 70_000][..], &long[1..150_001]].concat();
        assert!(all(second) == expected);
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error() {
        let mut spool = Spool::new().unwrap();
        spool.push(b"abc").unwrap();
        spool.to = 5;
        let room = Segments::buffer(10);
        assert_eq!(spool.read(&room).unwrap(), 3);
        assert_eq!(spool.read(&room).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
