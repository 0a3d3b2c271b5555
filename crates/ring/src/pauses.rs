//! For what a reactor does by itself though it may block: after it did, it is left to others for a while.
//!
//! In: the work, each time. Out: its result, or that there is a pause. What must hold: a reactor is blocked by such work for a small
//! part of its time only: a twentieth, unless it blocks for seconds at a time.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::host;

/// What takes less has not blocked; what takes more is looked at.
const QUICK: Duration = Duration::from_micros(200);
/// A pause is so many times as long as the work has blocked.
const TIMES: u32 = 20;
/// And no longer: then it is tried again.
const MOST: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Pauses(Cell<Option<Instant>>);

impl Pauses {
    /// Does the work, unless there is a pause.
    pub fn attempt<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let began = Instant::now();
        if self.0.get().is_some_and(|until| began < until) {
            return None;
        }
        let switches = host::voluntary_switches();
        let done = work();
        // Time alone does not tell: a busy machine may have run others meanwhile.
        let took = began.elapsed();
        if took > QUICK && host::voluntary_switches() != switches {
            self.blocked(took);
        }
        Some(done)
    }

    pub fn blocked(&self, took: Duration) {
        self.0.set(Some(Instant::now() + (took * TIMES).min(MOST)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_blocked_is_left_alone_for_a_while() {
        let pauses = Pauses::default();
        // A pause of 2 s.
        assert_eq!(pauses.attempt(|| std::thread::sleep(QUICK * 500)), Some(()));
        assert_eq!(pauses.attempt(|| ()), None);
        std::thread::sleep(pauses.0.get().unwrap() - Instant::now());
        assert_eq!(pauses.attempt(|| 7), Some(7));
        assert_eq!(pauses.attempt(|| 8), Some(8));
    }

    #[test]
    fn it_is_tried_again() {
        let pauses = Pauses::default();
        pauses.blocked(Duration::from_secs(3600));
        assert!(pauses.0.get().unwrap() <= Instant::now() + MOST);
    }
}
