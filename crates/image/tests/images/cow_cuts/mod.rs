//! Power cuts: a COW file over its backing file, on simulated disks with one power supply, cut at
//! any event.
//!
//! ```text
//!   plan   parameters of a run, derived from its seed: header, memory, injected errors
//!   life   boots: a guest's load on one or two reactors, a commit, another backing file
//!   client   a guest's clients; the oracle records their requests
//! ```
//!
//! After each cut the file must open, pass the check, and hold over its backing file the data that
//! the oracle expects. A failure reports its seed: `BLOCKYARD_SEED=N` runs that one alone.
//! `BLOCKYARD_CUTS=N` sets the number of random cuts.

use crate::lives;

mod client;
mod life;
mod plan;

use blockyard_storage::sim::{Liar, Lie, Rng, SimDisk};

use self::life::{Life, Tally};
use self::plan::Plan;

/// Number of random power cuts if `BLOCKYARD_CUTS` is not set.
const CUTS: u64 = 2_000;

/// Seeds that failed once.
const FAILED_ONCE: [u64; 0] = [];
/// The same for deaths of the process. (The mark of a journal lay in two sectors.)
const DIED_ONCE: [u64; 2] = [565, 577];

/// Runs several boots of one disk, each cut at a random event.
fn random_life(plan: Plan, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let mut life = Life::new(plan);
    life.be_created(rng.below(14), tally)?;
    for _ in 0..3 {
        let events = rng.below(life.events());
        life.load(events, SimDisk::into, tally)?;
        let (what, events) = (rng.below(4), rng.below(30));
        match what {
            0 => drop(life.commit(events, tally)?),
            1 => drop(life.rebase(events / 5, tally)?),
            _ => {}
        }
    }
    Ok(())
}

#[test]
fn flushed_data_survive_random_cuts() {
    let life = |seed, tally: &mut Tally| random_life(Plan::random(seed), tally);
    let tally = lives::run(&FAILED_ONCE, lives::cuts(CUTS), Tally::default, life);
    assert!(tally.saw_everything() || !lives::is_thorough(CUTS), "{tally}");
}

#[test]
fn answered_writes_survive_deaths_of_the_process() {
    let life = |seed, tally: &mut Tally| {
        random_life(Plan { dies: true, trouble: None, ..Plan::random(seed) }, tally)
    };
    let tally = lives::run(&DIED_ONCE, lives::cuts(CUTS) * 2 / 5, Tally::default, life);
    assert!(tally.recoveries_cut > 50 || !lives::is_thorough(CUTS), "{tally}");
}

#[test]
fn flushed_data_survive_a_cut_at_every_event() {
    every_event(0..6, false);
}

/// The same with a journal: the process dies, or the power fails and the journal is gone.
#[test]
fn answered_writes_survive_a_death_at_every_event() {
    let tally = every_event(40..48, true);
    assert!(tally.deaths > 100 && tally.cuts - tally.deaths > 100, "{tally}");
}

fn every_event(seeds: std::ops::Range<u64>, dies: bool) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        let plan = Plan { requests: 8, clients: 5, dies, ..Plan::quiet(seed) };
        let whole = (0..).find(|&events| {
            let mut life = Life::new(plan.clone());
            life.be_created(u64::MAX, &mut Tally::default()).unwrap();
            life.load(events, SimDisk::into, &mut tally).unwrap()
        });
        println!("seed {seed}, version {}, {:?}: {whole:?} events", plan.version, plan.shape);
        assert!(whole > Some(40), "a run of only {whole:?} events");
    }
    println!("{tally}");
    tally
}

/// Creation, commit and rebase of a file, each cut at every event.
#[test]
fn commands_on_a_closed_file_survive_a_cut_at_every_event() {
    let (mut tally, mut most) = (Tally::default(), 0);
    for seed in 100..106 {
        let plan = Plan::quiet(seed);
        let each = |step: &dyn Fn(&mut Life, u64, &mut Tally) -> bool, tally: &mut Tally| {
            (0..).find(|&events| {
                let mut life = Life::new(plan.clone());
                life.be_created(u64::MAX, &mut Tally::default()).unwrap();
                life.load(u64::MAX, SimDisk::into, &mut Tally::default()).unwrap();
                step(&mut life, events, tally)
            })
        };
        let created =
            (0..).find(|&events| Life::new(plan.clone()).be_created(events, &mut tally).unwrap());
        let committed =
            each(&|life, events, tally| life.commit(events, tally).unwrap(), &mut tally);
        let rebased = each(&|life, events, tally| life.rebase(events, tally).unwrap(), &mut tally);
        assert!(
            created > Some(5) && committed > Some(7) && rebased > Some(3),
            "{created:?} {committed:?} {rebased:?}"
        );
        most = most.max(committed.unwrap_or_default());
    }
    println!("{tally}");
    assert!(most > 20, "no commit copied much: {most} events");
}

/// Tests the test: a defective storage must be detected.
#[test]
fn defective_storage_is_detected() {
    // Without the first of two syncs, bits may become durable before their data.
    for lie in [Lie::NoSync, Lie::HalfTheSyncs, Lie::LosesPieces] {
        let caught = (0..150).filter(|&seed| {
            let mut life = Life::new(Plan { clients: 2, ..Plan::quiet(seed) });
            life.be_created(u64::MAX, &mut Tally::default()).unwrap();
            let events = Rng::new(seed).below(life.events());
            life.load(events, |disk| Liar::new(disk, lie).into(), &mut Tally::default()).is_err()
        });
        let caught = caught.count();
        assert!(caught >= 10, "{lie:?} was caught in {caught} of 150 runs");
    }
}
