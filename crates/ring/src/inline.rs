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
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};

use crate::host;
use crate::segments::Segments;

/// So many writes in a row, and the other tasks get a turn: a task that does nothing else never waits by itself.
const TURN: u32 = 32;
/// Longer writes are the workers': several copy at a time.
const LONGEST: usize = 256 << 10;
/// A write that takes less has not blocked; one that takes more is looked at.
const QUICK: Duration = Duration::from_micros(200);
/// For how long a write that blocked sends the next ones to the workers; doubled each time, up to the most.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MOST: Duration = Duration::from_secs(2);
/// So many writes that did not block make the pause short again.
const FORGIVEN: u32 = 1000;

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
    until: Cell<Option<Instant>>,
    pause: Cell<Duration>,
    good: Cell<u32>,
    /// Writes since others had a turn.
    turn: Cell<u32>,
}

impl InlineWrites {
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let regular = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
        let direct = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::DIRECT);
        let way = if regular && !direct { Way::Unknown } else { Way::Ring };
        Ok(InlineWrites {
            way: Cell::new(way),
            until: Cell::new(None),
            pause: Cell::new(PAUSE),
            good: Cell::new(0),
            turn: Cell::new(0),
        })
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
        let began = Instant::now();
        if self.until.get().is_some_and(|until| began < until) {
            return None;
        }
        let switches = host::voluntary_switches();
        let written = host::write_at(fd, segments, offset, 0);
        // Time alone does not tell: a busy machine may have run others meanwhile.
        let now = Instant::now();
        if now - began > QUICK && host::voluntary_switches() != switches {
            self.blocked(now);
        } else {
            self.went_well();
        }
        written.ok()
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

    fn blocked(&self, now: Instant) {
        self.until.set(Some(now + self.pause.get()));
        self.pause.set((self.pause.get() * 2).min(PAUSE_MOST));
        self.good.set(0);
    }

    #[inline]
    fn went_well(&self) {
        self.good.set(self.good.get() + 1);
        if self.good.get() >= FORGIVEN {
            self.good.set(0);
            self.pause.set(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

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
    fn a_write_that_blocked_sends_the_next_ones_elsewhere_and_is_forgiven_later() {
        let (fd, inline) = of(Way::Inline);
        let bytes = Segments::from_bytes(b"x");
        inline.blocked(Instant::now());
        assert_eq!(inline.write(fd.as_fd(), &bytes, 0), None);
        std::thread::sleep(PAUSE);
        assert_eq!(inline.write(fd.as_fd(), &bytes, 0), Some(1));
        assert_eq!(inline.pause.get(), PAUSE * 2);
        for _ in 0..FORGIVEN {
            inline.went_well();
        }
        assert_eq!(inline.pause.get(), PAUSE);
        (0..20).for_each(|_| inline.blocked(Instant::now()));
        assert_eq!(inline.pause.get(), PAUSE_MOST);
    }

    #[test]
    fn an_error_is_left_to_the_ring_to_tell() {
        let (_, inline) = of(Way::Inline);
        let read_only = rustix::fs::open("/dev/null", OFlags::RDONLY, 0.into()).unwrap();
        assert_eq!(inline.write(read_only.as_fd(), &Segments::from_bytes(b"x"), 0), None);
    }
}
