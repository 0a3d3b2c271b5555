//! The disks of a device: all of them, and the active ones, which are all that a control period
//! visits.
//!
//! ```text
//!   all ── first operation ──► active ── idle for a while, and no lead ─► resting
//!                                ▲                                          │
//!                                └──────────── next operation ──────────────┤
//!                                    absent ◄── no operation for 10 s ──────┘
//! ```
//!
//! In: disks that begin to work, and the time. Out: the active disks in the order of their numbers,
//! and the number of present disks. What must hold: a disk with operations in flight or waiting,
//! with counts that no period has taken, or with a lead on a shared device is active. A disk that
//! is not active costs a period nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::ABSENT_NS;
use crate::Time;
use crate::account::Account;
use crate::wait_list::before;

/// The disks of a device; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    /// By number. None: the number is free.
    all: Vec<Option<Arc<Account>>>,
    /// In the order of their numbers, so that sums over them are the same in every run.
    active: Vec<Arc<Account>>,
    /// The present disks that are not awake, by a time at which they were busy.
    resting: BTreeSet<(Time, usize)>,
    /// Number of disks that are present.
    present: usize,
    /// Number of visits to accounts.
    #[cfg(test)]
    pub visits: std::cell::Cell<u64>,
}

impl Accounts {
    /// Adds a disk. Returns its number.
    pub fn join(&mut self, account: &Arc<Account>) -> usize {
        let free = self.all.iter().position(Option::is_none);
        let number = free.unwrap_or(self.all.len());
        match free {
            Some(at) => self.all[at] = Some(account.clone()),
            None => self.all.push(Some(account.clone())),
        }
        number
    }

    /// Removes a disk.
    pub fn leave(&mut self, number: usize) -> Option<Arc<Account>> {
        let left = self.all[number].take()?;
        if let Ok(at) = self.position(number) {
            self.active.remove(at);
        }
        self.resting.remove(&(left.rested_at.load(Relaxed), number));
        self.present -= usize::from(left.present.swap(false, Relaxed));
        Some(left)
    }

    pub fn get(&self, number: usize) -> Option<&Arc<Account>> {
        self.all.get(number)?.as_ref()
    }

    /// Returns the number of disks that are present.
    pub fn present(&self) -> usize {
        self.present
    }

    /// Returns the active disks.
    pub fn active(&self) -> impl Iterator<Item = &Arc<Account>> {
        self.active.iter().inspect(|_| self.visit())
    }

    /// Returns all disks. Only a change of settings may take so long.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Account>> {
        self.all.iter().flatten().inspect(|_| self.visit())
    }

    fn visit(&self) {
        #[cfg(test)]
        self.visits.set(self.visits.get() + 1);
    }

    fn position(&self, number: usize) -> Result<usize, usize> {
        self.active.binary_search_by_key(&number, |account| account.number())
    }

    /// Adds a disk to the active ones. Returns false if it is one of them.
    pub fn activate(&mut self, account: &Account) -> bool {
        let number = account.number();
        let Err(at) = self.position(number) else { return false };
        let Some(known) = self.all.get(number).cloned().flatten() else { return false };
        self.active.insert(at, known);
        account.is_active.store(true, Relaxed);
        true
    }

    /// Records that an active disk begins to work. Returns whether it was absent.
    pub fn wake(&mut self, account: &Account) -> bool {
        account.awake.store(true, Relaxed);
        self.resting.remove(&(account.rested_at.load(Relaxed), account.number()));
        let was_absent = !account.present.swap(true, Relaxed);
        self.present += usize::from(was_absent);
        was_absent
    }

    /// Puts the disks to rest that were idle for a control period, and counts those as absent that
    /// were idle for long. `tag`: the device's virtual time.
    pub fn rest(&mut self, now: Time, period: u64, tag: u64) {
        for account in &self.active {
            self.visit();
            // Start tags wrap around. A tag that falls behind by half of the range would compare as
            // ahead.
            let _ = account
                .start_tag
                .fetch_update(Relaxed, Relaxed, |own| before(own, tag).then_some(tag));
            // A period may be long, if no disk has sent an operation meanwhile.
            if !account.is_idle() {
                account.busy_at.store(now, Relaxed);
            }
            let busy_at = account.busy_at.load(Relaxed);
            let rests = account.is_idle() && now > busy_at + period;
            if rests && account.awake.swap(false, Relaxed) {
                account.rested_at.store(busy_at, Relaxed);
                self.resting.insert((busy_at, account.number()));
            }
        }
        while let Some((at, number)) = self.resting.first().copied() {
            if now < at.saturating_add(ABSENT_NS) {
                break;
            }
            self.visit();
            self.resting.pop_first();
            let Some(Some(account)) = self.all.get(number) else { continue };
            if account.is_idle() && !account.is_busy(now, ABSENT_NS) {
                account.present.store(false, Relaxed);
                self.present -= 1;
                continue;
            }
            // It had operations that did not wake it.
            let at = if account.is_idle() { account.busy_at.load(Relaxed) } else { now };
            account.rested_at.store(at, Relaxed);
            self.resting.insert((at, number));
        }
    }

    /// Removes the disks from the active ones that have rested for `quiet` nanoseconds. `tag`: the
    /// device's virtual time, if the device is shared. What a disk was charged beyond it is a lead,
    /// which a period must not forget.
    pub fn retire(&mut self, now: Time, quiet: u64, tag: Option<u64>) {
        self.active.retain(|account| {
            let has_lead = || tag.is_some_and(|tag| before(tag, account.start_tag.load(Relaxed)));
            let stays = account.awake.load(Relaxed)
                || account.is_busy(now, quiet)
                || !account.is_idle()
                || has_lead();
            account.is_active.store(stays, Relaxed);
            stays
        });
    }
}
