//! Power cuts of whole disks on the simulated one. The tests drive the disks as exports do, cut the
//! power at any event, and check the result.
//!
//! ```text
//!   plan    the settings of a run: alignment, reactors, faults; a seed determines them
//!   load    the run: lanes of requests on one or two reactors, to their end or to the power cut
//!   judge   what is reported to the oracle, and the rules for answers that it does not know
//! ```
//!
//! A failure names its seed: `BLOCKYARD_SEED=N` runs only that one. `BLOCKYARD_CUTS=N` sets the
//! number of random power cuts.

mod judge;
mod load;
mod plan;

use std::io;

use blockyard_storage::sim::{Liar, Lie, OpKind, Rng, SimDisk};

use load::{Life, Tally};
use plan::{Plan, SHAPES, Trouble};

/// Random power cuts of an ordinary run.
const CUTS: u64 = 8_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// Makes three power cuts of one disk at random events.
fn random_life(plan: Plan, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let events = plan.events();
    let mut life = Life::new(plan);
    for _ in 0..3 {
        life.boot(rng.below(events), SimDisk::into, tally)?;
    }
    Ok(())
}

#[test]
fn durable_writes_survive_random_power_cuts() {
    let cuts = number("BLOCKYARD_CUTS").unwrap_or(CUTS);
    let seeds = number("BLOCKYARD_SEED").map_or(0..u64::MAX, |seed| seed..seed + 1);
    let (mut tally, first) = (Tally::default(), seeds.start);
    let mut last = first;
    for seed in seeds {
        if tally.cuts >= cuts {
            break;
        }
        random_life(Plan::random(seed), &mut tally).unwrap();
        last = seed;
    }
    println!("seeds {first} to {last}: {tally}");
    if first == 0 && cuts >= CUTS {
        assert!(tally.shared_syncs() && tally.poisoned > 50 && tally.grew > 50, "{tally}");
    }
}

#[test]
fn durable_writes_survive_a_power_cut_at_every_event() {
    let mut tally = Tally::default();
    for (number, shape) in SHAPES.into_iter().cycle().take(9).enumerate() {
        let (seed, writethrough, reactors) = (number as u64, number / 3 == 2, 1 + number % 2);
        let plan =
            Plan { shape, writethrough, reactors, requests: 9, lanes: 6, ..Plan::quiet(seed) };
        let whole = (0..).find(|&events| {
            let survived = Life::new(plan.clone()).boot(events, SimDisk::into, &mut tally).unwrap();
            assert!(!survived || events > 60, "a run of only {events} events");
            survived
        });
        println!(
            "seed {seed}, {shape:?}, writethrough {writethrough}, {reactors} reactors: \
             {whole:?} events"
        );
    }
    println!("{tally}");
}

/// Two reactors flush at the same time, and one sync fails: no flush that depends on it may
/// succeed.
#[test]
fn a_failed_sync_fails_all_flushes_that_depend_on_it() {
    let mut tally = Tally::default();
    let seeds = 10_000..10_400;
    for seed in seeds.clone() {
        let mut rng = Rng::new(seed);
        let plan = Plan {
            reactors: 2,
            shape: *rng.pick(&SHAPES),
            trouble: Some(Trouble::new(OpKind::Sync, io::ErrorKind::Other).after(rng.below(4))),
            ..Plan::quiet(seed)
        };
        let events = if rng.one_in(2) { u64::MAX } else { rng.below(plan.events()) };
        Life::new(plan).boot(events, SimDisk::into, &mut tally).unwrap();
    }
    println!("seeds {seeds:?}: {tally}");
    assert!(tally.poisoned > 200 && tally.waiters_failed > 100, "{tally}");
}

/// Tests the checks of this test: they must detect a faulty storage.
#[test]
fn the_judges_detect_a_faulty_storage() {
    for lie in [Lie::NoSync, Lie::NotDurable, Lie::LosesPieces, Lie::ReadsZeroes(4096)] {
        let caught = (0..100).filter(|&seed| {
            let plan = Plan::quiet(seed);
            let events = Rng::new(seed).below(plan.events());
            Life::new(plan)
                .boot(events, |disk| Liar::new(disk, lie).into(), &mut Tally::default())
                .is_err()
        });
        let caught = caught.count();
        assert!(caught >= 10, "{lie:?} was detected in {caught} of 100 runs");
    }
}

/// A file that ends within a block of O_DIRECT grows to the end of its last sector, not of the
/// block.
#[test]
fn a_write_never_extends_the_guest_s_disk() {
    let mut tally = Tally::default();
    for seed in 20_000..20_100 {
        let plan = Plan { shape: SHAPES[2], capacity: 35 * 512, missing: 100, ..Plan::quiet(seed) };
        let mut life = Life::new(plan);
        assert!(life.boot(u64::MAX, SimDisk::into, &mut tally).unwrap());
    }
    assert!(tally.grew > 50 && tally.longest <= 35 * 512, "{tally}");
}
