use super::*;

fn stats() -> PeriodStats {
    let (elapsed_ns, has_excess, over_share_weight) = (20_000_000, true, 0.5);
    let in_flight_ns = u64::MAX;
    PeriodStats {
        elapsed_ns,
        has_excess,
        over_share_weight,
        in_flight_ns,
        ..PeriodStats::default()
    }
}

/// Returns a period in which a disk within its share was not slowed down.
fn harmless() -> PeriodStats {
    PeriodStats {
        within_operations: 100,
        within_baseline_ns: 10_000_000,
        within_service_ns: 10_000_000,
        completed_cost_ns: 10_000_000,
        over_share_cost_ns: 8_000_000,
        operations: 200,
        ..stats()
    }
}

const CONFIRMED: Shown = Shown { has_changed: false, correction: 1.0, is_vague: false };
const CHANGED: Shown = Shown { has_changed: true, correction: 3.0, is_vague: false };

fn after(window: &mut InFlightWindow, stats: &PeriodStats, periods: u64) -> u64 {
    (0..periods).for_each(|n| window.adjust(n * 20_000_000, stats, false));
    window.size()
}

#[test]
fn the_window_grows_until_the_device_queue_is_full_and_then_shrinks() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let busy = PeriodStats {
        completed_cost_ns: 20_000_000,
        over_share_cost_ns: 20_000_000,
        over_share_weight: 1.0,
        operations: 100,
        total_baseline_ns: 5_000_000,
        ..stats()
    };
    assert!(
        after(&mut window, &PeriodStats { total_service_ns: 50_000_000, ..busy }, 20) > 2_000_000
    );
    for n in 20..80 {
        // What is in flight decides how long an operation takes.
        let queued = PeriodStats { total_service_ns: 200 * window.size(), ..busy };
        window.adjust(n * 20_000_000, &queued, false);
    }
    assert!(window.size() < 1_000_000, "{}", window.size());
}

#[test]
fn the_window_does_not_shrink_if_that_makes_no_operation_shorter() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000_000));
    let slow = PeriodStats {
        completed_cost_ns: 7_000_000,
        over_share_cost_ns: 7_000_000,
        over_share_weight: 1.0,
        operations: 100,
        total_baseline_ns: 100_000_000,
        total_service_ns: 300_000_000,
        ..stats()
    };
    let least = (0..200).map(|n| {
        window.adjust(n * 20_000_000, &slow, false);
        window.size()
    });
    let least = least.min().unwrap();
    assert!(least > 750_000, "{least}");
}

#[test]
fn the_window_does_not_open_for_a_disk_whose_operations_take_long() {
    let growth = |within_in_service| {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(500_000));
        assert!(window.protect(0));
        let before = window.size();
        let operations = 2;
        let none = PeriodStats { protected_waits: true, within_in_service, operations, ..stats() };
        window.adjust(2_000_000, &none, false);
        window.size() as f64 / before as f64
    };
    assert!(growth(false) > 1.9, "it waits because the window is too small: {}", growth(false));
    assert!(growth(true) < 1.2, "it waits for the device: {}", growth(true));
}

#[test]
fn an_operation_larger_than_the_window_does_not_count_as_left_over() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(500_000));
    assert!(window.protect(0));
    let before = window.size();
    let slowed = PeriodStats {
        within_operations: 4,
        within_baseline_ns: 200_000,
        within_service_ns: 4_000_000,
        completed_cost_ns: 2_000_000,
        over_share_cost_ns: 1_900_000,
        operations: 8,
        elapsed_ns: 2_000_000,
        in_flight_ns: 3 * before,
        ..stats()
    };
    (1..10).for_each(|n| window.adjust(n * 2_000_000, &slowed, false));
    assert!(window.size() < before, "{} of {before}", window.size());
}

#[test]
fn a_probe_that_corrects_the_baselines_lets_the_window_grow_fast_again() {
    let harmless = harmless();
    let seems_slowed = PeriodStats { within_service_ns: 16_000_000, ..harmless };
    let growth = |shown: &Shown| {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(500_000));
        window.adjust(0, &seems_slowed, false);
        let before = window.size();
        window.probed(shown, false);
        let wants_probe = window.wants_probe(&harmless, 1);
        (1..6).for_each(|n| window.adjust(n * 20_000_000, &harmless, false));
        (window.size() as f64 / before as f64, wants_probe)
    };
    let (confirmed, wants_probe) = growth(&CONFIRMED);
    assert!(confirmed < 1.2 && !wants_probe, "{confirmed}");
    let (corrected, wants_probe) = growth(&Shown { correction: 1.1, is_vague: true, ..CONFIRMED });
    assert!(corrected > 1.5 && wants_probe, "{corrected}");
}

#[test]
fn a_probe_that_shows_a_slower_device_restores_the_window() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000_000));
    let harmless = harmless();
    let slowed = PeriodStats { within_service_ns: 30_000_000, ..harmless };
    window.adjust(0, &harmless, true);
    let before = window.size();
    window.adjust(20_000_000, &slowed, true);
    assert_eq!(window.size(), before, "a probe decides first");
    assert!(window.wants_probe(&slowed, 1));
    window.probed(&CHANGED, false);
    assert_eq!(window.size(), before);
    // Without a change of the device neighbours are the cause.
    window.adjust(40_000_000, &harmless, true);
    window.adjust(60_000_000, &slowed, true);
    window.probed(&CONFIRMED, false);
    assert!(window.size() < before * 9 / 10, "{} of {before}", window.size());
    // No probe may begin, so the window shrinks at once, and a later probe restores it.
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000_000));
    window.adjust(0, &harmless, false);
    window.adjust(20_000_000, &slowed, false);
    assert!(window.size() < 900_000, "{}", window.size());
    window.probed(&CHANGED, false);
    assert_eq!(window.size(), 1_000_000);
}

#[test]
fn disks_within_their_share_are_protected_up_to_the_share_of_the_others() {
    let polite = PeriodStats {
        within_operations: 100,
        within_baseline_ns: 4_000_000,
        within_service_ns: 20_000_000,
        operations: 200,
        ..stats()
    };
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let more =
        PeriodStats { completed_cost_ns: 10_000_000, over_share_cost_ns: 8_000_000, ..polite };
    assert!(
        after(&mut window, &more, 20) < 100_000,
        "they get more than their half of what is completed"
    );
    let less =
        PeriodStats { completed_cost_ns: 10_000_000, over_share_cost_ns: 4_000_000, ..polite };
    let before = window.size();
    assert!(after(&mut window, &less, 20) > before, "they get less than their half of it");
    // The slowdown is small, and the others get their half of the device's capacity. So the
    // window shrinks further.
    let slightly = PeriodStats {
        within_service_ns: 4_300_000,
        completed_cost_ns: 14_000_000,
        over_share_cost_ns: 12_000_000,
        ..polite
    };
    let before = window.size();
    assert!(after(&mut window, &slightly, 20) < before);
}

#[test]
fn a_latency_target_precedes_shares_but_starves_no_disk() {
    let polite = PeriodStats {
        target_ratio: Some(2.0),
        completed_cost_ns: 10_000_000,
        over_share_cost_ns: 2_000_000,
        ..stats()
    };
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    assert!(after(&mut window, &polite, 30) < 50_000);
    let before = window.size();
    assert!(
        after(&mut window, &PeriodStats { over_share_cost_ns: 100_000, ..polite }, 30) >= before
    );
    assert!(after(&mut window, &PeriodStats { target_ratio: Some(0.5), ..polite }, 30) > before);
}

#[test]
fn the_window_stays_for_a_second_after_the_last_protected_operation() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let polite = PeriodStats {
        within_operations: 100,
        within_baseline_ns: 4_000_000,
        within_service_ns: 4_000_000,
        over_share_cost_ns: 30_000_000,
        ..stats()
    };
    window.adjust(0, &polite, false);
    let busy = PeriodStats {
        completed_cost_ns: 30_000_000,
        over_share_cost_ns: 30_000_000,
        over_share_weight: 0.9,
        operations: 100,
        ..stats()
    };
    // A protected disk that waits shows that the window is too small.
    let waits = PeriodStats { protected_waits: true, ..busy };
    let steps = [
        (500_000_000, &busy, 1.0),
        (600_000_000, &waits, 1.03),
        (900_000_000, &busy, 1.0),
        (1_500_000_000, &busy, 1.1),
    ];
    for (now, stats, grows) in steps {
        let before = window.size() as f64;
        window.adjust(now, stats, false);
        let by = window.size() as f64 / before;
        assert!((by - grows).abs() < 0.001, "at {now}: {by}");
    }
}

#[test]
fn the_window_closes_for_a_disk_that_begins_and_opens_while_that_is_harmless() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let before = window.size();
    assert!(window.protect(5_000_000_000) && window.size() == before / 8);
    assert!(!window.protect(5_500_000_000), "a disk is protected already");
    let harmless = PeriodStats {
        within_operations: 100,
        within_baseline_ns: 4_000_000,
        within_service_ns: 4_000_000,
        operations: 100,
        in_flight_ns: 100_000,
        ..stats()
    };
    // What was in flight before is slow, and does not count: neither in this period nor in the
    // next one.
    let drains =
        PeriodStats { in_flight_ns: 50_000_000, within_service_ns: 80_000_000, ..harmless };
    let last = PeriodStats { within_service_ns: 80_000_000, ..harmless };
    window.adjust(5_500_000_000, &drains, false);
    window.adjust(5_500_000_001, &last, false);
    assert!(window.is_opening() && window.size() >= before / 8, "{}", window.size());
    for n in 2..=7 {
        window.adjust(5_500_000_000 + n, &harmless, false);
    }
    assert!(window.is_opening() && window.size() > before, "{}", window.size());
    let slowed = PeriodStats { within_service_ns: 8_000_000, ..harmless };
    window.adjust(5_600_000_000, &slowed, false);
    assert!(!window.is_opening());
}

#[test]
fn a_slow_disk_shrinks_a_window_that_limits_nothing() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let slowed = PeriodStats {
        within_operations: 100,
        within_baseline_ns: 4_000_000,
        within_service_ns: 80_000_000,
        completed_cost_ns: 20_000_000,
        over_share_cost_ns: 19_000_000,
        in_flight_ns: 100_000,
        ..stats()
    };
    window.adjust(1_000_000_000, &slowed, false);
    assert!(window.size() < 50_000, "{}", window.size());
}

#[test]
fn unknown_baselines_and_lasting_slowdowns_want_a_probe() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    let unknown = |within_unknown| PeriodStats { within_operations: 10, within_unknown, ..stats() };
    assert!(window.wants_probe(&unknown(6), 0) && !window.wants_probe(&unknown(5), u64::MAX));
    let slowed = PeriodStats {
        within_operations: 100,
        within_baseline_ns: 4_000_000,
        within_service_ns: 80_000_000,
        ..stats()
    };
    window.adjust(0, &slowed, false);
    assert!(!window.wants_probe(&slowed, DOUBTFUL_NS));
    assert!(window.wants_probe(&slowed, DOUBTFUL_NS + 1));
}

#[test]
fn disks_within_their_share_keep_room_while_they_have_operations() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000_000));
    let holds = PeriodStats { within_in_flight_ns: 100_000, ..harmless() };
    after(&mut window, &holds, 30);
    assert!(window.usual().abs_diff(200_000) <= 1, "{}", window.usual());
    assert!(window.room().abs_diff(window.size() - 100_000) <= 1, "{}", window.room());
    window.adjust(600_000_000, &stats(), false);
    assert_eq!((window.usual(), window.room()), (0, window.size()));
}

#[test]
fn the_smallest_window_is_too_large_until_nothing_is_slowed_down_for_a_while() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000));
    let steps = [
        (0, 13_000_000, false),
        (1, 20_000_000, true),
        (2, 13_000_000, true),
        (3, 10_000_000, true),
        (1 + KEEP_NS, 10_000_000, true),
        (2 + KEEP_NS, 10_000_000, false),
        (3 + KEEP_NS, 13_000_000, false),
    ];
    for (now, within_service_ns, expected) in steps {
        window.adjust(now, &PeriodStats { within_service_ns, ..harmless() }, false);
        assert_eq!(window.is_too_large(), expected, "step {now}");
    }
}

#[test]
fn the_capacity_is_the_highest_rate_over_several_periods() {
    let mut window = InFlightWindow::new(DeviceClass::FLASH, None);
    after(&mut window, &PeriodStats { completed_cost_ns: 40_000_000, ..harmless() }, 20);
    after(&mut window, &harmless(), 20);
    assert!((window.capacity() - 2.0).abs() < 0.001, "{}", window.capacity());
}

#[test]
fn after_a_slowdown_the_window_grows_fast_only_for_disks_that_wait() {
    let growth = |within_waits| {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(500_000));
        window.adjust(0, &PeriodStats { within_service_ns: 16_000_000, ..harmless() }, false);
        let before = window.size() as f64;
        window.adjust(20_000_000, &PeriodStats { within_waits, ..harmless() }, false);
        window.size() as f64 / before
    };
    assert!(growth(true) > 1.09 && growth(false) < 1.01, "{} {}", growth(true), growth(false));
}

/// A device that has become three times slower serves what is in flight at once. It completes more
/// if more is in flight, up to 16 operations, which cost 1,000,000 ns.
#[test]
fn the_window_grows_if_a_larger_one_makes_no_operation_longer() {
    let sizes = |servers: f64| {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(270_000));
        window.capacity = 0.33;
        let mut sizes = Vec::new();
        for n in 0..200 {
            let in_flight = window.size() as f64 / 62_500.0;
            let operations = (in_flight.min(servers) * 20.0 / 3.0) as u64;
            let each = 3_000_000.0 * (in_flight / servers).max(1.0);
            let slow = PeriodStats {
                completed_cost_ns: operations * 62_500,
                over_share_cost_ns: operations * 62_500,
                over_share_weight: 1.0,
                operations,
                total_baseline_ns: operations * 1_000_000,
                total_service_ns: operations * each as u64,
                ..stats()
            };
            window.adjust(n * 20_000_000, &slow, false);
            sizes.push(window.size());
        }
        sizes
    };
    let grown = sizes(16.0);
    assert!(grown[100] > 600_000, "{grown:?}");
    let full = sizes(4.0);
    assert!(full.iter().all(|size| *size < 400_000), "more would only queue: {full:?}");
}

/// In-flight cost is read at one moment. A disk within its share may have stopped just before.
#[test]
fn a_window_that_shrinks_keeps_the_part_of_a_disk_that_has_just_stopped() {
    let size = |within_in_service| {
        let mut window = InFlightWindow::new(DeviceClass::FLASH, Some(1_000_000));
        let slowed = PeriodStats {
            within_operations: 150,
            within_baseline_ns: 150_000_000,
            within_service_ns: 160_000_000,
            within_in_flight_ns: 490_000,
            within_in_service: true,
            completed_cost_ns: 20_000_000,
            over_share_cost_ns: 10_500_000,
            operations: 320,
            in_flight_ns: 1_000_000,
            ..stats()
        };
        after(&mut window, &slowed, 4);
        window.adjust(
            80_000_000,
            &PeriodStats { in_flight_ns: 500_000, within_in_service, ..slowed },
            false,
        );
        window.size()
    };
    assert!(size(false) > 700_000 && size(true) < 700_000, "{} {}", size(false), size(true));
}
