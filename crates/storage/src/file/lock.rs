//! The lock of an image file, and how long a start waits for it.
//!
//! What must hold: if a living process holds the lock, the start fails soon. If a killed process
//! left the lock behind, the start waits for it.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_ring::host::{self, Holder, Lock};

/// Longest time to wait for the lock of a killed process. The kernel tears down an io_uring after
/// its process has ended. Each request still in flight keeps the file, and so its lock. On a slow
/// device that takes many seconds.
const LINGER: Duration = Duration::from_secs(30);
/// Time after which the log says what the start waits for.
const QUIET: Duration = Duration::from_secs(1);
/// Time for which a holder must stay alive before an error names it, because it may be about to be
/// killed.
const GLANCE: Duration = Duration::from_millis(50);
const LINGER_STEP: Duration = Duration::from_millis(10);

/// Why a file was not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Other processes hold the lock; the text names them.
    #[error("it is in use by {0}")]
    Held(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Locks the file. Returns an error that names the processes that hold the lock.
pub fn take_lock(path: &Path, fd: BorrowedFd<'_>, lock: Lock) -> Result<(), LockError> {
    let start = Instant::now();
    let attempt = || host::lock(fd, lock);
    let pause = || {
        std::thread::sleep(LINGER_STEP);
        start.elapsed()
    };
    wait_for_lock(path, attempt, || host::holders(fd), pause)
}

/// Retries the lock while no living process holds it, because a killed process keeps its lock until
/// its last request is done. `pause` sleeps, and returns the time since the start.
fn wait_for_lock(
    path: &Path,
    mut attempt: impl FnMut() -> io::Result<bool>,
    holders: impl Fn() -> Vec<Holder>,
    mut pause: impl FnMut() -> Duration,
) -> Result<(), LockError> {
    let (mut waited, mut logged) = (Duration::ZERO, false);
    loop {
        if attempt()? {
            return Ok(());
        }
        let holders = holders();
        let ends = holders.iter().all(|holder| holder.leaving);
        if waited >= if ends { LINGER } else { GLANCE } {
            return Err(LockError::Held(named(&holders)));
        }
        if ends && waited >= QUIET && !std::mem::replace(&mut logged, true) {
            let (path, holder, limit) = (path.display(), named(&holders), LINGER.as_secs());
            tracing::warn!(
                "image {path}: waiting up to {limit} s for its lock, which {holder} still holds"
            );
        }
        waited = pause();
    }
}

/// Returns the holders of a lock for a message.
fn named(holders: &[Holder]) -> String {
    if holders.is_empty() {
        // /proc may hide processes of other users and containers. It does not show the requests of
        // a process that has ended.
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
        // Each pause takes a second. The lock becomes free after `free_after` pauses.
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
