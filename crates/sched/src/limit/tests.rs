use super::*;
use proptest::prelude::*;
use std::sync::atomic::Ordering::SeqCst;

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

fn op(kind: OperationKind, bytes: u64, requests: u32) -> Operation {
    Operation { kind, bytes, sequential: false, requests }
}

fn read(bytes: u64) -> Operation {
    op(OperationKind::Read, bytes, 1)
}

fn limit(rate: u64, max: u64, length_ms: u64) -> Limit {
    Limit { rate, max: Some(max), length: Duration::from_millis(length_ms) }
}

fn iops(limit: Limit) -> Limits {
    Limits { iops: Some(limit), ..Limits::default() }
}

fn bps(limit: Limit) -> Limits {
    Limits { bps: Some(limit), ..Limits::default() }
}

/// A repeatable random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Simulates a client that always has work, from time `from` to `to`. It retries up to `late` after
/// the time that the limiter returned. Returns the time and the amount of each admitted operation.
fn greedy(
    limiter: &Limiter,
    from: Time,
    to: Time,
    late: u64,
    mut next: impl FnMut() -> Operation,
) -> Vec<(Time, u64)> {
    let (mut now, mut passed, mut random) = (from, Vec::new(), Random(to | 1));
    while now < to {
        let operation = next();
        while now < to {
            match limiter.take(now, &operation, None) {
                Ok(()) => {
                    passed.push((now, operation.bytes.max(u64::from(operation.requests))));
                    break;
                }
                Err(then) => {
                    assert!(then > now, "told to retry at {then}, at {now}");
                    now = then + if late > 0 { random.below(late) } else { 0 };
                }
            }
        }
    }
    passed
}

fn sum(passed: &[(Time, u64)]) -> u64 {
    passed.iter().map(|p| p.1).sum()
}

/// Checks that between any two operations at most `rate` and `more` were admitted.
#[track_caller]
fn assert_rate_not_exceeded(passed: &[(Time, u64)], rate: u64, more: f64) {
    // Largest excess over the rate since any earlier operation.
    let (mut ahead, mut last) = (0.0f64, 0);
    for &(now, amount) in passed {
        ahead = (ahead - (now - last) as f64 * rate as f64 / 1e9).max(0.0) + amount as f64;
        last = now;
        assert!(
            ahead <= more * (1.0 + 1e-9) + 1e-3,
            "{ahead} ahead of {rate} a second at {now}, and may be {more}"
        );
    }
}

#[test]
fn each_limit_counts_its_kinds_of_operations() {
    // Finds out which of six limits of one unit a second refuse a second operation.
    let counts = |operation: Operation| {
        let one = || Some(Limit::of(1));
        let none = Limits::default;
        let each = [
            Limits { iops: one(), ..none() },
            Limits { iops_read: one(), ..none() },
            Limits { iops_write: one(), ..none() },
            Limits { bps: one(), ..none() },
            Limits { bps_read: one(), ..none() },
            Limits { bps_write: one(), ..none() },
        ];
        each.map(|limits| {
            let limiter = Limiter::new(&limits);
            limiter.take(0, &operation, None).unwrap();
            limiter.take(0, &operation, None).map_or_else(|then| then.div_ceil(S), |()| 0)
        })
    };
    assert_eq!(counts(op(OperationKind::Read, 4096, 1)), [1, 1, 0, 4096, 4096, 0]);
    assert_eq!(counts(op(OperationKind::Write, 4096, 3)), [3, 0, 3, 4096, 0, 4096]);
    assert_eq!(counts(op(OperationKind::WriteZeroes, 1 << 20, 1)), [1, 0, 1, 1 << 20, 0, 1 << 20]);
    assert_eq!(
        counts(op(OperationKind::Discard, 1 << 40, 1)),
        [1, 0, 1, 0, 0, 0],
        "a discard moves no bytes"
    );
    assert_eq!(counts(op(OperationKind::Flush, 0, 1)), [0; 6]);
}

#[test]
fn without_limits_every_operation_is_admitted() {
    let limiter = Limiter::new(&Limits::default());
    assert!(limiter.is_unlimited());
    assert_eq!(limiter.take(0, &read(u64::MAX), None), Ok(()));
    limiter.set(&iops(Limit::of(1)));
    assert!(!limiter.is_unlimited());
    assert_eq!(
        (limiter.take(0, &read(512), None), limiter.take(0, &read(512), None).is_err()),
        (Ok(()), true)
    );
    limiter.set(&Limits::default());
    assert!(limiter.is_unlimited());
    assert_eq!(limiter.take(0, &read(512), None), Ok(()));
}

#[test]
fn all_limits_are_charged_or_none() {
    let limits = Limits {
        iops: Some(Limit::of(1_000_000)),
        bps_write: Some(Limit::of(1000)),
        ..Limits::default()
    };
    let limiter = Limiter::new(&limits);
    limiter.take(0, &op(OperationKind::Write, 1_000_000, 1), None).unwrap();
    // Refused operations are not charged to the limit that would admit them.
    for _ in 0..200_000 {
        assert!(limiter.take(0, &op(OperationKind::Write, 1, 1), None).is_err());
    }
    let reads = greedy(&limiter, 0, 100 * MS, 0, || op(OperationKind::Read, 0, 1));
    assert!((109_990..=110_000).contains(&reads.len()), "{}", reads.len());
    // The same with operations that are refunded, at a rate whose interval between operations is no
    // whole number of nanoseconds.
    let limiter = Limiter::new(&iops(Limit::of(70_001)));
    for _ in 0..200_000 {
        limiter.take(0, &read(0), None).unwrap();
        limiter.refund(&read(0), None);
    }
    assert_eq!(greedy(&limiter, 0, S, 0, || read(0)).len(), 70_001 + 700);
}

#[test]
fn a_thousand_million_requests_are_charged_exactly() {
    // The rates do not divide a second, and the admitted amounts are known.
    for (rate, largest) in [(7u64, 3), (999_983, 20_000), (3_000_000_019, 100_000)] {
        let limiter = Limiter::new(&iops(Limit::of(rate)));
        let (mut now, mut all, mut random) = (0, 0u64, Random(rate));
        let mut asked = 0;
        while all < 1_000_000_000 && asked < 400_000 {
            let operation = op(OperationKind::Read, 0, 1 + random.below(largest) as u32);
            while let Err(then) = limiter.take(now, &operation, None) {
                now = then;
            }
            all += u64::from(operation.requests);
            asked += 1;
        }
        // All admitted operations are paid at exactly this nanosecond.
        let paid = (u128::from(all) * u128::from(S) / u128::from(rate)) as u64;
        let full = limiter.generation(limiter.changes.load(SeqCst))[0].buckets[0].full.load(SeqCst);
        assert_eq!(full, paid, "{all} requests in {asked} operations at {rate} a second");
        assert!(now <= paid && paid - now <= 10 * MS + u64::from(largest as u32) * S / rate);
    }
}

#[test]
fn after_any_idle_time_at_most_the_burst_is_granted() {
    let limiter = Limiter::new(&iops(limit(1000, 5000, 2000)));
    for round in 1..5 {
        // Each round starts 11 days after the one before.
        let start = round * 1_000_000 * S;
        let passed = greedy(&limiter, start, start + 10 * S, 50_000, || read(0));
        let within = |to: u64| passed.iter().filter(|p| p.0 < start + to).count();
        assert!((5000..=5050).contains(&within(S)), "{}", within(S));
        assert!((9950..=10_050).contains(&within(2 * S)), "{}", within(2 * S));
        // After the burst of 8000 operations only the rate is admitted, here for 10 s.
        assert!((17_990..=18_000).contains(&passed.len()), "{}", passed.len());
    }
}

#[test]
fn small_operations_do_not_starve_large_ones() {
    // One client asks for 4 KiB again and again. Another one's 4 MiB are admitted as soon as the
    // bucket admits anything.
    let limiter = Limiter::new(&bps(Limit::of(1 << 20)));
    let (mut now, mut large_at) = (0, 0);
    while now < 60 * S {
        if limiter.take(now, &read(4 << 20), None).is_ok() {
            large_at += 1;
        }
        now = limiter.take(now, &read(4096), None).err().unwrap_or(now);
    }
    assert!((15..=16).contains(&large_at), "{large_at} of 4 s each");
}

#[test]
fn a_debt_of_any_size_is_paid() {
    let limiter = Limiter::new(&bps(limit(1 << 20, 2 << 20, 3000)));
    limiter.take(0, &read(100 << 20), None).unwrap();
    // The time to retry is 100 s at the rate, less half of the burst of 3 s.
    assert_eq!(limiter.take(0, &read(512), None), Err(100 * S - 1500 * MS));
    limiter.force(0, &read(1 << 20));
    assert_eq!(limiter.take(0, &read(512), None), Err(101 * S - 1500 * MS));
    limiter.refund(&read(1 << 20), None);
    assert_eq!(limiter.take(100 * S - 1500 * MS, &read(512), None), Ok(()));
}

#[test]
fn a_change_takes_effect_at_once() {
    let limiter = Limiter::new(&iops(Limit::of(1)));
    limiter.take(5 * S, &read(0), None).unwrap();
    assert!(limiter.take(5 * S, &read(0), None).unwrap_err() > 5900 * MS);
    // After a change to a faster limit, the debt of a request is its cost at the new rate.
    limiter.set(&iops(Limit::of(1000)));
    let passed = greedy(&limiter, 5 * S, 6 * S, 0, || read(0));
    assert!((998..=1010).contains(&passed.len()), "{}", passed.len());
    // After a change to a slower limit, the used part of the bucket is no debt at the new rate.
    limiter.set(&iops(Limit::of(10)));
    let passed = greedy(&limiter, 6 * S, 16 * S, 0, || read(0));
    assert!((99..=101).contains(&passed.len()), "{}", passed.len());
    // A burst is granted once, even if the limit is set again and again, also with other values.
    let mut all = 0;
    for i in 0..1000 {
        limiter.set(&iops(limit(10, 1000, 1000)));
        limiter.set(&iops(limit(10, 1001 + i % 2, 1000)));
        all +=
            greedy(&limiter, 16 * S + i * 10 * MS, 16 * S + (i + 1) * 10 * MS, 0, || read(0)).len();
    }
    assert!((1085..=1105).contains(&all), "{all}: 990 and ten seconds");
    // Changes of other limits do not affect how much of this limit is used.
    let mut limits = iops(limit(10, 1000, 1000));
    for i in 0..100 {
        limits.bps = Some(Limit::of(1 << (20 + i % 8)));
        limiter.set(&limits);
        assert!(
            limiter.take(26 * S, &op(OperationKind::Read, 0, 100), None).is_err() || i == 0,
            "{i}"
        );
    }
}

#[test]
fn several_reactors_together_get_the_rate_of_one() {
    const THREADS: usize = 4;
    let limits = Limits {
        iops: Some(Limit::of(1_000_003)),
        bps_read: Some(Limit::of(300 << 20)),
        ..Limits::default()
    };
    let (limiter, clock) = (Limiter::new(&limits), AtomicU64::new(0));
    let passed: Vec<_> = std::thread::scope(|scope| {
        let reactor = |seed| {
            let (limiter, clock) = (&limiter, &clock);
            move || {
                let (mut random, mut passed) = (Random(seed), [0, 0]);
                while clock.fetch_add(300, SeqCst) < S / 2 {
                    let bytes = 512 << random.below(4);
                    let now = clock.load(SeqCst).saturating_sub(random.below(20_000));
                    let operation = op(OperationKind::Read, bytes, 1);
                    if limiter.take(now, &operation, None).is_ok() {
                        // Some admitted operations are refunded.
                        if random.below(4) == 0 {
                            limiter.refund(&operation, None);
                        } else {
                            passed = [passed[0] + 1, passed[1] + bytes];
                        }
                    }
                }
                passed
            }
        };
        let threads: Vec<_> =
            (1..=THREADS as u64).map(|i| scope.spawn(reactor(i * 7919))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let (requests, bytes) = passed.iter().fold((0, 0), |sum, p| (sum.0 + p[0], sum.1 + p[1]));
    // The threads ask 1.7 million times, for 2 KiB on average, so the limit of bytes decides.
    assert!(requests < 510_000, "{requests}");
    let most = (300 << 20) * 51 / 100;
    assert!(bytes <= most && bytes > most / 100 * 98, "{bytes} of {most}");
}

#[test]
fn a_charge_that_loses_a_race_is_refunded() {
    // One limit charges each admitted operation 2 s of a very long burst. The threads race for the
    // other limit, which admits one operation a second.
    let counts = limit(1, 1_000_000_000, 1_000_000_000);
    let limiter = Limiter::new(&Limits {
        iops: Some(counts),
        bps: Some(Limit::of(4096)),
        ..Limits::default()
    });
    let (clock, passed) = (AtomicU64::new(S), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while clock.load(SeqCst) < 200_000 * S {
                    match limiter.take(clock.load(SeqCst), &op(OperationKind::Read, 4096, 2), None)
                    {
                        Ok(()) => passed.fetch_add(1, SeqCst),
                        Err(_) => clock.fetch_add(S / 4, SeqCst),
                    };
                }
            });
        }
    });
    let passed = passed.load(SeqCst);
    assert!((150_000..=200_010).contains(&passed), "{passed}");
    let full = limiter.generation(limiter.changes.load(SeqCst))[0].buckets[1].full.load(SeqCst);
    assert_eq!(full, S + passed * 2 * S, "{passed} passed, {} were charged", (full - S) / (2 * S));
}

#[test]
fn limits_can_change_while_reactors_use_them() {
    let (slow, fast) = (iops(Limit::of(1)), iops(Limit::of(1_000_000)));
    let (limiter, clock) = (Limiter::new(&slow), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while clock.load(SeqCst) < S / 4 {
                    let _ = limiter.take(clock.fetch_add(100, SeqCst), &read(512), None);
                }
            });
        }
        while clock.load(SeqCst) < S / 4 {
            limiter.set(&slow);
            limiter.set(&fast);
            // A charge of the slow limit (one second) must never go to the bucket of the fast one.
            // Load the bucket before the clock, because time advances between the loads.
            let full =
                limiter.generation(limiter.changes.load(SeqCst))[0].buckets[0].full.load(SeqCst);
            let now = clock.load(SeqCst);
            assert!(full <= now + 20 * MS, "{} ms", (full - now) / MS);
        }
    });
}

/// Returns a limit, and the largest operation of a client: the limit's rate divided by 10 to 2500,
/// but at least 1.
fn any_limit() -> impl Strategy<Value = (Limit, u64)> {
    let rate = prop_oneof![1u64..100, 1u64..100_000, 1u64..1 << 32, 1u64..1 << 50];
    (rate, prop::option::of((1u64..10, 1u64..2000)), 20u64..5000).prop_map(
        |(rate, burst, operations)| {
            let limit = burst.map_or(Limit::of(rate), |(times, length)| {
                limit(rate, rate.saturating_mul(times), length)
            });
            (limit, (2 * rate / operations).max(1))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Grants never exceed the configured rate. A caller that always has work receives the full
    /// rate.
    #[test]
    fn grants_never_exceed_the_rate_and_reach_it(
        (limit, largest) in any_limit(),
        late in 0u64..3 * MS,
        seed in 1u64..u64::MAX,
        start in 0u64..1 << 60,
    ) {
        let limiter = Limiter::new(&bps(limit));
        let (mut random, mut passed, mut now, mut biggest) = (Random(seed), Vec::new(), start, 1);
        for _ in 0..20 {
            // Time for a few hundred operations, and then an idle time.
            let busy = (u128::from(largest) * 100 * u128::from(S) / u128::from(limit.rate)) as u64;
            let part = greedy(&limiter, now, now + busy, late, || {
                let bytes = 1 + random.below(largest);
                biggest = biggest.max(bytes);
                read(bytes)
            });
            // Full rate, except for the excess of the previous operation and for late retries.
            let due = limit.rate as f64 * (busy.saturating_sub(late) as f64 / 1e9)
                - 2.0 * biggest as f64
                - 1.0;
            prop_assert!(sum(&part) as f64 >= due, "{} of {due}", sum(&part));
            passed.extend(part);
            now += busy + random.below(2 * busy);
        }
        let at_most = |rate: u64, holds: f64| {
            assert_rate_not_exceeded(&passed, rate, holds.max(holds / 2.0 + biggest as f64))
        };
        let peak = limit.max.unwrap_or(limit.rate);
        at_most(peak, peak as f64 / 100.0);
        if let Some(max) = limit.max {
            let burst = (max - limit.rate) as f64 * limit.length.as_secs_f64();
            at_most(limit.rate, burst.max(limit.rate as f64 / 100.0));
        }
    }

    /// No value overflows.
    #[test]
    fn nothing_overflows(
        rate in 1u64..=1 << 50,
        more in 0u64..=1 << 50,
        length in any::<u64>(),
        bytes in any::<u64>(),
        now in any::<u64>(),
    ) {
        let length = Duration::from_nanos(length);
        let all = Some(Limit { rate, max: Some(rate + more), length });
        let limits = Limits {
            iops: all,
            iops_read: all,
            iops_write: all,
            bps: all,
            bps_read: all,
            bps_write: all,
        };
        let limiter = Limiter::new(&limits);
        for operation in [op(OperationKind::Write, bytes, u32::MAX), read(bytes)] {
            for _ in 0..3 {
                let _ = limiter.take(now, &operation, None);
                limiter.force(now, &operation);
            }
            limiter.refund(&operation, None);
        }
        limiter.set(&iops(Limit::of(1)));
        limiter.set(&limits);
        let _ = limiter.take(now, &read(1), None);
    }
}

// Each case has about ten rates, and admits thousands of requests at each.
proptest! {
    #![proptest_config(ProptestConfig {
        cases: 50,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Limits that change all the time. Each phase grants its rate. The first request after a
    /// change waits no longer than before the change, or than one request at the new rate and the
    /// bucket's slack.
    #[test]
    fn each_phase_between_changes_has_its_rate(
        rates in prop::collection::vec(1u64..200_000, 2..20),
        late in 0u64..MS,
    ) {
        let limiter = Limiter::new(&Limits::default());
        let (mut now, mut waits) = (S, 0);
        for rate in rates {
            limiter.set(&iops(Limit::of(rate)));
            let wait = limiter.take(now, &read(0), None).err().map_or(0, |then| then - now);
            prop_assert!(wait <= waits.max(S / rate) + 10 * MS, "{wait}");
            let length = (20 * S / rate).max(100 * MS);
            let passed = greedy(&limiter, now, now + length, late, || read(0)).len() as f64;
            let of = |time: u64| rate as f64 * (time as f64 / 1e9);
            prop_assert!(passed <= of(length + 10 * MS) + 2.0, "{passed} in {length} ns at {rate}");
            // The last request may be too late for the phase.
            let least = of(length.saturating_sub(wait + late)) - 2.0;
            prop_assert!(passed >= least, "{passed} in {length} ns at {rate}");
            now += length;
            waits = limiter.take(now, &read(0), None).err().map_or(0, |then| then - now);
        }
    }
}

/// Simulates several flows that retry late after the time that the limiter returned. Returns the
/// amount a second that was admitted for each flow.
fn compete(
    limiter: &Limiter,
    from: Time,
    seconds: u64,
    all: &[(&Flow, Operation, u64)],
) -> Vec<f64> {
    let (mut random, mut passed) = (Random(1234567), vec![0u64; all.len()]);
    let mut next: Vec<Time> = all.iter().map(|_| from).collect();
    loop {
        let at = (0..all.len()).min_by_key(|i| next[*i]).unwrap();
        let (now, (flow, operation, gather)) = (next[at], &all[at]);
        if now > from + seconds * S {
            return passed.iter().map(|n| *n as f64 / seconds as f64).collect();
        }
        let mut asked = limiter.take(now, operation, Some(flow));
        while asked.is_ok() {
            passed[at] += operation.bytes.max(u64::from(operation.requests));
            asked = limiter.take(now, operation, Some(flow));
        }
        let told = asked.unwrap_err().max(now);
        next[at] = (told + gather + random.below(50_000)).min(now + 20 * MS);
    }
}

#[test]
fn waiting_flows_share_a_limit_by_weight() {
    for (rate, seconds) in [(10, 40), (2000, 40), (100_000, 10)] {
        let limiter = Limiter::new(&iops(Limit::of(rate)));
        let flows = [100, 100, 300].map(|weight| limiter.join(weight));
        // The second flow always retries last.
        let all =
            [(&*flows[0], read(0), 1), (&*flows[1], read(0), 300_000), (&*flows[2], read(0), 1)];
        let got = compete(&limiter, S, seconds, &all);
        let due = [0.2, 0.2, 0.6].map(|part| part * rate as f64);
        for (got, due) in got.iter().zip(due) {
            assert!((got / due - 1.0).abs() < 0.03, "{got} of {due} at {rate}");
        }
        // If a flow does not use its part of the limit, the others get it.
        let got = compete(&limiter, 50 * S, seconds, &all[..2]);
        assert!(
            got.iter().all(|got| (got / (rate as f64 / 2.0) - 1.0).abs() < 0.03),
            "{got:?} at {rate}"
        );
    }
    // A flow that was idle has saved up no credit.
    let limiter = Limiter::new(&iops(Limit::of(2000)));
    let flows = [100, 100].map(|weight| limiter.join(weight));
    let all = [(&*flows[0], read(0), 1), (&*flows[1], read(0), 1)];
    assert!(compete(&limiter, S, 20, &all[..1])[0] > 1990.0);
    let got = compete(&limiter, 21 * S, 5, &all);
    assert!(got.iter().all(|got| (got / 1000.0 - 1.0).abs() < 0.03), "{got:?}");
    // Limits of bytes are shared equally, whatever the sizes.
    let limiter = Limiter::new(&bps(Limit::of(100 << 20)));
    let flows = [100, 100].map(|weight| limiter.join(weight));
    let got = compete(
        &limiter,
        S,
        40,
        &[(&flows[0], read(4096), 1), (&flows[1], read(1 << 20), 300_000)],
    );
    assert!((got[0] / got[1] - 1.0).abs() < 0.03, "{got:?}");
}

#[test]
fn a_flow_that_waits_for_one_limit_does_not_delay_others_at_another_limit() {
    let limits = Limits {
        iops_read: Some(Limit::of(10)),
        iops_write: Some(Limit::of(10_000)),
        ..Limits::default()
    };
    let limiter = Limiter::new(&limits);
    let (reads, writes) = (limiter.join(100), limiter.join(100));
    let write = op(OperationKind::Write, 4096, 1);
    let got = compete(&limiter, S, 20, &[(&reads, read(4096), 1), (&writes, write, 1)]);
    assert!(
        (got[0] / 4096.0 / 10.0 - 1.0).abs() < 0.03
            && (got[1] / 4096.0 / 10_000.0 - 1.0).abs() < 0.03,
        "{got:?}"
    );
    // A flow of small and one of large operations, each at another limit: neither stops the other.
    let limits =
        Limits { iops: Some(Limit::of(1000)), bps: Some(Limit::of(64 << 20)), ..Limits::default() };
    let limiter = Limiter::new(&limits);
    let (small, large) = (limiter.join(100), limiter.join(100));
    let got = compete(&limiter, S, 20, &[(&small, read(4096), 1), (&large, read(256 << 10), 1)]);
    let (requests, bytes) = (got[0] / 4096.0 + got[1] / 262_144.0, got[0] + got[1]);
    let used = (requests / 1000.0).max(bytes / (64 << 20) as f64);
    assert!(
        (0.97..=1.02).contains(&used) && got[0] / 4096.0 > 300.0 && got[1] / 262_144.0 > 100.0,
        "{used}: {got:?}"
    );
}

#[test]
fn a_flow_that_has_gone_delays_others_only_for_a_moment() {
    let limiter = Limiter::new(&iops(Limit::of(1000)));
    let (here, gone) = (limiter.join(100), limiter.join(100));
    while limiter.take(S, &read(0), Some(&gone)).is_ok() {}
    // `here` gets far ahead of `gone`, which still counts as waiting, but is delayed only for a
    // moment.
    let first = compete(&limiter, S, 1, &[(&here, read(0), 1)]);
    assert!((900.0..=1010.0).contains(&first[0]), "{first:?}");
    drop(gone);
    let later = compete(&limiter, 2 * S, 5, &[(&here, read(0), 1)]);
    assert!((990.0..=1010.0).contains(&later[0]), "{later:?}");
}
