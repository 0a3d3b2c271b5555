//! The policy of signals: whether a reactor signals a guest itself, or a thread does.
//!
//! A write to an eventfd or a socket runs through all of its waiters. Another process that has the
//! descriptor too can add millions of them, and the writer pays. So a guest with slow signals must
//! not make its reactor send them.
//!
//! ```text
//!   Direct ── a slow signal ──► Measured ── some slow ones ──► Threaded
//!     ◄────────────── no slow signal for a time ────────────────┘
//! ```
//!
//! In: the time, and how long each signal took. Out: the mode of the next signal. What must hold:
//! the slow signals that a reactor sends take about 2 of [`PAUSE_FACTOR`] parts of its time. The
//! first slow signal only leads to a measurement of processor time, because the kernel may have
//! interrupted the thread.

use std::time::{Duration, Instant};

/// A signal that takes longer is slow. One to an eventfd of KVM takes 1 to 5 us, one to a socket
/// of User Mode Linux up to 20 us.
pub(crate) const SLOW: Duration = Duration::from_micros(50);
/// Time that slow signals may take in the mode `Measured`. Interrupts count as processor time, too.
const ALLOWED: Duration = Duration::from_micros(200);
/// A mode lasts this multiple of the slow signal's duration.
const PAUSE_FACTOR: u32 = 1000;
/// Longest duration of a mode after its last slow signal.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SignalMode {
    /// The reactor signals, and measures the time.
    #[default]
    Direct,
    /// The reactor signals, and measures the time of the processor.
    Measured,
    /// A thread signals.
    Threaded,
}

#[derive(Debug, Default)]
pub(crate) struct SignalPolicy {
    mode: SignalMode,
    /// Time when the mode ends, if it is not `Direct`.
    until: Option<Instant>,
    /// Time that slow signals took in the mode `Measured`.
    spent: Duration,
}

impl SignalPolicy {
    /// Returns the mode of the next signal.
    #[inline]
    pub fn mode(&mut self, now: Instant) -> SignalMode {
        if self.until.is_some_and(|until| now >= until) {
            *self = SignalPolicy::default();
        }
        self.mode
    }

    /// Reports how long a signal took. `Threaded`: the longest of several. Returns whether a thread
    /// signals from now on.
    #[inline]
    pub fn sent(&mut self, now: Instant, took: Duration) -> bool {
        if took <= SLOW {
            return false;
        }
        let until = now + took.saturating_mul(PAUSE_FACTOR).min(MAX_PAUSE);
        self.until = self.until.max(Some(until));
        let before = self.mode;
        match before {
            SignalMode::Direct => self.mode = SignalMode::Measured,
            SignalMode::Measured => {
                self.spent = self.spent.saturating_add(took);
                if self.spent > ALLOWED {
                    self.mode = SignalMode::Threaded;
                }
            }
            SignalMode::Threaded => {}
        }
        before != self.mode && self.mode == SignalMode::Threaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_second_slow_signal_moves_the_signals_to_a_thread() {
        let (mut policy, now) = (SignalPolicy::default(), Instant::now());
        assert!(!policy.sent(now, SLOW));
        assert_eq!(policy.mode(now), SignalMode::Direct);
        assert!(!policy.sent(now, MS));
        assert_eq!(policy.mode(now), SignalMode::Measured);
        assert!(!policy.sent(now, SLOW), "a fast signal changes nothing");
        assert!(policy.sent(now, MS));
        assert_eq!(policy.mode(now), SignalMode::Threaded);
        assert!(!policy.sent(now, MS), "it is there already");
    }

    #[test]
    fn a_few_signals_that_are_somewhat_slow_stay_with_the_reactor() {
        let (mut policy, now) = (SignalPolicy::default(), Instant::now());
        let somewhat = SLOW + Duration::from_micros(10);
        for _ in 0..4 {
            assert!(!policy.sent(now, somewhat));
        }
        assert!(policy.sent(now, somewhat), "more than 200 us");
    }

    #[test]
    fn a_mode_ends_after_a_thousand_times_its_slowest_signal() {
        let (mut policy, start) = (SignalPolicy::default(), Instant::now());
        policy.sent(start, 2 * MS);
        policy.sent(start + MS, MS);
        assert_eq!(policy.mode(start + 1999 * MS), SignalMode::Threaded);
        policy.sent(start + 1999 * MS, MS);
        assert_eq!(policy.mode(start + 2998 * MS), SignalMode::Threaded);
        assert_eq!(policy.mode(start + 2999 * MS), SignalMode::Direct);
        // However slow it is, the mode ends.
        policy.sent(start, Duration::MAX);
        assert_eq!(policy.mode(start + MAX_PAUSE), SignalMode::Direct);
    }

    /// Whatever the front end does, the slow signals of the reactor take a small part of its time.
    #[test]
    fn slow_signals_of_the_reactor_take_a_five_hundredth_of_its_time() {
        for (each, pause) in [(MS, MS), (300 * MS, MS), (MS, 1001 * MS), (10 * MS, 9999 * MS)] {
            let (mut policy, start) = (SignalPolicy::default(), Instant::now());
            let (mut now, mut spent) = (start, Duration::ZERO);
            while now < start + Duration::from_secs(2000) {
                let is_own = policy.mode(now) != SignalMode::Threaded;
                now += each;
                if is_own {
                    spent += each;
                }
                // A thread that never reports a slow signal is the worst case.
                policy.sent(now, if is_own { each } else { Duration::ZERO });
                now += pause;
            }
            let part = spent.as_secs_f64() / (now - start).as_secs_f64();
            assert!(part < 0.0025, "{part} with {each:?} and {pause:?}");
        }
    }
}
