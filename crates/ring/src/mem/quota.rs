//! Limits on the guest memory that front ends have mapped in this process.
//!
//! In: the mappings that front ends request. Out: a [`Charge`] for each, or a refusal.
//!
//! What must hold
//! - A charge lives as long as its mapping. So memory that only requests in flight still hold is
//!   counted too, and memory that a thread unmaps.
//! - A front end that connects again is not refused because its earlier memory is being unmapped.
//! - No front end can map more than its own limit, nor use the address space that is reserved for
//!   the other exports there are. An export that comes when all is in use has to wait.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that one front end may map. The largest guests today have 24 TiB. 16 TiB suffice for a
/// guest of 8 TiB while its memory table is replaced, because the old and the new table are mapped
/// at the same time.
const OWN_BYTES: u64 = 16 << 40;

/// Number of regions that one front end may have (the reply to VHOST_USER_GET_MAX_MEM_SLOTS).
pub const MEMORY_SLOTS: u64 = 509;

/// Number of mappings that one front end may have: an old and a new table, and in-flight regions.
const OWN_MAPPINGS: u64 = 2 * MEMORY_SLOTS + 6;

/// Longest wait for memory that is being unmapped, which takes 10 to 20 ms for each GiB. It is
/// shorter than an export that stops waits for a session that a descriptor blocks (5 s).
const UNMAP_TIME: Duration = Duration::from_secs(4);

/// A number of bytes, and a number of mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub bytes: u64,
    pub mappings: u64,
}

impl Amount {
    fn map(self, f: impl Fn(u64) -> u64) -> Amount {
        Amount { bytes: f(self.bytes), mappings: f(self.mappings) }
    }

    fn plus(self, other: Amount) -> Amount {
        Amount {
            bytes: self.bytes.saturating_add(other.bytes),
            mappings: self.mappings.saturating_add(other.mappings),
        }
    }

    fn less(self, other: Amount) -> Amount {
        Amount {
            bytes: self.bytes.saturating_sub(other.bytes),
            mappings: self.mappings.saturating_sub(other.mappings),
        }
    }

    fn fits(self, limit: Amount) -> bool {
        self.bytes <= limit.bytes && self.mappings <= limit.mappings
    }
}

/// Why a mapping is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// The front end's own limit.
    Own { bytes: u64, mappings: u64 },
    /// The limit of all front ends together, without what is reserved for the others.
    All { bytes: u64, mappings: u64 },
}

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (limit, (bytes, mappings)) = match self {
            Exceeded::Own { bytes, mappings } => ("one front end may map", (bytes, mappings)),
            Exceeded::All { bytes, mappings } => {
                ("all front ends together may map", (bytes, mappings))
            }
        };
        write!(f, "{limit} at most {bytes} bytes in {mappings} mappings")
    }
}

/// The limits of all accounts, and what each account uses.
///
/// One half of `all` is reserved: each account has an equal part of it. The other half is shared:
/// accounts that need more get it, first come, first served.
pub(crate) struct Quota {
    all: Amount,
    own: Amount,
    state: Mutex<State>,
    /// Signals each end of a charge or of an account.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    used: HashMap<u64, Amount>,
    /// Number of mappings that threads unmap, by account.
    leaving: HashMap<u64, u64>,
    next: u64,
}

impl Quota {
    pub(crate) fn new(all: Amount, own: Amount) -> Arc<Quota> {
        Arc::new(Quota { all, own, state: Mutex::default(), freed: Condvar::new() })
    }

    /// Returns the quota of this process: three quarters of its address space, and of the mappings
    /// that the kernel allows it. The rest is for its own memory.
    pub(crate) fn of_process() -> Arc<Quota> {
        static PROCESS: OnceLock<Arc<Quota>> = OnceLock::new();
        let make = || {
            let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
            let bytes = address_space().min(limit.unwrap_or(u64::MAX));
            let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
            // If the file cannot be read, use the kernel's default.
            let mappings = text.trim().parse().unwrap_or(65530);
            let own = Amount { bytes: OWN_BYTES, mappings: OWN_MAPPINGS };
            Quota::new(Amount { bytes, mappings }.map(|n| n / 4 * 3), own)
        };
        PROCESS.get_or_init(make).clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn account(self: &Arc<Quota>) -> Arc<Account> {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.used.insert(number, Amount::default());
        Arc::new(Account { quota: self.clone(), number })
    }
}

/// Returns the size of the process's address space in bytes: the stack lies near its end.
fn address_space() -> u64 {
    let place = 0u8;
    ((&raw const place).addr() as u64).next_power_of_two()
}

/// What one front end has mapped.
pub(crate) struct Account {
    quota: Arc<Quota>,
    number: u64,
}

impl Account {
    /// Charges one mapping of `bytes` bytes. At a limit, waits for memory that threads unmap.
    pub(crate) fn charge(self: &Arc<Account>, bytes: u64) -> Result<Charge, Exceeded> {
        self.charge_within(bytes, UNMAP_TIME)
    }

    fn charge_within(self: &Arc<Account>, bytes: u64, limit: Duration) -> Result<Charge, Exceeded> {
        let end = Instant::now() + limit;
        let mut state = self.quota.state();
        loop {
            let Err(why) = self.enter(&mut state, bytes) else {
                return Ok(Charge { account: self.clone(), bytes, is_leaving: false });
            };
            let is_more_free_soon = match why {
                Exceeded::Own { .. } => state.leaving.contains_key(&self.number),
                Exceeded::All { .. } => !state.leaving.is_empty(),
            };
            let left = end.saturating_duration_since(Instant::now());
            if !is_more_free_soon || left.is_zero() {
                return Err(why);
            }
            let waited = self.quota.freed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Adds one mapping to what the account uses.
    fn enter(&self, state: &mut State, bytes: u64) -> Result<(), Exceeded> {
        let quota = &*self.quota;
        let amount = Amount { bytes, mappings: 1 };
        let used = state.used.get(&self.number).copied().unwrap_or_default().plus(amount);
        if !used.fits(quota.own) {
            return Err(Exceeded::Own { bytes: quota.own.bytes, mappings: quota.own.mappings });
        }
        let half = quota.all.map(|n| n / 2);
        let guaranteed = half.map(|n| n / state.used.len().max(1) as u64);
        let others =
            state.used.iter().filter(|(number, _)| **number != self.number).map(|(_, used)| *used);
        let (mut sum, mut beyond) = (used, used.less(guaranteed));
        for other in others {
            sum = sum.plus(other);
            beyond = beyond.plus(other.less(guaranteed));
        }
        if !sum.fits(quota.all) || (!beyond.fits(half) && !used.fits(guaranteed)) {
            return Err(Exceeded::All { bytes: quota.all.bytes, mappings: quota.all.mappings });
        }
        state.used.insert(self.number, used);
        Ok(())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.quota.state().used.remove(&self.number);
        self.quota.freed.notify_all();
    }
}

/// The charge for one mapping. Dropping it frees the amount.
pub(crate) struct Charge {
    account: Arc<Account>,
    bytes: u64,
    is_leaving: bool,
}

impl Charge {
    /// Notes that a thread unmaps the memory, and drops the charge after that.
    pub(crate) fn leaves(&mut self) {
        if !std::mem::replace(&mut self.is_leaving, true) {
            *self.account.quota.state().leaving.entry(self.account.number).or_default() += 1;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let Account { quota, number } = &*self.account;
        let mut state = quota.state();
        if let Some(used) = state.used.get_mut(number) {
            *used = used.less(Amount { bytes: self.bytes, mappings: 1 });
        }
        if self.is_leaving
            && let Entry::Occupied(mut leaving) = state.leaving.entry(*number)
        {
            *leaving.get_mut() -= 1;
            if *leaving.get() == 0 {
                leaving.remove();
            }
        }
        drop(state);
        quota.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::waits;

    fn quota() -> Arc<Quota> {
        Quota::new(Amount { bytes: 800, mappings: 40 }, Amount { bytes: 300, mappings: 20 })
    }

    /// Returns true if a charge is refused without a wait.
    fn is_refused_at_once(account: &Arc<Account>, bytes: u64) -> bool {
        let account = account.clone();
        let charge = move || account.charge_within(bytes, Duration::from_secs(3600)).is_err();
        waits::within("the charge is refused", charge)
    }

    #[test]
    fn one_front_end_cannot_exceed_its_own_limit() {
        let account = quota().account();
        let first = account.charge(300).unwrap();
        assert!(matches!(account.charge(1), Err(Exceeded::Own { bytes: 300, .. })));
        assert!(matches!(account.charge(u64::MAX), Err(Exceeded::Own { .. })));
        drop(first);
        let small: Vec<_> = (0..20).map(|_| account.charge(1).unwrap()).collect();
        assert!(matches!(account.charge(1), Err(Exceeded::Own { mappings: 20, .. })));
        drop(small);
        account.charge(300).unwrap();
    }

    #[test]
    fn a_front_end_waits_for_its_earlier_memory_to_be_unmapped() {
        let account = quota().account();
        let (mut first, second) = (account.charge(200).unwrap(), account.charge(100).unwrap());
        // No thread unmaps it.
        assert!(is_refused_at_once(&account, 300));
        first.leaves();
        assert!(account.charge_within(200, Duration::ZERO).is_err());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| account.charge_within(200, waits::LIMIT));
            drop(first);
            next.join().unwrap().unwrap();
        });
        drop(second);
        // Another front end does not wait for it, if its own limit is the reason.
        let mut first = account.charge(300).unwrap();
        first.leaves();
        let other = account.quota.account();
        assert!(is_refused_at_once(&other, 301));
    }

    #[test]
    fn greedy_front_ends_cannot_use_the_reserved_parts_of_others() {
        let quota = Quota::new(
            Amount { bytes: 800, mappings: 4000 },
            Amount { bytes: 300, mappings: 2000 },
        );
        let accounts: Vec<_> = (0..8).map(|_| quota.account()).collect();
        let mut charges = Vec::new();
        // Seven of eight front ends map memory until they are refused.
        for account in &accounts[..7] {
            while let Ok(charge) = account.charge(10) {
                charges.push(charge);
            }
        }
        let kept = accounts[7].charge(50).unwrap();
        assert!(
            matches!(accounts[7].charge(10), Err(Exceeded::All { .. })),
            "beyond its reserved part"
        );
        drop((charges, kept));
        let most = accounts[7].charge(300).unwrap();
        drop(most);
        // A front end whose account was dropped has no reserved part.
        drop(accounts);
        let alone = quota.account();
        alone.charge(300).unwrap();
    }

    #[test]
    fn the_size_of_the_address_space_is_plausible() {
        assert!((1 << 38..=1 << 57).contains(&address_space()), "{:#x}", address_space());
    }
}
