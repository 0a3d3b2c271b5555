//! The policy of notification: when to signal the guest that requests are complete.
//!
//! For a virtual machine, one interrupt per batch is right. For User Mode Linux an interrupt is a
//! Unix signal, which costs more than the I/O and stops the guest's only CPU. So the queue
//! coalesces completions that it signals over a stream socket. It signals when `most` completions
//! are pending, or `wait` after the first one.
//!
//! A wait is vain if no further completion arrived during it, because the guest was waiting for the
//! signal. After a vain wait, the queue signals the next `SKIP` completions at once. This number
//! doubles with each further vain wait.
//!
//! In: the time, and the number of completions that were published. Out: whether to signal now, and
//! when to check again. `vhost_user/notify.rs` signals.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Counters;

const SKIP: u32 = 16;
const SKIP_MOST: u32 = 4096;

/// Longest time that completions wait to be coalesced. With a time of 0 the queue signals at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coalesce {
    /// Coalesces if the call descriptor is a stream socket (User Mode Linux). Signals eventfds at
    /// once.
    Auto,
    /// Coalesces for this time, whatever the type of the call descriptor is.
    Fixed(Duration),
}

impl Coalesce {
    /// Returns the longest wait for a call descriptor. `is_stream`: the descriptor is a stream
    /// socket.
    pub fn wait(self, is_stream: bool) -> Duration {
        match self {
            Coalesce::Auto if is_stream => Duration::from_micros(400),
            Coalesce::Auto => Duration::ZERO,
            Coalesce::Fixed(wait) => wait,
        }
    }
}

/// Numbers of completions and signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotifyFigures {
    /// Completions for which the guest wanted a notification.
    pub completions: u64,
    /// Number of signals in total.
    pub signals: u64,
    /// Signals sent at once because enough completions were pending.
    pub full: u64,
    /// Signals after a wait in which more completions arrived.
    pub gathered: u64,
    /// Signals after a wait in which no further completion arrived.
    pub vain: u64,
    /// Signals sent at once because an earlier wait was in vain.
    pub skipped: u64,
}

impl NotifyFigures {
    pub fn merge(&mut self, other: &NotifyFigures) {
        self.completions += other.completions;
        self.signals += other.signals;
        self.full += other.full;
        self.gathered += other.gathered;
        self.vain += other.vain;
        self.skipped += other.skipped;
    }
}

/// Decides when to signal the guest.
#[derive(Debug)]
pub(crate) struct Coalescer {
    wait: Duration,
    most: u32,
    pending: u32,
    /// Time when the wait ends, and the number of pending completions when the wait began.
    due: Option<(Instant, u32)>,
    skip: u32,
    next_skip: u32,
    counters: Rc<Counters>,
}

impl Coalescer {
    /// `wait`: longest time that a completion may wait. `queue_size`: number of entries of the
    /// ring.
    pub fn new(wait: Duration, queue_size: u16, counters: Rc<Counters>) -> Self {
        let most = (u32::from(queue_size) / 4).clamp(1, 32);
        Coalescer { wait, most, pending: 0, due: None, skip: 0, next_skip: SKIP, counters }
    }

    /// Reports that the queue published `new` completions for which the guest wants a notification.
    /// Returns whether to signal now.
    #[inline]
    pub fn published(&mut self, new: u32, now: Instant) -> bool {
        self.count(|figures| figures.completions += u64::from(new));
        if self.wait.is_zero() {
            return self.signal(|_| {});
        }
        self.pending += new;
        if self.skip > 0 {
            self.skip -= 1;
            return self.signal(|figures| figures.skipped += 1);
        }
        if self.pending >= self.most {
            self.next_skip = SKIP;
            return self.signal(|figures| figures.full += 1);
        }
        self.due.get_or_insert((now + self.wait, self.pending));
        false
    }

    /// Returns when to call [`Coalescer::expired`], if completions are pending.
    pub fn due(&self) -> Option<Instant> {
        self.due.map(|(at, _)| at)
    }

    /// Returns whether the wait is over, so that the queue must signal now.
    pub fn expired(&mut self, now: Instant) -> bool {
        match self.due {
            Some((at, began)) if now >= at => {
                if self.pending == began {
                    self.skip = self.next_skip;
                    self.next_skip = (self.next_skip * 2).min(SKIP_MOST);
                    return self.signal(|figures| figures.vain += 1);
                }
                self.next_skip = SKIP;
                self.signal(|figures| figures.gathered += 1)
            }
            _ => false,
        }
    }

    #[inline]
    fn signal(&mut self, reason: impl FnOnce(&mut NotifyFigures)) -> bool {
        self.pending = 0;
        self.due = None;
        self.count(|figures| {
            figures.signals += 1;
            reason(figures);
        });
        true
    }

    #[inline]
    fn count(&self, f: impl FnOnce(&mut NotifyFigures)) {
        let mut figures = self.counters.notify.get();
        f(&mut figures);
        self.counters.notify.set(figures);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::seeded::Seeded;

    #[test]
    fn completions_are_coalesced_and_a_vain_wait_is_not_repeated() {
        let start = Instant::now();
        let us = |n| start + Duration::from_micros(n);
        let mut c = Coalescer::new(Duration::from_micros(400), 128, Rc::default());
        assert!(!c.published(1, us(0)) && !c.published(5, us(10)));
        assert!(!c.expired(us(399)));
        assert!(c.expired(us(400)) && c.due().is_none());
        // A batch of 32 completions needs no wait.
        assert!(c.published(32, us(500)));
        // A single completion waits in vain. The next 16 completions are signalled at once. The
        // completion after them waits again.
        assert!(!c.published(1, us(600)) && c.expired(us(1000)));
        assert!((0..16).all(|n| c.published(1, us(1001 + n))));
        assert!(!c.published(1, us(2000)) && c.expired(us(2400)));
        assert!(
            (0..32).all(|n| c.published(1, us(2401 + n))),
            "twice as many after the next vain wait"
        );
        assert!(!c.published(1, us(3000)) && !c.published(1, us(3001)) && c.expired(us(3400)));
        assert!(!c.published(1, us(3500)) && c.expired(us(3900)));
        assert!(
            (0..16).all(|n| c.published(1, us(3901 + n))) && !c.published(1, us(4000)),
            "a wait that brought more resets the number"
        );
    }

    #[test]
    fn eventfds_are_signalled_at_once() {
        assert_eq!(Coalesce::Auto.wait(false), Duration::ZERO);
        assert!(Coalescer::new(Duration::ZERO, 128, Rc::default()).published(1, Instant::now()));
    }
    /// Batches of 1 to 4 completions, at random times. The queue checks when a batch completes and
    /// when a wait ends.
    #[test]
    fn no_completion_waits_longer_than_the_limit() {
        const WAIT: Duration = Duration::from_micros(400);
        for seed in 1..50 {
            let (counters, mut random) = (Rc::<Counters>::default(), Seeded(seed));
            let mut c = Coalescer::new(WAIT, 64, counters.clone());
            let (mut now, mut oldest, mut pending, mut all, mut signals) =
                (Instant::now(), None, 0, 0, 0);
            // The guest is busy, then idle, then busy again.
            for most_pause in [20.0, 2000.0, 100.0].into_iter().flat_map(|pause| [pause; 500]) {
                let next = now + Duration::from_secs_f64(random.next() * most_pause / 1e6);
                if let Some(due) = c.due().filter(|due| *due <= next) {
                    assert!(due - oldest.take().unwrap() <= WAIT, "seed {seed}");
                    assert!(!c.expired(due - Duration::from_nanos(1)) && c.expired(due));
                    (pending, signals) = (0, signals + 1);
                }
                now = next;
                let new = 1 + (random.next() * 4.0) as u32;
                (pending, all) = (pending + new, all + new);
                oldest.get_or_insert(now);
                if c.published(new, now) {
                    (oldest, pending, signals) = (None, 0, signals + 1);
                }
                assert!(pending < 16, "a quarter of the queue is signalled at once");
                assert_eq!(c.due().is_some(), pending > 0, "pending completions have a deadline");
            }
            let figures = counters.notify.get();
            assert_eq!((figures.completions, figures.signals), (u64::from(all), signals));
            assert_eq!(
                figures.signals,
                figures.full + figures.gathered + figures.vain + figures.skipped
            );
            assert!(
                figures.full > 0 && figures.gathered > 0 && figures.vain > 0 && figures.skipped > 0,
                "{figures:?}"
            );
            assert!(figures.signals * 2 < figures.completions, "{figures:?}");
        }
    }

    #[test]
    fn figures_of_reactors_are_added() {
        let one =
            NotifyFigures { completions: 1, signals: 2, full: 3, gathered: 4, vain: 5, skipped: 6 };
        let mut both = one;
        both.merge(&one);
        assert_eq!(
            both,
            NotifyFigures {
                completions: 2,
                signals: 4,
                full: 6,
                gathered: 8,
                vain: 10,
                skipped: 12
            }
        );
    }
}
