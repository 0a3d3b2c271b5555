//! A fair, asynchronous counting semaphore: limits how many operations, or bytes, are in progress.
//!
//! What must hold
//! - Waiters are served first come, first served, even if a later waiter wants fewer permits and
//!   those are free. If later waiters could overtake, a waiter that wants many permits would
//!   starve.
//! - Each waiter is in the queue exactly once.
//! - A release wakes only the first waiter, so its cost does not depend on the number of waiters.
//! - Without waiters, acquiring and releasing are one atomic operation each.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A fair counting semaphore; see the module documentation.
#[derive(Debug)]
pub struct Semaphore {
    permits: u64,
    free: AtomicU64,
    /// Length of the queue. A waiter stores it before it checks `free` again. A release loads it
    /// after it has added to `free`. So the waiter sees the permits, or the release sees the
    /// waiter.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Waiters by arrival number, ascending.
    waiting: VecDeque<(u64, Waker)>,
    /// Arrival number of the latest waiter.
    arrivals: u64,
}

impl Semaphore {
    /// Creates a semaphore with `permits` permits.
    pub fn new(permits: u64) -> Self {
        Semaphore {
            permits,
            free: AtomicU64::new(permits),
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
        }
    }

    /// Acquires one permit. Dropping the guard releases it.
    pub async fn acquire(&self) -> Permit<'_> {
        self.acquire_many(1).await
    }

    /// Acquires `wanted` permits, or all of them if the semaphore has fewer.
    pub async fn acquire_many(&self, wanted: u64) -> Permit<'_> {
        let wanted = wanted.min(self.permits);
        if self.waiting.load(Ordering::SeqCst) > 0 || !self.try_acquire(wanted) {
            Waiting { semaphore: self, wanted, number: None }.await;
        }
        Permit { semaphore: self, permits: wanted }
    }

    fn try_acquire(&self, wanted: u64) -> bool {
        self.free
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |free| free.checked_sub(wanted))
            .is_ok()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_first(&self) {
        let first = self.queue().waiting.front().map(|(_, waker)| waker.clone());
        if let Some(first) = first {
            first.wake();
        }
    }
}

/// Future of an acquisition that could not complete at once.
struct Waiting<'a> {
    semaphore: &'a Semaphore,
    wanted: u64,
    /// Arrival number; set by the first poll, which joins the queue.
    number: Option<u64>,
}

impl Waiting<'_> {
    fn leave(&mut self, queue: &mut Queue) {
        if let Some(number) = self.number.take()
            && let Ok(at) = queue.waiting.binary_search_by_key(&number, |(number, _)| *number)
        {
            queue.waiting.remove(at);
            self.semaphore.waiting.store(queue.waiting.len(), Ordering::SeqCst);
        }
    }
}

impl Future for Waiting<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let semaphore = self.semaphore;
        let mut queue = semaphore.queue();
        match self.number {
            // This poll was spurious. Store the waker again, because it may have changed.
            Some(own) => {
                if let Ok(at) = queue.waiting.binary_search_by_key(&own, |(number, _)| *number) {
                    queue.waiting[at].1.clone_from(cx.waker());
                }
            }
            None => {
                queue.arrivals += 1;
                let own = queue.arrivals;
                queue.waiting.push_back((own, cx.waker().clone()));
                semaphore.waiting.store(queue.waiting.len(), Ordering::SeqCst);
                self.number = Some(own);
            }
        }
        let first = queue.waiting.front().map(|(number, _)| *number);
        if first != self.number || !semaphore.try_acquire(self.wanted) {
            return Poll::Pending;
        }
        self.leave(&mut queue);
        drop(queue);
        // The free permits may suffice for the next waiter too.
        semaphore.wake_first();
        Poll::Ready(())
    }
}

impl Drop for Waiting<'_> {
    /// Leaves the queue. The next waiter may have waited only because this one was ahead of it.
    fn drop(&mut self) {
        if self.number.is_some() {
            let semaphore = self.semaphore;
            self.leave(&mut semaphore.queue());
            semaphore.wake_first();
        }
    }
}

/// Permits that were acquired. Dropping it releases them.
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
    permits: u64,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.semaphore.free.fetch_add(self.permits, Ordering::SeqCst);
        if self.semaphore.waiting.load(Ordering::SeqCst) > 0 {
            self.semaphore.wake_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Executor;
    use crate::testing::waits;

    #[test]
    fn tasks_never_exceed_the_permits_and_all_complete() {
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        let (semaphore, inside, done) =
            (Rc::new(Semaphore::new(3)), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for task in 0..50u64 {
            let (handle, semaphore, inside, done) =
                (handle.clone(), semaphore.clone(), inside.clone(), done.clone());
            handle.clone().spawn(async move {
                for round in 0..4 {
                    // Cause a spurious wake-up while the task waits.
                    handle.wake_at(handle.read_clock() + Duration::from_micros(50 * (task % 5)));
                    let _permit = semaphore.acquire().await;
                    inside.set(inside.get() + 1);
                    assert!(inside.get() <= 3);
                    match (task + round) % 3 {
                        0 => handle.sleep(Duration::from_micros(100)).await,
                        1 => handle.yield_now().await,
                        _ => {}
                    }
                    inside.set(inside.get() - 1);
                }
                done.set(done.get() + 1);
                if done.get() == 50 {
                    handle.stop();
                }
            });
        }
        // After a lost wake-up nothing would be ready.
        waits::run(&executor).unwrap();
        assert_eq!((done.get(), inside.get()), (50, 0));
    }

    /// A waker that counts its wake-ups.
    struct CountingWaker(AtomicU64);

    impl std::task::Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> (Poll<F::Output>, Arc<CountingWaker>) {
        let waker = Arc::new(CountingWaker(AtomicU64::new(0)));
        (future.poll(&mut Context::from_waker(&Waker::from(waker.clone()))), waker)
    }

    fn wakeups(waker: &CountingWaker) -> u64 {
        waker.0.load(Ordering::Relaxed)
    }

    #[test]
    fn a_small_request_does_not_overtake_a_large_one() {
        let semaphore = Semaphore::new(10);
        let (Poll::Ready(six), _) = poll(pin!(semaphore.acquire_many(6))) else {
            panic!("10 are free")
        };
        let mut much = pin!(semaphore.acquire_many(100));
        let (waits, much_waker) = poll(much.as_mut());
        assert!(waits.is_pending(), "it wants all 10 permits, and 4 are free");
        let mut little = pin!(semaphore.acquire_many(1));
        let (waits, little_waker) = poll(little.as_mut());
        assert!(waits.is_pending(), "a permit is free, but a waiter is ahead of it");
        drop(six);
        assert_eq!((wakeups(&much_waker), wakeups(&little_waker)), (1, 0));
        let (Poll::Ready(all), _) = poll(much.as_mut()) else { panic!("10 are free") };
        assert!(poll(little.as_mut()).0.is_pending());
        drop(all);
        assert!(poll(little.as_mut()).0.is_ready());
    }

    #[test]
    fn a_dropped_waiter_wakes_the_next_one() {
        let semaphore = Semaphore::new(2);
        let (Poll::Ready(_one), _) = poll(pin!(semaphore.acquire())) else { panic!("2 are free") };
        let mut both = Box::pin(semaphore.acquire_many(2));
        assert!(poll(both.as_mut()).0.is_pending());
        let mut one = pin!(semaphore.acquire());
        let (waits, waker) = poll(one.as_mut());
        assert!(waits.is_pending());
        drop(both);
        assert_eq!(wakeups(&waker), 1);
        assert!(poll(one.as_mut()).0.is_ready());
    }

    /// No wake-up is lost if one thread releases permits while another joins the queue.
    #[test]
    fn all_waiters_on_several_threads_complete() {
        let (semaphore, inside) = (Semaphore::new(5), AtomicU64::new(0));
        std::thread::scope(|threads| {
            for thread in 0..4u64 {
                let (semaphore, inside) = (&semaphore, &inside);
                threads.spawn(move || {
                    for round in 0..5000 {
                        let wanted = 1 + (thread + round) % 5;
                        let _permit = block_on(semaphore.acquire_many(wanted));
                        assert!(inside.fetch_add(wanted, Ordering::SeqCst) + wanted <= 5);
                        inside.fetch_sub(wanted, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(semaphore.free.load(Ordering::SeqCst), 5);
    }

    /// A waker that unparks a thread.
    struct Sleeper(std::thread::Thread);

    impl std::task::Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let (mut future, waker) =
            (pin!(future), Waker::from(Arc::new(Sleeper(std::thread::current()))));
        let end = Instant::now() + waits::LIMIT;
        loop {
            if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return done;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "a wake-up was lost");
            std::thread::park_timeout(left);
        }
    }
}
