//! Runs simulations by their seeds, on all processors, until enough power cuts were made.
//!
//! `BLOCKYARD_SEED=N` runs that seed alone. `BLOCKYARD_CUTS=N` sets the number of cuts. Failures
//! are reported with their seeds at the end, so that a run of hours continues after a failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Number of failures after which the run stops.
const FAILURES: usize = 10;

/// Counters of one thread.
pub trait Count: Default + Send {
    fn cuts(&self) -> u64;
    fn add(&mut self, other: &Self);
}

pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// Returns the number of cuts of a test program; `usual` if the environment does not set it.
pub fn cuts(usual: u64) -> u64 {
    number("BLOCKYARD_CUTS").unwrap_or(usual)
}

/// Returns true if the run is long enough that every state must have occurred.
pub fn is_thorough(usual: u64) -> bool {
    cuts(usual) >= usual && number("BLOCKYARD_SEED").is_none()
}

/// Runs `life` with the seeds that have failed once, then with 0, 1, 2, ... until `cuts` cuts were
/// made. `new` makes each thread's counters.
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
