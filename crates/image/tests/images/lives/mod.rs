//! Lives by their seeds, on all processors, until enough cuts were made: for the tests that cut the
//! power.
//!
//! `BLOCKYARD_SEED=N` runs that seed alone. `BLOCKYARD_CUTS=N` makes as many cuts in all. What
//! fails is told with its seed, when all has been tried: a run of hours is not lost for one of
//! them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Failures that are enough to stop for.
const FAILURES: usize = 10;

/// What is counted, by each thread for itself.
pub trait Count: Default + Send {
    fn cuts(&self) -> u64;
    fn add(&mut self, other: &Self);
}

pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// The cuts to be made by a whole program of tests; `usual` if nobody says.
pub fn cuts(usual: u64) -> u64 {
    number("BLOCKYARD_CUTS").unwrap_or(usual)
}

/// Whether so much is done that everything must have been seen.
pub fn is_thorough(usual: u64) -> bool {
    cuts(usual) >= usual && number("BLOCKYARD_SEED").is_none()
}

/// Runs `life` with the seeds that have failed once, then with 0, 1, 2, ... until `cuts` were made;
/// `new` gives each thread its counters.
pub fn run<T: Count + std::fmt::Display>(
    failed_once: &[u64],
    cuts: u64,
    new: impl Fn() -> T + Sync,
    life: impl Fn(u64, &mut T) -> Result<(), String> + Sync,
) -> T {
    let alone = number("BLOCKYARD_SEED");
    let (next, made) = (AtomicU64::new(0), AtomicU64::new(0));
    let (total, failures) = (Mutex::new(new()), Mutex::new(Vec::new()));
    let kept = failed_once.len() as u64;
    let seed = |n: u64| match alone {
        Some(seed) => (n == 0).then_some(seed),
        None if n < kept => Some(failed_once[n as usize]),
        None => (made.load(Ordering::Relaxed) < cuts).then_some(n - kept),
    };
    let worker = || {
        let mut tally = new();
        while let Some(seed) = seed(next.fetch_add(1, Ordering::Relaxed)) {
            let before = tally.cuts();
            let end = catch_unwind(AssertUnwindSafe(|| life(seed, &mut tally)));
            made.fetch_add(tally.cuts() - before, Ordering::Relaxed);
            let failure = match end {
                Ok(Ok(())) => continue,
                Ok(Err(e)) => e,
                Err(_) => format!("seed {seed}: a panic, told above"),
            };
            eprintln!("{failure}");
            let mut failures = failures.lock().unwrap();
            failures.push(seed);
            if failures.len() >= FAILURES {
                break;
            }
        }
        total.lock().unwrap().add(&tally);
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(worker))));
    let (total, failures) = (total.into_inner().unwrap(), failures.into_inner().unwrap());
    let last = alone.unwrap_or(next.into_inner().saturating_sub(kept + 1 + threads as u64));
    println!("seeds {} to {last}, and {kept} that failed once: {total}", alone.unwrap_or(0));
    assert!(failures.is_empty(), "seeds that fail: {failures:?}; BLOCKYARD_SEED=N runs one alone");
    total
}
