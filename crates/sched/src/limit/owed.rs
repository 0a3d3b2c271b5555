//! What a disk owes to the limits of its group.
//!
//! In: the amounts of operations that began before the group's limits admitted them as a whole: a
//! large one, or one that a drain admitted. Out: slices that the group's buckets are charged, one
//! after another. What must hold: the disk begins nothing that uses a limit to which it owes
//! something. The other disks of the group wait for a few slices, and not until all is paid,
//! because each slice waits for its turn among the disks ([`Flow`](super::Flow)). The disk pays
//! first what drains have admitted, because its queues take no requests until then.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{LIMITS, NAMES};

/// Amounts that are owed, for each limit.
#[derive(Debug, Default)]
pub struct Owed {
    amounts: [AtomicU64; LIMITS],
    /// The part of the amounts that drains have admitted, at most the amount.
    forced: [AtomicU64; LIMITS],
    /// Held while a part and its amount change. What begins takes no lock: it only makes an amount
    /// larger.
    both: Mutex<()>,
}

fn add(owed: &AtomicU64, amount: u64) {
    if amount > 0 {
        let _ = owed.fetch_update(Relaxed, Relaxed, |owed| Some(owed.saturating_add(amount)));
    }
}

/// Removes at most `most`. Returns what was removed.
fn remove(owed: &AtomicU64, most: u64) -> u64 {
    let left = |owed: u64| Some(owed.saturating_sub(most));
    owed.fetch_update(Relaxed, Relaxed, left).unwrap_or_else(|owed| owed).min(most)
}

impl Owed {
    pub fn is_zero(&self) -> bool {
        self.amounts.iter().all(|owed| owed.load(Relaxed) == 0)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.both.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a part is owed that drains have admitted. Another thread may be about to
    /// remove both.
    pub fn is_forced(&self) -> bool {
        let mut all = self.forced.iter().zip(&self.amounts);
        all.any(|(forced, owed)| forced.load(Relaxed) > 0 && owed.load(Relaxed) > 0)
    }

    /// Returns whether something is owed to a limit of which this is an amount.
    pub fn has(&self, amounts: &[u64; LIMITS]) -> bool {
        self.amounts.iter().zip(amounts).any(|(owed, amount)| *amount > 0 && owed.load(Relaxed) > 0)
    }

    pub fn of(&self, limit: usize) -> u64 {
        self.amounts[limit].load(Relaxed)
    }

    pub fn add_to(&self, limit: usize, amount: u64) {
        add(&self.amounts[limit], amount);
    }

    /// Adds an amount that a drain has admitted.
    pub fn force_to(&self, limit: usize, amount: u64) {
        let _both = self.lock();
        self.add_to(limit, amount);
        add(&self.forced[limit], amount);
    }

    /// Removes at most this amount, first of what drains have admitted. Returns what was removed.
    pub fn remove_from(&self, limit: usize, most: u64) -> u64 {
        let _both = self.lock();
        let removed = remove(&self.amounts[limit], most);
        remove(&self.forced[limit], removed);
        removed
    }

    /// Removes at most this amount, because an operation does not begin that no drain has admitted.
    /// Returns what was removed. If the disk has paid for the operation, that pays for what drains
    /// have admitted.
    pub fn take_back(&self, limit: usize, most: u64) -> u64 {
        let _both = self.lock();
        let removed = remove(&self.amounts[limit], most);
        self.forced[limit].fetch_min(self.of(limit), Relaxed);
        removed
    }

    /// Moves all to another one. There it does not count as admitted by drains.
    pub fn move_to(&self, other: &Owed) {
        (0..LIMITS).for_each(|limit| other.add_to(limit, self.remove_from(limit, u64::MAX)));
    }

    /// Returns what drains have admitted, by the names of the limits.
    pub fn forced(&self) -> BTreeMap<String, u64> {
        let _both = self.lock();
        let all = NAMES.iter().zip(&self.forced);
        let all = all.map(|(name, forced)| (name.to_string(), forced.load(Relaxed)));
        all.filter(|(_, amount)| *amount > 0).collect()
    }

    /// Notes which part of the amounts drains have admitted at another server. `None`: all.
    pub fn continue_forced(&self, forced: Option<&BTreeMap<String, u64>>) {
        for (limit, name) in NAMES.iter().enumerate() {
            let most = forced.map_or(u64::MAX, |all| all.get(*name).copied().unwrap_or(0));
            self.forced[limit].store(most.min(self.of(limit)), Relaxed);
        }
    }

    /// Moves all to the next server, by the names of the limits.
    pub fn hand_over(&self) -> BTreeMap<String, u64> {
        let all = NAMES.iter().enumerate();
        let all = all.map(|(limit, name)| (name.to_string(), self.remove_from(limit, u64::MAX)));
        all.filter(|(_, amount)| *amount > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::{Host, Knobs, Limit, Limits, Operation, OperationKind, Share, Time};

    const MS: Time = 1_000_000;
    const BEGIN: Time = 1000 * MS;
    const RATE: u64 = 10_000_000;
    const FLUSH: Operation =
        Operation { kind: OperationKind::Flush, bytes: 0, sequential: false, requests: 1 };

    fn write(bytes: u64) -> Operation {
        Operation { kind: OperationKind::Write, bytes, sequential: false, requests: 1 }
    }

    fn read(bytes: u64) -> Operation {
        Operation { kind: OperationKind::Read, ..write(bytes) }
    }

    fn limit(rate: u64, max: Option<u64>) -> Option<Limit> {
        Some(Limit { rate, max, length: Duration::from_secs(1) })
    }

    /// Disks of a group with these limits.
    fn disks<const N: usize>(limits: Limits) -> [Arc<Share>; N] {
        let group = Knobs { limits, ..Knobs::default() };
        let host = Host::default();
        let disks = [(); N].map(|()| host.share(None, Some(("g", &group)), &Knobs::default()));
        host.set_group("g", &group, BEGIN);
        disks
    }

    fn bps() -> Limits {
        Limits { bps: limit(RATE, None), ..Limits::default() }
    }

    /// One disk pays what it owes, while others send operations that come every 100 ms. Returns
    /// when all is paid, and the longest wait of the others.
    fn pay(payer: &Share, others: &[(&Share, Operation)]) -> (Time, Time) {
        let flows: Vec<_> = others.iter().map(|(other, _)| other.new_flow()).collect();
        let (mut now, mut attempt, mut longest) = (BEGIN, BEGIN, 0);
        let mut arrived = vec![None; others.len()];
        loop {
            if now >= attempt {
                match payer.pay_group(now) {
                    Some(next) => attempt = next,
                    None => return (now, longest),
                }
                assert!(payer.owes_group());
            }
            for (((other, operation), flow), arrived) in others.iter().zip(&flows).zip(&mut arrived)
            {
                if (now - BEGIN).is_multiple_of(100 * MS) {
                    assert_eq!(arrived.replace(now), None, "a disk waits for 100 ms");
                }
                if let Some(at) = *arrived
                    && other.limit(now, operation, flow).is_ok()
                {
                    longest = longest.max(now - at);
                    *arrived = None;
                }
            }
            now += MS;
        }
    }

    #[track_caller]
    fn took(paid: Time, expected: Time) {
        let took = paid - BEGIN;
        assert!(took.abs_diff(expected) < expected / 20, "{} ms", took / MS);
    }

    #[test]
    fn an_operation_of_many_seconds_delays_the_other_disks_of_the_group_for_a_moment() {
        // A burst that is used up, and none.
        for max in [None, Some(20 * RATE)] {
            let limits = Limits { bps: limit(RATE, max), ..Limits::default() };
            let [one, other] = disks(limits);
            let burst = max.map_or(0, |max| max - RATE);
            one.limit(BEGIN, &write((1 << 28) + burst), &one.new_flow()).unwrap();
            assert_eq!(one.paused_until(BEGIN), None, "reads go on");
            // The other disk gets a tenth of the rate.
            let (paid, longest) = pay(&one, &[(&other, write(RATE / 100))]);
            assert!(longest <= 80 * MS, "{max:?}: {} ms", longest / MS);
            took(paid, (1 << 28) * 1000 / RATE * MS * 10 / 9);
            one.limit(paid + 100 * MS, &write(1), &one.new_flow()).unwrap();
        }
    }

    #[test]
    fn operations_that_a_drain_admits_delay_the_other_disks_of_the_group_for_a_moment() {
        let [one, other] = disks(bps());
        for _ in 0..30 {
            let _ = one.force(BEGIN, &write(RATE));
        }
        assert!(one.paused_until(BEGIN).is_some() && other.paused_until(BEGIN).is_none());
        let (paid, longest) = pay(&one, &[(&other, write(RATE / 100))]);
        assert!(longest <= 40 * MS, "{} ms", longest / MS);
        took(paid, 30_000 * MS * 10 / 9);
        assert_eq!(one.paused_until(paid), None);
    }

    /// An NBD client of the disk writes all the time. Each request owes something to the limit, and
    /// begins in the same moment in which the disk has paid for the last one.
    #[test]
    fn a_client_that_goes_on_does_not_keep_the_queues_paused_after_a_drain() {
        const TICK: u64 = 20 * MS;
        let [one] = disks(bps());
        let _ = one.force(BEGIN, &write(RATE / 1000 * 1004));
        let (flow, mut now, mut begun) = (one.new_flow(), BEGIN, 0);
        while one.paused_until(now).is_some() {
            now += TICK;
            assert!(now < BEGIN + 10_000 * MS, "the queues are paused after {begun} requests");
            begun += u32::from(one.limit(now, &write(RATE / 1000 * 210), &flow).is_ok());
        }
        assert!(begun == 1 && one.owes_group(), "{begun} requests");
        // A bucket of 10 ms pays at most so much in a tick.
        assert!(now >= BEGIN + 100 * TICK, "{} ms", (now - BEGIN) / MS);
    }

    /// The disk has paid for 6 of the 20 seconds of an operation when a drain admits 10 seconds
    /// more. Without the operation the payments are those of the drain's requests, and 4 seconds
    /// are left.
    #[test]
    fn an_operation_that_does_not_begin_leaves_no_debt_for_the_queues() {
        let [one] = disks(bps());
        let (large, flow, mut now) = (write(20 * RATE), one.new_flow(), BEGIN);
        one.limit(now, &large, &flow).unwrap();
        while now < BEGIN + 6_000 * MS {
            now = one.pay_group(now).unwrap();
        }
        let _ = one.force(now, &write(10 * RATE));
        one.withdraw(now, &large);
        assert!(one.paused_until(now).is_some());
        let from = now;
        while let Some(next) = one.pay_group(now) {
            now = next;
        }
        took(BEGIN + now - from, 4_000 * MS);
        one.limit(now + 100 * MS, &write(8 * RATE), &flow).unwrap();
        assert!(one.owes_group());
        assert_eq!(one.paused_until(now + 100 * MS), None, "no drain has admitted it");
    }

    #[test]
    fn what_is_owed_to_one_limit_delays_nothing_else_of_the_disk() {
        let [one] = disks(Limits { bps_write: limit(RATE, None), ..Limits::default() });
        one.limit(BEGIN, &write(10 * RATE), &one.new_flow()).unwrap();
        assert!(one.limit(BEGIN + 100 * MS, &write(1), &one.new_flow()).is_err());
        for other in [read(1 << 20), FLUSH] {
            one.limit(BEGIN, &other, &one.new_flow()).unwrap();
        }
        assert_eq!(one.paused_until(BEGIN), None);
    }

    /// Each of the others uses one limit all the time.
    #[test]
    fn a_debt_to_two_limits_is_paid_at_both_at_the_same_time() {
        let [one, reads, writes] = disks(Limits {
            bps_read: limit(10 * RATE, None),
            bps_write: limit(RATE, None),
            ..Limits::default()
        });
        let _ = one.force(BEGIN, &read(10 * RATE));
        let _ = one.force(BEGIN, &write(RATE));
        let others = [(&*reads, read(RATE / 2)), (&*writes, write(RATE / 20))];
        let (paid, longest) = pay(&one, &others);
        assert!(longest <= 80 * MS, "{} ms", longest / MS);
        // Half of each rate goes to the other disk.
        took(paid, 2000 * MS);
    }

    #[test]
    fn what_is_owed_ends_with_the_limit_and_with_an_operation_that_does_not_begin() {
        let [one] = disks(bps());
        let large = write(100 * RATE);
        one.limit(BEGIN, &large, &one.new_flow()).unwrap();
        assert!(one.owes_group());
        one.refund(BEGIN, &large, Default::default());
        assert!(!one.owes_group());
        let _ = one.force(BEGIN, &large);
        one.group().unwrap().set(&Knobs::default());
        one.group_changed(BEGIN);
        assert!(!one.owes_group());
        assert_eq!(one.paused_until(BEGIN), None);
    }

    #[test]
    fn the_next_server_knows_which_disk_owes() {
        let ([old, _], [new, other]) = (disks(bps()), disks(bps()));
        let _ = old.force(BEGIN, &write(10 * RATE));
        let state = old.hand_over(BEGIN);
        assert!(!old.owes_group());
        new.continue_from(BEGIN, &state);
        assert!(new.owes_group() && new.paused_until(BEGIN).is_some());
        other.limit(BEGIN, &write(RATE / 100), &other.new_flow()).unwrap();
    }

    /// Each operation is worth more than the part that the group is charged at once.
    #[test]
    fn large_operations_alone_in_a_group_get_the_whole_rate_and_the_whole_burst() {
        for (max, length, expected) in [(None, RATE / 10, 10), (Some(20 * RATE), RATE / 10, 200)] {
            let [one] = disks(Limits { bps: limit(RATE, max), ..Limits::default() });
            let (flow, mut now, mut begun) = (one.new_flow(), BEGIN, 0);
            while now < BEGIN + 1000 * MS {
                match one.limit(now, &write(length), &flow) {
                    Ok(()) => begun += 1,
                    Err(next) => now = next + MS / 3,
                }
            }
            assert!((expected - expected / 10..=expected + 2).contains(&begun), "{max:?}: {begun}");
        }
    }

    /// A disk that is closed and opened again has no debt of its own any more.
    #[test]
    fn what_a_disk_owes_that_is_gone_is_paid_in_turn_with_the_others() {
        let [one, other] = disks(bps());
        let group = one.group().unwrap().clone();
        let _ = one.force(BEGIN, &write(10 * RATE));
        drop(one);
        let (flow, mut now, mut admitted) = (other.new_flow(), BEGIN, 0);
        while !group.orphans.is_zero() {
            if other.limit(now, &write(RATE / 100), &flow).is_ok() {
                admitted += 1;
            }
            now += MS;
        }
        took(now, 20_000 * MS);
        assert!((900..=1100).contains(&admitted), "{admitted} times 10 ms of the rate in 20 s");
    }
}
