//! The polling policy: what a virtqueue, or an NBD connection, does when it has no request to take.
//!
//! The strategies:
//! - sleep until the next kick;
//! - busy-poll the ring for a while, then sleep;
//! - busy-poll also while requests are in flight, so that the processor does not sleep until the
//!   storage answers;
//! - gather: after a kick, sleep a little longer, so that more requests arrive before the queue
//!   reads the ring;
//! - co-locate: run the reactor's thread on the guest's processors. For User Mode Linux it also
//!   busy-polls in flight.
//!
//! Which strategy is fastest depends on where the host's scheduler runs guest and reactor.
//! Measurements show no rule that predicts it:
//! - Guest and reactor on different CPUs, storage that answers at once: busy-polling doubles
//!   throughput.
//! - Guest and reactor on the same CPU: busy-polling halves throughput.
//! - User Mode Linux alone on a machine: the scheduler spreads it over two CPUs, and each of its
//!   system calls costs two wake-ups. A reactor that busy-polls keeps the second CPU busy, and the
//!   guest then runs three times as fast.
//! - User Mode Linux, one request at a time, storage that takes 40 us: the processor sleeps and
//!   wakes within each request. Busy-polling also in flight makes requests 8 to 23% shorter.
//! - One CPU: each kick costs two switches of the address space. Gathering saves some of them,
//!   except for a guest that has one request at a time.
//!
//! So the policy measures. A trial runs each candidate strategy for several short slices, and
//! compares the rates of requests. A strategy that burns CPU time or delays requests must be faster
//! than plain sleep by a margin. An idle queue costs nothing, because trials run only while
//! requests come.
//!
//! In: the time, the number of requests, and when the queue becomes empty or takes requests. Out:
//! how long to busy-poll or to gather, and whether to run on the guest's processors.
//! `vhost_user/queue.rs` and `nbd/idle.rs` carry that out.

use std::rc::Rc;
use std::time::{Duration, Instant};

use blockyard_ring::{Latest, later};

use super::Counters;

/// Longest busy-poll. If a guest's mean pause is at least twice as long as the busy-poll, the queue
/// does not busy-poll.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// Longest busy-poll for User Mode Linux, whose system calls take longer.
const BUSY_POLL_LONG: Duration = Duration::from_micros(300);
/// A second busy-poll time for NBD clients, besides [`BUSY_POLL`]. If a client's processor enters a
/// sleep state between two requests, the client needs longer to send the next request.
const BUSY_POLL_LONGER: Duration = Duration::from_micros(200);
/// Time that the queue waits after a kick for more requests.
const GATHER: Duration = Duration::from_micros(200);
/// Longest mean pause of a guest for which the policy tries co-location.
const CO_LOCATED_PAUSE: Duration = Duration::from_micros(500);

/// Number of requests after which a slice ends, if its least duration is over. A slice that lasts
/// longer than `MAX_SLICE` ends the trial.
const SLICE_REQUESTS: u64 = 32;
const MAX_SLICE: Duration = Duration::from_millis(60);
/// Number of gathers in a row that yield only one chain each before the queue stops gathering.
const MAX_VAIN_GATHERS: u32 = 8;
/// Fraction of the best rate below which a candidate leaves the trial.
const DROP_BELOW: f64 = 0.7;
/// Factor by which the strategy that was chosen before must be faster than each other candidate to
/// end a trial early.
const CLEARLY_FASTER: f64 = 1.15;
/// Time between a decision and the next trial. The time doubles each time a trial confirms the
/// decision.
const HOLD: Duration = Duration::from_secs(1);
const MAX_HOLD: Duration = Duration::from_secs(16);
/// Between trials the rate is measured in windows. If the rate of `WINDOWS` windows in a row leaves
/// `SAME_LOAD`, relative to the expected rate, a trial starts early.
const WINDOW: Duration = Duration::from_millis(50);
const WINDOWS: u32 = 2;
const SAME_LOAD: std::ops::Range<f64> = 0.5..2.0;

/// How a queue polls (`--poll`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollMode {
    /// Tries the strategies, and keeps the fastest.
    Auto,
    Off,
    /// Always busy-polls for this long.
    Fixed(Duration),
}

/// What a queue does when its ring is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    Sleep,
    BusyPoll,
    BusyPollLonger,
    BusyPollInFlight,
    Gather,
    CoLocated,
    BusyPollInFlightCoLocated,
}

impl Strategy {
    pub const ALL: [Strategy; 7] = [
        Strategy::Sleep,
        Strategy::BusyPoll,
        Strategy::BusyPollLonger,
        Strategy::BusyPollInFlight,
        Strategy::Gather,
        Strategy::CoLocated,
        Strategy::BusyPollInFlightCoLocated,
    ];

    /// Returns the strategy's name for the log.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Sleep => "sleep",
            Strategy::BusyPoll => "busy-poll",
            Strategy::BusyPollLonger => "busy-poll longer",
            Strategy::BusyPollInFlight => "busy-poll in flight",
            Strategy::Gather => "gather",
            Strategy::CoLocated => "co-located",
            Strategy::BusyPollInFlightCoLocated => "busy-poll in flight, co-located",
        }
    }
}

/// What trials measured and decided, summed over the queues of a disk on a reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PollingFigures {
    /// The figures of each strategy, indexed by [`Strategy`].
    pub strategies: [TrialFigures; Strategy::ALL.len()],
    /// Trials that ended without a decision because the guest paused.
    pub given_up: u64,
    /// Trials that began early because the rate had changed.
    pub early: u64,
    /// Times that a queue stopped gathering because nothing more arrived meanwhile.
    pub vain: u64,
}

/// Measurements of one strategy in trials.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrialFigures {
    /// Trials that chose this strategy.
    pub chosen: u64,
    /// Number of measured time slices.
    pub slices: u64,
    /// Sum of the request rates of the trial's time slices, in requests per second.
    rates: f64,
    /// The rate of the last slice, in requests per second.
    pub last: Option<Latest<f64>>,
}

impl TrialFigures {
    /// Returns the mean rate of the slices in requests per second, or `None` if no trial used this
    /// strategy.
    pub fn rate(&self) -> Option<f64> {
        (self.slices > 0).then(|| self.rates / self.slices as f64)
    }
}

impl PollingFigures {
    /// Returns the figures of one strategy.
    pub fn of(&self, strategy: Strategy) -> TrialFigures {
        self.strategies[strategy as usize]
    }

    pub fn merge(&mut self, other: &PollingFigures) {
        for (mine, theirs) in self.strategies.iter_mut().zip(&other.strategies) {
            mine.chosen += theirs.chosen;
            mine.slices += theirs.slices;
            mine.rates += theirs.rates;
            mine.last = later(mine.last, theirs.last);
        }
        self.given_up += other.given_up;
        self.early += other.early;
        self.vain += other.vain;
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    strategy: Strategy,
    busy_poll: Duration,
    /// The queue busy-polls also while requests are in flight.
    in_flight: bool,
    gather: Duration,
    co_located: bool,
    /// Factor by which this candidate's rate must exceed that of plain sleep.
    gain: f64,
}

const SLEEP: Candidate = Candidate {
    strategy: Strategy::Sleep,
    busy_poll: Duration::ZERO,
    in_flight: false,
    gather: Duration::ZERO,
    co_located: false,
    gain: 1.0,
};

/// The candidates of a trial, and the parameters of the measurement. The first candidate is plain
/// sleep.
#[derive(Debug)]
struct TrialPlan {
    candidates: &'static [Candidate],
    /// Some candidates busy-poll while requests are in flight.
    tries_in_flight: bool,
    /// Least duration of a slice. Requests in a quarter of this time before the slice do not count,
    /// because the scheduler needs time to react.
    slice: Duration,
    /// Number of slices of each candidate.
    rounds: usize,
    /// Number of rounds after which a trial may end early, or drop a slow candidate. A single slice
    /// may be wrong because the machine stopped for a moment.
    decisive_after: usize,
}

const FOR_EVENTFDS: &TrialPlan = &TrialPlan {
    candidates: &[
        SLEEP,
        Candidate { strategy: Strategy::BusyPoll, busy_poll: BUSY_POLL, gain: 1.05, ..SLEEP },
        Candidate { strategy: Strategy::CoLocated, co_located: true, gain: 1.03, ..SLEEP },
    ],
    tries_in_flight: false,
    slice: Duration::from_millis(3),
    rounds: 4,
    decisive_after: 3,
};
const IN_FLIGHT: Candidate = Candidate {
    strategy: Strategy::BusyPollInFlight,
    busy_poll: BUSY_POLL_LONG,
    in_flight: true,
    gain: 1.1,
    ..SLEEP
};
const FOR_STREAMS: &TrialPlan = &TrialPlan {
    candidates: &[
        SLEEP,
        Candidate { strategy: Strategy::BusyPoll, busy_poll: BUSY_POLL_LONG, gain: 1.1, ..SLEEP },
        IN_FLIGHT,
        Candidate { strategy: Strategy::Gather, gather: GATHER, gain: 1.05, ..SLEEP },
        Candidate { strategy: Strategy::BusyPollInFlightCoLocated, co_located: true, ..IN_FLIGHT },
    ],
    tries_in_flight: true,
    slice: Duration::from_millis(12),
    rounds: 2,
    decisive_after: 1,
};
/// The trial plan for NBD clients.
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
    tries_in_flight: false,
    slice: Duration::from_millis(3),
    rounds: 4,
    decisive_after: 3,
};
const MAX_CANDIDATES: usize = 5;
const MAX_ROUNDS: usize = 4;

/// Rates of one candidate's slices, in requests per second. The policy compares medians, so one
/// slice in which the whole machine stopped has no effect.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    slices: [f64; MAX_ROUNDS],
    count: usize,
}

impl Rates {
    /// Inserts a rate, and keeps `slices` in ascending order.
    fn add(&mut self, rate: f64) {
        let at = self.slices[..self.count].partition_point(|r| *r <= rate);
        self.slices.copy_within(at..self.count, at + 1);
        self.slices[at] = rate;
        self.count += 1;
    }

    /// Returns the median rate, or 0.0 if there is no slice.
    fn median(&self) -> f64 {
        let (below, above) = (self.count.saturating_sub(1) / 2, self.count / 2);
        if self.count == 0 { 0.0 } else { (self.slices[below] + self.slices[above]) / 2.0 }
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `rate`: the expected rate, from the trial or from the first window. `changed_windows`:
    /// number of windows in a row with a rate outside [`SAME_LOAD`].
    Decided {
        until: Option<Instant>,
        rate: Option<f64>,
        changed_windows: u32,
    },
    Trial {
        round: usize,
        counting: bool,
    },
}

/// Decides what one queue, or the NBD connections of one disk, do when idle.
#[derive(Debug)]
pub(crate) struct PollingPolicy {
    mode: PollMode,
    plan: &'static TrialPlan,
    /// The reactor can run on the guest's processors alone.
    can_co_locate: bool,
    /// Index of the candidate in use, and of the candidate that the last trial chose.
    current: usize,
    decided: usize,
    vain_gathers: u32,
    state: State,
    /// The current trial began because the rate had changed.
    began_early: bool,
    hold: Duration,
    /// Moving average of the time between an empty queue and the next request, in nanoseconds.
    pause: f64,
    empty_since: Option<Instant>,
    rates: [Rates; MAX_CANDIDATES],
    /// Candidates that the current trial does not measure.
    excluded: [bool; MAX_CANDIDATES],
    /// Time when the current slice or window began, and the number of requests at that time.
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
            vain_gathers: 0,
            state: State::Decided { until: None, rate: None, changed_windows: 0 },
            began_early: false,
            hold: HOLD,
            pause: 1e9,
            empty_since: None,
            rates: Default::default(),
            excluded: Default::default(),
            began: (now, 0),
            counters,
        }
    }

    /// Returns the policy for NBD connections.
    pub fn for_clients(mode: PollMode, now: Instant, counters: Rc<Counters>) -> Self {
        PollingPolicy { plan: FOR_CLIENTS, ..PollingPolicy::new(mode, false, now, counters) }
    }

    /// Chooses the candidates by how the guest is notified: User Mode Linux uses a stream (a pipe
    /// or socket), a virtual machine an eventfd. Resets the decision.
    pub fn set_notified_by_stream(&mut self, by_stream: bool) {
        self.plan = if by_stream { FOR_STREAMS } else { FOR_EVENTFDS };
        (self.current, self.decided, self.hold) = (0, 0, HOLD);
        self.state = State::Decided { until: None, rate: None, changed_windows: 0 };
    }

    /// Returns how long to busy-poll before the queue sleeps, or `None` to sleep at once. The queue
    /// calls this when its ring is empty. `done` is the number of requests since the queue's start.
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

    /// Returns how long to busy-poll although requests are in flight, or `None` to sleep until one
    /// is complete. The queue calls this when its ring is empty.
    #[inline]
    pub fn waits_in_flight(&mut self, now: Instant, done: u64) -> Option<Duration> {
        if self.mode != PollMode::Auto || !self.plan.tries_in_flight {
            return None;
        }
        // The queue may never again be without requests in flight.
        self.step(now, done);
        let Candidate { busy_poll, in_flight, .. } = self.plan.candidates[self.current];
        (in_flight && self.pauses_below(busy_poll * 2)).then_some(busy_poll)
    }

    /// Returns how long to wait for more kicks, if the strategy gathers. The queue calls this after
    /// a kick has woken it.
    #[inline]
    pub fn gather(&self) -> Option<Duration> {
        let gather = self.plan.candidates[self.current].gather;
        (!gather.is_zero() && self.pauses_below(gather * 2)).then_some(gather)
    }

    /// Returns whether the reactor should run on the guest's processors alone.
    #[inline]
    pub fn co_located(&self) -> bool {
        self.plan.candidates[self.current].co_located
    }

    /// Reports the number of chains that the queue took after a gather.
    #[inline]
    pub fn gathered(&mut self, chains: usize, now: Instant, done: u64) {
        self.vain_gathers = if chains > 1 { 0 } else { self.vain_gathers + 1 };
        if self.vain_gathers >= MAX_VAIN_GATHERS {
            self.vain_gathers = 0;
            self.count(|figures| figures.vain += 1);
            match self.state {
                State::Trial { round, .. } => {
                    self.excluded[self.current] = true;
                    self.next_slice(round, now, done);
                }
                // The load has changed since the decision.
                State::Decided { .. } => {
                    self.decide(0, now, done);
                    self.state = State::Decided { until: None, rate: None, changed_windows: 0 };
                }
            }
        }
    }

    /// Reports that requests arrived.
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

    /// Returns whether a candidate can be faster for a guest with this mean pause.
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
            State::Decided { until, rate, changed_windows } => {
                // Trials begin only at the end of a window, when the average pause reflects the
                // current load.
                if time < WINDOW {
                    return;
                }
                self.began = (now, done);
                let like = *rate.get_or_insert(here);
                *changed_windows =
                    if SAME_LOAD.contains(&(here / like)) { 0 } else { *changed_windows + 1 };
                let began_early = *changed_windows >= WINDOWS;
                if until.is_none_or(|u| now >= u) || began_early {
                    self.began_early = began_early;
                    self.begin_trial(now, done);
                }
            }
            // The guest paused, so the slice measured no candidate.
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
                    tried.last = Some(Latest { at: now, value: here });
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
            let early = u64::from(self.began_early);
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
        let is_decisive = round + 1 >= self.plan.decisive_after;
        if is_decisive {
            for i in 1..self.plan.candidates.len() {
                self.excluded[i] |= self.rates[i].median() < self.rates[best].median() * DROP_BELOW;
            }
        }
        let rivals = self.excluded[1..self.plan.candidates.len()].iter().any(|out| !out)
            && !(is_decisive && self.confirmed(best));
        if rivals && round + 1 < self.plan.rounds {
            return self.begin_slice(round + 1, 0, now, done);
        }
        let strategy = self.plan.candidates[best].strategy;
        self.count(|figures| figures.strategies[strategy as usize].chosen += 1);
        // The trial's rate becomes the expected rate. The first window cannot set it, because
        // client and reactor may have shared a processor during the slices and separate afterwards.
        // If the rate had already changed before this trial, the first window sets the expected
        // rate.
        let promised = (!self.began_early).then(|| self.rates[best].median());
        self.decide(best, now, done);
        if let State::Decided { rate, .. } = &mut self.state {
            *rate = promised;
        }
    }

    /// Returns the candidate with the highest quotient of rate and required gain.
    fn best(&self) -> usize {
        let worth = |i: usize| self.rates[i].median() / self.plan.candidates[i].gain;
        let tried = (0..self.plan.candidates.len()).filter(|&i| i == 0 || !self.excluded[i]);
        tried.max_by(|&a, &b| worth(a).total_cmp(&worth(b)).then(b.cmp(&a))).unwrap_or(0)
    }

    /// Returns whether `best` was also chosen by the last trial, and is clearly faster than all
    /// others.
    fn confirmed(&self, best: usize) -> bool {
        let rate = self.rates[best].median();
        best == self.decided
            && (0..self.plan.candidates.len())
                .all(|i| i == best || self.rates[i].median() * CLEARLY_FASTER < rate)
    }

    fn begin_slice(&mut self, round: usize, candidate: usize, now: Instant, done: u64) {
        self.current = candidate;
        self.state = State::Trial { round, counting: false };
        self.began = (now, done);
    }

    /// Updates the figures. Called at the end of slices and trials, never for single requests.
    fn count(&self, f: impl FnOnce(&mut PollingFigures)) {
        let mut figures = self.counters.polling.get();
        f(&mut figures);
        self.counters.polling.set(figures);
    }

    fn decide(&mut self, candidate: usize, now: Instant, done: u64) {
        self.hold = if candidate == self.decided { (self.hold * 2).min(MAX_HOLD) } else { HOLD };
        (self.current, self.decided) = (candidate, candidate);
        self.state =
            State::Decided { until: Some(now + self.hold), rate: None, changed_windows: 0 };
        self.began = (now, done);
    }
}

#[cfg(test)]
mod tests;
