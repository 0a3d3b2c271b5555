//! Calls that another process can make slow: whether a reactor makes them itself.
//!
//! A write to an eventfd or a socket runs through all of its waiters. Another process that has the
//! descriptor too can add millions of them, and the caller pays. So a peer with slow calls must not
//! make a reactor wait for them. A thread, or a worker of io_uring, makes them.
//!
//! ```text
//!   Direct ── a slow call ──► Measured ── some slow ones ──► Elsewhere
//!     ◄────────────── no slow call for a time ──────────────────┘
//! ```
//!
//! In: the time, and how long each call took. Out: the mode of the next call. What must hold: the
//! slow calls that a reactor makes for one peer take about 1/[`SHARE`] of its time. The
//! time that a call may take for its bytes does not count.
//! The first slow call only leads to a measurement of processor time, because the kernel may have
//! interrupted the thread. That measurement is two system calls for each call, so it ends as soon
//! as the slow calls have taken less than their share.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::{Latest, later};

/// A call that takes longer is slow. A signal to an eventfd of KVM takes 1 to 5 us, one to a socket
/// of User Mode Linux up to 20 us.
pub(crate) const SLOW: Duration = Duration::from_micros(50);
/// Time that a call may take for each byte that it transfers, beside [`SLOW`]. A virtual machine
/// was seen to send 128 KiB in 200 us (1.5 ns for a byte), so large replies looked like waiters.
const FOR_BYTE: Duration = Duration::from_nanos(4);
/// The number of bytes of a call that count. A socket takes about so many at once.
const MOST_BYTES: u32 = 512 << 10;
/// Time that slow calls may take in the mode `Measured`, beside their share of the time. Interrupts
/// and time that a hypervisor takes count as processor time, too: on a busy virtual machine, calls
/// of an ordinary client took up to 350 us, in bursts of 0.6 ms.
const ALLOWED: Duration = Duration::from_millis(1);
/// In the mode `Measured`, slow calls may take at most 1/`SHARE` of the time. Calls that are made
/// elsewhere take longer: they double the latency of a client with one request at a time. On that
/// machine, slow calls of an ordinary client took 1/100.
const SHARE: u32 = 32;
/// The mode `Elsewhere` lasts this multiple of the slow call's duration.
const PAUSE_FACTOR: u32 = 1000;
/// Longest duration of a mode after its last slow call.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// How the next call is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallMode {
    /// The reactor makes the call, and measures the time.
    #[default]
    Direct,
    /// The reactor makes the call, and measures the time of the processor.
    Measured,
    /// A thread, or a worker of io_uring, makes the call.
    Elsewhere,
}

/// Decides where the calls to one peer are made. See the module documentation.
#[derive(Clone, Debug, Default)]
pub struct SlowCalls {
    mode: CallMode,
    /// Time when the mode ends, if it is not `Direct`.
    until: Option<Instant>,
    /// When the last slow call was made.
    last: Option<Instant>,
    /// Time that slow calls took in the mode `Measured`, less their share of the time since. It is
    /// never below 0: a peer saves nothing for later.
    spent: Duration,
}

impl SlowCalls {
    /// Returns whether a call was slow.
    #[inline]
    pub fn is_slow(took: Duration) -> bool {
        took > SLOW
    }

    /// Returns `took` less the time that a call may take to transfer `bytes`.
    #[inline]
    pub fn beside_bytes(took: Duration, bytes: usize) -> Duration {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(MOST_BYTES);
        took.saturating_sub(FOR_BYTE * bytes)
    }

    /// Returns the mode of the next call.
    #[inline]
    pub fn mode(&mut self, now: Instant) -> CallMode {
        if self.until.is_some_and(|until| now >= until) {
            *self = SlowCalls::default();
        }
        self.mode
    }

    /// Reports how long a call took beside its bytes, or the longest of several. Returns the mode
    /// of the next call if this one changes it.
    #[inline]
    pub fn made(&mut self, now: Instant, took: Duration) -> Option<CallMode> {
        if !SlowCalls::is_slow(took) {
            return None;
        }
        let before = self.mode;
        let last = self.last.replace(now).unwrap_or(now);
        match before {
            CallMode::Direct => self.mode = CallMode::Measured,
            CallMode::Measured => {
                let share = now.saturating_duration_since(last) / SHARE;
                self.spent = self.spent.saturating_sub(share).saturating_add(took);
                if self.spent > ALLOWED {
                    self.mode = CallMode::Elsewhere;
                }
            }
            CallMode::Elsewhere => {}
        }
        let pause = match self.mode {
            CallMode::Elsewhere => took.saturating_mul(PAUSE_FACTOR),
            // Until these calls have taken less than their share.
            _ => self.spent.max(took).saturating_mul(SHARE),
        };
        self.until = self.until.max(Some(now + pause.min(MAX_PAUSE)));
        (before != self.mode).then_some(self.mode)
    }
}

/// What the policy saw of some peers, and decided. Figures of several reactors can be added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlowCallFigures {
    /// Number of slow calls.
    pub slow: u64,
    /// Number of times that the mode became `Measured`.
    pub measured: u64,
    /// Number of times that the mode became `Elsewhere`.
    pub elsewhere: u64,
    /// How long the last slow call took.
    pub last: Option<Latest<Duration>>,
}

impl SlowCallFigures {
    /// Adds the figures of `other`.
    pub fn merge(&mut self, other: &SlowCallFigures) {
        self.slow += other.slow;
        self.measured += other.measured;
        self.elsewhere += other.elsewhere;
        self.last = later(self.last, other.last);
    }
}

/// The figures of the calls to some peers on one reactor.
#[derive(Debug, Default)]
pub struct SlowCallCounters(Cell<SlowCallFigures>);

impl SlowCallCounters {
    pub fn figures(&self) -> SlowCallFigures {
        self.0.get()
    }

    /// Counts a slow call. `becomes`: the mode that it led to ([`SlowCalls::made`]).
    pub fn count(&self, now: Instant, took: Duration, becomes: Option<CallMode>) {
        let mut figures = self.0.get();
        figures.slow += 1;
        figures.last = Some(Latest { at: now, value: took });
        match becomes {
            Some(CallMode::Measured) => figures.measured += 1,
            Some(CallMode::Elsewhere) => figures.elsewhere += 1,
            Some(CallMode::Direct) | None => {}
        }
        self.0.set(figures);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_second_slow_call_is_the_last_one_of_the_reactor() {
        let (mut policy, now) = (SlowCalls::default(), Instant::now());
        assert_eq!(policy.made(now, SLOW), None);
        assert_eq!(policy.mode(now), CallMode::Direct);
        assert_eq!(policy.made(now, MS), Some(CallMode::Measured));
        assert_eq!(policy.mode(now), CallMode::Measured);
        assert_eq!(policy.made(now, SLOW), None, "a fast call changes nothing");
        assert_eq!(policy.made(now, 2 * MS), Some(CallMode::Elsewhere));
        assert_eq!(policy.mode(now), CallMode::Elsewhere);
        assert_eq!(policy.made(now, 2 * MS), None, "it is there already");
    }

    #[test]
    fn a_call_that_transfers_more_may_take_longer() {
        let is_slow = |us, bytes| {
            SlowCalls::is_slow(SlowCalls::beside_bytes(Duration::from_micros(us), bytes))
        };
        assert!(is_slow(70, 4096) && !is_slow(60, 4096));
        assert!(is_slow(1200, 256 << 10) && !is_slow(1000, 256 << 10));
        assert!(!is_slow(2100, usize::MAX) && is_slow(2200, usize::MAX));
    }

    #[test]
    fn a_few_calls_that_are_somewhat_slow_stay_with_the_reactor() {
        let (mut policy, now) = (SlowCalls::default(), Instant::now());
        let somewhat = SLOW + Duration::from_micros(10);
        for _ in 0..17 {
            assert_ne!(policy.made(now, somewhat), Some(CallMode::Elsewhere));
        }
        assert_eq!(policy.made(now, somewhat), Some(CallMode::Elsewhere), "more than 1 ms");
    }

    /// 40 slow calls of 60 us in a second are 0.24%: a hypervisor takes time now and then.
    #[test]
    fn rare_slow_calls_stay_on_the_reactor() {
        let (mut policy, start) = (SlowCalls::default(), Instant::now());
        let somewhat = SLOW + Duration::from_micros(10);
        for number in 0..1000 {
            assert_ne!(policy.made(start + number * 25 * MS, somewhat), Some(CallMode::Elsewhere));
        }
        // A peer that was patient has saved nothing for a burst.
        assert_eq!(policy.made(start + 25_000 * MS, 2 * MS), Some(CallMode::Elsewhere));
        let (mut policy, mut now) = (SlowCalls::default(), start);
        let left = (0..1000).any(|_| {
            now += MS;
            policy.made(now, somewhat) == Some(CallMode::Elsewhere)
        });
        assert!(left, "6% of the time");
    }

    #[test]
    fn figures_have_the_slow_calls_the_decisions_and_the_last_time() {
        let (mut policy, now) = (SlowCalls::default(), Instant::now());
        let counters = SlowCallCounters::default();
        for (at, took) in [(0, 2 * MS), (1, 5 * MS), (2, MS)] {
            let at = now + at * MS;
            counters.count(at, took, policy.made(at, took));
        }
        let last = Some(Latest { at: now + 2 * MS, value: MS });
        let mut figures = counters.figures();
        assert_eq!(figures, SlowCallFigures { slow: 3, measured: 1, elsewhere: 1, last });
        figures.merge(&counters.figures());
        assert_eq!(figures, SlowCallFigures { slow: 6, measured: 2, elsewhere: 2, last });
    }

    #[test]
    fn a_mode_ends_after_a_thousand_times_its_slowest_call() {
        let (mut policy, start) = (SlowCalls::default(), Instant::now());
        policy.made(start, 2 * MS);
        policy.made(start, 2 * MS);
        assert_eq!(policy.mode(start + 1999 * MS), CallMode::Elsewhere);
        policy.made(start + 1999 * MS, MS);
        assert_eq!(policy.mode(start + 2998 * MS), CallMode::Elsewhere);
        assert_eq!(policy.mode(start + 2999 * MS), CallMode::Direct);
        // However slow it is, the mode ends.
        policy.made(start, Duration::MAX);
        assert_eq!(policy.mode(start + MAX_PAUSE), CallMode::Direct);
    }

    /// An interrupt that took 4 ms costs measurements for 128 ms, and not for 4 s.
    #[test]
    fn processor_time_is_measured_until_the_slow_calls_have_their_share() {
        let (mut policy, start) = (SlowCalls::default(), Instant::now());
        policy.made(start, 4 * MS);
        assert_eq!(policy.mode(start + 127 * MS), CallMode::Measured);
        assert_eq!(policy.mode(start + 128 * MS), CallMode::Direct);
        // Slow calls one after the other count together.
        let somewhat = SLOW + Duration::from_micros(10);
        for _ in 0..17 {
            policy.made(start, somewhat);
        }
        assert_eq!(policy.mode(start + 30 * MS), CallMode::Measured, "16 * 60 us * 32");
        assert_eq!(policy.mode(start + 31 * MS), CallMode::Direct);
    }

    /// A peer that knows the policy: it makes as many slow calls as the reactor itself makes, and
    /// waits until the policy has forgotten them.
    #[test]
    fn a_peer_that_waits_for_the_end_of_a_mode_gains_nothing() {
        let us = Duration::from_micros;
        for each in [us(60), us(350), MS, 20 * MS] {
            let (mut policy, start) = (SlowCalls::default(), Instant::now());
            let (mut now, mut spent) = (start, Duration::ZERO);
            while now < start + (500 * each).max(Duration::from_secs(20)) {
                now += each;
                spent += each;
                policy.made(now, each);
                let is_last = {
                    let mut next = policy.clone();
                    next.made(now + each, each) == Some(CallMode::Elsewhere)
                };
                while is_last && policy.mode(now) != CallMode::Direct {
                    now += us(100);
                }
            }
            let part = spent.as_secs_f64() / (now - start).as_secs_f64();
            assert!(part < 0.07, "{part} with {each:?}");
        }
    }

    /// Whatever the peer does, the slow calls of the reactor take a small part of its time.
    #[test]
    fn slow_calls_of_the_reactor_take_a_small_part_of_its_time() {
        let us = Duration::from_micros;
        for (each, pause, most) in [
            (us(60), us(1), 0.02),
            (us(60), us(1900), 0.031),
            (us(350), us(1), 0.005),
            (MS, MS, 0.004),
            (300 * MS, MS, 0.003),
            (MS, 1001 * MS, 0.003),
            (10 * MS, 9999 * MS, 0.003),
        ] {
            let (mut policy, start) = (SlowCalls::default(), Instant::now());
            let (mut now, mut spent) = (start, Duration::ZERO);
            while now < start + (2000 * each).max(Duration::from_secs(20)) {
                let is_own = policy.mode(now) != CallMode::Elsewhere;
                now += each;
                if is_own {
                    spent += each;
                }
                // A thread that never reports a slow call is the worst case.
                policy.made(now, if is_own { each } else { Duration::ZERO });
                now += pause;
            }
            let part = spent.as_secs_f64() / (now - start).as_secs_f64();
            assert!(part < most, "{part} with {each:?} and {pause:?}");
        }
    }
    /// A random number from 0 to 1 (splitmix64).
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A peer in a seeded trace, and what the trace has shown.
    struct Trace {
        policy: SlowCalls,
        seed: u64,
        now: Instant,
        /// Time that slow calls of the reactor took.
        spent: Duration,
        /// The mode must last until then, if it is `Elsewhere`, and end then at the latest.
        ends: Option<Instant>,
        /// Number of calls since the reactor began to make them again, and of calls elsewhere.
        calls: u32,
        elsewhere: u64,
        /// Whether the thread that makes calls elsewhere reports slow ones.
        reports: bool,
    }

    impl Trace {
        fn new(seed: u64) -> Self {
            let (start, policy) = (Instant::now(), SlowCalls::default());
            let (spent, ends, calls, elsewhere, reports) = Default::default();
            Trace { policy, seed, now: start, spent, ends, calls, elsewhere, reports }
        }

        /// Makes a call that takes `took`, and waits for `pause`.
        fn call(&mut self, took: Duration, pause: Duration) {
            let (seed, mode) = (self.seed, self.policy.mode(self.now));
            match self.ends {
                Some(ends) if self.now < ends => {
                    assert_eq!(mode, CallMode::Elsewhere, "seed {seed}: it returned too early");
                }
                Some(_) => {
                    assert_eq!(mode, CallMode::Direct, "seed {seed}: it has not returned");
                    (self.ends, self.calls) = (None, 0);
                }
                None => assert_ne!(mode, CallMode::Elsewhere, "seed {seed}: without a reason"),
            }
            self.now += took;
            let slow = SlowCalls::is_slow(took);
            let is_own = mode != CallMode::Elsewhere;
            if is_own {
                self.calls += 1;
                self.spent += if slow { took } else { Duration::ZERO };
            } else {
                self.elsewhere += 1;
            }
            let reported = if is_own || self.reports { took } else { Duration::ZERO };
            let becomes = self.policy.made(self.now, reported);
            assert!(slow || becomes.is_none(), "seed {seed}: a fast call changed the mode");
            if slow && (!is_own && self.reports || becomes == Some(CallMode::Elsewhere)) {
                let pause = took.saturating_mul(PAUSE_FACTOR).min(MAX_PAUSE);
                self.ends = self.ends.max(Some(self.now + pause));
            }
            self.now += pause;
        }
    }

    /// Returns a time between two times. Short times are as frequent as long ones.
    fn between(state: &mut u64, least: Duration, most: Duration) -> Duration {
        least.mul_f64((most.as_secs_f64() / least.as_secs_f64()).powf(random(state)))
    }

    /// Peers that behave, that are on a busy host, and that are slow on purpose, one after another.
    /// The mode lasts exactly as long as its slowest call says. A slow peer costs the reactor a
    /// small part of its time.
    #[test]
    fn in_a_seeded_trace_slow_peers_are_found_and_calls_return_to_the_reactor() {
        let us = Duration::from_micros;
        for seed in 0..30 {
            let (mut trace, mut state) = (Trace::new(seed), seed);
            for _ in 0..30 {
                let kind = (random(&mut state) * 3.0) as u32;
                let each = between(&mut state, SLOW + us(10), 20 * MS);
                let pause = between(&mut state, us(1), each);
                (trace.calls, trace.elsewhere) = (0, 0);
                trace.reports = random(&mut state) < 0.5;
                let (began, before) = (trace.now, trace.spent);
                for call in 0..3000 {
                    match kind {
                        // A peer that is slow on purpose, for at least half of the time.
                        0 => trace.call(each, pause),
                        // A host that interrupts a call now and then: slow calls take less than 1%.
                        1 if call % 50 == 0 => trace.call(us(350), us(5)),
                        1 => trace.call(us(5), us(1000)),
                        // A peer that behaves.
                        _ => trace.call(between(&mut state, us(1), SLOW), pause),
                    }
                }
                match kind {
                    // Each return to the reactor is found again after a few calls.
                    0 => {
                        let least = each - (each + pause) / SHARE;
                        let most = 2 + ALLOWED.div_duration_f64(least).ceil() as u32;
                        assert!(trace.calls <= most, "seed {seed}: {} calls", trace.calls);
                        assert!(trace.elsewhere > 0, "seed {seed}: it was not found");
                        let (time, spent) = (trace.now - began, trace.spent - before);
                        let most = time.mul_f64(0.07) + ALLOWED + 2 * each;
                        assert!(spent <= most, "seed {seed}: {spent:?} of {time:?}");
                    }
                    // After the mode of an earlier peer has ended, it does not come again.
                    _ => {
                        trace.now += MAX_PAUSE;
                        for _ in 0..1000 {
                            let slow = if kind == 1 { us(350) } else { SLOW };
                            trace.call(slow, us(50_000));
                        }
                        assert_eq!(trace.policy.mode(trace.now + MS * 100), CallMode::Direct);
                        assert_eq!(trace.ends, None, "seed {seed}: a peer that behaves was left");
                    }
                }
            }
        }
    }
}
