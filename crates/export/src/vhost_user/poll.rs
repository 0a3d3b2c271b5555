//! Busy-polling, where it pays.
//!
//! A queue that has just gone empty, with nothing in flight, may look again for a few microseconds before it sleeps. With a
//! guest on another CPU and storage that answers at once that doubles throughput; where guest and reactor share a CPU it
//! halves it. No rule told the two apart in our measurements, so it is tried: slices with and without, and the count of
//! requests decides. A queue whose guest pauses longer than the limit is never polled, and an idle one costs nothing.

use std::time::{Duration, Instant};

/// How long one look may last, and the pause between requests above which polling is hopeless.
const LIMIT: Duration = Duration::from_micros(50);
const SLICE: Duration = Duration::from_millis(4);
const SLICES: u32 = 8;
/// What polling must gain to be kept.
const GAIN: f64 = 1.05;
const REST: Duration = Duration::from_millis(500);
const REST_MOST: Duration = Duration::from_secs(16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollMode {
    /// Try, and keep what pays.
    Auto,
    Off,
    /// Always look this long.
    Fixed(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Sleep (or poll) as decided, until then.
    Settled {
        poll: bool,
        until: Option<Instant>,
    },
    Trial {
        slice: u32,
        ends: Instant,
    },
}

#[derive(Debug)]
pub struct Poller {
    mode: PollMode,
    state: State,
    rest: Duration,
    /// Moving average of the pause between going empty and the next request, in nanoseconds.
    pause: f64,
    empty_since: Option<Instant>,
    /// Requests in the trial's slices without and with polling, and the count when this slice began.
    counts: [u64; 2],
    slice_began: u64,
}

impl Poller {
    pub fn new(mode: PollMode) -> Self {
        Poller {
            mode,
            state: State::Settled { poll: false, until: None },
            rest: REST,
            pause: 1e9,
            empty_since: None,
            counts: [0; 2],
            slice_began: 0,
        }
    }

    /// The queue went empty: how long to look for more before sleeping. `done` counts requests since ever.
    #[inline]
    pub fn went_empty(&mut self, now: Instant, done: u64) -> Option<Duration> {
        self.empty_since.get_or_insert(now);
        match self.mode {
            PollMode::Off => None,
            PollMode::Fixed(time) => Some(time),
            PollMode::Auto => {
                self.step(now, done);
                let poll = match self.state {
                    State::Settled { poll, .. } => poll,
                    State::Trial { slice, .. } => slice % 2 == 1,
                };
                (poll && self.hopeful()).then_some(LIMIT)
            }
        }
    }

    /// Requests came.
    #[inline]
    pub fn came(&mut self, now: Instant) {
        if let Some(since) = self.empty_since.take() {
            let pause = now.saturating_duration_since(since).as_nanos() as f64;
            self.pause += (pause.min(1e7) - self.pause) / 16.0;
        }
    }

    fn hopeful(&self) -> bool {
        self.pause < LIMIT.as_nanos() as f64 * 2.0
    }

    fn step(&mut self, now: Instant, done: u64) {
        match self.state {
            State::Settled { until, .. } => {
                if self.hopeful() && until.is_none_or(|u| now >= u) {
                    self.counts = [0; 2];
                    self.slice_began = done;
                    self.state = State::Trial { slice: 0, ends: now + SLICE };
                }
            }
            State::Trial { slice, ends } if now >= ends => {
                self.counts[slice as usize % 2] += done - self.slice_began;
                self.slice_began = done;
                // A slice that ran on through a pause of the guest says nothing about polling.
                let stale = now.saturating_duration_since(ends) > SLICE;
                if stale || slice + 1 == SLICES {
                    let pays = !stale && self.counts[1] as f64 > self.counts[0] as f64 * GAIN;
                    self.rest = if pays { REST } else { (self.rest * 2).min(REST_MOST) };
                    self.state = State::Settled { poll: pays, until: Some(now + self.rest) };
                } else {
                    self.state = State::Trial { slice: slice + 1, ends: now + SLICE };
                }
            }
            State::Trial { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that comes back `pause` after each request, served at `rate` requests a millisecond as `polled` tells.
    fn run(poller: &mut Poller, pause: Duration, rate: impl Fn(bool) -> f64, time: Duration) -> f64 {
        let start = Instant::now();
        let (mut now, mut done, mut polled, mut looks) = (start, 0.0, 0u32, 0u32);
        while now - start < time {
            let poll = poller.went_empty(now, done as u64).is_some();
            now += pause;
            poller.came(now);
            now += Duration::from_secs_f64(1e-3 / rate(poll));
            done += 1.0;
            looks += 1;
            polled += u32::from(poll);
        }
        f64::from(polled) / f64::from(looks)
    }

    #[test]
    fn polling_is_kept_where_it_pays_and_dropped_where_it_does_not() {
        let us = Duration::from_micros;
        let second = Duration::from_secs(2);
        assert!(run(&mut Poller::new(PollMode::Auto), us(2), |p| if p { 200.0 } else { 100.0 }, second) > 0.8);
        assert!(run(&mut Poller::new(PollMode::Auto), us(2), |p| if p { 90.0 } else { 100.0 }, second) < 0.1);
        assert_eq!(run(&mut Poller::new(PollMode::Auto), us(500), |_| 100.0, second), 0.0);
        assert_eq!(run(&mut Poller::new(PollMode::Off), us(2), |_| 100.0, second), 0.0);
    }
}
