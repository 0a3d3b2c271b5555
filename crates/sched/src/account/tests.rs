//! Counters of a disk, and the exactness of shares.

use super::*;

#[test]
fn a_disk_mostly_waits_if_more_than_half_of_its_operations_do() {
    let account = Account::new(&Knobs::default(), None);
    let counters = account.new_counters();
    let is_over = |waits: u64, begun: u64, waiting: u64| {
        // Half of them began without a wait.
        (0..begun / 2).for_each(|_| account.began());
        (begun / 2..begun).for_each(|_| counters.began());
        account.waits.store(waits, Relaxed);
        account.waiting.store(waiting, Relaxed);
        account.take_counts(1, 1).mostly_waited
    };
    assert!(is_over(6, 10, 0));
    assert!(!is_over(5, 10, 0), "half of them is not most");
    assert!(!is_over(0, 0, 0), "it has done nothing");
    assert!(is_over(0, 0, 1), "all that it has waits");
    assert!(!is_over(0, 1, 1));
}

#[test]
fn what_all_reactors_count_is_taken_once() {
    let account = Account::new(&Knobs::default(), None);
    let reactors = [account.new_counters(), account.new_counters()];
    reactors[0].served(10, 100, 150, 90);
    reactors[1].served(20, 200, 200, 0);
    account.costs_more(5);
    let counts = account.take_counts(1, 1);
    assert_eq!((counts.served, counts.cost_ns, counts.unknown), (2, 35, 1));
    assert_eq!((counts.service_ns, counts.latency_ns, counts.baseline_ns), (300, 350, 290));
    assert_eq!(account.take_counts(2, 1).served, 0);
    // A reactor closes the disk. What it has counted is not lost.
    reactors[1].served(1, 1, 1, 1);
    let [first, second] = reactors;
    drop(second);
    first.served(1, 1, 1, 1);
    assert_eq!(account.take_counts(3, 1).served, 2);
    assert_eq!((account.take_counts(4, 1).served, account.counters().len()), (0, 1));
}

#[test]
fn number_and_cost_in_flight_share_a_word() {
    let in_flight = InFlight::default();
    assert_eq!(in_flight.add(InFlight::MAX_COST_NS), (0, 0));
    assert_eq!(in_flight.add(1), (1, InFlight::MAX_COST_NS));
    assert_eq!(in_flight.get(), (2, InFlight::MAX_COST_NS + 1));
    in_flight.remove(InFlight::MAX_COST_NS);
    in_flight.remove(1);
    assert_eq!(in_flight.get(), (0, 0));
}

#[test]
fn a_disk_has_the_reservation_of_its_group() {
    let reserve = Knobs { reserve_iops: Some(100), ..Knobs::default() };
    let group = |knobs: &Knobs| Some(Arc::new(Group::new("group", knobs)));
    for (own, of_group, expected) in [
        (Knobs::default(), None, false),
        (reserve.clone(), None, true),
        (Knobs { reserve_bps: Some(1), ..Knobs::default() }, None, true),
        (Knobs::default(), group(&Knobs::default()), false),
        (Knobs::default(), group(&reserve), true),
        (reserve.clone(), group(&Knobs::default()), true),
    ] {
        assert_eq!(Account::new(&own, of_group).has_reservation(), expected);
    }
}

#[test]
fn shares_stay_exact_over_a_hundred_million_operations() {
    const OPERATIONS: u64 = 100_000_000;
    let weights = [1, 7, 977, 9973];
    let costs = [4_001, 12_503, 1_777, 13];
    let accounts = weights.map(|weight| Account::new(&Knobs { weight, ..Knobs::default() }, None));
    let steps: [u64; 4] = std::array::from_fn(|i| accounts[i].virtual_cost(costs[i]));
    // Begin close to the largest value, so that the tags wrap around during the test.
    let mut tags = [u64::MAX - 1_000_000; 4];
    let mut counts = [0u64; 4];
    for _ in 0..OPERATIONS {
        let earlier = |one: usize, other: usize| {
            if before(tags[other], tags[one]) { other } else { one }
        };
        let next = earlier(earlier(0, 1), earlier(2, 3));
        tags[next] = tags[next].wrapping_add(steps[next]);
        counts[next] += 1;
    }
    let used: [f64; 4] = std::array::from_fn(|i| counts[i] as f64 * costs[i] as f64);
    let (all, sum) = (used.iter().sum::<f64>(), weights.iter().sum::<u32>());
    for ((used, weight), cost) in used.iter().zip(weights).zip(costs) {
        let due = all * f64::from(weight) / f64::from(sum);
        // Allow for one operation of each disk in flight, and a millionth for rounding.
        let most = 2.0 * cost.max(4_001 * u64::from(weight)) as f64 + due * 1e-6;
        assert!(
            (used - due).abs() <= most,
            "weight {weight} has used {used} ns, and {due} are due"
        );
    }
}
