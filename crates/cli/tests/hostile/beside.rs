//! Neighbours during an attack: the server must serve another disk of the same reactor.
//!
//! A case calls [`beside`] with a function that repeats steps of its attack while
//! [`Attack::goes_on`] returns true. In `make test` the neighbour's reads must complete while the
//! attack makes steps. With `BLOCKYARD_BESIDE=SECONDS` (scripts/soak.d/hostile) the test also
//! measures the neighbour's latencies, alternately without and with the attack. The p99 with the
//! attack must be at most [`MOST_TIMES`] the p99 without it. The names of these tests begin with
//! `beside_`, so that the soak part finds them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread, scope};
use std::time::{Duration, Instant};

use blockyard_driver::request::IN;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::daemon::{Daemon, OTHER};
use super::guest::{D, Guest, Layout, NONE, into, out, rung};

/// Number of reads of the neighbour and of steps of the attack, in `make test`.
const READS: u32 = 100;
const STEPS: u64 = 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// Rounds of a measurement. Each has a part without and a part with the attack.
const ROUNDS: u32 = 5;
const MOST_TIMES: f64 = 3.0;

/// A run of an attack, for the function that makes its steps.
pub struct Attack<'a> {
    daemon: &'a Daemon,
    ends: &'a AtomicBool,
    steps: &'a AtomicU64,
    /// Waits for the first step.
    watcher: &'a Thread,
}

impl Attack<'_> {
    /// Returns the socket of a disk. The neighbour uses `OTHER`; the attack uses `VICTIM` or
    /// `SLOW`.
    pub fn socket(&self, disk: &str) -> PathBuf {
        self.daemon.socket(disk)
    }

    /// Counts a step. Returns false when the attack is over.
    pub fn goes_on(&self) -> bool {
        if self.steps.fetch_add(1, Ordering::Relaxed) == 0 {
            self.watcher.unpark();
        }
        !self.ends.load(Ordering::Relaxed)
    }
}

/// Ends the loop of another thread, also if this one panics.
pub struct End<'a>(pub &'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checks that the attack `what` does not delay a neighbour. `attack` connects and makes steps
/// until it is over. A measurement runs it several times.
pub fn beside(what: &str, daemon: &Daemon, attack: impl Fn(&Attack<'_>) + Sync) {
    let mut neighbour = Neighbour::start(daemon);
    let Ok(seconds) = std::env::var("BLOCKYARD_BESIDE") else {
        return during(daemon, &attack, |steps| neighbour.reads_while(steps, what));
    };
    let seconds: f64 = seconds.parse().expect("BLOCKYARD_BESIDE is a number of seconds");
    let part = Duration::from_secs_f64(seconds / f64::from(2 * ROUNDS));
    neighbour.p99(part / 4);
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(neighbour.p99(part));
        beside.push(during(daemon, &attack, |_| neighbour.p99(part)));
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (alone, beside) = (median(&mut alone), median(&mut beside));
    let times = beside.as_secs_f64() / alone.as_secs_f64();
    println!("beside: {what}: p99 alone {alone:?}, beside {beside:?}, {times:.2} times");
    assert!(
        times <= MOST_TIMES,
        "{what}: the neighbour's p99 is {beside:?}, {times:.1} times its {alone:?} alone"
    );
}

/// Calls `look` during the attack, with the number of steps.
fn during<T>(
    daemon: &Daemon,
    attack: &(impl Fn(&Attack<'_>) + Sync),
    look: impl FnOnce(&AtomicU64) -> T,
) -> T {
    let (ends, steps, watcher) = (AtomicBool::new(false), AtomicU64::new(0), thread::current());
    scope(|scope| {
        let attacker = scope.spawn(|| {
            yields_to_all();
            attack(&Attack { daemon, ends: &ends, steps: &steps, watcher: &watcher });
        });
        let looked = {
            let _end = End(&ends);
            let start = Instant::now();
            while steps.load(Ordering::Relaxed) == 0 {
                assert!(!attacker.is_finished(), "the attack ended before its first step");
                assert!(start.elapsed() < PATIENCE, "the attack makes no step");
                thread::park_timeout(PATIENCE);
            }
            look(&steps)
        };
        attacker.join().unwrap();
        looked
    })
}

/// Lowers the priority of the attacker in a measurement. Its own CPU time must not slow the
/// neighbour down: the test measures the effect of the daemon's work.
fn yields_to_all() {
    if std::env::var_os("BLOCKYARD_BESIDE").is_some() {
        let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
        let done = Command::new("chrt").args(["--idle", "--pid", "0", &thread]).status().unwrap();
        assert!(done.success(), "chrt --idle --pid 0 {thread}: {done}");
    }
}

/// A front end with one read at a time.
struct Neighbour {
    guest: Guest,
    chain: [D; 3],
    status: u64,
}

impl Neighbour {
    fn start(daemon: &Daemon) -> Self {
        let mut guest = Guest::start(&daemon.socket(OTHER), Layout::Split);
        let (header, status) = (guest.header(IN, 0), guest.status());
        let data = guest.memory.take(4096, 4096).unwrap();
        Neighbour { guest, chain: [out(header, 16), into(data, 4096), into(status, 1)], status }
    }

    /// Does one read and returns its duration. Sleeps until the device signals, so it takes no CPU
    /// time from the daemon.
    fn read(&mut self, what: &str) -> Duration {
        let start = Instant::now();
        self.guest.bytes_at(self.status, &[NONE]);
        self.guest.offer(0, &self.chain);
        while self.guest.rings[0].reap(3).is_none() {
            assert!(start.elapsed() < PATIENCE, "{what}: the neighbour's read is not answered");
            let call = self.guest.rings[0].setup.call.clone();
            let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
            let _ = rustix::event::poll(&mut [PollFd::new(&*call, PollFlags::IN)], Some(&limit));
            rung(&call);
        }
        assert_eq!(self.guest.byte(self.status), 0, "{what}: the neighbour's read failed");
        start.elapsed()
    }

    fn reads_while(&mut self, steps: &AtomicU64, what: &str) {
        let before = steps.load(Ordering::Relaxed);
        let (mut reads, mut last, mut since) = (0, before, Instant::now());
        while reads < READS || last - before < STEPS {
            // Each read has its own limit, and so has each step.
            self.read(what);
            reads += 1;
            let made = steps.load(Ordering::Relaxed);
            if made != last {
                (last, since) = (made, Instant::now());
            }
            assert!(since.elapsed() < PATIENCE, "{what}: the attack ended or makes no step");
        }
    }

    fn p99(&mut self, time: Duration) -> Duration {
        let start = Instant::now();
        let mut times = Vec::new();
        while start.elapsed() < time {
            times.push(self.read("the measurement"));
        }
        times.sort_unstable();
        times[times.len() * 99 / 100]
    }
}
