//! Limits what the queues of one disk take in one iteration of their reactor, and what the starts
//! of queues take in the long run ([`StartDebt`]).
//!
//! An iteration is one pass of the reactor over its tasks.
//!
//! In: what a queue took, in descriptors and bytes, and the number of the iteration. Out: whether
//! the queue may take more. What must hold:
//! - In one iteration, all queues of a disk together take at most one budget and one more request,
//!   whatever their rings contain.
//! - A queue that got nothing in an iteration, because the others used up the budget, comes first
//!   in the next iteration.
//! - If an iteration lasts too long, each queue takes one more batch at most.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::{self, Arc};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_ring::Handle;

use crate::placement;

/// Maximum number of descriptors in one iteration: about 50 us of work. Each request also counts as
/// [`REQUEST`] descriptors.
const DESCRIPTORS: u32 = 1024;
/// Number of descriptors that a request counts as, in addition to its own descriptors.
pub const REQUEST: u32 = 8;
/// Maximum number of bytes in one iteration. Storage that answers at once copies these bytes during
/// the iteration.
const BYTES: u64 = 1 << 20;
/// Time after which an iteration has lasted too long.
const TIME: Duration = Duration::from_micros(200);

/// The starts of an export's queues may take 1/`START_SHARE` of a reactor's time.
const START_SHARE: u32 = 20;
/// Time that the starts of an export's queues may take at once. It lets a guest with many queues
/// boot without a wait. The first start on a reactor also opens the disk there.
const START_CREDIT: Duration = Duration::from_millis(50);
/// Longest wait before a start.
pub const LONGEST_START_WAIT: Duration = Duration::from_secs(1);

/// The accounts of the disks of a reactor.
#[derive(Default)]
struct Accounts(RefCell<Vec<(sync::Weak<Disk>, Weak<Account>)>>);

/// Work that takes long for few bytes. A reactor does one part of it in an iteration, for all tasks
/// together.
#[derive(Default)]
struct Turn(Cell<u64>);

/// Waits for an iteration in which no other task has done a part of such work.
pub async fn long_turn(handle: &Handle) {
    let turn = handle.local::<Turn>();
    while turn.0.get() == handle.iteration() {
        handle.yield_now().await;
    }
    turn.0.set(handle.iteration());
}

/// The reactors' time that the starts of an export's queues have taken, and that is not paid by the
/// time that has passed since. A front end may stop and start a ring in a loop, and each start of a
/// ring with many entries takes milliseconds of a reactor.
///
/// In: how long each start took. Out: how long the next start must wait.
#[derive(Debug, Default)]
pub struct StartDebt {
    /// The debt at the time `since`.
    debt: Duration,
    since: Option<Instant>,
}

impl StartDebt {
    /// Counts a start that took a reactor's thread this processor time. A start that is shorter
    /// than an iteration does not count.
    pub fn count(&mut self, now: Instant, took: Duration) {
        if took > TIME {
            let most = START_CREDIT + LONGEST_START_WAIT / START_SHARE;
            self.debt = self.left(now).saturating_add(took).min(most);
            self.since = Some(now);
        }
    }

    /// Returns how long the next start must wait.
    pub fn wait(&self, now: Instant) -> Duration {
        self.left(now).saturating_sub(START_CREDIT) * START_SHARE
    }

    fn left(&self, now: Instant) -> Duration {
        let passed = self.since.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.debt.saturating_sub(passed / START_SHARE)
    }
}

/// What the queues of one disk on one reactor have taken in this iteration.
#[derive(Debug, Default)]
struct Account {
    iteration: Cell<u64>,
    descriptors: Cell<u32>,
    bytes: Cell<u64>,
    /// Longest series of iterations in which a queue got nothing: among the queues that got nothing
    /// in the last iteration, and among those that got nothing in this iteration.
    longest_before: Cell<u32>,
    longest: Cell<u32>,
}

impl Account {
    #[inline]
    fn begin(&self, iteration: u64) {
        let last = self.iteration.replace(iteration);
        if last != iteration {
            self.descriptors.set(0);
            self.bytes.set(0);
            let longest = self.longest.take();
            // A queue that got nothing asks again in the next iteration. So if no queue asked in
            // the last iteration, no queue waits.
            self.longest_before.set(if last.wrapping_add(1) == iteration { longest } else { 0 });
        }
    }

    #[inline]
    fn is_spent(&self) -> bool {
        self.descriptors.get() >= DESCRIPTORS || self.bytes.get() >= BYTES
    }
}

/// One queue's access to the account of its disk. A queue that is refused must ask again in the
/// next iteration, if it still has requests.
#[derive(Debug, Default)]
pub struct Budget {
    account: Rc<Account>,
    /// Last iteration in which the queue took something.
    took: Cell<u64>,
    /// Last iteration in which the queue was refused, and the number of such iterations in a row.
    refused: Cell<u64>,
    refused_iterations: Cell<u32>,
}

impl Budget {
    /// Returns the budget for a new queue of `disk` on this reactor. The reactor's thread leaves
    /// the processors of another guest.
    pub fn of(handle: &Handle, disk: &Arc<Disk>) -> Self {
        placement::go_home();
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

    /// Counts what the queue took in iteration number `iteration`.
    #[inline]
    pub fn spend(&self, iteration: u64, descriptors: u32, bytes: u64) {
        let account = &*self.account;
        account.begin(iteration);
        account.descriptors.set(account.descriptors.get().saturating_add(descriptors));
        account.bytes.set(account.bytes.get().saturating_add(bytes));
        self.took.set(iteration);
        self.refused_iterations.set(0);
    }

    /// Waits for an iteration in which the queue may take a request, and counts the request in that
    /// iteration.
    pub async fn admit(&self, handle: &Handle, descriptors: u32, bytes: u64) {
        while self.is_spent(handle.iteration()) {
            handle.yield_now().await;
        }
        self.spend(handle.iteration(), descriptors, bytes);
    }

    /// Returns whether the queue may take nothing more in iteration number `iteration`. If the
    /// queue took nothing in this iteration, the account records that, so that the queue comes
    /// earlier in the next iteration.
    #[inline]
    pub fn is_spent(&self, iteration: u64) -> bool {
        let account = &*self.account;
        account.begin(iteration);
        let took = self.took.get() == iteration;
        let is_behind = !took && self.refused_iterations.get() < account.longest_before.get();
        if !account.is_spent() && !is_behind {
            return false;
        }
        if !took && self.refused.replace(iteration) != iteration {
            self.refused_iterations.set(self.refused_iterations.get().saturating_add(1));
            account.longest.set(account.longest.get().max(self.refused_iterations.get()));
        }
        true
    }
}

/// Returns whether the reactor has at most one queue, connection or device queue.
pub fn is_alone(handle: &Handle) -> bool {
    let accounts = handle.local::<Accounts>();
    let queues =
        accounts.0.borrow().iter().map(|(_, account)| account.strong_count()).sum::<usize>();
    queues <= 1
}

/// Returns whether an iteration that began at `began` has lasted too long, so that each queue must
/// yield.
#[inline]
pub fn is_over(began: Instant, now: Instant) -> bool {
    now.saturating_duration_since(began) >= TIME
}

#[cfg(test)]
mod tests {
    use blockyard_disk::{DiskOptions, Source};
    use blockyard_image::{CacheMode, ChainOptions};
    use blockyard_ring::Executor;

    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    /// All requests are available at once, as in a ublk queue with one task for each tag.
    #[test]
    fn tasks_that_share_a_budget_are_admitted_over_several_iterations() {
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
                let (mut before, mut iterations) = (0, 0);
                while before < TASKS {
                    handle.yield_now().await;
                    let now = admitted.get();
                    // Two iterations may pass between two checks.
                    assert!(
                        now - before <= 2 * u64::from(most),
                        "{} tasks between two checks",
                        now - before
                    );
                    (before, iterations) = (now, iterations + 1);
                }
                iterations
            };
            assert!(executor.block_on(work).unwrap() >= TASKS / 2 / u64::from(most));
        }
    }

    #[test]
    fn each_iteration_has_a_new_budget_of_descriptors_and_bytes() {
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

    /// Runs queues that always have more requests, in the same order in each iteration. This order
    /// favours the first queue. Returns the number of descriptors that each queue took.
    fn run_iterations(
        account: &Rc<Account>,
        queues: usize,
        iterations: u64,
        take: u32,
    ) -> Vec<u32> {
        let queue = || Budget { account: account.clone(), ..Budget::default() };
        let queues: Vec<_> = (0..queues).map(|_| (queue(), Cell::new(0))).collect();
        for iteration in 1..=iterations {
            let mut together = 0;
            for (budget, taken) in &queues {
                while !budget.is_spent(iteration) {
                    budget.spend(iteration, take, 0);
                    together += take;
                    taken.set(taken.get() + take);
                }
            }
            assert!(
                (DESCRIPTORS..DESCRIPTORS + take).contains(&together),
                "{together} descriptors in an iteration"
            );
        }
        queues.iter().map(|(_, taken)| taken.get()).collect()
    }

    #[test]
    fn queues_of_a_disk_have_equal_parts_of_its_budget() {
        let account = Rc::default();
        for take in [1, 11, 700, 1026] {
            let taken = run_iterations(&account, 64, 640, take);
            let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
            assert!(*least > 0 && most - least <= 2 * 1026, "{least} to {most} descriptors");
        }
    }

    #[test]
    fn a_queue_that_stops_asking_delays_the_others_by_one_iteration_at_most() {
        let account = Rc::<Account>::default();
        let queue = || Budget { account: account.clone(), ..Budget::default() };
        let (first, leaves, last) = (queue(), queue(), queue());
        first.spend(1, DESCRIPTORS, 0);
        assert!(leaves.is_spent(1));
        // The budget has refused the queue `leaves`, which does not request more. Because of its
        // claim, the other queues take nothing in one further iteration.
        assert!(last.is_spent(2));
        assert!(!last.is_spent(3));
    }

    #[test]
    fn a_disk_has_one_account_on_a_reactor() {
        let disk = || {
            let (name, serial, cache) = (String::new(), String::new(), CacheMode::None);
            let options = DiskOptions {
                name,
                serial,
                read_only: false,
                cache,
                filters: Vec::new(),
                on_enospc: Default::default(),
            };
            Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()))
        };
        let (one, other) = (disk(), disk());
        let executor = Executor::new().unwrap();
        let budget = |disk| Budget::of(executor.handle(), disk);
        let (first, second, neighbour) = (budget(&one), budget(&one), budget(&other));
        first.spend(1, DESCRIPTORS, 0);
        assert!(second.is_spent(1) && !neighbour.is_spent(1));
        drop((first, second));
        assert!(is_alone(executor.handle()));
        let first = budget(&one);
        assert!(!first.is_spent(1) && !is_alone(executor.handle()));
        drop((first, neighbour));

        // The only queue has moved the thread to its guest's processors.
        let own = placement::home().unwrap();
        let mut guest = CpuSet::new();
        guest.set((0..CpuSet::MAX_CPU).find(|&cpu| own.is_set(cpu)).unwrap());
        placement::move_to(&guest);
        let _other = budget(&other);
        assert_eq!(sched_getaffinity(None).unwrap(), own);
    }

    #[test]
    fn starts_in_a_loop_take_a_twentieth_of_the_time() {
        let (took, mut debt, began) =
            (Duration::from_millis(3), StartDebt::default(), Instant::now());
        let (mut now, mut busy) = (began, Duration::ZERO);
        for start in 0..1000 {
            let wait = debt.wait(now);
            assert!(start > 16 || wait.is_zero(), "start {start} waits for {wait:?}");
            now += wait + took;
            busy += took;
            debt.count(now, took);
        }
        let share = now.duration_since(began).as_secs_f64() / busy.as_secs_f64();
        assert!((19.0..=20.5).contains(&share), "1/{share}");
    }

    #[test]
    fn a_start_waits_for_a_bounded_time_and_only_after_long_starts() {
        let (mut debt, now) = (StartDebt::default(), Instant::now());
        for _ in 0..10_000 {
            debt.count(now, TIME);
        }
        assert_eq!(debt.wait(now), Duration::ZERO);
        debt.count(now, START_CREDIT);
        assert_eq!(debt.wait(now), Duration::ZERO);
        for _ in 0..3 {
            debt.count(now, Duration::from_secs(100));
            assert_eq!(debt.wait(now), LONGEST_START_WAIT);
        }
        assert_eq!(debt.wait(now + LONGEST_START_WAIT), Duration::ZERO);
    }

    #[test]
    fn an_iteration_ends_after_its_time() {
        let began = Instant::now();
        assert!(!is_over(began, began) && !is_over(began + TIME, began));
        assert!(is_over(began, began + TIME));
    }
}
