use super::*;
use crate::policy::seeded::Seeded;

/// The origin of all times in these tests. Its absolute value has no effect.
fn origin() -> Instant {
    Instant::now()
}

/// A guest that sends its next request `pause` after the last request is complete, on a host that
/// serves `rate` requests per millisecond. The rate depends on the strategy.
struct Guest {
    policy: PollingPolicy,
    now: Instant,
    done: f64,
}

#[derive(Default, PartialEq, Debug)]
struct Shares {
    polled: f64,
    gathered: f64,
}

impl Guest {
    fn new(mode: PollMode, by_stream: bool) -> Self {
        let now = origin();
        let mut policy = PollingPolicy::new(mode, false, now, Rc::default());
        policy.set_notified_by_stream(by_stream);
        Guest { policy, now, done: 0.0 }
    }

    /// Runs for `time`. Returns the share of idle periods in which the policy busy-polled, and the
    /// share in which it gathered.
    fn run(&mut self, pause: Duration, rate: impl Fn(bool, bool) -> f64, time: Duration) -> Shares {
        let (start, mut times, mut shares) = (self.now, 0.0, Shares::default());
        while self.now - start < time {
            let polls = self.policy.went_empty(self.now, self.done as u64).is_some();
            let gathers = self.policy.gather().is_some();
            self.now += pause;
            self.policy.requests_arrived(self.now);
            self.now += Duration::from_secs_f64(1e-3 / rate(polls, gathers));
            self.done += 1.0;
            times += 1.0;
            shares.polled += f64::from(u8::from(polls));
            shares.gathered += f64::from(u8::from(gathers));
        }
        Shares { polled: shares.polled / times, gathered: shares.gathered / times }
    }
}

const TIME: Duration = Duration::from_secs(4);

fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}

#[test]
fn busy_polling_is_kept_if_it_is_faster_and_dropped_if_it_is_slower() {
    let mut auto = Guest::new(PollMode::Auto, false);
    assert!(auto.run(us(2), |polls, _| if polls { 200.0 } else { 100.0 }, TIME).polled > 0.8);
    let mut auto = Guest::new(PollMode::Auto, false);
    assert!(auto.run(us(2), |polls, _| if polls { 90.0 } else { 100.0 }, TIME).polled < 0.1);
    let mut off = Guest::new(PollMode::Off, true);
    assert_eq!(off.run(us(2), |_, _| 100.0, TIME), Shares::default());
}

#[test]
fn a_guest_with_long_pauses_is_not_busy_polled_for() {
    for by_stream in [false, true] {
        let mut auto = Guest::new(PollMode::Auto, by_stream);
        assert_eq!(
            auto.run(us(1000), |polls, _| if polls { 200.0 } else { 100.0 }, TIME),
            Shares::default()
        );
    }
}

#[test]
fn queues_of_streams_gather_if_that_is_faster() {
    let gathering = |polls, gathers| {
        if gathers {
            25.0
        } else if polls {
            10.0
        } else {
            20.0
        }
    };
    let shares = Guest::new(PollMode::Auto, true).run(us(20), gathering, TIME);
    assert!(shares.gathered > 0.8, "{shares:?}");
    assert_eq!(Guest::new(PollMode::Auto, false).run(us(20), gathering, TIME).gathered, 0.0);
}

/// Storage takes time. The guest has one request at a time, or always more than one in flight.
#[test]
fn the_queue_waits_for_storage_without_sleep_if_that_is_faster() {
    for (faster, always_in_flight) in [(true, false), (true, true), (false, false)] {
        let counters = Rc::<Counters>::default();
        let mut now = origin();
        let mut policy = PollingPolicy::new(PollMode::Auto, false, now, counters.clone());
        policy.set_notified_by_stream(true);
        let (start, mut done, mut polled, mut calls) = (now, 0, 0, 0);
        while now - start < TIME {
            let has_settled = now - start > TIME / 2;
            if !(always_in_flight && has_settled) {
                policy.went_empty(now, done);
                now += us(5);
                policy.requests_arrived(now);
            }
            let polls = policy.waits_in_flight(now, done).is_some();
            if has_settled {
                (polled, calls) = (polled + i32::from(polls), calls + 1);
            }
            now += us(if polls == faster { 80 } else { 110 });
            done += 1;
        }
        let share = f64::from(polled) / f64::from(calls);
        assert_eq!(share > 0.8, faster, "{faster} {always_in_flight} {share}");
        assert_eq!(share < 0.2, !faster, "{faster} {always_in_flight} {share}");
        assert!(counters.polling.get().of(Strategy::BusyPollInFlight).slices > 0);
    }
    for mode in [PollMode::Off, PollMode::Fixed(us(50))] {
        let mut policy = PollingPolicy::new(mode, false, origin(), Rc::default());
        policy.set_notified_by_stream(true);
        assert_eq!(policy.waits_in_flight(origin(), 0), None);
    }
}

#[test]
fn a_guest_that_sends_one_request_at_a_time_ends_gathering() {
    let (now, counters) = (origin(), Rc::<Counters>::default());
    let mut policy = PollingPolicy::new(PollMode::Auto, false, now, counters.clone());
    policy.set_notified_by_stream(true);
    policy.current = policy.plan.candidates.iter().position(|m| !m.gather.is_zero()).unwrap();
    policy.pause = 1e4;
    for _ in 0..MAX_VAIN_GATHERS - 1 {
        policy.gathered(1, now, 0);
    }
    policy.gathered(2, now, 0);
    assert!(policy.gather().is_some(), "a gather of two chains resets the count of vain ones");
    for _ in 0..MAX_VAIN_GATHERS {
        policy.gathered(1, now, 0);
    }
    assert!(policy.gather().is_none());
    assert_eq!(counters.polling.get().vain, 1);
}

/// The pause of 30 ms is in the first busy-polling slice that counts. (That slice has 56 requests;
/// 14 requests before it do not count.)
#[test]
fn a_machine_that_stands_still_for_a_moment_does_not_change_the_decision() {
    let mut auto = Guest::new(PollMode::Auto, false);
    let polled = std::cell::Cell::new(0);
    let rate = |polls, _| match polls {
        true if polled.replace(polled.get() + 1) == 30 => 1.0 / 30.0,
        true => 30.0,
        false => 20.0,
    };
    let shares = auto.run(us(20), rate, HOLD / 2);
    assert!(polled.get() > 30 && shares.polled > 0.7, "{shares:?}");
}

#[test]
fn a_client_with_slow_answers_is_busy_polled_for_longer() {
    let now = origin();
    let run = |needs: Duration| {
        let mut guest = Guest {
            policy: PollingPolicy::for_clients(PollMode::Auto, now, Rc::default()),
            now,
            done: 0.0,
        };
        let (mut polled, mut slept) = (0, 0);
        while guest.now - now < TIME {
            let busy_poll = guest.policy.went_empty(guest.now, guest.done as u64);
            // Without busy-polling, the server must be woken for each request.
            guest.now += us(60);
            guest.policy.requests_arrived(guest.now);
            let found = busy_poll.is_some_and(|time| time >= needs);
            guest.now += us(if found { 20 } else { 60 });
            guest.done += 1.0;
            polled += u32::from(busy_poll == Some(BUSY_POLL_LONGER));
            slept += u32::from(busy_poll.is_none());
        }
        (polled as f64 / guest.done, f64::from(slept) / guest.done)
    };
    assert!(run(us(60)).0 > 0.8, "{:?}", run(us(60)));
    // If the short busy-poll is enough, the policy does not use the longer one. If both are too
    // short, the reactor sleeps.
    assert!(run(us(40)).0 < 0.1, "{:?}", run(us(40)));
    assert!(run(us(400)).1 > 0.8, "{:?}", run(us(400)));
}

#[test]
fn a_trial_whose_rate_does_not_last_is_repeated() {
    let mut auto = Guest::new(PollMode::Auto, false);
    // Sleep is fast until the first trial has ended.
    let first = auto.run(us(20), |polls, _| if polls { 40.0 } else { 55.0 }, WINDOW + us(40_000));
    assert!(first.polled < 0.5, "{first:?}");
    assert!(
        matches!(auto.policy.state, State::Decided { rate: Some(_), .. }),
        "{:?}",
        auto.policy.state
    );
    let later = auto.run(us(60), |polls, _| if polls { 40.0 } else { 15.0 }, HOLD / 2);
    assert!(later.polled > 0.5, "{later:?}");
}

#[test]
fn a_changed_load_starts_a_trial_at_once() {
    let mut auto = Guest::new(PollMode::Auto, false);
    // Runs long enough for the time between trials to grow.
    auto.run(us(2), |polls, _| if polls { 90.0 } else { 100.0 }, TIME * 4);
    assert!(auto.run(us(4), |polls, _| if polls { 40.0 } else { 20.0 }, TIME / 4).polled > 0.5);
}

/// Rates vary by a quarter, and one request in ten thousand takes longer than a slice. Busy-polling
/// is a fifth faster, or a fifth slower.
#[test]
fn noisy_rates_are_compared_by_their_medians() {
    for seed in 0..20 {
        for gain in [1.2, 0.8] {
            let random = std::cell::RefCell::new(Seeded(seed));
            let rate = |polls: bool, _| {
                let mut random = random.borrow_mut();
                let (noise, rare) = (random.next(), random.next());
                let rate = if polls { 40.0 * gain } else { 40.0 } * (0.75 + noise / 2.0);
                if rare < 1e-4 { 0.1 } else { rate }
            };
            let mut auto = Guest::new(PollMode::Auto, false);
            let shares = auto.run(us(5), rate, TIME);
            assert_eq!(shares.polled > 0.5, gain > 1.0, "seed {seed}, gain {gain}: {shares:?}");
        }
    }
}

#[test]
fn figures_hold_the_choices_and_the_measured_rates() {
    let counters = Rc::<Counters>::default();
    let mut policy = PollingPolicy::new(PollMode::Auto, false, origin(), counters.clone());
    policy.set_notified_by_stream(false);
    let mut guest = Guest { policy, ..Guest::new(PollMode::Auto, false) };
    guest.run(us(20), |polls, _| if polls { 40.0 } else { 20.0 }, TIME);
    let figures = counters.polling.get();
    let (sleep, busy_poll) = (figures.of(Strategy::Sleep), figures.of(Strategy::BusyPoll));
    assert!(busy_poll.chosen > 0 && sleep.chosen == 0, "{figures:?}");
    // A request takes its pause of 20 us, and 25 us with busy-polling or 50 us without.
    assert!((busy_poll.rate().unwrap() / 22_222.0 - 1.0).abs() < 0.05, "{figures:?}");
    assert!((sleep.rate().unwrap() / 14_286.0 - 1.0).abs() < 0.05, "{figures:?}");
    assert!(figures.of(Strategy::Gather).rate().is_none(), "queues with eventfds never gather");
    let mut both = figures;
    both.merge(&figures);
    assert_eq!(both.of(Strategy::BusyPoll).chosen, busy_poll.chosen * 2);
    assert_eq!(both.of(Strategy::BusyPoll).rate(), busy_poll.rate());
    assert_eq!((figures.given_up, figures.early), (0, 0));
    // The guest stops in the middle of a trial.
    while !matches!(guest.policy.state, State::Trial { .. }) {
        guest.run(us(20), |_, _| 5.0, us(1000));
    }
    guest.run(MAX_SLICE * 2, |_, _| 5.0, MAX_SLICE * 4);
    assert_eq!(counters.polling.get().given_up, 1);
    assert!(counters.polling.get().early > 0, "another rate");
}
