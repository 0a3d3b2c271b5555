//! A lock on byte ranges that separates read-modify-write from other writes to the same blocks.
//!
//! Only images whose O_DIRECT unit is larger than a sector need this. A write of part of a block
//! reads the block, changes it and writes all of it. That would undo a concurrent write to the rest
//! of the block. So all writes of such an image lock their blocks first. All reactors share the
//! lock. Images with 512-byte units never use it.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Mutex;
use std::task::{Poll, Waker};

/// A lock on byte ranges; see the module documentation.
#[derive(Debug, Default)]
pub struct RangeLock {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    ranges: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

impl RangeLock {
    /// Waits until no other guard holds a byte of `range`, and holds it until the guard is dropped.
    pub async fn hold(&self, range: Range<u64>) -> RangeGuard<'_> {
        poll_fn(|cx| {
            let mut held = self.held.lock().unwrap_or_else(|e| e.into_inner());
            if held.ranges.iter().any(|r| r.start < range.end && range.start < r.end) {
                held.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            held.ranges.push(range.clone());
            Poll::Ready(())
        })
        .await;
        RangeGuard { lock: self, range }
    }
}

/// Holds a range until it is dropped.
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    range: Range<u64>,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.held.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(at) = held.ranges.iter().position(|r| *r == self.range) {
            held.ranges.swap_remove(at);
        }
        for waker in held.waiting.drain(..) {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::sim::{Rng, Sim, yield_now};
    use blockyard_ring::Executor;

    /// Locks random ranges, and checks that no other task holds a byte of them.
    async fn visit(lock: &RangeLock, inside: &[AtomicU32], mut rng: Rng, visits: usize) {
        for _ in 0..visits {
            let start = rng.below(inside.len() as u64);
            let end = rng.between(start + 1, (start + 8).min(inside.len() as u64));
            let guard = lock.hold(start..end).await;
            let cells = &inside[start as usize..end as usize];
            cells.iter().for_each(|c| {
                assert_eq!(c.fetch_add(1, Ordering::SeqCst), 0, "two hold {start}..{end}")
            });
            for _ in 0..rng.below(3) {
                yield_now().await;
            }
            cells.iter().for_each(|c| assert_eq!(c.fetch_sub(1, Ordering::SeqCst), 1));
            drop(guard);
        }
    }

    fn cells() -> Vec<AtomicU32> {
        (0..32).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn no_byte_is_held_twice_and_every_task_gets_its_range() {
        for seed in 0..200 {
            let (sim, shared) =
                (Sim::new(seed).step_limit(100_000), Rc::new((RangeLock::default(), cells())));
            let mut rng = Rng::new(seed);
            let tasks: Vec<_> = (0..8)
                .map(|_| {
                    let (shared, rng) = (shared.clone(), rng.fork());
                    sim.spawn(async move { visit(&shared.0, &shared.1, rng, 20).await })
                })
                .collect();
            sim.block_on(async move {
                for task in tasks {
                    task.await;
                }
            })
            .unwrap();
            let held = shared.0.held.lock().unwrap();
            assert!(held.ranges.is_empty() && held.waiting.is_empty(), "seed {seed}");
        }
    }

    #[test]
    fn reactors_of_several_threads_share_the_lock() {
        let (lock, inside) =
            (std::sync::Arc::new(RangeLock::default()), std::sync::Arc::new(cells()));
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (lock, inside) = (lock.clone(), inside.clone());
                std::thread::spawn(move || {
                    let executor = Executor::new().unwrap();
                    let handle = executor.handle().clone();
                    let (left, done) =
                        (Rc::new(std::cell::Cell::new(4)), blockyard_ring::Signal::new(&handle));
                    for task in 0..4 {
                        let (lock, inside, left, done) =
                            (lock.clone(), inside.clone(), left.clone(), done.clone());
                        handle.spawn(async move {
                            visit(&lock, &inside, Rng::new(thread * 4 + task), 500).await;
                            left.set(left.get() - 1);
                            done.ring();
                        });
                    }
                    let all = async move {
                        while left.get() > 0 {
                            done.wait().await;
                        }
                    };
                    executor.block_on(all).unwrap();
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(lock.held.lock().unwrap().ranges.is_empty());
    }

    #[test]
    fn adjacent_ranges_do_not_wait_and_a_dropped_wait_leaves_nothing_behind() {
        let sim = Sim::new(1);
        sim.block_on(async {
            let lock = RangeLock::default();
            let first = lock.hold(0..4096).await;
            let _beside = lock.hold(4096..8192).await;
            {
                let mut waiter = Box::pin(lock.hold(0..8192));
                poll_fn(|cx| {
                    assert!(waiter.as_mut().poll(cx).is_pending());
                    Poll::Ready(())
                })
                .await;
            }
            drop(first);
            let _again = lock.hold(100..200).await;
        })
        .unwrap();
    }
}
