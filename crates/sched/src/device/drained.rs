//! Operations that a drain admits: they cannot wait.
//!
//! What must hold: they take no room of the window. Other disks would wait until the last of
//! them has ended. Their cost is charged to the disk, which owes it.

use std::sync::atomic::Ordering::SeqCst;

use super::{Advance, Device, Grant};
use crate::Time;
use crate::account::Account;
use crate::cost::Operation;

impl Device {
    /// Admits an operation that cannot wait.
    pub(crate) fn force(&self, account: &Account, now: Time, operation: &Operation) -> Grant {
        let cost = self.costs.of_request(operation);
        account.began();
        self.charge(account, now, cost, (operation.requests, operation.bytes), Advance::Disk);
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

    pub(super) fn began_forced(&self, account: &Account) {
        self.forced.fetch_add(1, SeqCst);
        account.in_flight.add(0);
    }

    /// Admits all waiting operations of the disk, because one of its queues is drained. Returns
    /// their cost.
    pub(crate) fn release(&self, account: &Account, now: Time) -> u64 {
        self.admit_all(&mut self.state(), account, now, true)
    }
}
