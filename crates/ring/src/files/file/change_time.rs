//! Sets a file's mtime when [`crate::policy::change_time`] decides so.
//!
//! What must hold: the mtime is set only to what the write itself would set.

use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Instant;

use rustix::fs::{FileType, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

use super::attempts::attempt;
use crate::policy::Counters;
use crate::policy::change_time::{Attempt, ChangeTime, Clock, Next};
use crate::tasks::clock;

/// The kernel's coarse clocks. Reading them is no system call.
struct CoarseClocks;

impl Clock for CoarseClocks {
    #[inline]
    fn tick(&self) -> (i64, i64) {
        let now = clock::Clock::CoarseRealtime.read();
        (now.as_secs() as i64, now.subsec_nanos().into())
    }

    #[inline]
    fn seconds(&self) -> i64 {
        clock::Clock::CoarseMonotonic.read().as_secs() as i64
    }
}

/// Returns the policy for the file.
pub fn policy(fd: BorrowedFd<'_>, counters: Rc<Counters>) -> io::Result<ChangeTime> {
    let regular = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
    let direct = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::DIRECT);
    Ok(ChangeTime::new(regular && direct, counters))
}

/// Returns how to make a write. Sets the mtime first, if the policy says so.
#[inline]
pub fn first(policy: &ChangeTime, fd: BorrowedFd<'_>, alone: bool) -> Attempt {
    let (attempt, is_due) = policy.first(&CoarseClocks, alone);
    if is_due {
        note(policy, fd);
    }
    attempt
}

/// Returns how to repeat the write, or `None` if the result is final.
#[inline]
pub fn next(
    policy: &ChangeTime,
    fd: BorrowedFd<'_>,
    attempt: Attempt,
    result: i32,
    alone: bool,
) -> Option<Attempt> {
    match policy.next(&CoarseClocks, attempt, result, alone) {
        Next::Done => None,
        Next::Again(attempt) => Some(attempt),
        Next::Note if note(policy, fd) => Some(Attempt::Noted),
        Next::Note => Some(Attempt::Plain),
    }
}

/// Sets the mtime to now. Returns false if that is not possible at this time.
fn note(policy: &ChangeTime, fd: BorrowedFd<'_>) -> bool {
    let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
    match attempt(&policy.pauses, Instant::now, || rustix::fs::futimens(fd, &times)) {
        Some(Ok(())) => {
            policy.was_noted();
            true
        }
        Some(Err(e)) => {
            tracing::debug!("cannot set a file's mtime ahead of its writes: {e}");
            policy.cannot_be_noted();
            false
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use super::*;

    const AGAIN: i32 = -libc::EAGAIN;

    /// Returns a file with an mtime of 1970, and the policy for a file that bypasses the page
    /// cache.
    fn old_file() -> (OwnedFd, ChangeTime) {
        let fd =
            rustix::fs::open(std::env::temp_dir(), OFlags::TMPFILE | OFlags::RDWR, 0o600.into())
                .unwrap();
        let then = || Timespec { tv_sec: 1, tv_nsec: 0 };
        rustix::fs::futimens(&fd, &Timestamps { last_access: then(), last_modification: then() })
            .unwrap();
        (fd, ChangeTime::new(true, Rc::default()))
    }

    fn modified(fd: &OwnedFd) -> i64 {
        rustix::fs::fstat(fd).unwrap().st_mtime as i64
    }

    #[test]
    fn only_the_mtime_is_set() {
        let seconds = || {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.unwrap().as_secs() as i64
        };
        let ((fd, policy), before) = (old_file(), seconds());
        assert_eq!(first(&policy, fd.as_fd(), true), Attempt::NoWait);
        assert_eq!(modified(&fd), 1);
        assert_eq!(next(&policy, fd.as_fd(), Attempt::NoWait, AGAIN, true), Some(Attempt::Noted));
        // The coarse clock of a file system can be a second behind.
        assert!((before - 1..=seconds()).contains(&modified(&fd)));
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_atime, 1, "the atime is unchanged");
        assert_eq!(next(&policy, fd.as_fd(), Attempt::Noted, 4096, true), None);
    }

    #[test]
    fn the_mtime_is_not_set_while_the_file_is_held() {
        let (fd, policy) = old_file();
        let held = policy.held();
        assert_eq!(next(&policy, fd.as_fd(), Attempt::NoWait, AGAIN, true), Some(Attempt::Plain));
        assert_eq!(modified(&fd), 1);
        drop(held);
        assert_eq!(next(&policy, fd.as_fd(), Attempt::NoWait, AGAIN, true), Some(Attempt::Noted));
        assert!(modified(&fd) > 1);
    }

    #[test]
    fn the_mtime_is_not_set_during_a_pause() {
        let (fd, policy) = old_file();
        let now = Instant::now();
        policy.pauses.done(now, now + Duration::from_secs(3600), || true);
        assert_eq!(next(&policy, fd.as_fd(), Attempt::NoWait, AGAIN, true), Some(Attempt::Plain));
        assert_eq!(modified(&fd), 1);
    }

    #[test]
    fn writes_are_plain_if_the_mtime_cannot_be_set() {
        let (_fd, policy) = old_file();
        let path = rustix::fs::open(std::env::temp_dir(), OFlags::PATH, 0.into()).unwrap();
        assert_eq!(
            next(&policy, path.as_fd(), Attempt::NoWait, AGAIN, true),
            Some(Attempt::Plain),
            "no such descriptor"
        );
        assert_eq!(first(&policy, path.as_fd(), true), Attempt::Plain);
    }

    #[test]
    fn files_in_the_page_cache_are_written_plainly() {
        let (fd, _) = old_file();
        let policy = super::policy(fd.as_fd(), Rc::default()).unwrap();
        assert_eq!(first(&policy, fd.as_fd(), true), Attempt::Plain);
    }
}
