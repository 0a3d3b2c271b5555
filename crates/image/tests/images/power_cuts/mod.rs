//! Power cuts: chains of images on simulated disks, under concurrent requests, cut at any event.
//!
//! ```text
//!   plan        parameters of a run, derived from its seed
//!   build       the initial images
//!   chain       their files, on disks with one power supply
//!   load        clients that send requests
//!   life        several boots
//!   judge       records answers in the oracle; further rules
//!   operation   commands on the closed image between boots
//!   tally       statistics
//!   check       reference implementation of check and read (format: its constants)
//!   qemu        QEMU's check of the same images
//! ```
//!
//! A failure reports its seed: `BLOCKYARD_SEED=N` runs that one alone. `BLOCKYARD_CUTS=N` sets the
//! number of random cuts.

use crate::lives;

mod build;
mod chain;
mod check;
mod format;
mod judge;
mod life;
mod load;
mod operation;
mod plan;
mod qemu;
mod tally;

use blockyard_image::Alignment;
use blockyard_storage::sim::{Liar, Lie, Rng, SimDisk};

use self::life::{Life, Start};
use self::operation::KINDS;
use self::plan::{Plan, SHAPES};
use self::tally::Tally;

/// Number of random power cuts if `BLOCKYARD_CUTS` is not set.
const CUTS: u64 = 1_300;

/// Seeds of plans that failed once.
const QUIET: [u64; 1] = [2451];
const GROWING: [u64; 0] = [];
const DYING: [u64; 6] = [339, 509, 687, 793, 1121, 1245];
const FILLING: [u64; 4] = [24, 201, 324, 483];
const TROUBLED: [u64; 11] = [171, 236, 395, 446, 449, 483, 485, 639, 722, 755, 959];

/// Runs a complete boot to count its events. Then runs boots with power cuts at random events. Each
/// boot begins with the state that the previous boot left. Runs commands on the image in between.
fn random_life(plan: Plan, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let start = Start::new(plan);
    let events = start.life().boot(u64::MAX, SimDisk::into, tally)?.events;
    for _ in 0..3 {
        let mut life = start.life();
        for _ in 0..4 {
            life.boot(rng.below(events + 1), SimDisk::into, tally)?;
            if rng.one_in(2) {
                life.operate(tally)?;
            }
        }
    }
    Ok(())
}

/// Runs plans until `percent` percent of all power cuts were made.
fn random_lives(plan: impl Fn(u64) -> Plan + Sync, percent: u64, failed_once: &[u64]) -> Tally {
    let cuts = lives::cuts(CUTS) * percent / 100;
    // QEMU is slow, so it checks only some of the images.
    let by_qemu = if cuts > CUTS { 3 * percent } else { (percent / 3).max(1) };
    let new = || Tally { one_in: cuts * 4 / by_qemu, ..Tally::default() };
    lives::run(failed_once, cuts, new, |seed, tally| random_life(plan(seed), tally))
}

#[test]
fn flushed_data_survive_random_cuts() {
    let tally = random_lives(Plan::quiet, 60, &QUIET);
    assert!(tally.saw_all_operations() || !lives::is_thorough(CUTS), "{tally}");
}

#[test]
fn refcounts_are_right_in_files_that_grow() {
    random_lives(Plan::growing, 15, &GROWING);
}

#[test]
fn clusters_are_not_reused_while_a_request_may_use_them() {
    random_lives(Plan::reusing, 10, &[]);
}

#[test]
fn freed_clusters_wait_for_a_durable_write_back() {
    random_lives(Plan::relieving, 1, &[]);
}

#[test]
fn compressed_writes_survive_random_cuts() {
    random_lives(Plan::packing, 4, &[]);
}

#[test]
fn partial_clusters_survive_random_cuts() {
    random_lives(Plan::deferring, 8, &[]);
}

#[test]
fn answered_writes_survive_deaths_of_the_process() {
    let tally = random_lives(Plan::dying, 20, &DYING);
    assert!(tally.recoveries_cut > 10 || !lives::is_thorough(CUTS), "{tally}");
}

#[test]
fn answered_writes_survive_deaths_with_a_full_journal() {
    random_lives(Plan::filling, 15, &FILLING);
}

#[test]
fn answered_writes_survive_deaths_with_a_journal_that_begins_late() {
    random_lives(Plan::late, 5, &[]);
}

#[test]
fn flushed_data_survive_errors_and_cuts() {
    let tally = random_lives(Plan::troubled, 23, &TROUBLED);
    assert!(tally.troubled > 50 || !lives::is_thorough(CUTS), "{tally}");
}

#[test]
fn answered_writes_survive_errors_and_deaths() {
    let tally = random_lives(Plan::unlucky, 8, &[]);
    assert!(tally.troubled > 20 || !lives::is_thorough(CUTS), "{tally}");
}

/// Small runs, cut at every event.
#[test]
fn flushed_data_survive_a_cut_at_every_event() {
    let mut tally = Tally::default();
    for (seed, shape) in (30_000..).zip(SHAPES.into_iter().cycle()).take(6) {
        let start = Start::new(Plan { shape, clients: 4, requests: 6, ..Plan::quiet(seed) });
        let whole = (0..).find(|&events| {
            let boot = start
                .life()
                .boot(events, SimDisk::into, &mut tally)
                .unwrap_or_else(|e| panic!("{e}"));
            assert!(!boot.survived || events > 20, "a run of only {events} events");
            boot.survived
        });
        println!("seed {seed}, {shape:?}: {whole:?} events");
    }
    println!("{tally}");
}

/// The same with a journal: at every event the process dies, or the power fails and the journal is
/// gone. Its last events are those of a clean end.
#[test]
fn answered_writes_survive_a_death_at_every_event() {
    let mut tally = Tally::default();
    for (seed, shape) in (40_000..).zip(SHAPES.into_iter().cycle()).take(8) {
        let start = Start::new(Plan { shape, clients: 4, requests: 6, ..Plan::dying(seed) });
        let whole = (0..).find(|&events| {
            let boot = start
                .life()
                .boot(events, SimDisk::into, &mut tally)
                .unwrap_or_else(|e| panic!("{e}"));
            assert!(!boot.survived || events > 20, "a run of only {events} events");
            boot.survived
        });
        println!("seed {seed}, {shape:?}: {whole:?} events");
    }
    println!("{tally}");
    assert!(tally.deaths > 100 && tally.cuts - tally.deaths > 100, "{tally}");
}

/// The boot that needs a new refcount table, cut at every event.
#[test]
fn a_new_refcount_table_survives_a_cut_at_every_event() {
    let mut tally = Tally::default();
    let start = Start::new(Plan::recounting(0));
    let table = |life: &Life| life.refcount_table();
    let mut life = start.life();
    let old = table(&life);
    let events =
        life.boot(u64::MAX, SimDisk::into, &mut tally).unwrap_or_else(|e| panic!("{e}")).events;
    assert_ne!(table(&life), old, "the refcount table has moved");
    let (mut before, mut after) = (0, 0);
    for events in 0..events {
        let mut life = start.life();
        life.boot(events, SimDisk::into, &mut tally).unwrap_or_else(|e| panic!("{e}"));
        *(if table(&life) == old { &mut before } else { &mut after }) += 1;
    }
    println!("{tally}; cuts that left the old table: {before}, and a new one: {after}");
    assert!(before > 10 && after > 10, "{before} cuts left the old table, {after} a new one");
}

/// Commands on a closed image, two of each kind.
#[test]
fn commands_between_boots_survive_a_cut_at_every_event() {
    let (mut tally, mut left) = (Tally::default(), [2; KINDS.len()]);
    for seed in 40_000.. {
        if left == [0; KINDS.len()] {
            break;
        }
        let mut life = Start::new(Plan { clients: 4, requests: 6, ..Plan::quiet(seed) }).life();
        life.boot(u64::MAX, SimDisk::into, &mut tally).unwrap_or_else(|e| panic!("{e}"));
        let operation = life.next_operation();
        let left = &mut left[operation.kind()];
        let mut cut = |events| {
            life.operate_once(&operation, events, false, &mut tally)
                .unwrap_or_else(|e| panic!("{e}"))
        };
        let events = cut(u64::MAX).events;
        if *left > 0 && events > 8 {
            *left -= 1;
            (0..events).for_each(|events| assert!(!cut(events).survived));
            println!("seed {seed}, {operation:?}: {events} events");
        }
    }
    println!("{tally}");
}

/// Tests the test: defective storage must be detected. How often it is detected depends on the
/// cuts, so the maximum number of runs is generous. The runs end when enough defects were detected.
#[test]
fn defective_storage_is_detected() {
    const ENOUGH: usize = 5;
    // `HalfTheSyncs` needs many runs, because only a power cut between two syncs shows this defect.
    for (lie, runs) in [
        (Lie::NoSync, 60),
        (Lie::HalfTheSyncs, 800),
        (Lie::LosesPieces, 60),
        (Lie::DiscardsMore, 120),
    ] {
        let is_caught = |&seed: &u64| {
            let mut rng = Rng::new(seed);
            let shape = Alignment { memory_align: 1, offset_align: 1 };
            let plan = Plan { shape, clients: 6, requests: 12, ..Plan::quiet(seed) };
            let events = if rng.one_in(2) { u64::MAX } else { rng.below(200) };
            let mut life = Start::new(plan).life();
            life.boot(events, move |disk| Liar::new(disk, lie).into(), &mut Tally::default())
                .is_err()
        };
        let caught: Vec<u64> = (0..runs).filter(is_caught).take(ENOUGH).collect();
        println!("{lie:?}: caught with the seeds {caught:?}");
        assert_eq!(caught.len(), ENOUGH, "{lie:?} was caught in so few of {runs} runs");
    }
}
