//! How many may do something at a time, or how much: a thing counts one, or its bytes.
//!
//! What must hold: who came first is first, also where what is free would do for one who came later
//! (else those who want much would wait for ever); whoever waits is in the queue, once; what ends
//! wakes the first of them only, so that a thousand waiters cost no more than one. Where nobody
//! waits, taking a turn is one exchange of an atomic, and ending it one more.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

#[derive(Debug)]
pub struct Turns {
    all: u64,
    free: AtomicU64,
    /// The length of the queue. Written before who waits looks at `free` once more, and read after
    /// `free` has grown: one of the two sees the other.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    /// By the numbers given to those who came, which rise.
    waiting: VecDeque<(u64, Waker)>,
    came: u64,
}

impl Turns {
    pub fn new(at_a_time: u64) -> Self {
        Turns {
            all: at_a_time,
            free: AtomicU64::new(at_a_time),
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
        }
    }

    /// Waits for a turn, which ends when the guard is dropped.
    pub async fn take(&self) -> Turn<'_> {
        self.take_many(1).await
    }

    /// As so many turns at once; as all there are, if they are fewer.
    pub async fn take_many(&self, wanted: u64) -> Turn<'_> {
        let taken = wanted.min(self.all);
        if self.waiting.load(Ordering::SeqCst) > 0 || !self.try_take(taken) {
            Waiting { turns: self, wanted: taken, number: None }.await;
        }
        Turn { turns: self, taken }
    }

    fn try_take(&self, wanted: u64) -> bool {
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

/// Somebody who could not go on at once; in the queue from the first look on.
struct Waiting<'a> {
    turns: &'a Turns,
    wanted: u64,
    number: Option<u64>,
}

impl Waiting<'_> {
    fn leave(&mut self, queue: &mut Queue) {
        if let Some(number) = self.number.take()
            && let Ok(at) = queue.waiting.binary_search_by_key(&number, |(who, _)| *who)
        {
            queue.waiting.remove(at);
            self.turns.waiting.store(queue.waiting.len(), Ordering::SeqCst);
        }
    }
}

impl Future for Waiting<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let turns = self.turns;
        let mut queue = turns.queue();
        match self.number {
            // Woken by something else, perhaps with another waker.
            Some(me) => {
                if let Ok(at) = queue.waiting.binary_search_by_key(&me, |(who, _)| *who) {
                    queue.waiting[at].1.clone_from(cx.waker());
                }
            }
            None => {
                queue.came += 1;
                let me = queue.came;
                queue.waiting.push_back((me, cx.waker().clone()));
                turns.waiting.store(queue.waiting.len(), Ordering::SeqCst);
                self.number = Some(me);
            }
        }
        let first = queue.waiting.front().map(|(who, _)| *who);
        if first != self.number || !turns.try_take(self.wanted) {
            return Poll::Pending;
        }
        self.leave(&mut queue);
        drop(queue);
        // There may be enough for the next one too.
        turns.wake_first();
        Poll::Ready(())
    }
}

impl Drop for Waiting<'_> {
    /// Given up while it waits: the next one may have been waiting for this one only.
    fn drop(&mut self) {
        if self.number.is_some() {
            let turns = self.turns;
            self.leave(&mut turns.queue());
            turns.wake_first();
        }
    }
}

pub struct Turn<'a> {
    turns: &'a Turns,
    taken: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.free.fetch_add(self.taken, Ordering::SeqCst);
        if self.turns.waiting.load(Ordering::SeqCst) > 0 {
            self.turns.wake_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::Duration;

    use crate::Executor;

    #[test]
    fn never_more_at_a_time_and_nobody_is_forgotten() {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let (turns, inside, done) =
            (Rc::new(Turns::new(3)), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for task in 0..50u64 {
            let (handle, turns, inside, done) =
                (handle.clone(), turns.clone(), inside.clone(), done.clone());
            handle.clone().spawn(async move {
                for round in 0..4 {
                    // Woken while it waits, and for nothing.
                    handle.wake_at(
                        std::time::Instant::now() + Duration::from_micros(50 * (task % 5)),
                    );
                    let _turn = turns.take().await;
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
        // A task that was forgotten would leave this running for ever.
        executor.run().unwrap();
        assert_eq!((done.get(), inside.get()), (50, 0));
    }

    /// Polled once by hand, by somebody who counts how often he is woken.
    struct Look(std::sync::atomic::AtomicU64);

    impl std::task::Wake for Look {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> (Poll<F::Output>, Arc<Look>) {
        let look = Arc::new(Look(AtomicU64::new(0)));
        (future.poll(&mut Context::from_waker(&Waker::from(look.clone()))), look)
    }

    fn woken(look: &Look) -> u64 {
        look.0.load(Ordering::Relaxed)
    }

    #[test]
    fn who_wants_much_is_not_passed_by_those_who_want_little() {
        let turns = Turns::new(10);
        let (Poll::Ready(six), _) = poll(pin!(turns.take_many(6))) else { panic!("10 are free") };
        let mut much = pin!(turns.take_many(100));
        let (waits, much_looks) = poll(much.as_mut());
        assert!(waits.is_pending(), "all of 10 are wanted, and 4 are free");
        let mut little = pin!(turns.take_many(1));
        let (waits, little_looks) = poll(little.as_mut());
        assert!(waits.is_pending(), "there is one for it, but another came first");
        drop(six);
        assert_eq!((woken(&much_looks), woken(&little_looks)), (1, 0));
        let (Poll::Ready(all), _) = poll(much.as_mut()) else { panic!("10 are free") };
        assert!(poll(little.as_mut()).0.is_pending());
        drop(all);
        assert!(poll(little.as_mut()).0.is_ready());
    }

    #[test]
    fn who_gives_up_waiting_lets_the_next_one_look() {
        let turns = Turns::new(2);
        let (Poll::Ready(_one), _) = poll(pin!(turns.take())) else { panic!("2 are free") };
        let mut both = Box::pin(turns.take_many(2));
        assert!(poll(both.as_mut()).0.is_pending());
        let mut one = pin!(turns.take());
        let (waits, looks) = poll(one.as_mut());
        assert!(waits.is_pending());
        drop(both);
        assert_eq!(woken(&looks), 1);
        assert!(poll(one.as_mut()).0.is_ready());
    }

    /// Takers on several threads: no wake-up is lost between "nothing is free" and the end of a
    /// turn.
    #[test]
    fn on_several_threads_nobody_is_forgotten() {
        let (turns, inside) = (Turns::new(5), AtomicU64::new(0));
        std::thread::scope(|threads| {
            for thread in 0..4u64 {
                let (turns, inside) = (&turns, &inside);
                threads.spawn(move || {
                    for round in 0..5000 {
                        let wanted = 1 + (thread + round) % 5;
                        let _turn = block_on(turns.take_many(wanted));
                        assert!(inside.fetch_add(wanted, Ordering::SeqCst) + wanted <= 5);
                        inside.fetch_sub(wanted, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(turns.free.load(Ordering::SeqCst), 5);
    }

    /// A thread that sleeps until it is woken.
    struct Sleeper(std::thread::Thread);

    impl std::task::Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let (mut future, waker) =
            (pin!(future), Waker::from(Arc::new(Sleeper(std::thread::current()))));
        loop {
            if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return done;
            }
            std::thread::park();
        }
    }
}
