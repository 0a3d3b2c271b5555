//! A polite guest beside a thrasher, on a device with something else: many idle disks, a stop,
//! another process, limits that change, or a reservation that the device cannot give.

use blockyard_sched::{Knobs, Limit, Limits, OperationKind};

use crate::model::{Guest, MS, Model, Mood, S, Simulation, reports, run};
use crate::orders::{
    BOTH, Bounds, FAST, NARROW, Neighbours, Order, PARALLEL, PLAIN, holds_beside, thrasher,
};

/// What must hold on the parallel device.
const BESIDE: Bounds = Bounds { p99: 2.0, ..PARALLEL };

const THREE: [Order; 3] = [Order::PoliteFirst, Order::ThrasherFirst, Order::Together];

fn holds(model: Model, bounds: &Bounds, thrasher: Guest, others: &[Guest]) {
    holds_beside(model, bounds, &Neighbours { thrashers: &[thrasher], others }, &THREE);
}

#[test]
fn beside_idle_disks() {
    let idle = |n: u64| Guest { until: MS, from: n * 1_000, ..Guest::reads(1) };
    let idle: Vec<_> = (0..300).map(idle).collect();
    holds(PLAIN, &BESIDE, thrasher(), &idle);
}

/// Each of them reads once a second, as the disk of an idle guest does.
#[test]
fn beside_disks_that_do_little() {
    let little = |n: u64| Guest { think: S, from: n * 3_300_000, ..Guest::reads(1) };
    let little: Vec<_> = (0..300).map(little).collect();
    holds(PLAIN, &BESIDE, thrasher(), &little);
}

/// Just before the second guest arrives, and while both work.
#[test]
fn while_the_device_stops_for_a_moment() {
    for at in [BOTH - 50 * MS, BOTH + S] {
        let mood = Mood::Stops(at, 100 * MS);
        holds(Model { mood, ..PLAIN }, &BESIDE, thrasher(), &[]);
    }
}

#[test]
fn while_the_device_stops_for_two_seconds() {
    for at in [BOTH - S, BOTH + S] {
        let mood = Mood::Stops(at, 2 * S);
        holds(Model { mood, ..PLAIN }, &BESIDE, thrasher(), &[]);
    }
}

/// It keeps 4 of the 16 servers busy, all the time or every other second.
#[test]
fn beside_a_process_that_takes_a_part_of_the_device() {
    for shifts in [None, Some((S, S))] {
        let process = Guest { is_foreign: true, shifts, from: S / 2, ..Guest::reads(4) };
        // Each time the process has gone, the window must open again.
        let bounds = Bounds { total: 0.85, ..BESIDE };
        holds(PLAIN, &bounds, thrasher(), &[process]);
    }
}

#[test]
fn beside_a_process_on_a_device_without_parallelism() {
    let process = Guest { is_foreign: true, ..Guest::reads(2) };
    // At depth 8 both guests have half of their rates alone, so the mean is twice that alone.
    holds(FAST, &Bounds { p99: 2.5, ..NARROW }, thrasher(), &[process]);
}

/// Each time the limit rises, the thrasher begins what has waited for it.
#[test]
fn while_the_limits_of_the_thrasher_change() {
    let of = |iops: Option<u64>| {
        let limit = |rate| Limit { rate, max: None, length: std::time::Duration::from_secs(1) };
        Knobs { limits: Limits { iops: iops.map(limit), ..Limits::default() }, ..Knobs::default() }
    };
    let limits = [Some(2_000), None, Some(100), Some(6_000), None, Some(50_000)];
    let at = |n: usize| S + n as u64 * 250 * MS;
    let changes = (0..28).map(|n| (at(n), of(limits[n % limits.len()]))).collect();
    holds(PLAIN, &BESIDE, Guest { changes, ..thrasher() }, &[]);
}

fn reserving(guest: Guest, iops: u64) -> Guest {
    Guest { knobs: Knobs { reserve_iops: Some(iops), ..guest.knobs }, ..guest }
}

/// The device gives 16,000 operations a second. A reservation comes before all shares, so a
/// reservation of 50,000 leaves next to nothing to the others, and half is out of reach for the
/// polite guest. It holds that the polite guest loses nothing if the reservation is its own, and
/// that the thrasher has the device if the reservation is the thrasher's, which is reported.
#[test]
fn beside_a_reservation_that_the_device_cannot_give() {
    for order in THREE {
        for depth in [1, 8] {
            let [alone, own, other] = [None, Some(0), Some(1)].map(|reserves| {
                let mut guests = crate::orders::arrive(order, &Guest::reads(depth), &[thrasher()]);
                match reserves {
                    None => guests.truncate(1),
                    Some(at) => guests[at] = reserving(guests[at].clone(), 50_000),
                }
                let got = Simulation::new(PLAIN, &guests).run(BOTH, BOTH + 4 * S);
                (got, reports())
            });
            let rate = |got: &[crate::model::Got]| got[0].operations as f64;
            let kept = rate(&own.0) / rate(&alone.0) * 2.0;
            assert!(kept > 1.8, "depth {depth}, {order:?}: its own reservation: {kept}");
            assert_eq!(own.1, [], "depth {depth}, {order:?}: the guest wants no more");
            let total: u64 = other.0.iter().map(|got| got.operations).sum();
            assert!(total > 63_000, "depth {depth}, {order:?}: {total} of 64,000");
            let [report] = &other.1[..] else { panic!("one report: {:?}", other.1) };
            assert!((15_000..17_000).contains(&report.operations), "{report}");
            let unmet = report.unmet.iter().map(|unmet| (&unmet.name[..], unmet.reserved));
            assert_eq!(unmet.collect::<Vec<_>>(), [("1", 50_000)], "{report}");
            assert!((14_000..17_000).contains(&report.unmet[0].got), "{report}");
        }
    }
}

/// Two servers give 2,000 operations a second.
#[test]
fn reservations_are_reported_if_their_sum_exceeds_what_the_device_gives() {
    let model = Model { servers: 2, span: 6 * S, ..PLAIN };
    let run = |knobs: [Knobs; 2], depth, group: Option<&'static str>| {
        let guest = |knobs: Knobs| match group {
            None => Guest { knobs, ..Guest::reads(depth) },
            Some(name) => Guest { group: Some((name, knobs)), ..Guest::reads(depth) },
        };
        let [one, two] = knobs.map(guest);
        run(model, &[one, two, Guest::reads(8)]);
        reports()
    };
    let iops = |rate| Knobs { reserve_iops: Some(rate), ..Knobs::default() };
    let names = |reports: Vec<blockyard_sched::Shortfall>| {
        let unmet = reports.into_iter().flat_map(|report| report.unmet);
        unmet.map(|unmet| (unmet.name, unmet.is_group, unmet.is_bytes)).collect::<Vec<_>>()
    };
    let of = |name: &str, is_group, is_bytes| (name.to_string(), is_group, is_bytes);
    let both = [of("0", false, false), of("1", false, false)];
    assert_eq!(names(run([iops(1_500), iops(1_500)], 64, None)), both);
    let bytes = Knobs { reserve_bps: Some(100 << 20), ..Knobs::default() };
    let one_of_bytes = [of("0", false, true)];
    assert_eq!(names(run([bytes, Knobs::default()], 64, None)), one_of_bytes);
    let group = [of("g", true, false)];
    assert_eq!(names(run([iops(5_000), iops(5_000)], 64, Some("g"))), group);
    // The device gives what is reserved, or a guest does not ask for it.
    assert_eq!(names(run([iops(700), iops(700)], 64, None)), []);
    assert_eq!(names(run([iops(5_000), Knobs::default()], 1, None)), []);
}

/// A device that stays too slow must not fill the log.
#[test]
fn a_reservation_is_reported_at_most_once_a_minute() {
    let model = Model { servers: 2, time: 4 * MS, span: 130 * S, ..PLAIN };
    let work = vec![(OperationKind::Read, 4096)];
    run(model, &[reserving(Guest { work, ..Guest::reads(64) }, 5_000), Guest::reads(4)]);
    assert_eq!(reports().len(), 3, "in 133 s");
}
