//! A polite guest beside guests that thrash, in every order of arrival, on devices of several
//! kinds. What the polite guest keeps must not depend on what happened before.

use std::sync::{Mutex, OnceLock};

use blockyard_sched::{DeviceClass, Operation, OperationKind};

use crate::model::{Got, Guest, MS, Model, Mood, S, Simulation};

/// The order in which the two guests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    PoliteFirst,
    ThrasherFirst,
    Together,
    /// The polite guest works for half a second, and rests for two.
    Shifts,
    /// The polite guest has worked alone, then the thrasher, and then the polite guest returns.
    Returns,
}

pub const ORDERS: [Order; 5] =
    [Order::PoliteFirst, Order::ThrasherFirst, Order::Together, Order::Shifts, Order::Returns];

/// Time from which both guests are there, and time at which the measurement ends.
pub const BOTH: u64 = 3 * S;
pub const END: u64 = BOTH + 5 * S;

/// Returns the guests, the polite one first.
pub fn arrive(order: Order, polite: &Guest, thrashers: &[Guest]) -> Vec<Guest> {
    let late = |guest: &Guest| Guest { from: BOTH, ..guest.clone() };
    let mut guests = vec![polite.clone()];
    guests.extend_from_slice(thrashers);
    match order {
        Order::PoliteFirst => guests[1..].iter_mut().for_each(|guest| *guest = late(guest)),
        Order::ThrasherFirst => guests[0] = late(&guests[0]),
        Order::Together => guests.iter_mut().for_each(|guest| *guest = late(guest)),
        Order::Shifts => {
            guests[0] = Guest { shifts: Some((S / 2, 2 * S)), ..late(&guests[0]) };
        }
        Order::Returns => {
            guests[0].shifts = Some((S, 2 * S));
            guests[1..].iter_mut().for_each(|guest| guest.from = S + S / 2);
        }
    }
    guests
}

/// What became of the polite guest.
#[derive(Debug)]
struct Kept {
    /// Its rate, as a part of its share of the rate that it has alone.
    part: f64,
    /// Its 99th percentile of the latency, as a multiple of that alone.
    p99: f64,
    /// The longest time in nanoseconds from an arrival until it has 80% of its share for 20 ms.
    time_to_share: u64,
    /// The cost of all that completed, as a part of what completes without the scheduler.
    total: f64,
}

/// What uses the device beside the polite guest.
pub struct Neighbours<'a> {
    pub thrashers: &'a [Guest],
    /// Guests that want next to nothing, and other processes. They are there also when the polite
    /// guest is alone, and no share is due to them.
    pub others: &'a [Guest],
}

pub fn cost(got: &[Got]) -> f64 {
    got.iter().map(|g| g.cost).sum::<u64>() as f64
}

/// All that determines the results of a simulation from [`BOTH`] to [`END`].
#[derive(PartialEq)]
struct Case {
    servers: usize,
    times: [u64; 5],
    /// [`Model::factor`] of the guests' operations.
    factors: Vec<u64>,
    mood: Mood,
    scheduler: (bool, Option<usize>, bool),
    class: DeviceClass,
    guests: Vec<Guest>,
}

impl Case {
    fn of(model: Model, guests: &[Guest]) -> Self {
        let Model { servers, time, per_mib, spread, factor, after, mood, sync, .. } = model;
        let Model { scheduled, window, calibrated, class, .. } = model;
        let work = guests.iter().flat_map(|guest| &guest.work).copied();
        let operations =
            work.map(|(kind, bytes)| Operation { kind, bytes, sequential: false, requests: 1 });
        Case {
            servers,
            times: [time, per_mib, spread, after, sync],
            factors: operations.map(|operation| factor(&operation)).collect(),
            mood,
            scheduler: (scheduled, window, calibrated),
            class,
            guests: guests.to_vec(),
        }
    }
}

/// Results that tests have in common.
type Known<K, V> = Mutex<Vec<(K, &'static OnceLock<V>)>>;

/// Returns the result of a case. The first test that asks for it computes it.
fn once<K: PartialEq, V>(known: &Known<K, V>, key: K, compute: impl FnOnce() -> V) -> &'static V {
    let cell = {
        let mut known = known.lock().unwrap();
        let found = known.iter().find(|(other, _)| *other == key).map(|(_, cell)| *cell);
        found.unwrap_or_else(|| {
            let cell: &'static OnceLock<V> = Box::leak(Box::new(OnceLock::new()));
            known.push((key, cell));
            cell
        })
    };
    cell.get_or_init(compute)
}

/// Returns the cost of all that completes without the scheduler. Between orders in which the polite
/// guest does not rest it differs by less than 0.5%.
pub fn unscheduled(model: Model, order: Order, polite: &Guest, beside: &Neighbours) -> f64 {
    static KNOWN: Known<Case, f64> = Mutex::new(Vec::new());
    let mut guests = arrive(order, polite, beside.thrashers);
    guests.extend_from_slice(beside.others);
    // Only the scheduler uses what is known in advance.
    let model = Model { scheduled: false, calibrated: false, ..model };
    let simulate = || cost(&Simulation::new(model, &guests).run(BOTH, END));
    *once(&KNOWN, Case::of(model, &guests), simulate)
}

/// Results of the polite guest alone.
pub struct Alone {
    pub operations: u64,
    /// 99th percentile of the latency, and the mean latency, in nanoseconds.
    p99: u64,
    pub mean: f64,
    /// Times of the completions in nanoseconds, in order.
    completions: Vec<u64>,
}

impl Alone {
    /// Returns the results of the polite guest, the first of `guests`, beside guests that want next
    /// to nothing. Tests on the same device share them, and so do orders in which the guest arrives
    /// at the same time.
    pub fn of(model: Model, guests: &[Guest]) -> &'static Self {
        static KNOWN: Known<Case, Alone> = Mutex::new(Vec::new());
        // The scheduler admits each operation of a disk that has the device to itself.
        let model = if guests.len() == 1 { Model { calibrated: false, ..model } } else { model };
        once(&KNOWN, Case::of(model, guests), || {
            let got = Simulation::new(model, guests).run(BOTH, END).remove(0);
            let (p99, mean) = (got.quantile(0.99), got.mean());
            Alone { operations: got.operations, p99, mean, completions: got.completions }
        })
    }
}

/// Results of the polite guest beside others.
pub struct Beside {
    /// See [`Kept`].
    part: f64,
    p99: f64,
    time_to_share: u64,
    /// Its mean latency in nanoseconds.
    pub mean: f64,
    /// Its lowest rate in a second, as a part of its mean rate alone. With fewer than a hundred
    /// seconds this is their first percentile.
    pub isolation: f64,
    /// The cost of all that completed.
    pub cost: f64,
}

impl Beside {
    /// Returns the results of the polite guest. Tests on the same device share them.
    pub fn of(model: Model, order: Order, polite: &Guest, beside: &Neighbours) -> &'static Self {
        static KNOWN: Known<(Case, usize), Beside> = Mutex::new(Vec::new());
        let mut guests = arrive(order, polite, beside.thrashers);
        let sharing = guests.len();
        guests.extend_from_slice(beside.others);
        once(&KNOWN, (Case::of(model, &guests), sharing), || {
            let alone = Alone::of(model, &[&guests[..1], beside.others].concat());
            let got = Simulation::new(model, &guests).run(BOTH, END);
            let (polite, due) = (&got[0], 1.0 / sharing as f64);
            Beside {
                part: polite.operations as f64 / alone.operations as f64 / due,
                p99: polite.quantile(0.99) as f64 / alone.p99 as f64,
                time_to_share: time_to_share(&model, &guests[0], due, alone, polite),
                mean: polite.mean(),
                isolation: isolation(alone, polite),
                cost: cost(&got),
            }
        })
    }
}

/// See [`Beside::isolation`].
fn isolation(alone: &Alone, beside: &Got) -> f64 {
    let wanted = alone.operations as f64 * S as f64 / (END - BOTH) as f64;
    let until = |at: u64| beside.completions.partition_point(|t| *t < at);
    let rate = |from: u64| (until(from + S) - until(from)) as f64 / wanted;
    (BOTH..END).step_by(S as usize).map(rate).fold(f64::INFINITY, f64::min)
}

/// `due`: the guest's share of the device, 0 to 1. A time in which the device stops counts for
/// nothing, and its end counts as an arrival.
fn time_to_share(model: &Model, guest: &Guest, due: f64, alone: &Alone, beside: &Got) -> u64 {
    const SLICE: u64 = 20 * MS;
    let (works, rests) = guest.shifts.unwrap_or((END - BOTH, 0));
    let (alone, beside) = (&alone.completions, &beside.completions);
    let count = |completions: &[u64], from: u64, to: u64| {
        let until = |t| completions.partition_point(|at| *at < t);
        until(to) - until(from)
    };
    let mut longest = 0;
    let first = if guest.from >= BOTH { guest.from } else { BOTH };
    let arrivals = (first..END).step_by((works + rests) as usize).map(|at| (at, at + works));
    let mut begins: Vec<_> = arrivals.collect();
    if let Mood::Stops(at, lasts) = model.mood {
        let stopped = |time| (at..at + lasts).contains(&time);
        let went_on = begins.iter().find(|(from, to)| *from < at + lasts && at + lasts < *to);
        let went_on = went_on.map(|(_, to)| (at + lasts, *to));
        begins.retain(|(from, _)| !stopped(*from));
        begins.extend(went_on);
    }
    for (begin, end) in begins {
        let reached = (begin..end.min(begin + S)).step_by((SLICE / 4) as usize).find(|from| {
            let [alone, beside] = [alone, beside].map(|at| count(at, *from, from + SLICE) as f64);
            beside > 0.0 && beside >= 0.8 * due * alone
        });
        longest = longest.max(reached.map_or(end - begin, |at| at - begin));
    }
    longest
}

/// What must hold in each row; see [`Kept`].
pub struct Bounds {
    pub kept: f64,
    pub p99: f64,
    pub total: f64,
    /// In nanoseconds.
    pub time_to_share: u64,
}

/// Of a device with spare parallelism: the thrasher hardly slows the polite guest down.
pub const PARALLEL: Bounds = Bounds { kept: 0.9, p99: 2.4, total: 0.9, time_to_share: 100 * MS };
/// Of a device that the polite guest could fill at depth 8. If both have their half, each operation
/// takes twice as long. So p99 cannot be below 2. The highest values come from the operations that
/// the thrasher had in flight when the polite guest arrived.
pub const NARROW: Bounds = Bounds { p99: 5.2, total: 0.85, ..PARALLEL };
/// Of a device that changes its speed. The window is too small until probes have shown the new one.
const CHANGING: Bounds = Bounds { p99: 2.7, total: 0.83, ..PARALLEL };

pub fn thrasher() -> Guest {
    let mix = vec![(OperationKind::Read, 4096), (OperationKind::Write, 4096)];
    Guest { work: mix, ..Guest::reads(256) }
}

fn holds(model: Model, bounds: &Bounds, thrashers: &[Guest]) {
    holds_beside(model, bounds, &Neighbours { thrashers, others: &[] }, &ORDERS);
}

pub fn holds_beside(model: Model, bounds: &Bounds, beside: &Neighbours, orders: &[Order]) {
    let mut missed = Vec::new();
    for depth in [1, 8] {
        let polite = Guest::reads(depth);
        let together = unscheduled(model, Order::Together, &polite, beside);
        for order in orders.iter().copied() {
            let free = match order {
                Order::Shifts | Order::Returns => unscheduled(model, order, &polite, beside),
                _ => together,
            };
            let Beside { part, p99, time_to_share, cost, .. } =
                *Beside::of(model, order, &polite, beside);
            let kept = Kept { part, p99, time_to_share, total: cost / free };
            let is_met = kept.part >= bounds.kept
                && kept.p99 <= bounds.p99
                && kept.total >= bounds.total
                && kept.time_to_share <= bounds.time_to_share;
            let row = format!("depth {depth}, {order:?}: {kept:.3?}");
            println!("{row}");
            if !is_met {
                missed.push(row);
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

pub const PLAIN: Model = Model { spread: 30, ..Model::PLAIN };

#[test]
fn on_a_parallel_device() {
    holds(PLAIN, &Bounds { kept: 1.7, p99: 2.0, ..PARALLEL }, &[thrasher()]);
}

#[test]
fn on_a_calibrated_device() {
    let bounds = Bounds { kept: 1.75, p99: 2.0, total: 0.95, ..PARALLEL };
    holds(Model { calibrated: true, ..PLAIN }, &bounds, &[thrasher()]);
}

/// One operation at a time is served, and its answer takes longer.
#[test]
fn on_a_device_with_a_pipeline() {
    let model = Model { servers: 1, time: 88_000, after: 300_000, ..PLAIN };
    holds(model, &NARROW, &[thrasher()]);
}

#[test]
fn on_a_device_without_parallelism() {
    holds(Model { servers: 1, time: 90_000, ..PLAIN }, &NARROW, &[thrasher()]);
}

/// A virtual disk of 90,000 reads a second.
pub const FAST: Model = Model { servers: 1, time: 11_000, after: 40_000, ..PLAIN };

#[test]
fn on_a_fast_device() {
    holds(FAST, &NARROW, &[thrasher()]);
}

#[test]
fn on_a_network_disk_with_a_token_bucket() {
    holds(Model { mood: Mood::Bucket(5_000), ..PLAIN }, &NARROW, &[thrasher()]);
}

/// Every two seconds nothing completes for 0.3 s.
#[test]
fn on_a_device_that_stalls() {
    let bounds = Bounds { p99: 2.7, total: 0.87, ..PARALLEL };
    holds(Model { mood: Mood::Stalls(2 * S, 300 * MS), ..PLAIN }, &bounds, &[thrasher()]);
}

/// A fixed window, chosen with knowledge of the future, shows what is possible: on a device that
/// changes, the window need not change. Beside requests of 1 MiB on a device without parallelism no
/// window is small enough, so [`Bounds::total`] is lower there.
#[test]
fn an_oracle_finds_a_fixed_window_except_beside_large_requests() {
    let fixed = |model, thrasher: Guest, window| {
        let guests = arrive(Order::ThrasherFirst, &Guest::reads(1), &[thrasher]);
        let run = |model| Simulation::new(model, &guests).run(BOTH, END);
        let alone = Simulation::new(model, &guests[..1]).run(BOTH, END).remove(0);
        let free = run(Model { scheduled: false, ..model });
        let got = run(Model { window: Some(window), ..model });
        let part = got[0].operations as f64 / alone.operations as f64 * 2.0;
        (part, cost(&got) / cost(&free))
    };
    let moods = [
        Mood::Stalls(2 * S, 300 * MS),
        Mood::Slows(S, 200 * MS),
        Mood::Changes(5 * S, 300),
        Mood::Changes(5 * S, 33),
    ];
    for mood in moods {
        let (part, total) = fixed(Model { mood, ..PLAIN }, thrasher(), 15);
        assert!(part > 1.98 && total > 0.99, "{part} {total}");
    }
    let work = vec![(OperationKind::Read, 1 << 20), (OperationKind::Write, 1 << 20)];
    let (part, total) = fixed(Model { per_mib: MS, ..FAST }, Guest { work, ..Guest::reads(32) }, 1);
    assert!(part < 0.12 && total > 0.95, "{part} {total}");
}

/// Garbage collection: it takes three times as long for a fifth of each second.
#[test]
fn on_a_device_that_collects_garbage() {
    holds(Model { mood: Mood::Slows(S, 200 * MS), ..PLAIN }, &CHANGING, &[thrasher()]);
}

#[test]
fn on_a_device_that_becomes_slower() {
    holds(Model { mood: Mood::Changes(5 * S, 300), ..PLAIN }, &CHANGING, &[thrasher()]);
}

#[test]
fn on_a_device_that_becomes_faster() {
    let bounds = Bounds { p99: 2.0, total: 0.95, ..CHANGING };
    holds(Model { mood: Mood::Changes(5 * S, 33), ..PLAIN }, &bounds, &[thrasher()]);
}

/// At depth 8 the polite guest uses twice its share of the device.
#[test]
fn beside_three_thrashers() {
    holds(PLAIN, &Bounds { p99: 6.0, ..PARALLEL }, &[thrasher(), thrasher(), thrasher()]);
}

/// A request of 1 MiB takes 21 times as long as one of 4 KiB, and cannot be interrupted.
#[test]
fn beside_a_thrasher_of_large_requests_flushes_and_discards() {
    let work = vec![
        (OperationKind::Read, 1 << 20),
        (OperationKind::Flush, 0),
        (OperationKind::Write, 64 << 10),
        (OperationKind::Discard, 1 << 20),
    ];
    let model = Model { per_mib: 20 * MS, ..PLAIN };
    let bounds = Bounds { p99: 19.0, time_to_share: 160 * MS, ..PARALLEL };
    holds(model, &bounds, &[Guest { work, ..Guest::reads(32) }]);
}

/// A request of 1 MiB takes 1 ms, as long as 90 of 4 KiB, and only one at a time is served.
#[test]
fn beside_a_thrasher_of_large_requests_on_a_device_without_parallelism() {
    let work = vec![(OperationKind::Read, 1 << 20), (OperationKind::Write, 1 << 20)];
    let bounds = Bounds { kept: 0.9, p99: 22.0, total: 0.6, time_to_share: 160 * MS };
    let model = Model { per_mib: MS, ..FAST };
    holds(model, &bounds, &[Guest { work, ..Guest::reads(32) }]);
}

/// A request of 1 MiB takes 10 ms, ten times what its cost says: a network disk of 100 MiB/s.
#[test]
fn beside_large_requests_that_take_longer_than_their_cost() {
    let work = vec![(OperationKind::Read, 1 << 20), (OperationKind::Write, 1 << 20)];
    let factor = |operation: &Operation| if operation.bytes >= 1 << 20 { 10 } else { 1 };
    let model = Model { per_mib: MS, factor, ..FAST };
    // One such request lasts as long as 70 of the polite guest's at depth 8.
    let bounds = Bounds { kept: 0.7, p99: 80.0, total: 0.6, time_to_share: 250 * MS };
    holds(model, &bounds, &[Guest { work, ..Guest::reads(8) }]);
}

/// A discard takes 5.5 ms, and its cost says 11 us.
#[test]
fn beside_discards_that_take_longer_than_their_cost() {
    let factor = |operation: &Operation| match operation.kind {
        OperationKind::Discard => 500,
        _ => 1,
    };
    let work = vec![(OperationKind::Discard, 1 << 20)];
    let bounds = Bounds { kept: 0.45, p99: 65.0, total: 0.6, time_to_share: 1100 * MS };
    holds(Model { factor, ..FAST }, &bounds, &[Guest { work, ..Guest::reads(8) }]);
}

/// Flushes wait for a sync of 20 ms, which takes one of eight servers.
#[test]
fn beside_a_thrasher_that_flushes_each_write() {
    let work = vec![(OperationKind::Write, 4096), (OperationKind::Flush, 0)];
    let model = Model { servers: 8, time: 80_000, factor: |_| 12, sync: 20 * MS, ..PLAIN };
    let bounds = Bounds { kept: 1.1, p99: 6.0, ..PARALLEL };
    holds(model, &bounds, &[Guest { work, ..Guest::reads(64) }]);
}

/// The image answers one guest's requests without the device. Their short times must not hide how
/// long the polite guest's requests take.
#[test]
fn beside_a_thrasher_and_a_guest_that_needs_no_device() {
    let answered = Guest { is_answered: true, think: 50_000, ..Guest::reads(4) };
    holds(FAST, &Bounds { p99: 9.0, ..NARROW }, &[thrasher(), answered]);
}

#[test]
fn beside_four_thrashers_on_a_device_without_parallelism() {
    let thrasher = Guest { depth: 64, ..thrasher() };
    let four = [thrasher.clone(), thrasher.clone(), thrasher.clone(), thrasher];
    holds(FAST, &Bounds { p99: 9.0, ..NARROW }, &four);
}

/// Its requests all fit into the window, so none of them waits.
#[test]
fn beside_a_thrasher_of_small_depth() {
    holds(FAST, &NARROW, &[Guest { depth: 32, ..thrasher() }]);
}

/// A probe holds the thrasher. If the polite guest stops meanwhile, only a timer ends the probe.
#[test]
fn a_probe_ends_although_the_polite_guest_stops() {
    for stop in 0..40 {
        let polite = Guest { from: BOTH, until: BOTH + stop * 2 * MS, ..Guest::reads(2) };
        let guests = [polite, thrasher()];
        let got = Simulation::new(PLAIN, &guests).run(BOTH, BOTH + S);
        let gaps = got[1].completions.windows(2).map(|pair| pair[1] - pair[0]);
        let last = BOTH + S - got[1].completions.last().unwrap();
        let longest = gaps.chain([last]).max().unwrap();
        assert!(longest < 150 * MS, "stop after {} ms: nothing for {longest} ns", 2 * stop);
    }
}

/// The same for a gap after a large request.
#[test]
fn a_gap_ends_although_the_polite_guest_stops() {
    let work = vec![(OperationKind::Read, 1 << 20)];
    let model = Model { per_mib: MS, ..FAST };
    for (depth, stop) in (0..60).flat_map(|stop| [(1, stop), (8, stop)]) {
        let until = BOTH + 100 * MS + stop * 700_000;
        let polite = Guest { from: BOTH, until, ..Guest::reads(depth) };
        let guests = [polite, Guest { work: work.clone(), ..Guest::reads(32) }];
        let got = Simulation::new(model, &guests).run(BOTH, BOTH + S);
        let gaps = got[1].completions.windows(2).map(|pair| pair[1] - pair[0]);
        let longest = gaps.max().unwrap();
        let last = got[1].completions.last().unwrap();
        assert!(longest < 50 * MS, "stop {stop}: nothing for {longest} ns");
        assert!(*last > BOTH + 950 * MS, "stop {stop}: nothing after {last} ns");
    }
}
