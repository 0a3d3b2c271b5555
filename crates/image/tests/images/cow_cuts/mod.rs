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

use std::io;

use blockyard_image::Storage;
use blockyard_ring::Segments;
use blockyard_storage::sim::Rng;

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
        life.load(events, |disk| disk, tally)?;
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
            life.load(events, |disk| disk, &mut tally).unwrap()
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
                life.load(u64::MAX, |disk| disk, &mut Tally::default()).unwrap();
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

/// Defects of a storage that the test must detect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    NoSync,
    /// Bits may become durable before their data.
    NoSyncBeforeTheBits,
    LosesPieces,
}

#[derive(Clone)]
struct Liar<S> {
    disk: S,
    lie: Lie,
    syncs: std::rc::Rc<std::cell::Cell<u64>>,
}

impl<S: Storage> Storage for Liar<S> {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        self.disk.read(segments, offset).await
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        if self.lie == Lie::LosesPieces && len > 4096 {
            let (_, n) = self.disk.write(segments.slice(0, 4096), offset, durable).await;
            return (segments, n.map(|_| len));
        }
        self.disk.write(segments, offset, durable).await
    }

    async fn sync(&self) -> io::Result<()> {
        self.syncs.set(self.syncs.get() + 1);
        match self.lie {
            Lie::NoSync => Ok(()),
            Lie::NoSyncBeforeTheBits if self.syncs.get() % 2 == 1 => Ok(()),
            _ => self.disk.sync().await,
        }
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.discard(offset, len).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.disk.zero(offset, len, unmap).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.set_len(len).await
    }

    async fn len(&self) -> io::Result<u64> {
        self.disk.len().await
    }
}

/// Tests the test: a defective storage must be detected.
#[test]
fn defective_storage_is_detected() {
    for lie in [Lie::NoSync, Lie::NoSyncBeforeTheBits, Lie::LosesPieces] {
        let caught = (0..150).filter(|&seed| {
            let mut life = Life::new(Plan { clients: 2, ..Plan::quiet(seed) });
            life.be_created(u64::MAX, &mut Tally::default()).unwrap();
            let events = Rng::new(seed).below(life.events());
            life.load(
                events,
                |disk| Liar { disk, lie, syncs: Default::default() },
                &mut Tally::default(),
            )
            .is_err()
        });
        let caught = caught.count();
        assert!(caught >= 10, "{lie:?} was caught in {caught} of 150 runs");
    }
}
