//! Power cuts during snapshots, commits, streams and backups, on simulated disks and a simulated
//! clock.
//!
//! ```text
//!   life     a disk over several boots: lays out its files, runs a boot, checks what is left
//!   boot     one boot: the jobs, and the load of the guest meanwhile on one or two reactors
//!   lane     one client: verified writes, zeroes, reads and flushes
//!   stage    what the jobs and the lanes of a boot share
//!   found    opens what a power cut has left, and checks it
//!   scratch  the folder of the files
//! ```
//!
//! The workers of the jobs run as they do on the thread of a job. Only the threads are missing: all
//! reactors run on this one. A seed determines everything, so a failure can be repeated:
//! `BLOCKYARD_SEED=N` runs only that one. `BLOCKYARD_CUTS=N` sets the number of random power cuts.
//!
//! What must hold after each power cut: the image that was named at the start, or the overlay that
//! its record names, opens for writing. Each image of the chain is consistent. The disk holds every
//! flushed write, and of each other write the old or the new data. A backup that has its name holds
//! the disk of one moment.

mod boot;
mod found;
mod lane;
mod life;
mod scratch;
mod stage;

use std::fmt;

use blockyard_storage::sim::{Lie, Rng};

use life::Life;

/// Random power cuts of an ordinary run.
const CUTS: u64 = 500;
/// Number of boots of one disk.
const BOOTS: usize = 5;
/// About the number of events of a boot. A smaller random number is likely to be within the boot.
const EVENTS: u64 = 1_000;

/// The kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Snapshot,
    Commit,
    Stream,
    Backup,
}

const JOBS: [Job; 4] = [Job::Snapshot, Job::Commit, Job::Stream, Job::Backup];

/// How a disk is built and used.
#[derive(Clone, Debug)]
struct Plan {
    seed: u64,
    /// Size of the disk in bytes.
    size: u64,
    /// Cluster size of the first image. None: it is raw.
    base: Option<u64>,
    reactors: usize,
    /// Clients of each reactor.
    lanes: u64,
    lie: Option<Lie>,
}

impl Plan {
    fn random(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x6375_7473);
        Plan {
            seed,
            size: 96 << 10,
            base: *rng.pick(&[None, Some(512), Some(4096)]),
            reactors: rng.between(1, 2) as usize,
            lanes: 3,
            lie: None,
        }
    }

    fn small(seed: u64) -> Self {
        let base = [None, Some(512), Some(4096)][seed as usize % 3];
        let reactors = 1 + seed as usize % 2;
        Plan { seed, size: 32 << 10, base, reactors, lanes: 2 / reactors as u64, lie: None }
    }
}

/// Counts of many boots. The arrays have one element for each of [`JOBS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// Boots that ended without a power cut, and power cuts while no job ran.
    survived: u64,
    cuts_between: u64,
    cuts_inside: [u64; 4],
    done: [u64; 4],
    /// Cuts inside a job after which the chain was the one after the job.
    switched: [u64; 4],
    /// Writes, and flushes, that were answered while a job ran.
    writes: u64,
    flushes: u64,
    /// Backups with a name that were checked.
    backups: u64,
    /// Number of events of the boots.
    events: u64,
}

impl Tally {
    fn cuts(&self) -> u64 {
        self.cuts_between + self.cuts_inside.iter().sum::<u64>()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { survived, cuts_between, writes, flushes, backups, events, .. } = self;
        for (number, job) in JOBS.iter().enumerate() {
            let [cuts, done, switched] =
                [&self.cuts_inside, &self.done, &self.switched].map(|counts| counts[number]);
            write!(f, "{job:?}: {done} done, {cuts} cuts, {switched} of them after it; ")?;
        }
        write!(
            f,
            "{survived} whole boots, {cuts_between} cuts between, {backups} backups checked, \
             {writes} writes and {flushes} flushes beside a job, {events} events"
        )
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// Cuts the power of one disk at random events of several boots.
fn random_life(plan: Plan, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let mut life = Life::new(plan);
    for _ in 0..BOOTS {
        let jobs = [*rng.pick(&JOBS), *rng.pick(&JOBS), *rng.pick(&JOBS)];
        life.boot(&jobs, Some(rng.below(EVENTS)), tally)?;
    }
    Ok(())
}

#[test]
fn flushed_writes_survive_random_power_cuts_during_live_work() {
    let cuts = number("BLOCKYARD_CUTS").unwrap_or(CUTS);
    let seeds = number("BLOCKYARD_SEED").map_or(0..u64::MAX, |seed| seed..seed + 1);
    let (mut tally, first) = (Tally::default(), seeds.start);
    let mut last = first;
    for seed in seeds {
        if tally.cuts() >= cuts {
            break;
        }
        random_life(Plan::random(seed), &mut tally).unwrap();
        last = seed;
    }
    println!("seeds {first} to {last}: {tally}");
    if first > 0 || cuts < CUTS {
        return;
    }
    let at_least =
        |counts: [u64; 4], least: [u64; 4]| counts.iter().zip(least).all(|(a, b)| *a >= b);
    // A stream of a small disk has few events, and a backup has its name when it has ended.
    assert!(at_least(tally.cuts_inside, [60, 40, 10, 30]), "{tally}");
    assert!(at_least(tally.done, [200, 60, 80, 100]), "{tally}");
    assert!(at_least(tally.switched, [10, 3, 0, 0]), "{tally}");
    assert!(tally.survived >= 50 && tally.cuts_between >= 100 && tally.backups >= 100, "{tally}");
    assert!(tally.writes > 10_000 && tally.flushes > 4_000, "{tally}");
}

/// Cuts the power at every event of a boot with one job, and of the closing of its disk.
#[test]
fn flushed_writes_survive_a_power_cut_at_every_event_of_a_live_job() {
    let mut switched = [0; 4];
    for (seed, job) in (0..).zip(JOBS) {
        let mut tally = Tally::default();
        let boot = |events| {
            let mut life = Life::new(Plan::small(seed));
            // The same disk each time, with an overlay that has data.
            life.boot(&[Job::Snapshot], None, &mut Tally::default()).unwrap();
            life.boot(&[job], Some(events), &mut tally).unwrap()
        };
        let whole = (0..5_000).map(boot).take_while(|survived| !survived).count();
        println!("{job:?}: {whole} events: {tally}");
        let number = job as usize;
        let least = [40, 60, 10, 40][number];
        assert!(tally.survived == 1 && tally.cuts_inside[number] >= least, "{tally}");
        switched[number] += tally.switched[number];
    }
    // A backup has its name only when it has ended.
    assert!(switched[..3].iter().all(|&cuts| cuts > 0), "{switched:?}");
}

#[test]
fn a_seed_repeats_a_life() {
    for seed in 0..6 {
        let life = || {
            let mut tally = Tally::default();
            random_life(Plan::random(seed), &mut tally).unwrap();
            tally
        };
        assert_eq!(life(), life());
    }
}

/// Tests the checks of this test: they must detect a faulty storage.
#[test]
fn the_judges_detect_a_faulty_storage() {
    for lie in [Lie::NoSync, Lie::HalfTheSyncs] {
        let is_caught = |seed: &u64| {
            let plan = Plan { lie: Some(lie), ..Plan::random(*seed) };
            random_life(plan, &mut Tally::default()).is_err()
        };
        let caught = (0..12).filter(is_caught).count();
        println!("{lie:?}: {caught}");
        assert!(caught >= 6, "{lie:?} was detected in {caught} of 12 lives");
    }
}
