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
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockyard_ring::{Latest, later};

use super::Counters;

/// Time between two looks while requests come.
pub const SHORTEST: Duration = Duration::from_micros(100);
/// Number of periods without requests after which the period doubles.
const PATIENCE: u32 = 16;
/// Number of times that the period doubles.
const DOUBLINGS: u32 = 5;
/// Time between two looks of an idle queue.
pub const LONGEST: Duration = SHORTEST.saturating_mul(1 << DOUBLINGS);

/// Number of looks by their period, and the last period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookFigures {
    /// Looks after [`SHORTEST`], because requests come.
    pub quick: u64,
    /// Looks after a time between the two.
    pub slower: u64,
    /// Looks after [`LONGEST`].
    pub idle: u64,
    pub period: Option<Latest<Duration>>,
}

impl LookFigures {
    pub fn merge(&mut self, other: &LookFigures) {
        self.quick += other.quick;
        self.slower += other.slower;
        self.idle += other.idle;
        self.period = later(self.period, other.period);
    }
}

/// The looks of one queue.
pub struct Looks {
    /// The time from which the looks of all queues are counted.
    start: Instant,
    /// When requests came or were answered last.
    worked: Cell<Instant>,
    counters: Rc<Counters>,
}

impl Looks {
    pub(crate) fn new(start: Instant, now: Instant, counters: Rc<Counters>) -> Self {
        Looks { start, worked: Cell::new(now), counters }
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
        self.count(now, period);
        let since = now.saturating_duration_since(self.start).as_nanos() as u64;
        let period = period.as_nanos() as u64;
        self.start + Duration::from_nanos((since / period + 1) * period)
    }

    fn count(&self, now: Instant, period: Duration) {
        let mut figures = self.counters.looks.get();
        let looks = match () {
            () if period == SHORTEST => &mut figures.quick,
            () if period == LONGEST => &mut figures.idle,
            () => &mut figures.slower,
        };
        *looks += 1;
        figures.period = Some(Latest { at: now, value: period });
        self.counters.looks.set(figures);
    }
}

#[cfg(test)]
mod tests {
    use super::super::seeded::Seeded;
    use super::*;

    fn queue(start: Instant, now: Instant) -> Looks {
        Looks::new(start, now, Rc::default())
    }

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
        let queue = queue(start, start);
        let mut before = start;
        for look in looks(&queue, start, start + Duration::from_secs(1)) {
            let (pause, idle) = (look - before, before - start);
            assert!(pause <= LONGEST && pause <= (idle / PATIENCE).max(SHORTEST), "{idle:?}");
            before = look;
        }
        assert_eq!(queue.next(before) - before, LONGEST);
        let a_second = looks(&queue, before, before + Duration::from_secs(1));
        assert!(a_second.len() <= 320, "{} looks", a_second.len());
        let LookFigures { quick, slower, idle, period } = queue.counters.looks.get();
        assert!(quick > 16 && slower > 16 && idle >= a_second.len() as u64);
        assert_eq!(period.map(|last| last.value), Some(LONGEST));
    }

    #[test]
    fn requests_make_it_quick_at_once() {
        let start = Instant::now();
        let queue = queue(start, start);
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
        let mut figures = queue.counters.looks.get();
        let last = Some(Latest { at: now, value: SHORTEST });
        let expected = LookFigures { quick: 2001, slower: 0, idle: 1, period: last };
        assert_eq!(figures, expected);
        figures.merge(&LookFigures { slower: 3, ..LookFigures::default() });
        assert_eq!(figures, LookFigures { slower: 3, ..expected });
    }

    #[test]
    fn idle_queues_look_at_the_same_times() {
        let start = Instant::now();
        let (first, second) = (start + Duration::from_micros(30), start + Duration::from_millis(7));
        let (first, second) = (queue(start, first), queue(start, second));
        let (from, until) = (start + Duration::from_secs(1), start + Duration::from_secs(2));
        let (first, second) = (looks(&first, from, until), looks(&second, from, until));
        assert_eq!(first, second);
        // A quick queue also looks when the idle ones do.
        let quick = queue(start, until);
        quick.has_worked(until);
        let (now, idle) = (until, looks(&queue(start, start), until, until));
        let quick = looks(&quick, now, now + LONGEST);
        assert!(quick.contains(&idle[0]));
    }
    /// A long trace of bursts and pauses of any length, with several queues on one start. What the
    /// module documentation says holds at each look, and for a request at any time.
    #[test]
    fn a_seeded_trace_keeps_the_bounds_of_waits_and_of_idle_looks() {
        for seed in 0..50 {
            let (mut seeded, start) = (Seeded(seed), Instant::now());
            let mut between = |least: Duration, most: Duration| {
                // Short times are as frequent as long ones.
                least.mul_f64((most.as_secs_f64() / least.as_secs_f64()).powf(seeded.next()))
            };
            let first = between(SHORTEST, Duration::from_secs(10));
            let (mut worked, mut now) = (start + first, start + first);
            let queue = queue(start, now);
            let (mut looks, mut idle_looks) = (0, 0);
            for _ in 0..500 {
                // The next request comes then, and a look finds it.
                let request = now + between(Duration::from_micros(1), Duration::from_secs(2));
                while now < request {
                    let look = queue.next(now);
                    looks += 1;
                    let (pause, idle) = (look - now, now - worked);
                    assert!(!pause.is_zero() && pause <= LONGEST, "seed {seed}: {pause:?}");
                    assert!(pause <= (idle / PATIENCE).max(SHORTEST), "seed {seed}: {idle:?}");
                    let period = queue.counters.looks.get().period.unwrap().value;
                    assert!(pause <= period, "seed {seed}");
                    let since = (look - start).as_nanos();
                    assert_eq!(since % period.as_nanos(), 0, "seed {seed}: not with the others");
                    // Idle for a while, it looks once in the longest period.
                    let is_idle = idle >= LONGEST * PATIENCE;
                    assert_eq!(is_idle, period == LONGEST, "seed {seed}: {idle:?}");
                    idle_looks += u64::from(is_idle);
                    now = look;
                }
                let waited = now - request;
                let most = ((request - worked) / PATIENCE).max(SHORTEST).min(LONGEST);
                assert!(waited <= most, "seed {seed}: {waited:?} of {most:?}");
                worked = now;
                queue.has_worked(now);
            }
            let figures = queue.counters.looks.get();
            assert_eq!(figures.quick + figures.slower + figures.idle, looks, "seed {seed}");
            assert_eq!(figures.idle, idle_looks, "seed {seed}");
            // All pauses together: a look in each longest period, and the slowing down after work.
            let (time, doublings) = ((now - start).as_secs_f64(), u64::from(PATIENCE * DOUBLINGS));
            let most = (time / LONGEST.as_secs_f64()) as u64 + 500 * 2 * (doublings + 1);
            assert!(looks <= most, "seed {seed}: {looks} looks in {time} s");
        }
    }
}
