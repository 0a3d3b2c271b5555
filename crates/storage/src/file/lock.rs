//! The lock of an image file, and how long a start waits for it.
//!
//! What must hold: a lock that a living process has is reported soon; one that a killed process
//! left behind is waited for.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_ring::host::{self, Holder, Lock};

/// How long the lock of a killed process may stay. The kernel takes an io_uring apart after its
/// process has ended, and each request that is still on its way to a device keeps the file, and so
/// its lock: on a slow device for many seconds.
const LINGER: Duration = Duration::from_secs(30);
/// Time after which the log says what the start waits for.
const QUIET: Duration = Duration::from_secs(1);
/// How long a holder must live to be believed in: the kill may be on its way.
const GLANCE: Duration = Duration::from_millis(50);
const LINGER_STEP: Duration = Duration::from_millis(10);

/// Why a file was not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// These processes have it.
    #[error("it is in use by {0}")]
    Held(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Locks the file, or says which process has it locked.
pub fn take_lock(path: &Path, fd: BorrowedFd<'_>, lock: Lock) -> Result<(), LockError> {
    let start = Instant::now();
    let attempt = || host::lock(fd, lock);
    let pause = || {
        std::thread::sleep(LINGER_STEP);
        start.elapsed()
    };
    wait_for_lock(path, attempt, || host::holders(fd), pause)
}

/// A killed process keeps its lock until its last request is done: as long as no living holder is
/// seen the lock is tried again. `pause` waits, and returns the time since the start.
fn wait_for_lock(
    path: &Path,
    mut attempt: impl FnMut() -> io::Result<bool>,
    holders: impl Fn() -> Vec<Holder>,
    mut pause: impl FnMut() -> Duration,
) -> Result<(), LockError> {
    let (mut waited, mut told) = (Duration::ZERO, false);
    loop {
        if attempt()? {
            return Ok(());
        }
        let holders = holders();
        let ends = holders.iter().all(|holder| holder.leaving);
        if waited >= if ends { LINGER } else { GLANCE } {
            return Err(LockError::Held(named(&holders)));
        }
        if ends && waited >= QUIET && !std::mem::replace(&mut told, true) {
            let (path, holder, limit) = (path.display(), named(&holders), LINGER.as_secs());
            tracing::warn!(
                "image {path}: waiting up to {limit} s for its lock, which {holder} still has"
            );
        }
        waited = pause();
    }
}

/// The holders of a lock, for a message.
fn named(holders: &[Holder]) -> String {
    if holders.is_empty() {
        // /proc does not show processes of other users and containers, nor what a process that has
        // ended left behind.
        return "another process, or the last requests of one that was killed".into();
    }
    let name = |holder: &Holder| {
        format!("{holder}{}", if holder.leaving { ", which is ending" } else { "" })
    };
    holders.iter().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_of_a_killed_process_is_waited_for() {
        let holder = |leaving| Holder { pid: 7, name: "blockyard".into(), leaving };
        // Each pause takes a second; the lock is free after so many of them.
        let outcome = |free_after: u64, holders: &[Holder]| {
            let (mut tried, mut paused) = (0, 0);
            let attempt = || {
                tried += 1;
                Ok(tried > free_after)
            };
            let pause = || {
                paused += 1;
                Duration::from_secs(paused)
            };
            match wait_for_lock(Path::new("x.img"), attempt, || holders.to_vec(), pause) {
                Err(LockError::Io(e)) => panic!("{e}"),
                Err(LockError::Held(holder)) => Err(holder),
                Ok(()) => Ok(()),
            }
        };
        assert_eq!(outcome(25, &[holder(true)]), Ok(()));
        assert_eq!(outcome(25, &[]), Ok(()));
        assert_eq!(outcome(1, &[holder(false)]), Ok(()));
        let lives = outcome(2, &[holder(false), holder(true)]).unwrap_err();
        assert_eq!(lives, "blockyard (pid 7), blockyard (pid 7), which is ending");
        assert!(outcome(100, &[]).unwrap_err().contains("was killed"));
    }
}
