//! Page-cache writes that are made here and now.
//!
//! A write to the page cache is a copy of a few microseconds. Where the file system can promise that it will not block
//! (XFS, btrfs, block devices) io_uring makes it on submission. Elsewhere (ext4 up to this day) io_uring hands it to a worker
//! thread, and two wake-ups cost ten times what the copy does. There the reactor copies by itself: while it has one file
//! that is written to, so that nobody else is kept waiting, and as long as no write blocks (dirty pages at their limit,
//! metadata to be read). One that did leaves the next ones to the workers for a while.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{FileType, OFlags};

use crate::host;
use crate::pauses::Pauses;
use crate::segments::Segments;

/// So many writes in a row, and the other tasks get a turn: a task that does nothing else never waits by itself.
const TURN: u32 = 32;
/// Longer writes are the workers': several copy at a time.
const LONGEST: usize = 256 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Not known before the first write.
    Unknown,
    /// io_uring does it as well or better.
    Ring,
    Inline,
}

pub(crate) struct InlineWrites {
    way: Cell<Way>,
    /// A write that blocked sends the next ones to the workers.
    pauses: Pauses,
    /// Writes since others had a turn.
    turn: Cell<u32>,
}

impl InlineWrites {
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let regular = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
        let direct = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::DIRECT);
        let way = if regular && !direct { Way::Unknown } else { Way::Ring };
        Ok(InlineWrites { way: Cell::new(way), pauses: Pauses::default(), turn: Cell::new(0) })
    }

    /// Whether a write of `len` bytes may be made here.
    #[inline]
    pub fn suits(&self, len: usize) -> bool {
        self.way.get() != Way::Ring && len <= LONGEST
    }

    /// Writes if it should be done here. None: not done, or not to its end; io_uring is to do all of it (again).
    pub fn write(&self, fd: BorrowedFd<'_>, segments: &Segments, offset: u64) -> Option<usize> {
        if self.way.get() == Way::Unknown {
            return self.find_out(fd, segments, offset);
        }
        self.pauses.attempt(|| host::write_at(fd, segments, offset, 0))?.ok()
    }

    /// After a write here: whether its task is to let others go first.
    #[inline]
    pub fn owes_a_turn(&self) -> bool {
        let turn = (self.turn.get() + 1) % TURN;
        self.turn.set(turn);
        turn == 0
    }

    /// The first write asks not to block: file systems that cannot promise it refuse at once.
    fn find_out(&self, fd: BorrowedFd<'_>, segments: &Segments, offset: u64) -> Option<usize> {
        let written = host::write_at(fd, segments, offset, libc::RWF_NOWAIT);
        let refused = matches!(&written, Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP));
        self.way.set(if refused { Way::Inline } else { Way::Ring });
        tracing::debug!(fd = fd.as_raw_fd(), way = ?self.way.get(), "page-cache writes");
        written.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use super::*;

    fn file(flags: OFlags) -> OwnedFd {
        let folder = std::env::temp_dir();
        rustix::fs::open(folder, OFlags::TMPFILE | OFlags::RDWR | flags, 0o600.into()).unwrap()
    }

    fn of(way: Way) -> (OwnedFd, InlineWrites) {
        let fd = file(OFlags::empty());
        let inline = InlineWrites::new(fd.as_fd()).unwrap();
        inline.way.set(way);
        (fd, inline)
    }

    #[test]
    fn what_is_written_here_is_in_the_file() {
        let (fd, inline) = of(Way::Inline);
        assert_eq!(inline.write(fd.as_fd(), &Segments::from_bytes(b"hello"), 3), Some(5));
        let mut bytes = [1; 8];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 0).unwrap(), 8);
        assert_eq!(&bytes, b"\0\0\0hello");
    }

    #[test]
    fn the_first_write_finds_the_way_and_loses_nothing() {
        let (fd, inline) = of(Way::Unknown);
        let first = inline.write(fd.as_fd(), &Segments::from_bytes(b"first"), 0);
        assert_ne!(inline.way.get(), Way::Unknown);
        // Whoever is told None writes it by the ring; Some is done.
        let len = host::file_size(&fd).unwrap();
        assert_eq!(len, first.unwrap_or(0) as u64);
    }

    #[test]
    fn direct_files_and_long_writes_are_the_rings() {
        let (_, inline) = of(Way::Inline);
        assert!(inline.suits(LONGEST) && !inline.suits(LONGEST + 1));
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(!InlineWrites::new(reader.as_fd()).unwrap().suits(512), "no regular file");
    }

    #[test]
    fn a_write_that_blocked_sends_the_next_ones_elsewhere() {
        let (fd, inline) = of(Way::Inline);
        let bytes = Segments::from_bytes(b"x");
        inline.pauses.blocked(Duration::from_millis(100));
        assert_eq!(inline.write(fd.as_fd(), &bytes, 0), None);
        std::thread::sleep(Duration::from_millis(2020));
        assert_eq!(inline.write(fd.as_fd(), &bytes, 0), Some(1));
    }

    #[test]
    fn an_error_is_left_to_the_ring_to_tell() {
        let (_, inline) = of(Way::Inline);
        let read_only = rustix::fs::open("/dev/null", OFlags::RDONLY, 0.into()).unwrap();
        assert_eq!(inline.write(read_only.as_fd(), &Segments::from_bytes(b"x"), 0), None);
    }
}
