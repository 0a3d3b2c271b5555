//! When a virtqueue looks at its ring if its front end sends no kicks (`VHOST_USER_SET_VRING_KICK`
//! without a descriptor).
//!
//! In: the time, and when requests come and are answered. Out: the time of the next look.
//!
//! What must hold
//! - A request that comes at the time T after the queue's last work waits at most the larger of
//!   T/16 and [`SHORTEST`], and never more than [`LONGEST`].
//! - After work the queue looks each [`SHORTEST`] again.
//! - Looks are at multiples of their period since one time, which all queues have in common. Each
//!   period is twice the next shorter one. So queues of a reactor look at the same time, and one
//!   expiry of its timer wakes all of them.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time between two looks while requests come.
pub const SHORTEST: Duration = Duration::from_micros(100);
/// Number of periods without requests after which the period doubles.
const PATIENCE: u32 = 16;
/// Number of times that the period doubles.
const DOUBLINGS: u32 = 5;
/// Time between two looks of an idle queue.
pub const LONGEST: Duration = SHORTEST.saturating_mul(1 << DOUBLINGS);

/// The looks of one queue.
pub struct Looks {
    /// The time from which the looks of all queues are counted.
    start: Instant,
    /// When requests came or were answered last.
    worked: Cell<Instant>,
}

impl Looks {
    pub fn new(start: Instant, now: Instant) -> Self {
        Looks { start, worked: Cell::new(now) }
    }

    /// The queue has found or answered requests.
    #[inline]
    pub fn has_worked(&self, now: Instant) {
        self.worked.set(now);
    }

    /// Returns when the queue looks next.
    pub fn next(&self, now: Instant) -> Instant {
        let idle = now.saturating_duration_since(self.worked.get());
        let mut period = SHORTEST;
        while period < LONGEST && idle >= period * 2 * PATIENCE {
            period *= 2;
        }
        let since = now.saturating_duration_since(self.start).as_nanos() as u64;
        let period = period.as_nanos() as u64;
        self.start + Duration::from_nanos((since / period + 1) * period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times of the looks of a queue between two times after its last request.
    fn looks(looks: &Looks, from: Instant, until: Instant) -> Vec<Instant> {
        let mut all = vec![looks.next(from)];
        while all[all.len() - 1] < until {
            all.push(looks.next(all[all.len() - 1]));
        }
        all
    }

    #[test]
    fn an_idle_queue_looks_less_and_less_often() {
        let start = Instant::now();
        let queue = Looks::new(start, start);
        let mut before = start;
        for look in looks(&queue, start, start + Duration::from_secs(1)) {
            let (pause, idle) = (look - before, before - start);
            assert!(pause <= LONGEST && pause <= (idle / PATIENCE).max(SHORTEST), "{idle:?}");
            before = look;
        }
        assert_eq!(queue.next(before) - before, LONGEST);
        let a_second = looks(&queue, before, before + Duration::from_secs(1));
        assert!(a_second.len() <= 320, "{} looks", a_second.len());
    }

    #[test]
    fn requests_make_it_quick_at_once() {
        let start = Instant::now();
        let queue = Looks::new(start, start);
        let later = queue.next(start + Duration::from_secs(3));
        queue.has_worked(later);
        assert_eq!(queue.next(later) - later, SHORTEST);
        // As long as requests come, it stays so.
        let mut now = later;
        for _ in 0..1000 {
            now = queue.next(now);
            if (now - later).as_micros().is_multiple_of(3000) {
                queue.has_worked(now);
            }
            assert_eq!(queue.next(now) - now, SHORTEST);
        }
    }

    #[test]
    fn idle_queues_look_at_the_same_times() {
        let start = Instant::now();
        let (first, second) = (start + Duration::from_micros(30), start + Duration::from_millis(7));
        let (first, second) = (Looks::new(start, first), Looks::new(start, second));
        let (from, until) = (start + Duration::from_secs(1), start + Duration::from_secs(2));
        let (first, second) = (looks(&first, from, until), looks(&second, from, until));
        assert_eq!(first, second);
        // A quick queue also looks when the idle ones do.
        let quick = Looks::new(start, until);
        quick.has_worked(until);
        let (now, idle) = (until, looks(&Looks::new(start, start), until, until));
        let quick = looks(&quick, now, now + LONGEST);
        assert!(quick.contains(&idle[0]));
    }
}
