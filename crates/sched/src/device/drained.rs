//! Operations that take no room of the window: those that a drain admits, because they cannot wait,
//! and those that last much longer than the device works for them.
//!
//! In: operations of a disk with a queue that is drained, or that last long. Out: their grants, and
//! what pays the disk's debt for them ([`crate::debt`]).
//!
//! What must hold: other disks never wait until such an operation has ended. Its cost is charged to
//! its disk. The disk owes the cost of what a drain admits.
//!
//! They slow down all that is in flight, also what fills the window. So while one of them is in
//! flight, each disk may have one operation in flight, whatever the window has room for.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::accounts::Accounts;
use super::{Advance, Device, Grant};
use crate::Time;
use crate::account::Account;
use crate::cost::Operation;
use crate::debt::{MIN_PART, Payment, Standing};
use crate::wait_list::{WaitList, later};

impl Device {
    /// Admits an operation that cannot wait.
    pub(crate) fn force(&self, account: &Account, now: Time, operation: &Operation) -> Grant {
        let cost = self.costs.of_request(operation);
        self.activate(account);
        account.began();
        self.charge(account, now, cost, operation, Advance::Disk);
        self.began_forced(account);
        let class = self.class_of(account, operation);
        Grant {
            cost_ns: cost,
            arrived: now,
            began: now,
            class,
            is_forced: true,
            ..Grant::default()
        }
    }

    /// Reverts an admission, because the operation does not begin: takes its cost off the disk's
    /// start tag, and frees its part of the window.
    pub(crate) fn refund(&self, account: &Account, now: Time, grant: &Grant) {
        account.refund(grant.cost_ns);
        if account.waiting.load(Relaxed) > 0 {
            // Operations of the disk may have begun to wait with the higher tag.
            let tag = later(account.start_tag.load(Relaxed), self.virtual_time.0.load(SeqCst));
            let number = account.number();
            self.state().wait_list.lower_tags(|disk| (disk == number).then_some(tag));
        }
        self.release_grant(account, now, grant);
    }

    /// Returns what pays the disk's debt at present, by its part of the device in the last control
    /// period.
    pub(crate) fn payment(&self, account: &Account) -> Payment {
        Payment {
            virtual_time: self.virtual_time.0.load(SeqCst),
            worth: account.worth(),
            rate: account.rate(),
        }
    }

    /// Returns how a disk with a debt stands among the disks that use the device now.
    #[cold]
    pub(crate) fn standing(&self, account: &Account, now: Time) -> Standing {
        let state = self.state();
        // Without operations no control period ends, and all disks stay awake.
        let ended = self.next_period_at.load(Relaxed).saturating_add(state.window.period());
        let works =
            |other: &Account| !other.is_idle() || (other.awake.load(Relaxed) && now <= ended);
        let others = state.accounts.active().filter(|other| other.number() != account.number());
        let weights: f64 = others.filter(|other| works(other)).map(|other| other.weight()).sum();
        let part = account.weight() / (account.weight() + weights);
        let rate = state.window.capacity() * part.max(MIN_PART);
        let waiting = self.waiting.load(SeqCst) as u64;
        Standing {
            payment: Payment { rate, ..self.payment(account) },
            margin: account.margin(),
            others_work: self.is_shared() && weights > 0.0,
            others_wait: self.is_shared() && waiting > account.waiting.load(Relaxed),
        }
    }

    /// Lets an admitted operation take no room from now on.
    pub(crate) fn leave_room(&self, account: &Account, now: Time, grant: &mut Grant) {
        if grant.is_forced {
            return;
        }
        self.began_forced(account);
        self.release_grant(account, now, grant);
        (grant.is_forced, grant.is_queued, grant.is_large) = (true, false, false);
    }

    pub(super) fn began_forced(&self, account: &Account) {
        self.forced.fetch_add(1, SeqCst);
        account.in_flight.add(0);
    }

    /// Admits all waiting operations of the disk, because one of its queues is drained. If the
    /// disk shares the device, `owe` adds their cost to the disk's debt. Returns the part of it to
    /// take off again: that of operations that were cancelled.
    pub(crate) fn release(&self, account: &Account, now: Time, owe: impl FnOnce(u64)) -> u64 {
        let mut state = self.state();
        let is_shared = self.is_shared();
        let cost = state.wait_list.set_forced(account.number(), is_shared);
        // Another reactor may take a grant at once, and refund it. Then the debt must contain its
        // cost already.
        if is_shared {
            owe(cost);
        }
        let admitted = self.admit_all(&mut state, account, now);
        self.admit_waiters(&mut state, now);
        // One of the operations may have kept the time of a probe for the other disks.
        state.wait_list.wake_first();
        if is_shared { cost.saturating_sub(admitted) } else { 0 }
    }

    /// Admits one operation of each disk that waits, has nothing in flight, and is not in a gap, if
    /// operations that take no room are in flight.
    pub(super) fn admit_idle(&self, wait_list: &mut WaitList, accounts: &Accounts, now: Time) {
        if self.forced.load(SeqCst) == 0 {
            return;
        }
        for disk in wait_list.disks() {
            let Some(account) = accounts.get(disk) else { continue };
            if account.in_flight.get().0 > 0 {
                continue;
            }
            if self.is_in_gap(account, now) {
                self.time_gap(wait_list, account);
                continue;
            }
            // A cancelled operation takes nothing.
            while let Some(waiter) = wait_list.pop_of(disk) {
                let is_admitted = self.admit_one(account, &waiter, now, Advance::Disk);
                waiter.waker.wake();
                if is_admitted {
                    break;
                }
            }
        }
    }
}
