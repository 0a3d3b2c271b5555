//! Power cuts: chains of images on simulated disks, under concurrent requests, cut at any moment, and judged.
//!
//! ```text
//!   plan    what a run is like, decided by its seed      build   the images it begins with
//!   chain   their files on disks with one power supply   load    lanes of requests, until they are through or the power goes
//!   life    boot after boot                              judge   what is told to the oracle, and its other rules
//!   liars   storage that breaks its promises
//!   check   references against refcounts, and reading, the slow way (format: its numbers); qemu: QEMU's opinion
//! ```
//! A failure names its seed: `BLOCKYARD_SEED=N` runs that one alone. `BLOCKYARD_CUTS=N` makes as many random cuts.

mod build;
mod chain;
mod check;
mod format;
mod judge;
mod liars;
mod life;
mod load;
mod plan;
mod qemu;

use blockyard_image::RawShape;
use blockyard_ring::sim::Rng;

use liars::{Liar, Lie};
use life::{Life, Tally};
use plan::{Plan, SHAPES};

/// Random cuts of an ordinary run.
const CUTS: u64 = 4_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

fn cuts() -> u64 {
    number("BLOCKYARD_CUTS").unwrap_or(CUTS)
}

/// A whole boot, to see how long one is; then some cut at random events, each going on from what the one before left.
fn random_life(plan: Plan, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let events = Life::new(plan.clone()).boot(u64::MAX, |disk| disk, tally)?.events;
    for _ in 0..3 {
        let mut life = Life::new(plan.clone());
        for _ in 0..3 {
            life.boot(rng.below(events + 1), |disk| disk, tally)?;
        }
    }
    Ok(())
}

/// `by_qemu`: about so many of the images are judged by QEMU too.
fn random_lives(plan: impl Fn(u64) -> Plan, cuts: u64, by_qemu: u64) -> Tally {
    let seeds = number("BLOCKYARD_SEED").map_or(0..u64::MAX, |seed| seed..seed + 1);
    let (mut tally, first) = (Tally { one_in: cuts * 3 / by_qemu, ..Tally::default() }, seeds.start);
    let mut last = first;
    for seed in seeds {
        if tally.cuts >= cuts {
            break;
        }
        random_life(plan(seed), &mut tally).unwrap_or_else(|e| panic!("{e}"));
        last = seed;
    }
    println!("seeds {first} to {last}: {tally}");
    tally
}

#[test]
fn what_was_promised_survives_random_cuts() {
    random_lives(Plan::quiet, cuts(), if cuts() > CUTS { 200 } else { 20 });
}

#[test]
fn refcounts_are_right_in_files_that_grow() {
    random_lives(Plan::growing, cuts() / 4, 5);
}

#[test]
fn what_was_promised_survives_errors_and_cuts() {
    let tally = random_lives(Plan::troubled, cuts() / 4, 5);
    assert!(tally.troubled > 50 || number("BLOCKYARD_SEED").is_some(), "{tally}");
}

/// Small runs, cut at every event there is.
#[test]
fn what_was_promised_survives_a_cut_at_every_event() {
    let mut tally = Tally::default();
    for (seed, shape) in (30_000..).zip(SHAPES.into_iter().cycle()).take(9) {
        let plan = Plan { shape, lanes: 4, requests: 6, ..Plan::quiet(seed) };
        let whole = (0..).find(|&events| {
            let boot = Life::new(plan.clone()).boot(events, |disk| disk, &mut tally).unwrap_or_else(|e| panic!("{e}"));
            assert!(!boot.survived || events > 20, "a run of only {events} events");
            boot.survived
        });
        println!("seed {seed}, {shape:?}: {whole:?} events");
    }
    println!("{tally}");
}

/// The judges are judged: a storage that lies is found out.
#[test]
fn liars_are_caught() {
    for lie in [Lie::NoSync, Lie::HalfTheSyncs, Lie::LosesPieces, Lie::DiscardsMore] {
        let caught = (0..60).filter(|&seed| {
            let mut rng = Rng::new(seed);
            let shape = RawShape { memory_align: 1, offset_align: 1 };
            let plan = Plan { shape, lanes: 6, requests: 12, ..Plan::quiet(seed) };
            let events = if rng.one_in(2) { u64::MAX } else { rng.below(200) };
            let mut life = Life::new(plan);
            life.boot(events, move |disk| Liar::new(disk, lie), &mut Tally::default()).is_err()
        });
        let caught = caught.count();
        println!("{lie:?}: caught in {caught} of 60 runs");
        assert!(caught >= 5, "{lie:?} was caught in {caught} of 60 runs");
    }
}
