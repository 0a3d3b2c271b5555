//! What one queue may do in one turn of its reactor.
//!
//! In: what was taken, in descriptors and bytes, and the number of the turn. Out: whether the queue must let the reactor go
//! on. What must hold: between two looks of the reactor at its other queues, a queue takes one budget and at most one more
//! request, whatever it finds and whatever is in flight. A turn that lasts is over for all: each queue takes one batch of it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use blockyard_ring::Handle;

/// Descriptors of a turn: about 50 us. A request costs as much as [`REQUEST`] of them besides.
const DESCRIPTORS: u32 = 1024;
pub const REQUEST: u32 = 8;
/// Bytes of a turn. Storage that answers at once copies them before it answers.
const BYTES: u64 = 1 << 20;
/// Time since the turn began.
const TIME: Duration = Duration::from_micros(200);

/// A queue's account of the current turn.
#[derive(Debug, Default)]
pub struct Budget {
    turn: Cell<u64>,
    descriptors: Cell<u32>,
    bytes: Cell<u64>,
}

impl Budget {
    /// Books what was taken in turn number `turn`.
    #[inline]
    pub fn spend(&self, turn: u64, descriptors: u32, bytes: u64) {
        if self.turn.replace(turn) != turn {
            self.descriptors.set(0);
            self.bytes.set(0);
        }
        self.descriptors.set(self.descriptors.get().saturating_add(descriptors));
        self.bytes.set(self.bytes.get().saturating_add(bytes));
    }

    /// Waits for a turn in which something may still be taken, and books this in it.
    pub async fn admit(&self, handle: &Handle, descriptors: u32, bytes: u64) {
        while self.is_spent(handle.turn()) {
            handle.yield_now().await;
        }
        self.spend(handle.turn(), descriptors, bytes);
    }

    /// Whether nothing more may be taken in turn number `turn`.
    #[inline]
    pub fn is_spent(&self, turn: u64) -> bool {
        self.turn.get() == turn && (self.descriptors.get() >= DESCRIPTORS || self.bytes.get() >= BYTES)
    }
}

/// Whether a turn that began at `began` has lasted so long that each queue lets the others go on.
#[inline]
pub fn is_over(began: Instant, now: Instant) -> bool {
    now.saturating_duration_since(began) >= TIME
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use blockyard_ring::Executor;

    use super::*;

    /// As the lanes of a ublk queue do it, one for each tag: all requests are there at once.
    #[test]
    fn tasks_that_share_a_budget_are_admitted_over_several_turns() {
        const TASKS: u64 = 1000;
        for (bytes, most) in [(0, DESCRIPTORS / REQUEST), (64 << 10, 16)] {
            let executor = Executor::new().unwrap();
            let handle = executor.handle().clone();
            let work = async move {
                let (budget, admitted) = (Rc::new(Budget::default()), Rc::new(Cell::new(0)));
                for _ in 0..TASKS {
                    let (budget, admitted, tasks) = (budget.clone(), admitted.clone(), handle.clone());
                    handle.spawn(async move {
                        budget.admit(&tasks, REQUEST, bytes).await;
                        admitted.set(admitted.get() + 1);
                    });
                }
                let (mut before, mut turns) = (0, 0);
                while before < TASKS {
                    handle.yield_now().await;
                    let now = admitted.get();
                    // A look sees two turns at most.
                    assert!(now - before <= 2 * u64::from(most), "{} tasks between two looks", now - before);
                    (before, turns) = (now, turns + 1);
                }
                turns
            };
            assert!(executor.block_on(work).unwrap() >= TASKS / 2 / u64::from(most));
        }
    }

    #[test]
    fn a_turn_has_a_budget_of_each_kind_and_the_next_one_has_another() {
        let budget = Budget::default();
        assert!(!budget.is_spent(0) && !budget.is_spent(7));
        budget.spend(7, DESCRIPTORS - 1, BYTES - 1);
        assert!(!budget.is_spent(7));
        budget.spend(7, 1, 0);
        assert!(budget.is_spent(7) && !budget.is_spent(8));
        budget.spend(8, 0, BYTES);
        assert!(budget.is_spent(8));
        budget.spend(9, u32::MAX, u64::MAX);
        budget.spend(9, u32::MAX, u64::MAX);
        assert!(budget.is_spent(9) && !budget.is_spent(10));
    }

    #[test]
    fn a_turn_that_lasts_is_over() {
        let began = Instant::now();
        assert!(!is_over(began, began) && !is_over(began + TIME, began));
        assert!(is_over(began, began + TIME));
    }
}
