//! The time of change of files that are written past the page cache, noted by the reactor where its writes wait for that.
//!
//! A write changes the file's time of change, once a tick of the kernel's clock (4 ms). Some file systems (ext4 from Linux 7 on,
//! XFS) may have to wait for that, so they refuse the first writes of each tick that io_uring makes on submission; worker
//! threads then make them, at the price of two changes of thread each. Here those writes are asked to fail instead, the
//! time is noted by a call of a few microseconds, and they are made again, now on submission. Once that is known to help the time
//! is noted ahead: with the first write of each tick.
//!
//! In: each write's beginning and result. Out: how it is to be made, or made again. What must hold: a write that this asked to
//! fail is made again, at last without being asked to; the time is none but what the write itself would set; on files that need
//! none of this nothing is noted.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::time::{ClockId, clock_gettime};

use crate::pauses::Pauses;

/// For how many seconds, at most, writes are not asked to fail, after one that failed for another reason: it takes new space.
const OTHERWISE: i64 = 1;

/// How a write is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// Whoever has to wait waits.
    Plain,
    /// It fails if it would have to wait.
    Unless,
    /// The same, right after the time was noted.
    Noted,
}

impl Attempt {
    pub fn flags(self) -> i32 {
        if self == Attempt::Plain { 0 } else { libc::RWF_NOWAIT }
    }
}

pub(crate) struct ChangeTime {
    /// Whether any of this may be worth it.
    on: Cell<bool>,
    /// It was: the time is noted ahead.
    ahead: Cell<bool>,
    /// The tick in which it was noted.
    noted: Cell<(i64, i64)>,
    /// Until then, in the seconds of the monotonic clock, writes are plain.
    plain_until: Cell<i64>,
    pauses: Pauses,
    /// Operations that may hold the file for long: then the call would block.
    holders: Cell<u32>,
}

impl ChangeTime {
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let regular = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile;
        let direct = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::DIRECT);
        let (ahead, noted, plain_until, pauses, holders) = Default::default();
        Ok(ChangeTime { on: Cell::new(regular && direct), ahead, noted, plain_until, pauses, holders })
    }

    /// How a write is to be made. `alone`: the thread may be blocked for a while, if it must.
    #[inline]
    pub fn first(&self, fd: BorrowedFd<'_>, alone: bool) -> Attempt {
        if !self.on.get() || !alone {
            return Attempt::Plain;
        }
        if self.ahead.get() {
            self.note(fd);
        } else if self.plain_until.get() != 0 && seconds() < self.plain_until.get() {
            return Attempt::Plain;
        }
        Attempt::Unless
    }

    /// How it is to be made again; None: the result is the write's.
    #[inline]
    pub fn next(&self, fd: BorrowedFd<'_>, attempt: Attempt, result: i32, alone: bool) -> Option<Attempt> {
        match (attempt, result) {
            (Attempt::Plain, _) => None,
            (_, result) if result == -libc::EAGAIN => Some(self.refused(fd, attempt, alone)),
            (_, result) if result == -libc::EOPNOTSUPP => {
                self.on.set(false);
                Some(Attempt::Plain)
            }
            (Attempt::Noted, result) if result >= 0 => {
                self.ahead.set(true);
                None
            }
            _ => None,
        }
    }

    fn refused(&self, fd: BorrowedFd<'_>, attempt: Attempt, alone: bool) -> Attempt {
        if attempt == Attempt::Noted {
            self.ahead.set(false);
            self.plain_until.set(seconds() + OTHERWISE);
            return Attempt::Plain;
        }
        if alone && self.note(fd) { Attempt::Noted } else { Attempt::Plain }
    }

    /// Notes the time, unless it was in this tick. False: it was, or it cannot be just now.
    #[inline]
    fn note(&self, fd: BorrowedFd<'_>) -> bool {
        let now = tick();
        self.noted.get() != now && self.holders.get() == 0 && self.note_at(fd, now)
    }

    fn note_at(&self, fd: BorrowedFd<'_>, now: (i64, i64)) -> bool {
        self.noted.set(now);
        let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times = Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
        match self.pauses.attempt(|| rustix::fs::futimens(fd, &times)) {
            Some(Ok(())) => true,
            // Another user's file, which may be written all the same.
            Some(Err(e)) => {
                tracing::debug!("noting the time of change: {e}");
                self.on.set(false);
                false
            }
            None => false,
        }
    }

    /// A plain write may hold the file while it waits.
    #[inline]
    pub fn may_hold(&self, attempt: Attempt) -> Option<impl Drop + '_> {
        (self.on.get() && attempt == Attempt::Plain).then(|| self.held())
    }

    /// As long as it is kept, no time is noted: see `holders`.
    pub fn held(&self) -> impl Drop + '_ {
        self.holders.set(self.holders.get() + 1);
        Held(self)
    }
}

struct Held<'a>(&'a ChangeTime);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.holders.set(self.0.holders.get() - 1);
    }
}

fn seconds() -> i64 {
    clock_gettime(ClockId::MonotonicCoarse).tv_sec
}

/// The tick, as the time at its beginning, which is what files are given. No system call.
#[inline]
fn tick() -> (i64, i64) {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec, now.tv_nsec)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use super::*;

    const AGAIN: i32 = -libc::EAGAIN;

    fn file(flags: OFlags) -> OwnedFd {
        rustix::fs::open(std::env::temp_dir(), OFlags::TMPFILE | OFlags::RDWR | flags, 0o600.into()).unwrap()
    }

    /// A file of 1970, as if it were one that is written past the page cache.
    fn old_file() -> (OwnedFd, ChangeTime) {
        let fd = file(OFlags::empty());
        let then = || Timespec { tv_sec: 1, tv_nsec: 0 };
        rustix::fs::futimens(&fd, &Timestamps { last_access: then(), last_modification: then() }).unwrap();
        let change = ChangeTime::new(fd.as_fd()).unwrap();
        change.on.set(true);
        (fd, change)
    }

    fn modified(fd: &OwnedFd) -> i64 {
        rustix::fs::fstat(fd).unwrap().st_mtime as i64
    }

    fn next_tick() {
        let before = tick();
        while tick() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_file_that_refuses_nothing_is_left_as_it_is() {
        let (fd, change) = old_file();
        for _ in 0..3 {
            let attempt = change.first(fd.as_fd(), true);
            assert_eq!(attempt, Attempt::Unless);
            assert_eq!(change.next(fd.as_fd(), attempt, 4096, true), None);
            next_tick();
        }
        assert_eq!(modified(&fd), 1);
    }

    #[test]
    fn where_noting_the_time_helps_it_is_noted_ahead() {
        let (fd, change) = old_file();
        let attempt = change.first(fd.as_fd(), true);
        assert_eq!(change.next(fd.as_fd(), attempt, AGAIN, true), Some(Attempt::Noted));
        let now = modified(&fd);
        assert!(now > 1);
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_atime, 1, "nobody has read it");
        assert_eq!(change.next(fd.as_fd(), Attempt::Noted, 4096, true), None);
        assert!(change.ahead.get());
        let (_, before) = (next_tick(), change.noted.get());
        assert_eq!(change.first(fd.as_fd(), true), Attempt::Unless);
        assert_ne!(change.noted.get(), before, "the next tick's first write notes it");
    }

    #[test]
    fn once_a_tick() {
        let (fd, change) = old_file();
        next_tick();
        let (before, again) = (tick(), [(); 2].map(|()| change.next(fd.as_fd(), Attempt::Unless, AGAIN, true)));
        // (A tick may end between the two.)
        assert!(again == [Some(Attempt::Noted), Some(Attempt::Plain)] || before != tick(), "{again:?}");
    }

    #[test]
    fn what_is_refused_for_another_reason_waits_where_it_must() {
        let (fd, change) = old_file();
        assert_eq!(change.next(fd.as_fd(), Attempt::Noted, AGAIN, true), Some(Attempt::Plain));
        assert_eq!(change.first(fd.as_fd(), true), Attempt::Plain, "for a second");
        assert_eq!(change.next(fd.as_fd(), Attempt::Plain, AGAIN, true), None);
        change.plain_until.set(seconds());
        assert_eq!(change.first(fd.as_fd(), true), Attempt::Unless);
    }

    #[test]
    fn not_while_the_file_is_held() {
        let (fd, change) = old_file();
        let held = change.held();
        assert_eq!(change.next(fd.as_fd(), Attempt::Unless, AGAIN, true), Some(Attempt::Plain));
        assert_eq!(modified(&fd), 1);
        drop(held);
        assert_eq!(change.next(fd.as_fd(), Attempt::Unless, AGAIN, true), Some(Attempt::Noted));
    }

    #[test]
    fn nor_while_others_would_wait() {
        let (fd, change) = old_file();
        assert_eq!(change.first(fd.as_fd(), false), Attempt::Plain);
        assert_eq!(change.next(fd.as_fd(), Attempt::Unless, AGAIN, false), Some(Attempt::Plain));
        let held = change.may_hold(Attempt::Plain);
        assert!(held.is_some() && change.may_hold(Attempt::Unless).is_none());
        assert_eq!(
            change.next(fd.as_fd(), Attempt::Unless, AGAIN, true),
            Some(Attempt::Plain),
            "a write waits at a worker"
        );
        assert_eq!(modified(&fd), 1);
    }

    #[test]
    fn where_it_cannot_be_or_is_no_use_writes_are_plain() {
        let (fd, change) = old_file();
        assert_eq!(change.next(fd.as_fd(), Attempt::Unless, -libc::EOPNOTSUPP, true), Some(Attempt::Plain));
        assert_eq!(change.first(fd.as_fd(), true), Attempt::Plain);
        let (_fd, change) = old_file();
        let path = rustix::fs::open(std::env::temp_dir(), OFlags::PATH, 0.into()).unwrap();
        assert_eq!(change.next(path.as_fd(), Attempt::Unless, AGAIN, true), Some(Attempt::Plain), "no such descriptor");
        assert!(!change.on.get());
        let buffered = file(OFlags::empty());
        assert_eq!(ChangeTime::new(buffered.as_fd()).unwrap().first(buffered.as_fd(), true), Attempt::Plain);
    }
}
