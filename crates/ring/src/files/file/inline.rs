//! Makes the page-cache writes that [`crate::policy::inline`] assigns to the reactor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::time::Instant;

use rustix::fs::{FileType, OFlags};

use super::attempts::attempt;
use crate::files::host;
use crate::mem::segments::Segments;
use crate::policy::Counters;
use crate::policy::inline::{InlineWrites, Way};

/// Returns the policy for the file.
pub fn policy(fd: BorrowedFd<'_>, counters: Rc<Counters>) -> io::Result<InlineWrites> {
    let regular = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
    let direct = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::DIRECT);
    Ok(InlineWrites::new(regular && !direct, counters))
}

/// Makes the write if the policy assigns it to the reactor. Returns `None` if the write was not
/// made, or failed. Then io_uring must make all of it (again).
pub fn write(
    policy: &InlineWrites,
    fd: BorrowedFd<'_>,
    segments: &Segments,
    offset: u64,
) -> Option<usize> {
    match policy.way() {
        Way::Ring => None,
        Way::Inline => {
            let work = || host::write_at(fd, segments, offset, 0);
            attempt(&policy.pauses, Instant::now, work)?.ok()
        }
        Way::Unknown => {
            let written = host::write_at(fd, segments, offset, libc::RWF_NOWAIT);
            policy.tried(matches!(&written, Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP)));
            tracing::debug!(fd = fd.as_raw_fd(), way = ?policy.way(), "page-cache writes");
            written.ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use super::*;

    fn file(flags: OFlags) -> (OwnedFd, InlineWrites) {
        let fd = rustix::fs::open(
            std::env::temp_dir(),
            OFlags::TMPFILE | OFlags::RDWR | flags,
            0o600.into(),
        )
        .unwrap();
        let policy = policy(fd.as_fd(), Rc::default()).unwrap();
        (fd, policy)
    }

    fn inline_file() -> (OwnedFd, InlineWrites) {
        let (fd, policy) = file(OFlags::empty());
        policy.tried(true);
        (fd, policy)
    }

    #[test]
    fn an_inline_write_is_in_the_file() {
        let (fd, policy) = inline_file();
        assert_eq!(write(&policy, fd.as_fd(), &Segments::from_bytes(b"hello"), 3), Some(5));
        let mut bytes = [1; 8];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 0).unwrap(), 8);
        assert_eq!(&bytes, b"\0\0\0hello");
    }

    #[test]
    fn the_first_write_decides_the_way_and_loses_nothing() {
        let (fd, policy) = file(OFlags::empty());
        assert_eq!(policy.way(), Way::Unknown);
        let first = write(&policy, fd.as_fd(), &Segments::from_bytes(b"first"), 0);
        assert_ne!(policy.way(), Way::Unknown);
        // `None` means that io_uring must make the write. `Some` means that the reactor has made
        // it.
        let len = host::file_size(&fd).unwrap();
        assert_eq!(len, first.unwrap_or(0) as u64);
    }

    #[test]
    fn only_regular_files_are_written_inline() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(!policy(reader.as_fd(), Rc::default()).unwrap().suits(512));
    }

    #[test]
    fn after_a_write_that_blocked_the_next_ones_go_to_io_uring() {
        let (fd, policy) = inline_file();
        let bytes = Segments::from_bytes(b"x");
        let now = Instant::now();
        // Report a write that blocked from now on for an hour.
        policy.pauses.done(now, now + Duration::from_secs(3600), || true);
        assert_eq!(write(&policy, fd.as_fd(), &bytes, 0), None);
        assert_eq!(host::file_size(&fd).unwrap(), 0);
        let (fd, policy) = inline_file();
        policy.pauses.done(now, now, || true);
        assert_eq!(write(&policy, fd.as_fd(), &bytes, 0), Some(1));
    }

    #[test]
    fn a_write_that_fails_inline_is_left_to_io_uring() {
        let (_, policy) = inline_file();
        let read_only = rustix::fs::open("/dev/null", OFlags::RDONLY, 0.into()).unwrap();
        assert_eq!(write(&policy, read_only.as_fd(), &Segments::from_bytes(b"x"), 0), None);
    }
}
