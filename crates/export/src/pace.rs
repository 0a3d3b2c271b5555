//! What a queue, or a client's connection, does when it has nothing to take: sleep until the kick, look again for a while
//! first, or sleep on after a kick until more have gathered; and whether its reactor keeps to the guest's own processors.
//!
//! Which of these pays depends on where the host's scheduler runs guest and reactor, and no rule told that in our
//! measurements. With a guest on another CPU and storage that answers at once, looking doubles throughput; where both share a
//! CPU it halves it. A User Mode Linux guest alone on a machine is spread over two CPUs and pays two wake-ups for each of its
//! system calls, until a reactor that looks keeps the second CPU busy: then the guest runs three times as fast. On one
//! CPU each kick costs two switches of address space, and gathering kicks saves them; a guest with one request at a time
//! never lets that CPU sleep. So it is tried: slices of each manner in turn, and the rate of requests decides. A manner
//! that burns or waits must gain to be kept; an idle queue costs nothing.

use std::time::{Duration, Instant};

/// How long one look lasts at most; a guest that pauses for twice as long is not waited for.
const LOOK: Duration = Duration::from_micros(50);
/// The same for User Mode Linux, whose system calls take so long.
const LOOK_LONG: Duration = Duration::from_micros(300);
/// How long kicks are gathered.
const GATHER: Duration = Duration::from_micros(200);
/// A guest that pauses for longer has other cares than where its reactor runs.
const BESIDE_PAUSE: Duration = Duration::from_micros(500);

/// A slice of a trial lasts until there were so many requests, but not for ever.
const SLICE_REQUESTS: u64 = 32;
const SLICE_MOST: Duration = Duration::from_millis(60);
/// Gathers in a row that brought no second chain: this guest does not send any.
const VAIN: u32 = 8;
/// A manner this much slower than the best is tried no further.
const HOPELESS: f64 = 0.7;
/// One that was decided for before, and is this much better than all others at once, needs no second look.
const CLEAR: f64 = 1.15;
/// How long a decision holds before it is tried again; twice as long each time it is confirmed.
const REST: Duration = Duration::from_secs(1);
const REST_MOST: Duration = Duration::from_secs(16);
/// While it holds, the rate is watched: so many windows in a row outside these bounds are another load, to be tried anew.
const WINDOW: Duration = Duration::from_millis(50);
const WINDOWS: u32 = 2;
const SAME_LOAD: std::ops::Range<f64> = 0.5..2.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollMode {
    /// Try, and keep what pays.
    Auto,
    Off,
    /// Always look this long.
    Fixed(Duration),
}

#[derive(Clone, Copy, Debug)]
struct Manner {
    name: &'static str,
    look: Duration,
    gather: Duration,
    beside: bool,
    /// By how much its rate must exceed that of plain sleep.
    gain: f64,
}

const SLEEP: Manner = Manner { name: "sleep", look: Duration::ZERO, gather: Duration::ZERO, beside: false, gain: 1.0 };
const BESIDE: Manner = Manner { name: "beside the guest", beside: true, gain: 1.03, ..SLEEP };

/// What is tried, and how: the plain manner first.
#[derive(Debug)]
struct Plan {
    manners: &'static [Manner],
    /// How long a slice lasts at least, beyond a quarter of it that is not counted: the scheduler has to follow.
    slice: Duration,
    /// Slices of each manner.
    rounds: usize,
}

const FOR_EVENTFDS: &Plan = &Plan {
    manners: &[SLEEP, Manner { name: "look", look: LOOK, gain: 1.05, ..SLEEP }, BESIDE],
    slice: Duration::from_millis(3),
    rounds: 4,
};
const FOR_STREAMS: &Plan = &Plan {
    manners: &[
        SLEEP,
        Manner { name: "look", look: LOOK_LONG, gain: 1.1, ..SLEEP },
        Manner { name: "gather", gather: GATHER, gain: 1.05, ..SLEEP },
        BESIDE,
        Manner { name: "gather beside the guest", gather: GATHER, gain: 1.05, ..BESIDE },
    ],
    slice: Duration::from_millis(12),
    rounds: 2,
};
const MANNERS_MOST: usize = 5;

/// Requests and the time they took.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    requests: u64,
    seconds: f64,
}

impl Count {
    fn rate(self) -> f64 {
        if self.seconds > 0.0 { self.requests as f64 / self.seconds } else { 0.0 }
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `rate` is what is to be expected: the trial's, or that of the first window; `strange`: windows in a row that were
    /// unlike it.
    Settled {
        until: Option<Instant>,
        rate: Option<f64>,
        strange: u32,
    },
    Trial {
        round: usize,
        counting: bool,
    },
}

#[derive(Debug)]
pub struct Pacer {
    mode: PollMode,
    plan: &'static Plan,
    /// The reactor can keep to the guest's processors.
    may_beside: bool,
    /// The manner in use, of the plan's, and the last that was decided for.
    manner: usize,
    settled: usize,
    vain: u32,
    state: State,
    /// The trial was begun because the rate was strange.
    doubted: bool,
    rest: Duration,
    /// Moving average of the pause between going empty and the next request, in nanoseconds.
    pause: f64,
    empty_since: Option<Instant>,
    counts: [Count; MANNERS_MOST],
    /// Manners that this trial leaves out.
    out: [bool; MANNERS_MOST],
    /// When this slice, or window, began, and the count of requests then.
    began: (Instant, u64),
}

impl Pacer {
    pub fn new(mode: PollMode, may_beside: bool, now: Instant) -> Self {
        Pacer {
            mode,
            plan: FOR_EVENTFDS,
            may_beside,
            manner: 0,
            settled: 0,
            vain: 0,
            state: State::Settled { until: None, rate: None, strange: 0 },
            doubted: false,
            rest: REST,
            pause: 1e9,
            empty_since: None,
            counts: Default::default(),
            out: Default::default(),
            began: (now, 0),
        }
    }

    /// How the guest is told: by a stream (a pipe or socket) if it is a User Mode Linux.
    pub fn told_by_stream(&mut self, by_stream: bool) {
        self.plan = if by_stream { FOR_STREAMS } else { FOR_EVENTFDS };
        (self.manner, self.settled, self.rest) = (0, 0, REST);
        self.state = State::Settled { until: None, rate: None, strange: 0 };
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
                let look = self.plan.manners[self.manner].look;
                (!look.is_zero() && self.pauses_below(look * 2)).then_some(look)
            }
        }
    }

    /// The queue slept and was kicked: how long to wait for more kicks before looking at them.
    #[inline]
    pub fn gather(&self) -> Option<Duration> {
        let gather = self.plan.manners[self.manner].gather;
        (!gather.is_zero() && self.pauses_below(gather * 2)).then_some(gather)
    }

    /// Whether the reactor is to keep to the guest's processors.
    #[inline]
    pub fn beside(&self) -> bool {
        self.plan.manners[self.manner].beside
    }

    /// After a gather, how many chains were there.
    #[inline]
    pub fn gathered(&mut self, chains: usize, now: Instant, done: u64) {
        self.vain = if chains > 1 { 0 } else { self.vain + 1 };
        if self.vain >= VAIN {
            self.vain = 0;
            match self.state {
                State::Trial { round, .. } => {
                    self.out[self.manner] = true;
                    self.next_slice(round, now, done);
                }
                // Another load than the one it was decided for.
                State::Settled { .. } => {
                    self.settle(0, now, done);
                    self.state = State::Settled { until: None, rate: None, strange: 0 };
                }
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

    fn pauses_below(&self, limit: Duration) -> bool {
        self.pause < limit.as_nanos() as f64
    }

    /// Whether this manner could be of use to a guest that pauses like this one.
    fn suits(&self, manner: &Manner) -> bool {
        if manner.beside && (!self.may_beside || !self.pauses_below(BESIDE_PAUSE)) {
            return false;
        }
        let wait = manner.look.max(manner.gather);
        wait.is_zero() || self.pauses_below(wait * 2)
    }

    fn step(&mut self, now: Instant, done: u64) {
        let time = now.saturating_duration_since(self.began.0);
        let here = Count { requests: done - self.began.1, seconds: time.as_secs_f64() };
        match &mut self.state {
            State::Settled { until, rate, strange } => {
                // Trials begin at the end of a window: by then the average pause is this load's.
                if time < WINDOW {
                    return;
                }
                self.began = (now, done);
                let like = *rate.get_or_insert(here.rate());
                *strange = if SAME_LOAD.contains(&(here.rate() / like)) { 0 } else { *strange + 1 };
                let doubted = *strange >= WINDOWS;
                if until.is_none_or(|u| now >= u) || doubted {
                    self.doubted = doubted;
                    self.begin_trial(now, done);
                }
            }
            // The guest paused: that says nothing about any manner.
            State::Trial { .. } if time > SLICE_MOST => self.settle(self.settled, now, done),
            State::Trial { counting, .. } if !*counting => {
                if time >= self.plan.slice / 4 {
                    *counting = true;
                    self.began = (now, done);
                }
            }
            State::Trial { round, .. } if time >= self.plan.slice && here.requests >= SLICE_REQUESTS => {
                let round = *round;
                let count = &mut self.counts[self.manner];
                count.requests += here.requests;
                count.seconds += here.seconds;
                self.next_slice(round, now, done);
            }
            State::Trial { .. } => {}
        }
    }

    fn begin_trial(&mut self, now: Instant, done: u64) {
        self.counts = Default::default();
        for (i, manner) in self.plan.manners.iter().enumerate() {
            self.out[i] = !self.suits(manner);
        }
        if self.out[1..self.plan.manners.len()].iter().any(|out| !out) {
            self.begin_slice(0, 0, now, done);
        }
    }

    fn next_slice(&mut self, round: usize, now: Instant, done: u64) {
        let next = (self.manner + 1..self.plan.manners.len()).find(|&i| !self.out[i]);
        if let Some(next) = next {
            return self.begin_slice(round, next, now, done);
        }
        let best = self.best();
        for i in 1..self.plan.manners.len() {
            self.out[i] |= self.counts[i].rate() < self.counts[best].rate() * HOPELESS;
        }
        let rivals = self.out[1..self.plan.manners.len()].iter().any(|out| !out) && !self.confirmed(best);
        if rivals && round + 1 < self.plan.rounds {
            return self.begin_slice(round + 1, 0, now, done);
        }
        tracing::debug!(
            manner = self.plan.manners[best].name,
            rates = ?self.counts.map(|c| c.rate().round()),
            "requests a second of each manner"
        );
        // What a trial promises is to hold: client and reactor may have shared a processor in its slices, and part after it. If
        // it was doubted already, the first window is to be believed.
        let promised = (!self.doubted).then(|| self.counts[best].rate());
        self.settle(best, now, done);
        if let State::Settled { rate, .. } = &mut self.state {
            *rate = promised;
        }
    }

    /// The manner with the best rate of those that gain enough.
    fn best(&self) -> usize {
        let of = |i: usize| self.counts[i].rate();
        let enough = |&i: &usize| i == 0 || !self.out[i] && of(i) > of(0) * self.plan.manners[i].gain;
        (0..self.plan.manners.len()).filter(enough).max_by(|&a, &b| of(a).total_cmp(&of(b))).unwrap_or(0)
    }

    /// Whether `best` is what was decided for before, and clearly better than all others.
    fn confirmed(&self, best: usize) -> bool {
        let rate = self.counts[best].rate();
        best == self.settled && (0..self.plan.manners.len()).all(|i| i == best || self.counts[i].rate() * CLEAR < rate)
    }

    fn begin_slice(&mut self, round: usize, manner: usize, now: Instant, done: u64) {
        self.manner = manner;
        self.state = State::Trial { round, counting: false };
        self.began = (now, done);
    }

    fn settle(&mut self, manner: usize, now: Instant, done: u64) {
        self.rest = if manner == self.settled { (self.rest * 2).min(REST_MOST) } else { REST };
        (self.manner, self.settled) = (manner, manner);
        self.state = State::Settled { until: Some(now + self.rest), rate: None, strange: 0 };
        self.began = (now, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that comes back `pause` after each request, and a host that serves it at `rate` requests a millisecond, as the
    /// manner tells.
    struct Guest {
        pacer: Pacer,
        now: Instant,
        done: f64,
    }

    #[derive(Default, PartialEq, Debug)]
    struct Shares {
        looked: f64,
        gathered: f64,
    }

    impl Guest {
        fn new(mode: PollMode, by_stream: bool) -> Self {
            let now = Instant::now();
            let mut pacer = Pacer::new(mode, false, now);
            pacer.told_by_stream(by_stream);
            Guest { pacer, now, done: 0.0 }
        }

        /// Shares of the times the queue went empty at which it looked, and at which it gathered.
        fn run(&mut self, pause: Duration, rate: impl Fn(bool, bool) -> f64, time: Duration) -> Shares {
            let (start, mut times, mut shares) = (self.now, 0.0, Shares::default());
            while self.now - start < time {
                let looks = self.pacer.went_empty(self.now, self.done as u64).is_some();
                let gathers = self.pacer.gather().is_some();
                self.now += pause;
                self.pacer.came(self.now);
                self.now += Duration::from_secs_f64(1e-3 / rate(looks, gathers));
                self.done += 1.0;
                times += 1.0;
                shares.looked += f64::from(u8::from(looks));
                shares.gathered += f64::from(u8::from(gathers));
            }
            Shares { looked: shares.looked / times, gathered: shares.gathered / times }
        }
    }

    const TIME: Duration = Duration::from_secs(4);

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    #[test]
    fn looking_is_kept_where_it_pays_and_dropped_where_it_does_not() {
        let mut auto = Guest::new(PollMode::Auto, false);
        assert!(auto.run(us(2), |looks, _| if looks { 200.0 } else { 100.0 }, TIME).looked > 0.8);
        let mut auto = Guest::new(PollMode::Auto, false);
        assert!(auto.run(us(2), |looks, _| if looks { 90.0 } else { 100.0 }, TIME).looked < 0.1);
        let mut off = Guest::new(PollMode::Off, true);
        assert_eq!(off.run(us(2), |_, _| 100.0, TIME), Shares::default());
    }

    #[test]
    fn a_guest_that_pauses_for_long_is_not_looked_for() {
        for by_stream in [false, true] {
            let mut auto = Guest::new(PollMode::Auto, by_stream);
            assert_eq!(auto.run(us(1000), |looks, _| if looks { 200.0 } else { 100.0 }, TIME), Shares::default());
        }
    }

    #[test]
    fn streams_gather_where_that_pays() {
        let gathering = |looks, gathers| {
            if gathers {
                25.0
            } else if looks {
                10.0
            } else {
                20.0
            }
        };
        let shares = Guest::new(PollMode::Auto, true).run(us(20), gathering, TIME);
        assert!(shares.gathered > 0.8, "{shares:?}");
        assert_eq!(Guest::new(PollMode::Auto, false).run(us(20), gathering, TIME).gathered, 0.0);
    }

    #[test]
    fn a_guest_that_sends_one_at_a_time_is_not_gathered_for() {
        let now = Instant::now();
        let mut pacer = Pacer::new(PollMode::Auto, false, now);
        pacer.told_by_stream(true);
        pacer.manner = pacer.plan.manners.iter().position(|m| !m.gather.is_zero()).unwrap();
        pacer.pause = 1e4;
        for _ in 0..VAIN - 1 {
            pacer.gathered(1, now, 0);
        }
        pacer.gathered(2, now, 0);
        assert!(pacer.gather().is_some(), "one good gather makes up for vain ones");
        for _ in 0..VAIN {
            pacer.gathered(1, now, 0);
        }
        assert!(pacer.gather().is_none());
    }

    #[test]
    fn a_trial_whose_promise_does_not_hold_is_made_again() {
        let mut auto = Guest::new(PollMode::Auto, false);
        // Until after the first trial, sleeping is fast.
        let first = auto.run(us(20), |looks, _| if looks { 40.0 } else { 55.0 }, WINDOW + us(40_000));
        assert!(first.looked < 0.5, "{first:?}");
        assert!(matches!(auto.pacer.state, State::Settled { rate: Some(_), .. }), "{:?}", auto.pacer.state);
        let later = auto.run(us(60), |looks, _| if looks { 40.0 } else { 15.0 }, REST / 2);
        assert!(later.looked > 0.5, "{later:?}");
    }

    #[test]
    fn another_load_is_tried_at_once_and_not_after_the_rest() {
        let mut auto = Guest::new(PollMode::Auto, false);
        // Long enough for the rests to have grown.
        auto.run(us(2), |looks, _| if looks { 90.0 } else { 100.0 }, TIME * 4);
        assert!(auto.run(us(4), |looks, _| if looks { 40.0 } else { 20.0 }, TIME / 4).looked > 0.5);
    }
}
