//! Finds a queue that hangs.
//!
//! In: the progress counter of each queue, and the time. Out: the first queue that finished nothing
//! for the limit. This module reads no clock.

use std::time::{Duration, Instant};

pub struct Watchdog {
    limit: Duration,
    /// The last value of each queue's counter, and the time of its last change.
    seen: Vec<(u64, Instant)>,
}

impl Watchdog {
    /// Watches this number of queues from `now` on. `limit`: seconds without progress.
    pub fn new(queues: usize, limit: f64, now: Instant) -> Self {
        Watchdog { limit: Duration::from_secs_f64(limit), seen: vec![(0, now); queues] }
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Counts the time of all queues from `now` on, because a new back end serves them.
    pub fn restart(&mut self, now: Instant) {
        self.seen.iter_mut().for_each(|seen| seen.1 = now);
    }

    /// Returns an error with the number of the first queue that hangs. `progress`: the counter of
    /// each queue, or `None` if the queue has ended. `target`: the name of what serves the queues.
    pub fn check(
        &mut self,
        now: Instant,
        target: &str,
        progress: impl IntoIterator<Item = Option<u64>>,
    ) -> anyhow::Result<()> {
        for (index, (seen, counter)) in self.seen.iter_mut().zip(progress).enumerate() {
            if counter != Some(seen.0) {
                *seen = (counter.unwrap_or(seen.0), now);
            }
            anyhow::ensure!(
                now.duration_since(seen.1) < self.limit,
                "queue {index}: the {target} finished nothing for {:?}",
                self.limit
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watchdog with a limit of 50 ms on a simulated clock.
    struct Simulated {
        watchdog: Watchdog,
        epoch: Instant,
    }

    impl Simulated {
        fn new(queues: usize) -> Self {
            let epoch = Instant::now();
            Simulated { watchdog: Watchdog::new(queues, 0.05, epoch), epoch }
        }

        fn at(&self, ms: u64) -> Instant {
            self.epoch + Duration::from_millis(ms)
        }

        /// Checks at a time in milliseconds. Returns the error's text.
        fn check(&mut self, ms: u64, progress: &[Option<u64>]) -> Option<String> {
            let now = self.at(ms);
            let checked = self.watchdog.check(now, "back end", progress.iter().copied());
            checked.err().map(|e| e.to_string())
        }
    }

    #[test]
    fn a_queue_that_hangs_beside_one_that_works_is_named() {
        let mut simulated = Simulated::new(2);
        for ms in (0..50).step_by(10) {
            assert_eq!(simulated.check(ms, &[Some(ms), Some(0)]), None, "{ms} ms");
        }
        let hung = "queue 1: the back end finished nothing for 50ms";
        assert_eq!(simulated.check(50, &[Some(50), Some(0)]).as_deref(), Some(hung));
        // One completion, and the time counts from it.
        assert_eq!(simulated.check(60, &[Some(51), Some(1)]), None);
        assert_eq!(simulated.check(109, &[Some(52), Some(1)]), None);
        assert!(simulated.check(110, &[Some(53), Some(1)]).unwrap().starts_with("queue 1:"));
        let mut simulated = Simulated::new(2);
        assert!(simulated.check(50, &[Some(0), Some(9)]).unwrap().starts_with("queue 0:"));
    }

    #[test]
    fn a_queue_that_has_ended_needs_no_progress() {
        let mut simulated = Simulated::new(2);
        assert_eq!(simulated.check(49, &[None, Some(7)]), None);
        assert_eq!(simulated.check(98, &[None, Some(8)]), None);
        assert_eq!(simulated.check(147, &[None, Some(9)]), None);
        assert!(simulated.check(200, &[None, Some(9)]).unwrap().starts_with("queue 1:"));
    }

    #[test]
    fn a_new_back_end_has_the_whole_limit() {
        let mut simulated = Simulated::new(1);
        assert_eq!(simulated.check(40, &[Some(0)]), None);
        let now = simulated.at(45);
        simulated.watchdog.restart(now);
        assert_eq!(simulated.check(94, &[Some(0)]), None);
        assert!(simulated.check(95, &[Some(0)]).is_some());
    }
}
