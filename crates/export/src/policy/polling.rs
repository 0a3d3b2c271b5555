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
//! one request at a time never lets that CPU sleep. So it is tried: slices of each candidate in turn,
//! and the rate of requests decides. A candidate that burns or waits must gain to be kept; an idle
//! queue costs nothing.
//!
//! In: the time, the number of requests, and when the queue goes empty or takes requests. Out: how
//! long to look or to gather, and whether to run on the guest's processors. `vhost_user/queue.rs`
//! and `nbd/idle.rs` carry that out.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Counters;

/// How long one look lasts at most; a guest that pauses for twice as long is not waited for.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// The same for User Mode Linux, whose system calls take so long.
const BUSY_POLL_LONG: Duration = Duration::from_micros(300);
/// The same for clients beside those of 50 us: one whose processor falls asleep between two
/// requests takes longer to come back.
const BUSY_POLL_LONGER: Duration = Duration::from_micros(200);
/// How long kicks are gathered.
const GATHER: Duration = Duration::from_micros(200);
/// A guest that pauses for longer has other cares than where its reactor runs.
const CO_LOCATED_PAUSE: Duration = Duration::from_micros(500);

/// A slice of a trial lasts until there were so many requests, but not for ever.
const SLICE_REQUESTS: u64 = 32;
const MAX_SLICE: Duration = Duration::from_millis(60);
/// Gathers in a row that brought no second chain: this guest does not send any.
const VAIN: u32 = 8;
/// A candidate this much slower than the best is tried no further.
const HOPELESS: f64 = 0.7;
/// One that was decided for before, and is this much better than all others at once, needs no
/// second look.
const CLEAR: f64 = 1.15;
/// How long a decision holds before it is tried again; twice as long each time it is confirmed.
const REST: Duration = Duration::from_secs(1);
const MAX_REST: Duration = Duration::from_secs(16);
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
pub enum Strategy {
    Sleep,
    BusyPoll,
    BusyPollLonger,
    Gather,
    CoLocated,
    GatherCoLocated,
}

impl Strategy {
    pub const ALL: [Strategy; 6] = [
        Strategy::Sleep,
        Strategy::BusyPoll,
        Strategy::BusyPollLonger,
        Strategy::Gather,
        Strategy::CoLocated,
        Strategy::GatherCoLocated,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Strategy::Sleep => "sleep",
            Strategy::BusyPoll => "busy-poll",
            Strategy::BusyPollLonger => "busy-poll longer",
            Strategy::Gather => "gather",
            Strategy::CoLocated => "co-located",
            Strategy::GatherCoLocated => "gather, co-located",
        }
    }
}

/// What trials measured and decided.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PollingFigures {
    /// By the number of [`Strategy`].
    strategies: [TrialFigures; Strategy::ALL.len()],
    /// Trials that ended without a decision, because the guest paused.
    pub given_up: u64,
    /// Trials that began early, because the rate had changed.
    pub early: u64,
}

/// What trials found about one strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrialFigures {
    /// Trials that decided for it.
    pub chosen: u64,
    pub slices: u64,
    /// Sum of the rates of its slices, in requests per second.
    rates: f64,
}

impl TrialFigures {
    /// Returns the mean rate of the slices in requests per second. None: it was not tried.
    pub fn rate(&self) -> Option<f64> {
        (self.slices > 0).then(|| self.rates / self.slices as f64)
    }
}

impl PollingFigures {
    pub fn of(&self, strategy: Strategy) -> TrialFigures {
        self.strategies[strategy as usize]
    }

    pub fn merge(&mut self, other: &PollingFigures) {
        for (mine, theirs) in self.strategies.iter_mut().zip(&other.strategies) {
            mine.chosen += theirs.chosen;
            mine.slices += theirs.slices;
            mine.rates += theirs.rates;
        }
        self.given_up += other.given_up;
        self.early += other.early;
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    strategy: Strategy,
    busy_poll: Duration,
    gather: Duration,
    co_located: bool,
    /// By how much its rate must exceed that of plain sleep.
    gain: f64,
}

const SLEEP: Candidate = Candidate {
    strategy: Strategy::Sleep,
    busy_poll: Duration::ZERO,
    gather: Duration::ZERO,
    co_located: false,
    gain: 1.0,
};
const CO_LOCATED: Candidate =
    Candidate { strategy: Strategy::CoLocated, co_located: true, gain: 1.03, ..SLEEP };

/// What is tried, and how: the plain candidate first.
#[derive(Debug)]
struct TrialPlan {
    candidates: &'static [Candidate],
    /// How long a slice lasts at least, beyond a quarter of it that is not counted: the scheduler
    /// has to follow.
    slice: Duration,
    /// Slices of each candidate.
    rounds: usize,
    /// Slices after which it may be given up, or taken, before the others: what one of them shows
    /// may be a machine that stands still.
    sure: usize,
}

const FOR_EVENTFDS: &TrialPlan = &TrialPlan {
    candidates: &[
        SLEEP,
        Candidate { strategy: Strategy::BusyPoll, busy_poll: BUSY_POLL, gain: 1.05, ..SLEEP },
        CO_LOCATED,
    ],
    slice: Duration::from_millis(3),
    rounds: 4,
    sure: 3,
};
const FOR_STREAMS: &TrialPlan = &TrialPlan {
    candidates: &[
        SLEEP,
        Candidate { strategy: Strategy::BusyPoll, busy_poll: BUSY_POLL_LONG, gain: 1.1, ..SLEEP },
        Candidate { strategy: Strategy::Gather, gather: GATHER, gain: 1.05, ..SLEEP },
        CO_LOCATED,
        Candidate { strategy: Strategy::GatherCoLocated, gather: GATHER, gain: 1.05, ..CO_LOCATED },
    ],
    slice: Duration::from_millis(12),
    rounds: 2,
    sure: 1,
};
/// NBD's clients.
const FOR_CLIENTS: &TrialPlan = &TrialPlan {
    candidates: &[
        SLEEP,
        Candidate { strategy: Strategy::BusyPoll, busy_poll: BUSY_POLL, gain: 1.05, ..SLEEP },
        Candidate {
            strategy: Strategy::BusyPollLonger,
            busy_poll: BUSY_POLL_LONGER,
            gain: 1.1,
            ..SLEEP
        },
    ],
    slice: Duration::from_millis(3),
    rounds: 4,
    sure: 3,
};
const MAX_CANDIDATES: usize = 5;
const MAX_ROUNDS: usize = 4;

/// Requests a second, in each slice of a candidate. Their median is what counts: a slice in which the
/// whole machine stood still says nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    slices: [f64; MAX_ROUNDS],
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
    Decided {
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
pub(crate) struct PollingPolicy {
    mode: PollMode,
    plan: &'static TrialPlan,
    /// The reactor can keep to the guest's processors.
    can_co_locate: bool,
    /// The candidate in use, of the plan's, and the last that was decided for.
    current: usize,
    decided: usize,
    vain: u32,
    state: State,
    /// The trial was begun because the rate was strange.
    doubted: bool,
    rest: Duration,
    /// Moving average of the pause between going empty and the next request, in nanoseconds.
    pause: f64,
    empty_since: Option<Instant>,
    rates: [Rates; MAX_CANDIDATES],
    /// Candidates that this trial leaves out.
    excluded: [bool; MAX_CANDIDATES],
    /// When this slice, or window, began, and the count of requests then.
    began: (Instant, u64),
    counters: Rc<Counters>,
}

impl PollingPolicy {
    pub fn new(mode: PollMode, can_co_locate: bool, now: Instant, counters: Rc<Counters>) -> Self {
        PollingPolicy {
            mode,
            plan: FOR_EVENTFDS,
            can_co_locate,
            current: 0,
            decided: 0,
            vain: 0,
            state: State::Decided { until: None, rate: None, strange: 0 },
            doubted: false,
            rest: REST,
            pause: 1e9,
            empty_since: None,
            rates: Default::default(),
            excluded: Default::default(),
            began: (now, 0),
            counters,
        }
    }

    /// For clients that are told by a socket.
    pub fn for_clients(mode: PollMode, now: Instant, counters: Rc<Counters>) -> Self {
        PollingPolicy { plan: FOR_CLIENTS, ..PollingPolicy::new(mode, false, now, counters) }
    }

    /// How the guest is told: by a stream (a pipe or socket) if it is a User Mode Linux.
    pub fn set_notified_by_stream(&mut self, by_stream: bool) {
        self.plan = if by_stream { FOR_STREAMS } else { FOR_EVENTFDS };
        (self.current, self.decided, self.rest) = (0, 0, REST);
        self.state = State::Decided { until: None, rate: None, strange: 0 };
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
                let busy_poll = self.plan.candidates[self.current].busy_poll;
                (!busy_poll.is_zero() && self.pauses_below(busy_poll * 2)).then_some(busy_poll)
            }
        }
    }

    /// The queue slept and was kicked: how long to wait for more kicks before looking at them.
    #[inline]
    pub fn gather(&self) -> Option<Duration> {
        let gather = self.plan.candidates[self.current].gather;
        (!gather.is_zero() && self.pauses_below(gather * 2)).then_some(gather)
    }

    /// Whether the reactor is to keep to the guest's processors.
    #[inline]
    pub fn co_located(&self) -> bool {
        self.plan.candidates[self.current].co_located
    }

    /// After a gather, how many chains were there.
    #[inline]
    pub fn gathered(&mut self, chains: usize, now: Instant, done: u64) {
        self.vain = if chains > 1 { 0 } else { self.vain + 1 };
        if self.vain >= VAIN {
            self.vain = 0;
            match self.state {
                State::Trial { round, .. } => {
                    self.excluded[self.current] = true;
                    self.next_slice(round, now, done);
                }
                // Another load than the one it was decided for.
                State::Decided { .. } => {
                    self.decide(0, now, done);
                    self.state = State::Decided { until: None, rate: None, strange: 0 };
                }
            }
        }
    }

    /// Requests came.
    #[inline]
    pub fn requests_arrived(&mut self, now: Instant) {
        if let Some(since) = self.empty_since.take() {
            let pause = now.saturating_duration_since(since).as_nanos() as f64;
            self.pause += (pause.min(1e7) - self.pause) / 16.0;
        }
    }

    fn pauses_below(&self, limit: Duration) -> bool {
        self.pause < limit.as_nanos() as f64
    }

    /// Whether this candidate could be of use to a guest that pauses like this one.
    fn suits(&self, candidate: &Candidate) -> bool {
        if candidate.co_located && (!self.can_co_locate || !self.pauses_below(CO_LOCATED_PAUSE)) {
            return false;
        }
        let wait = candidate.busy_poll.max(candidate.gather);
        wait.is_zero() || self.pauses_below(wait * 2)
    }

    fn step(&mut self, now: Instant, done: u64) {
        let time = now.saturating_duration_since(self.began.0);
        let (requests, seconds) = (done - self.began.1, time.as_secs_f64().max(1e-9));
        let here = requests as f64 / seconds;
        match &mut self.state {
            State::Decided { until, rate, strange } => {
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
            // The guest paused: that says nothing about any candidate.
            State::Trial { .. } if time > MAX_SLICE => {
                self.count(|figures| figures.given_up += 1);
                self.decide(self.decided, now, done);
            }
            State::Trial { counting, .. } if !*counting => {
                if time >= self.plan.slice / 4 {
                    *counting = true;
                    self.began = (now, done);
                }
            }
            State::Trial { round, .. } if time >= self.plan.slice && requests >= SLICE_REQUESTS => {
                let round = *round;
                self.rates[self.current].add(here);
                let strategy = self.plan.candidates[self.current].strategy;
                self.count(|figures| {
                    let tried = &mut figures.strategies[strategy as usize];
                    (tried.slices, tried.rates) = (tried.slices + 1, tried.rates + here);
                });
                self.next_slice(round, now, done);
            }
            State::Trial { .. } => {}
        }
    }

    fn begin_trial(&mut self, now: Instant, done: u64) {
        self.rates = Default::default();
        for (i, candidate) in self.plan.candidates.iter().enumerate() {
            self.excluded[i] = !self.suits(candidate);
        }
        if self.excluded[1..self.plan.candidates.len()].iter().any(|out| !out) {
            let early = u64::from(self.doubted);
            self.count(|figures| figures.early += early);
            self.begin_slice(0, 0, now, done);
        }
    }

    fn next_slice(&mut self, round: usize, now: Instant, done: u64) {
        let next = (self.current + 1..self.plan.candidates.len()).find(|&i| !self.excluded[i]);
        if let Some(next) = next {
            return self.begin_slice(round, next, now, done);
        }
        let best = self.best();
        let sure = round + 1 >= self.plan.sure;
        if sure {
            for i in 1..self.plan.candidates.len() {
                self.excluded[i] |= self.rates[i].median() < self.rates[best].median() * HOPELESS;
            }
        }
        let rivals = self.excluded[1..self.plan.candidates.len()].iter().any(|out| !out)
            && !(sure && self.confirmed(best));
        if rivals && round + 1 < self.plan.rounds {
            return self.begin_slice(round + 1, 0, now, done);
        }
        let strategy = self.plan.candidates[best].strategy;
        self.count(|figures| figures.strategies[strategy as usize].chosen += 1);
        // What a trial promises is to hold: client and reactor may have shared a processor in its
        // slices, and part after it. If it was doubted already, the first window is to be believed.
        let promised = (!self.doubted).then(|| self.rates[best].median());
        self.decide(best, now, done);
        if let State::Decided { rate, .. } = &mut self.state {
            *rate = promised;
        }
    }

    /// The candidate with the best rate, each by what it must gain.
    fn best(&self) -> usize {
        let worth = |i: usize| self.rates[i].median() / self.plan.candidates[i].gain;
        let tried = (0..self.plan.candidates.len()).filter(|&i| i == 0 || !self.excluded[i]);
        tried.max_by(|&a, &b| worth(a).total_cmp(&worth(b)).then(b.cmp(&a))).unwrap_or(0)
    }

    /// Whether `best` is what was decided for before, and clearly better than all others.
    fn confirmed(&self, best: usize) -> bool {
        let rate = self.rates[best].median();
        best == self.decided
            && (0..self.plan.candidates.len())
                .all(|i| i == best || self.rates[i].median() * CLEAR < rate)
    }

    fn begin_slice(&mut self, round: usize, candidate: usize, now: Instant, done: u64) {
        self.current = candidate;
        self.state = State::Trial { round, counting: false };
        self.began = (now, done);
    }

    /// Trials count, at the end of a slice; requests do not.
    fn count(&self, f: impl FnOnce(&mut PollingFigures)) {
        let mut figures = self.counters.polling.get();
        f(&mut figures);
        self.counters.polling.set(figures);
    }

    fn decide(&mut self, candidate: usize, now: Instant, done: u64) {
        self.rest = if candidate == self.decided { (self.rest * 2).min(MAX_REST) } else { REST };
        (self.current, self.decided) = (candidate, candidate);
        self.state = State::Decided { until: Some(now + self.rest), rate: None, strange: 0 };
        self.began = (now, done);
    }
}

#[cfg(test)]
mod tests;
