//! Power cuts: chains of images on simulated disks, under concurrent requests, cut at any moment, and judged.
//!
//! ```text
//!   plan    what a run is like, decided by its seed      build   the images it begins with
//!   chain   their files on disks with one power supply   load    lanes of requests, until they are through or the power goes
//!   life    boot after boot                              judge   what is told to the oracle, and its other rules
//!   check   references against refcounts, and reading, the slow way (format: its numbers)
//! ```
//! A failure names its seed: `BLOCKYARD_SEED=N` runs that one alone. `BLOCKYARD_CUTS=N` makes as many random cuts.

mod build;
mod chain;
mod check;
mod format;
mod judge;
mod life;
mod load;
mod plan;

use blockyard_ring::sim::Rng;

use life::{Life, Tally};
use plan::Plan;

/// Random cuts of an ordinary run.
const CUTS: u64 = 4_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
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

fn random_lives(plan: impl Fn(u64) -> Plan, cuts: u64) -> Tally {
    let seeds = number("BLOCKYARD_SEED").map_or(0..u64::MAX, |seed| seed..seed + 1);
    let (mut tally, first) = (Tally::default(), seeds.start);
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
    random_lives(Plan::quiet, number("BLOCKYARD_CUTS").unwrap_or(CUTS));
}

#[test]
fn what_was_promised_survives_errors_and_cuts() {
    let tally = random_lives(Plan::troubled, number("BLOCKYARD_CUTS").unwrap_or(CUTS) / 4);
    assert!(tally.troubled > 50 || number("BLOCKYARD_SEED").is_some(), "{tally}");
}
