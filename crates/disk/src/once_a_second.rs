//! Limits a log line to once a second.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The rate limit of one disk's log lines, for any thread. It takes no lock, because failing
/// requests use it.
#[derive(Debug, Default)]
pub(crate) struct OnceASecond {
    /// Time of the first call.
    start: OnceLock<Instant>,
    /// Time when the next line is allowed, in milliseconds since `start`.
    next: AtomicU64,
}

impl OnceASecond {
    /// Returns whether a line may be written now.
    pub fn admits(&self, now: Instant) -> bool {
        const SECOND: u64 = Duration::from_secs(1).as_millis() as u64;
        let since =
            now.saturating_duration_since(*self.start.get_or_init(|| now)).as_millis() as u64;
        let next = self.next.load(Ordering::Relaxed);
        since >= next
            && self
                .next
                .compare_exchange(next, since + SECOND, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_may_log_one_line_a_second() {
        let (one, other) = (OnceASecond::default(), OnceASecond::default());
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let written = |lines: &OnceASecond| {
            (0..3000).step_by(100).filter(|ms| lines.admits(at(*ms))).collect::<Vec<_>>()
        };
        assert_eq!(written(&one), [0, 1000, 2000]);
        assert_eq!(
            written(&other),
            [0, 1000, 2000],
            "a disk that fails does not silence another one"
        );
    }
}
