//! How many may do something at a time.
//!
//! What must hold: whoever waits is in the queue, once; a turn that ends wakes one of them, so that a thousand waiters
//! cost no more than one. (A future that waits is not given up: it would take a wake-up with it.)

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Mutex;
use std::task::{Poll, Waker};

#[derive(Debug)]
pub struct Turns(Mutex<State>);

#[derive(Debug)]
struct State {
    free: u32,
    waiting: VecDeque<(u64, Waker)>,
    /// Numbers given to those who came.
    came: u64,
}

impl Turns {
    pub fn new(at_a_time: u32) -> Self {
        Turns(Mutex::new(State { free: at_a_time, waiting: VecDeque::new(), came: 0 }))
    }

    /// Waits for a turn, which ends when the guard is dropped.
    pub async fn take(&self) -> Turn<'_> {
        let mut number = None;
        poll_fn(|cx| {
            let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
            state.came += 1;
            let me = *number.get_or_insert(state.came);
            // It may have been woken by something else, and be in the queue still.
            state.waiting.retain(|(who, _)| *who != me);
            if state.free == 0 {
                state.waiting.push_back((me, cx.waker().clone()));
                return Poll::Pending;
            }
            state.free -= 1;
            Poll::Ready(())
        })
        .await;
        Turn(self)
    }
}

pub struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let next = {
            let mut state = self.0.0.lock().unwrap_or_else(|e| e.into_inner());
            state.free += 1;
            state.waiting.pop_front()
        };
        if let Some((_, next)) = next {
            next.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::Duration;

    use blockyard_ring::Executor;

    #[test]
    fn never_more_at_a_time_and_nobody_is_forgotten() {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let (turns, inside, done) = (Rc::new(Turns::new(3)), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for task in 0..50u64 {
            let (handle, turns, inside, done) = (handle.clone(), turns.clone(), inside.clone(), done.clone());
            handle.clone().spawn(async move {
                for round in 0..4 {
                    // Woken while it waits, and for nothing.
                    handle.wake_at(std::time::Instant::now() + Duration::from_micros(50 * (task % 5)));
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
}
