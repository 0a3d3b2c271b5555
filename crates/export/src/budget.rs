//! What the queues of one disk may do in one turn of their reactor.
//!
//! In: what a queue took, in descriptors and bytes, and the number of the turn. Out: whether the
//! queue may take more. What must hold: between two looks of the reactor at its other disks, all
//! queues of a disk together take one budget and at most one more request, whatever they find and
//! whatever is in flight. A queue that the others left nothing comes before them in the next turn.
//! A turn that lasts is over for all: each queue takes one batch of it.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::{self, Arc};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_ring::Handle;

/// Descriptors of a turn: about 50 us. A request costs as much as [`REQUEST`] of them besides.
const DESCRIPTORS: u32 = 1024;
pub const REQUEST: u32 = 8;
/// Bytes of a turn. Storage that answers at once copies them before it answers.
const BYTES: u64 = 1 << 20;
/// Time since the turn began.
const TIME: Duration = Duration::from_micros(200);

/// The accounts of the disks of a reactor.
#[derive(Default)]
struct Accounts(RefCell<Vec<(sync::Weak<Disk>, Weak<Account>)>>);

/// The account of a disk on one reactor.
#[derive(Debug, Default)]
struct Account {
    turn: Cell<u64>,
    descriptors: Cell<u32>,
    bytes: Cell<u64>,
    /// The longest row of turns in which a queue got nothing: among those that got nothing in the
    /// last turn, and in this one.
    longest_before: Cell<u32>,
    longest: Cell<u32>,
}

impl Account {
    #[inline]
    fn begin(&self, turn: u64) {
        let last = self.turn.replace(turn);
        if last != turn {
            self.descriptors.set(0);
            self.bytes.set(0);
            let longest = self.longest.take();
            // A queue that got nothing asks again in the next turn. If it did not, it wants nothing
            // any more.
            self.longest_before.set(if last.wrapping_add(1) == turn { longest } else { 0 });
        }
    }

    #[inline]
    fn is_spent(&self) -> bool {
        self.descriptors.get() >= DESCRIPTORS || self.bytes.get() >= BYTES
    }
}

/// A queue's part of its disk's account. A queue that may take nothing must ask again in the next
/// turn, if it still wants.
#[derive(Debug, Default)]
pub struct Budget {
    account: Rc<Account>,
    /// Turn in which the queue took something last.
    took: Cell<u64>,
    /// Turn in which the queue got nothing last, and the number of such turns in a row.
    refused: Cell<u64>,
    row: Cell<u32>,
}

impl Budget {
    /// The budget of one more queue of this disk on this reactor.
    pub fn of(handle: &Handle, disk: &Arc<Disk>) -> Self {
        let accounts = handle.local::<Accounts>();
        let mut accounts = accounts.0.borrow_mut();
        accounts.retain(|(_, account)| account.strong_count() > 0);
        let known = accounts.iter().find(|(known, _)| known.as_ptr() == Arc::as_ptr(disk));
        let account = known.and_then(|(_, account)| account.upgrade()).unwrap_or_else(|| {
            let account = Rc::default();
            accounts.push((Arc::downgrade(disk), Rc::downgrade(&account)));
            account
        });
        Budget { account, ..Budget::default() }
    }

    /// Books what the queue took in turn number `turn`.
    #[inline]
    pub fn spend(&self, turn: u64, descriptors: u32, bytes: u64) {
        let account = &*self.account;
        account.begin(turn);
        account.descriptors.set(account.descriptors.get().saturating_add(descriptors));
        account.bytes.set(account.bytes.get().saturating_add(bytes));
        self.took.set(turn);
        self.row.set(0);
    }

    /// Waits for a turn in which the queue may take something, and books this in it.
    pub async fn admit(&self, handle: &Handle, descriptors: u32, bytes: u64) {
        while self.is_spent(handle.iteration()) {
            handle.yield_now().await;
        }
        self.spend(handle.iteration(), descriptors, bytes);
    }

    /// Whether the queue may take nothing more in turn number `turn`. If it has taken nothing in
    /// this turn, the account notes that, and the queue comes earlier in the next turn.
    #[inline]
    pub fn is_spent(&self, turn: u64) -> bool {
        let account = &*self.account;
        account.begin(turn);
        let took = self.took.get() == turn;
        let is_behind = !took && self.row.get() < account.longest_before.get();
        if !account.is_spent() && !is_behind {
            return false;
        }
        if !took && self.refused.replace(turn) != turn {
            self.row.set(self.row.get().saturating_add(1));
            account.longest.set(account.longest.get().max(self.row.get()));
        }
        true
    }
}

/// Whether a turn that began at `began` has lasted so long that each queue lets the others go on.
#[inline]
pub fn is_over(began: Instant, now: Instant) -> bool {
    now.saturating_duration_since(began) >= TIME
}

#[cfg(test)]
mod tests {
    use blockyard_disk::{DiskOptions, Source};
    use blockyard_image::{CacheMode, ChainOptions};
    use blockyard_ring::Executor;

    use super::*;

    /// As the tasks of a ublk queue do it, one for each tag: all requests are there at once.
    #[test]
    fn tasks_that_share_a_budget_are_admitted_over_several_turns() {
        const TASKS: u64 = 1000;
        for (bytes, most) in [(0, DESCRIPTORS / REQUEST), (64 << 10, 16)] {
            let executor = Executor::new().unwrap();
            let handle = executor.handle().clone();
            let work = async move {
                let (budget, admitted) = (Rc::new(Budget::default()), Rc::new(Cell::new(0)));
                for _ in 0..TASKS {
                    let (budget, admitted, tasks) =
                        (budget.clone(), admitted.clone(), handle.clone());
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
                    assert!(
                        now - before <= 2 * u64::from(most),
                        "{} tasks between two looks",
                        now - before
                    );
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

    /// Queues that always want more, polled in the same order in each turn: the order that favours
    /// the first.
    fn rounds(account: &Rc<Account>, queues: usize, turns: u64, take: u32) -> Vec<u32> {
        let queue = || Budget { account: account.clone(), ..Budget::default() };
        let queues: Vec<_> = (0..queues).map(|_| (queue(), Cell::new(0))).collect();
        for turn in 1..=turns {
            let mut together = 0;
            for (budget, taken) in &queues {
                while !budget.is_spent(turn) {
                    budget.spend(turn, take, 0);
                    together += take;
                    taken.set(taken.get() + take);
                }
            }
            assert!(
                (DESCRIPTORS..DESCRIPTORS + take).contains(&together),
                "{together} descriptors in a turn"
            );
        }
        queues.iter().map(|(_, taken)| taken.get()).collect()
    }

    #[test]
    fn queues_of_a_disk_share_its_budget_and_take_turns() {
        let account = Rc::default();
        for take in [1, 11, 700, 1026] {
            let taken = rounds(&account, 64, 640, take);
            let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
            assert!(*least > 0 && most - least <= 2 * 1026, "{least} to {most} descriptors");
        }
    }

    #[test]
    fn a_queue_that_wants_nothing_any_more_holds_up_no_other() {
        let account = Rc::<Account>::default();
        let queue = || Budget { account: account.clone(), ..Budget::default() };
        let (first, leaves, last) = (queue(), queue(), queue());
        first.spend(1, DESCRIPTORS, 0);
        assert!(leaves.is_spent(1));
        // `leaves` was refused and does not ask again: the others lose one turn.
        assert!(last.is_spent(2));
        assert!(!last.is_spent(3));
    }

    #[test]
    fn a_disk_has_one_account_on_a_reactor() {
        let disk = || {
            let (name, serial, cache) = (String::new(), String::new(), CacheMode::None);
            let options =
                DiskOptions { name, serial, read_only: false, cache, filters: Vec::new() };
            Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()))
        };
        let (one, other) = (disk(), disk());
        let executor = Executor::new().unwrap();
        let budget = |disk| Budget::of(executor.handle(), disk);
        let (first, second, neighbour) = (budget(&one), budget(&one), budget(&other));
        first.spend(1, DESCRIPTORS, 0);
        assert!(second.is_spent(1) && !neighbour.is_spent(1));
        drop((first, second));
        assert!(!budget(&one).is_spent(1));
    }

    #[test]
    fn a_turn_that_lasts_is_over() {
        let began = Instant::now();
        assert!(!is_over(began, began) && !is_over(began + TIME, began));
        assert!(is_over(began, began + TIME));
    }
}
