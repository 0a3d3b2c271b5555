//! Guests that share a simulated device: shares, protection, reservations, and freedom from
//! starvation.

mod beside;
mod events;
mod figures;
mod model;
mod orders;

use blockyard_sched::{DeviceClass, Knobs, OperationKind};
use model::{Got, Guest, MS, Model, S, Simulation, run};

fn thrasher() -> Guest {
    Guest {
        work: vec![(OperationKind::Read, 4096), (OperationKind::Write, 4096)],
        ..Guest::reads(1024)
    }
}

fn shares(got: &[Got]) -> Vec<f64> {
    let all: u64 = got.iter().map(|g| g.cost).sum();
    got.iter().map(|g| g.cost as f64 / all as f64).collect()
}

fn within(got: &[Got], weights: &[f64], tolerance: f64) {
    let sum: f64 = weights.iter().sum();
    for (i, (share, weight)) in shares(got).iter().zip(weights).enumerate() {
        let due = weight / sum;
        assert!(
            (share / due - 1.0).abs() <= tolerance,
            "disk {i}: {share:.4} of the device, and {due:.4} is due"
        );
    }
}

#[test]
fn a_guest_within_its_share_is_hardly_slowed_by_one_that_thrashes() {
    // At depth 8 a guest uses half of the servers, its whole share. If all operations take the same
    // time, they run in lockstep: a guest that pauses for a moment finds all servers busy. Its p99
    // is higher then. `orders` has more cases.
    let cases = [
        (1, 0, 0, 0.98, 1.3),
        (1, 50, 0, 0.976, 1.3),
        (7, 50, 0, 0.95, 1.3),
        (1, 0, 30_000, 0.95, 1.5),
        (8, 0, 30_000, 0.93, 2.3),
    ];
    for (depth, spread, think, keeps, slows) in cases {
        let model = Model { spread, span: 10 * S, calibrated: think > 0, ..Model::PLAIN };
        let polite = Guest { think, ..Guest::reads(depth) };
        let alone = &run(model, std::slice::from_ref(&polite))[0];
        let beside = &run(model, &[polite.clone(), thrasher()]);
        let kept = beside[0].operations as f64 / alone.operations as f64;
        let p99 = beside[0].quantile(0.99) as f64 / alone.quantile(0.99) as f64;
        assert!(
            kept > keeps,
            "depth {depth}, spread {spread}, think {think}: {kept:.3} of its rate alone"
        );
        assert!(
            p99 < slows,
            "depth {depth}, spread {spread}, think {think}: p99 is {p99:.2} times that alone"
        );
        let total: u64 = beside.iter().map(|g| g.cost).sum();
        let done = total as f64 / model.span as f64;
        assert!(
            done > 0.8,
            "depth {depth}, spread {spread}, think {think}: the device does {done:.2}"
        );
        // A fifth of the time shows that the polite guest gets less than a tenth.
        let unscheduled = Model { scheduled: false, span: model.span / 5, ..model };
        let unscheduled = &run(unscheduled, &[polite, thrasher()])[0];
        assert!(
            unscheduled.operations * 10 < beside[0].operations / 5,
            "the scheduler makes no difference in this test"
        );
    }
}

#[test]
fn weights_decide_under_saturation() {
    let weights = [1.0, 2.0, 4.0, 8.0];
    let guests = |work: [Vec<(OperationKind, u64)>; 4]| -> Vec<Guest> {
        let guest =
            |(work, weight)| Guest { work, ..Guest::reads(64) }.weighing(weight as u32 * 100);
        work.into_iter().zip(weights).map(guest).collect()
    };
    let read = |bytes| vec![(OperationKind::Read, bytes)];
    let got = run(Model::PLAIN, &guests([read(4096), read(4096), read(4096), read(4096)]));
    within(&got, &weights, 0.01);
    for Got { figures, .. } in &got {
        let ratio = figures.owed_ns as f64 / figures.used_ns as f64;
        assert!((0.9..1.1).contains(&ratio), "what is owed is used: {figures:?}");
    }
    let model = Model { per_mib: 20 * MS, spread: 30, span: 20 * S, ..Model::PLAIN };
    let mixed = [
        read(65_536),
        vec![(OperationKind::Write, 4096), (OperationKind::Read, 262_144)],
        read(4096),
        read(16_384),
    ];
    within(&run(model, &guests(mixed)), &weights, 0.03);
}

#[test]
fn sixty_four_disks_of_the_same_weight_get_equal_shares() {
    let got = run(Model { spread: 30, ..Model::PLAIN }, &vec![Guest::reads(32); 64]);
    let (sum, squares) =
        got.iter().fold((0.0, 0.0), |(s, q), g| (s + g.cost as f64, q + (g.cost as f64).powi(2)));
    let jain = sum * sum / (64.0 * squares);
    assert!(jain > 0.99, "Jain's index is {jain:.4}");
}

#[test]
fn an_unused_share_goes_to_the_others_and_the_device_stays_busy() {
    let idler = Guest { think: 50 * MS, ..Guest::reads(1) }.weighing(800);
    let got = run(Model::PLAIN, &[idler, Guest::reads(64), Guest::reads(64).weighing(200)]);
    let total: u64 = got.iter().map(|g| g.cost).sum();
    assert!(total as f64 > 0.97 * 5e9, "{:.3} of the device", total as f64 / 5e9);
    let mean = got[0].latencies.iter().sum::<u64>() / got[0].operations;
    assert!(mean < MS * 13 / 10, "an operation of the idler takes {mean} ns, and alone 1 ms");
    within(&got[1..], &[1.0, 2.0], 0.03);
    assert!(got[0].figures.donated_ns > got[0].figures.used_ns, "{:?}", got[0].figures);
}

#[test]
fn reservations_precede_shares() {
    let reserved = |iops| Guest {
        knobs: Knobs { reserve_iops: Some(iops), weight: 1, ..Knobs::default() },
        ..Guest::reads(32)
    };
    let mut guests = vec![reserved(5000), reserved(2000)];
    guests.extend(vec![thrasher().weighing(10_000); 4]);
    let got = run(Model::PLAIN, &guests);
    assert!(
        got[0].operations >= 25_000 && got[1].operations >= 10_000,
        "{} {}",
        got[0].operations,
        got[1].operations
    );
    assert!(
        got[0].operations < 26_500,
        "the disk gets more than its reservation: {}",
        got[0].operations
    );
}

#[test]
fn a_group_has_one_share_for_all_its_disks() {
    let group = Some(("g", Knobs { weight: 100, ..Knobs::default() }));
    // The window of a rotational device is larger.
    let classes = [(DeviceClass::FLASH, 64, 0.03), (DeviceClass::ROTATIONAL, 1024, 0.05)];
    for (class, depth, tolerance) in classes {
        let guest = || Guest::reads(depth);
        let member = |weight| Guest { group: group.clone(), ..guest() }.weighing(weight);
        let model = Model { class, ..Model::PLAIN };
        let got = run(model, &[member(100), member(300), guest()]);
        within(&got, &[1.0, 3.0, 4.0], tolerance);
    }
}

#[test]
fn weights_change_while_guests_run() {
    let mut simulation = Simulation::new(Model::PLAIN, &[Guest::reads(64), Guest::reads(64)]);
    within(&simulation.run(S, 2 * S), &[1.0, 1.0], 0.03);
    for weight in [100, 400, 1, 10_000, 300] {
        let now = simulation.now();
        simulation.share(0).set(&Knobs { weight, ..Knobs::default() }, now);
        let got = simulation.run(now + 100 * MS, now + S);
        if weight <= 400 && weight > 1 {
            within(&got, &[f64::from(weight), 100.0], 0.03);
        }
    }
}

#[test]
fn bursts_gain_no_more_than_a_constant_load() {
    // Bursts after idle times, at several depths, get at most half of the device, and no more than
    // a constant load gets.
    let steady = &shares(&run(Model::PLAIN, &[thrasher(), Guest::reads(64)]))[1].clone();
    for think in [100_000, MS, 5 * MS, 30 * MS] {
        for depth in [4, 64, 512] {
            let got = run(Model::PLAIN, &[thrasher(), Guest { think, ..Guest::reads(depth) }]);
            let share = shares(&got)[1];
            assert!(
                share < steady + 0.02,
                "resting for {think} ns at depth {depth} gets {share:.3} instead of {steady:.3}"
            );
        }
    }
}

#[test]
fn no_disk_starves() {
    // The smallest weight against the largest one, with several kinds of neighbours, and a latency
    // target that cannot be met.
    let strict =
        Knobs { latency_target: Some(std::time::Duration::from_nanos(1)), ..Knobs::default() };
    let light = Guest::reads(64).weighing(1);
    for neighbour in [thrasher().weighing(10_000), Guest { knobs: strict, ..Guest::reads(8) }] {
        let got = run(
            Model { span: 20 * S, ..Model::PLAIN },
            &[light.clone(), neighbour.clone(), neighbour],
        );
        assert!(got[0].operations > 5, "{} operations in 20 s", got[0].operations);
    }
}

#[test]
fn shares_hold_on_a_device_slower_than_its_cost_model() {
    let slow = Model { time: 20 * MS, ..Model::PLAIN };
    // The cost model is that of a fast device.
    let mut simulation = Simulation::new(slow, &[Guest::reads(256), Guest::reads(256)]);
    let got = simulation.run(5 * S, 15 * S);
    within(&got, &[1.0, 1.0], 0.03);
}

#[test]
fn waiting_operations_are_admitted_when_the_neighbours_have_gone() {
    // From 4 s on the disk is the only active one. From 14 s on it has the device to itself.
    let leaves = Guest { until: 4 * S, ..thrasher() };
    let mut simulation = Simulation::new(Model::PLAIN, &[Guest::reads(256), leaves]);
    simulation.run(S, 4 * S);
    assert!(simulation.share(0).figures().waiting > 100);
    let got = simulation.run(20 * S, 25 * S);
    assert_eq!(got[0].figures.waiting, 0);
    assert!(got[0].cost as f64 > 0.99 * 5e9);
    // The longest wait is the time of 256 operations.
    assert!(got[0].quantile(1.0) < 20 * MS, "{} ns", got[0].quantile(1.0));
}

#[test]
fn operations_without_neighbours_are_no_debt() {
    // A database that syncs has the device to itself for long. Then a thrasher starts.
    let lone = Guest::reads(2);
    let late = Guest { from: 20 * S + MS / 2, ..thrasher() };
    let mut simulation = Simulation::new(Model { calibrated: true, ..Model::PLAIN }, &[lone, late]);
    for second in 0..20 {
        simulation.run(second * S, (second + 1) * S);
        let (share, now) = (simulation.share(0), simulation.now());
        (0..1000).for_each(|_| share.done(now, share.sync(now)));
    }
    let got = simulation.run(20 * S, 21 * S);
    assert!(
        got[0].operations > 1_200,
        "{} of 2,000: it pays for operations without neighbours",
        got[0].operations
    );
}
