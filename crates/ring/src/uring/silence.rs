//! Notices that the kernel's worker threads complete nothing.
//!
//! io_uring gives syncs and allocations to worker threads (io-wq). The kernel can lose such an
//! operation: it counts on a worker that is about to end. Then nothing looks at the operation
//! before the ring gives the workers something else to do.
//!
//! In: starts and completions of operations for workers, and the time. Out: how long the ring may
//! wait, and whether it must give the workers an operation that does nothing.

use std::time::{Duration, Instant};

/// How long the workers may complete nothing. On a slow device they take this long, too, and the
/// operation that does nothing costs a worker some microseconds.
const SILENCE: Duration = Duration::from_secs(5);

/// The operations of a ring that the workers have.
#[derive(Default)]
pub(crate) struct Silence {
    operations: usize,
    /// None: the time begins at the next wait.
    until: Option<Instant>,
}

impl Silence {
    #[inline]
    pub fn started(&mut self) {
        self.operations += 1;
    }

    /// One completion shows that the workers look at their queue.
    #[inline]
    pub fn completed(&mut self) {
        self.operations -= 1;
        self.until = None;
    }

    /// Returns how long the ring may wait at `now`, if the caller allows `limit`.
    #[inline]
    pub fn bound(&mut self, limit: Option<Duration>, now: Instant) -> Option<Duration> {
        if self.operations == 0 {
            return limit;
        }
        let until = *self.until.get_or_insert(now + SILENCE);
        let left = until.saturating_duration_since(now);
        Some(limit.map_or(left, |limit| limit.min(left)))
    }

    /// Returns whether the workers have completed nothing for too long. Then the time begins again.
    #[inline]
    pub fn is_too_long(&mut self, now: Instant) -> bool {
        let is_over = self.operations > 0 && self.until.is_some_and(|until| until <= now);
        if is_over {
            self.until = Some(now + SILENCE);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_workers_is_bounded_and_ends_with_a_request_to_them() {
        let (start, mut silence) = (Instant::now(), Silence::default());
        let second = Duration::from_secs(1);
        assert_eq!((silence.bound(None, start), silence.is_too_long(start)), (None, false));
        silence.started();
        assert_eq!(silence.bound(None, start), Some(5 * second));
        assert_eq!(silence.bound(Some(second), start + 3 * second), Some(second));
        assert_eq!(silence.bound(None, start + 3 * second), Some(2 * second));
        assert!(!silence.is_too_long(start + 4 * second));
        assert!(silence.is_too_long(start + 6 * second));
        assert!(!silence.is_too_long(start + 6 * second), "once for each such time");
        silence.started();
        silence.completed();
        assert!(!silence.is_too_long(start + 20 * second), "a worker has completed something");
        assert_eq!(silence.bound(None, start + 20 * second), Some(5 * second));
        silence.completed();
        assert_eq!(silence.bound(None, start + 21 * second), None);
        assert!(!silence.is_too_long(start + 60 * second));
    }
}
