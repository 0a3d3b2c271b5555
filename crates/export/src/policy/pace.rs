//! What a queue, or a client's connection, does when it has nothing to take: sleep until the kick,
//! look again for a while first, or sleep on after a kick until more have gathered; and whether its
//! reactor keeps to the guest's own processors.
//!
//! Which of these pays depends on where the host's scheduler runs guest and reactor, and no rule
//! told that in our measurements. With a guest on another CPU and storage that answers at once,
//! looking doubles throughput; where both share a CPU it halves it. A User Mode Linux guest alone
//! on a machine is spread over two CPUs and pays two wake-ups for each of its system calls, until a
//! reactor that looks keeps the second CPU busy: then the guest runs three times as fast. On one
//! CPU each kick costs two switches of address space, and gathering kicks saves them; a guest with
//! one request at a time never lets that CPU sleep. So it is tried: slices of each manner in turn,
//! and the rate of requests decides. A manner that burns or waits must gain to be kept; an idle
//! queue costs nothing.
//!
//! In: the time, the number of requests, and when the queue goes empty or takes requests. Out: how
//! long to look or to gather, and whether to run on the guest's processors. `vhost_user/queue.rs`
//! and `nbd/idle.rs` carry that out.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Counters;

/// How long one look lasts at most; a guest that pauses for twice as long is not waited for.
const LOOK: Duration = Duration::from_micros(50);
/// The same for User Mode Linux, whose system calls take so long.
const LOOK_LONG: Duration = Duration::from_micros(300);
/// The same for clients beside those of 50 us: one whose processor falls asleep between two
/// requests takes longer to come back.
const LOOK_LONGER: Duration = Duration::from_micros(200);
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
/// One that was decided for before, and is this much better than all others at once, needs no
/// second look.
const CLEAR: f64 = 1.15;
/// How long a decision holds before it is tried again; twice as long each time it is confirmed.
const REST: Duration = Duration::from_secs(1);
const REST_MOST: Duration = Duration::from_secs(16);
/// While it holds, the rate is watched: so many windows in a row outside these bounds are another
/// load, to be tried anew.
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

/// What is done when a queue has nothing to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    Sleep,
    Look,
    LookLonger,
    Gather,
    Beside,
    GatherBeside,
}

impl Polling {
    pub const ALL: [Polling; 6] = [
        Polling::Sleep,
        Polling::Look,
        Polling::LookLonger,
        Polling::Gather,
        Polling::Beside,
        Polling::GatherBeside,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Polling::Sleep => "sleep",
            Polling::Look => "look",
            Polling::LookLonger => "look longer",
            Polling::Gather => "gather",
            Polling::Beside => "beside the guest",
            Polling::GatherBeside => "gather beside the guest",
        }
    }
}

/// What trials measured and decided.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PaceFigures {
    /// By the number of [`Polling`].
    kinds: [Tried; Polling::ALL.len()],
    /// Trials that ended without a decision, because the guest paused.
    pub given_up: u64,
    /// Trials that began early, because the rate had changed.
    pub early: u64,
}

/// What trials found about one kind of polling.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tried {
    /// Trials that decided for it.
    pub chosen: u64,
    pub slices: u64,
    /// Sum of the rates of its slices, in requests per second.
    rates: f64,
}

impl Tried {
    /// Returns the mean rate of the slices in requests per second. None: it was not tried.
    pub fn rate(&self) -> Option<f64> {
        (self.slices > 0).then(|| self.rates / self.slices as f64)
    }
}

impl PaceFigures {
    pub fn of(&self, kind: Polling) -> Tried {
        self.kinds[kind as usize]
    }

    pub fn merge(&mut self, other: &PaceFigures) {
        for (mine, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.chosen += theirs.chosen;
            mine.slices += theirs.slices;
            mine.rates += theirs.rates;
        }
        self.given_up += other.given_up;
        self.early += other.early;
    }
}

#[derive(Clone, Copy, Debug)]
struct Manner {
    kind: Polling,
    look: Duration,
    gather: Duration,
    beside: bool,
    /// By how much its rate must exceed that of plain sleep.
    gain: f64,
}

const SLEEP: Manner = Manner {
    kind: Polling::Sleep,
    look: Duration::ZERO,
    gather: Duration::ZERO,
    beside: false,
    gain: 1.0,
};
const BESIDE: Manner = Manner { kind: Polling::Beside, beside: true, gain: 1.03, ..SLEEP };

/// What is tried, and how: the plain manner first.
#[derive(Debug)]
struct Plan {
    manners: &'static [Manner],
    /// How long a slice lasts at least, beyond a quarter of it that is not counted: the scheduler
    /// has to follow.
    slice: Duration,
    /// Slices of each manner.
    rounds: usize,
    /// Slices after which it may be given up, or taken, before the others: what one of them shows
    /// may be a machine that stands still.
    sure: usize,
}

const FOR_EVENTFDS: &Plan = &Plan {
    manners: &[SLEEP, Manner { kind: Polling::Look, look: LOOK, gain: 1.05, ..SLEEP }, BESIDE],
    slice: Duration::from_millis(3),
    rounds: 4,
    sure: 3,
};
const FOR_STREAMS: &Plan = &Plan {
    manners: &[
        SLEEP,
        Manner { kind: Polling::Look, look: LOOK_LONG, gain: 1.1, ..SLEEP },
        Manner { kind: Polling::Gather, gather: GATHER, gain: 1.05, ..SLEEP },
        BESIDE,
        Manner { kind: Polling::GatherBeside, gather: GATHER, gain: 1.05, ..BESIDE },
    ],
    slice: Duration::from_millis(12),
    rounds: 2,
    sure: 1,
};
/// NBD's clients.
const FOR_CLIENTS: &Plan = &Plan {
    manners: &[
        SLEEP,
        Manner { kind: Polling::Look, look: LOOK, gain: 1.05, ..SLEEP },
        Manner { kind: Polling::LookLonger, look: LOOK_LONGER, gain: 1.1, ..SLEEP },
    ],
    slice: Duration::from_millis(3),
    rounds: 4,
    sure: 3,
};
const MANNERS_MOST: usize = 5;
const ROUNDS_MOST: usize = 4;

/// Requests a second, in each slice of a manner. Their median is what counts: a slice in which the
/// whole machine stood still says nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    slices: [f64; ROUNDS_MOST],
    count: usize,
}

impl Rates {
    /// In ascending order.
    fn add(&mut self, rate: f64) {
        let at = self.slices[..self.count].partition_point(|r| *r <= rate);
        self.slices.copy_within(at..self.count, at + 1);
        self.slices[at] = rate;
        self.count += 1;
    }

    /// 0 of none.
    fn median(&self) -> f64 {
        let (below, above) = (self.count.saturating_sub(1) / 2, self.count / 2);
        if self.count == 0 { 0.0 } else { (self.slices[below] + self.slices[above]) / 2.0 }
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `rate` is what is to be expected: the trial's, or that of the first window; `strange`:
    /// windows in a row that were unlike it.
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
pub(crate) struct Pacer {
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
    rates: [Rates; MANNERS_MOST],
    /// Manners that this trial leaves out.
    out: [bool; MANNERS_MOST],
    /// When this slice, or window, began, and the count of requests then.
    began: (Instant, u64),
    counters: Rc<Counters>,
}

impl Pacer {
    pub fn new(mode: PollMode, may_beside: bool, now: Instant, counters: Rc<Counters>) -> Self {
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
            rates: Default::default(),
            out: Default::default(),
            began: (now, 0),
            counters,
        }
    }

    /// For clients that are told by a socket.
    pub fn of_clients(mode: PollMode, now: Instant, counters: Rc<Counters>) -> Self {
        Pacer { plan: FOR_CLIENTS, ..Pacer::new(mode, false, now, counters) }
    }

    /// How the guest is told: by a stream (a pipe or socket) if it is a User Mode Linux.
    pub fn told_by_stream(&mut self, by_stream: bool) {
        self.plan = if by_stream { FOR_STREAMS } else { FOR_EVENTFDS };
        (self.manner, self.settled, self.rest) = (0, 0, REST);
        self.state = State::Settled { until: None, rate: None, strange: 0 };
    }

    /// The queue went empty: how long to look for more before sleeping. `done` counts requests
    /// since ever.
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
        let (requests, seconds) = (done - self.began.1, time.as_secs_f64().max(1e-9));
        let here = requests as f64 / seconds;
        match &mut self.state {
            State::Settled { until, rate, strange } => {
                // Trials begin at the end of a window: by then the average pause is this load's.
                if time < WINDOW {
                    return;
                }
                self.began = (now, done);
                let like = *rate.get_or_insert(here);
                *strange = if SAME_LOAD.contains(&(here / like)) { 0 } else { *strange + 1 };
                let doubted = *strange >= WINDOWS;
                if until.is_none_or(|u| now >= u) || doubted {
                    self.doubted = doubted;
                    self.begin_trial(now, done);
                }
            }
            // The guest paused: that says nothing about any manner.
            State::Trial { .. } if time > SLICE_MOST => {
                self.count(|figures| figures.given_up += 1);
                self.settle(self.settled, now, done);
            }
            State::Trial { counting, .. } if !*counting => {
                if time >= self.plan.slice / 4 {
                    *counting = true;
                    self.began = (now, done);
                }
            }
            State::Trial { round, .. } if time >= self.plan.slice && requests >= SLICE_REQUESTS => {
                let round = *round;
                self.rates[self.manner].add(here);
                let kind = self.plan.manners[self.manner].kind;
                self.count(|figures| {
                    let tried = &mut figures.kinds[kind as usize];
                    (tried.slices, tried.rates) = (tried.slices + 1, tried.rates + here);
                });
                self.next_slice(round, now, done);
            }
            State::Trial { .. } => {}
        }
    }

    fn begin_trial(&mut self, now: Instant, done: u64) {
        self.rates = Default::default();
        for (i, manner) in self.plan.manners.iter().enumerate() {
            self.out[i] = !self.suits(manner);
        }
        if self.out[1..self.plan.manners.len()].iter().any(|out| !out) {
            let early = u64::from(self.doubted);
            self.count(|figures| figures.early += early);
            self.begin_slice(0, 0, now, done);
        }
    }

    fn next_slice(&mut self, round: usize, now: Instant, done: u64) {
        let next = (self.manner + 1..self.plan.manners.len()).find(|&i| !self.out[i]);
        if let Some(next) = next {
            return self.begin_slice(round, next, now, done);
        }
        let best = self.best();
        let sure = round + 1 >= self.plan.sure;
        if sure {
            for i in 1..self.plan.manners.len() {
                self.out[i] |= self.rates[i].median() < self.rates[best].median() * HOPELESS;
            }
        }
        let rivals = self.out[1..self.plan.manners.len()].iter().any(|out| !out)
            && !(sure && self.confirmed(best));
        if rivals && round + 1 < self.plan.rounds {
            return self.begin_slice(round + 1, 0, now, done);
        }
        let kind = self.plan.manners[best].kind;
        self.count(|figures| figures.kinds[kind as usize].chosen += 1);
        // What a trial promises is to hold: client and reactor may have shared a processor in its
        // slices, and part after it. If it was doubted already, the first window is to be believed.
        let promised = (!self.doubted).then(|| self.rates[best].median());
        self.settle(best, now, done);
        if let State::Settled { rate, .. } = &mut self.state {
            *rate = promised;
        }
    }

    /// The manner with the best rate, each by what it must gain.
    fn best(&self) -> usize {
        let worth = |i: usize| self.rates[i].median() / self.plan.manners[i].gain;
        let tried = (0..self.plan.manners.len()).filter(|&i| i == 0 || !self.out[i]);
        tried.max_by(|&a, &b| worth(a).total_cmp(&worth(b)).then(b.cmp(&a))).unwrap_or(0)
    }

    /// Whether `best` is what was decided for before, and clearly better than all others.
    fn confirmed(&self, best: usize) -> bool {
        let rate = self.rates[best].median();
        best == self.settled
            && (0..self.plan.manners.len())
                .all(|i| i == best || self.rates[i].median() * CLEAR < rate)
    }

    fn begin_slice(&mut self, round: usize, manner: usize, now: Instant, done: u64) {
        self.manner = manner;
        self.state = State::Trial { round, counting: false };
        self.began = (now, done);
    }

    /// Trials count, at the end of a slice; requests do not.
    fn count(&self, f: impl FnOnce(&mut PaceFigures)) {
        let mut figures = self.counters.pace.get();
        f(&mut figures);
        self.counters.pace.set(figures);
    }

    fn settle(&mut self, manner: usize, now: Instant, done: u64) {
        self.rest = if manner == self.settled { (self.rest * 2).min(REST_MOST) } else { REST };
        (self.manner, self.settled) = (manner, manner);
        self.state = State::Settled { until: Some(now + self.rest), rate: None, strange: 0 };
        self.began = (now, done);
    }
}

#[cfg(test)]
mod tests;
