//! Measures the time that the scheduler adds to a request, in nanoseconds: `cargo run --release -p
//! blockyard-sched --example price`.
//!
//! One thread. Each value is the median of several rounds. "alone": one disk has the device to
//! itself. "inside": several disks, all within their share. "waits": all disks exceed their share;
//! each operation waits and is admitted when an earlier one completes. The time that it spends
//! waiting is not counted. "one busy beside": one disk works beside disks that have worked before
//! and are idle.

use std::hint::black_box;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use blockyard_sched::{
    DeviceProfile, Host, Knobs, Operation, OperationKind, ReactorShare, WaitToken,
};

const READ: Operation =
    Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };
const ROUNDS: usize = 9;
const OPERATIONS: u64 = 400_000;

fn disks(count: usize) -> Vec<ReactorShare> {
    let host = Host::default();
    (0..count)
        .map(|_| {
            let device = Some(("device", &DeviceProfile::FLASH));
            host.share(device, None, &Knobs::default()).on_reactor()
        })
        .collect()
}

/// Returns the median time of an operation in nanoseconds.
fn median(mut round: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    all.sort_by(f64::total_cmp);
    all[ROUNDS / 2]
}

/// A clock that advances as for a device of a hundred thousand operations a second.
struct Clock(u64);

impl Clock {
    fn tick(&mut self) -> u64 {
        self.0 += 10_000;
        self.0
    }
}

fn inside(count: usize) -> f64 {
    let shares = disks(count);
    let mut clock = Clock(1_000_000_000);
    let mut next = 0;
    median(|| {
        let start = Instant::now();
        for _ in 0..OPERATIONS {
            let share = &shares[next % count];
            next += 1;
            let now = clock.tick();
            match black_box(share).ask(now, &READ) {
                Some(grant) => share.done(now, grant),
                None => unreachable!("no other operation is in flight"),
            }
        }
        start.elapsed().as_nanos() as f64 / OPERATIONS as f64
    })
}

fn waits(count: usize) -> f64 {
    let shares = disks(count);
    let mut clock = Clock(1_000_000_000);
    // Each disk has four operations in flight or waiting: more than the window, so that no
    // operation is admitted at once.
    let mut under: Vec<(usize, Arc<WaitToken>, Option<blockyard_sched::Grant>)> = Vec::new();
    for n in 0..4 * count.max(64) {
        let (disk, token) = (n % count, Arc::<WaitToken>::default());
        let now = clock.tick();
        let grant = shares[disk].ask(now, &READ);
        if grant.is_none() {
            shares[disk].wait(now, &READ, &token, Waker::noop());
        }
        under.push((disk, token, grant));
    }
    let mut at = 0;
    median(|| {
        let (start, mut done) = (Instant::now(), 0);
        while done < OPERATIONS {
            at = (at + 1) % under.len();
            let (disk, token, grant) = &mut under[at];
            let now = clock.tick();
            let waited = || shares[*disk].granted(now, now, &READ, token);
            let ended = grant.take().or_else(|| token.take_grant().then(waited));
            let Some(ended) = ended else { continue };
            shares[*disk].done(now, ended);
            *grant = shares[*disk].ask(now, &READ);
            if grant.is_none() {
                shares[*disk].wait(now, &READ, token, Waker::noop());
            }
            done += 1;
        }
        start.elapsed().as_nanos() as f64 / OPERATIONS as f64
    })
}

/// Returns the time of an operation of one busy disk beside `idle` disks that have worked before.
fn beside_idle(idle: usize) -> f64 {
    let shares = disks(idle + 1);
    let mut clock = Clock(1_000_000_000);
    let mut request = |share: &ReactorShare| {
        let now = clock.tick();
        share.done(now, black_box(share).ask(now, &READ).expect("the device is idle"));
    };
    shares.iter().for_each(&mut request);
    median(|| {
        let start = Instant::now();
        (0..OPERATIONS).for_each(|_| request(&shares[idle]));
        start.elapsed().as_nanos() as f64 / OPERATIONS as f64
    })
}

fn main() {
    println!("{:>6}  {:>10}  {:>10}", "disks", "inside", "waits");
    println!("{:>6}  {:>7.0} ns  {:>10}", "1", inside(1), "(alone)");
    for count in [2, 10, 100, 1000] {
        println!("{count:>6}  {:>7.0} ns  {:>7.0} ns", inside(count), waits(count));
    }
    println!("\n{:>10}  {:>15}", "idle disks", "one busy beside");
    for idle in [1, 100, 1000, 4000] {
        println!("{idle:>10}  {:>12.0} ns", beside_idle(idle));
    }
}
