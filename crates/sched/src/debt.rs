//! Debt of a disk: cost that was admitted before its limits and its share allowed it, because a
//! queue was drained.
//!
//! In: operations that a drain admitted, and operations that wait. Out: until when the disk's
//! queues take no requests. What must hold: over any time a disk that is drained again and again
//! gets what its limits and its share allow, plus what one drain admits. The latter is bounded,
//! because the queues take no requests while operations of more than [`MAX_QUEUED_NS`] wait.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::Time;

/// Largest cost of a disk's waiting operations, in nanoseconds of its limits or share. If they cost
/// more, the disk's queues take no more requests. This bounds what a drain admits, and so the time
/// until the debt is paid.
pub(crate) const MAX_QUEUED_NS: u64 = 30_000_000_000;
/// Largest cost that one waiting operation counts for, in nanoseconds.
const MAX_OPERATION_NS: u64 = 1 << 50;
/// Pause before a queue checks the cost of the waiting operations again, in nanoseconds.
const CHECK_PERIOD_NS: u64 = 20_000_000;

/// The debt of a disk; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Debt {
    /// Times when the debt to the limits is paid, and the debt to the device.
    limits: AtomicU64,
    device: AtomicU64,
    /// Whether the disk has had a debt to the device and may still exceed its share.
    ahead: AtomicBool,
    /// Cost of the waiting operations, in nanoseconds.
    queued_ns: AtomicU64,
    /// Number of operations that wait for limits or for the device.
    waiting: AtomicU64,
}

impl Debt {
    /// Extends the debt to the limits until `opens`, the time when they admit the next operation.
    pub fn owe_limits(&self, opens: Time) {
        self.limits.fetch_max(opens, Relaxed);
    }

    /// Shortens the debt to the limits after a change of the limits. `opens`: the time when they
    /// admit the next operation.
    pub fn limits_changed(&self, opens: Time) {
        self.limits.fetch_min(opens, Relaxed);
    }

    /// Extends the debt to the device by `time`: the nanoseconds in which the disk's share covers
    /// the cost.
    pub fn owe_device(&self, now: Time, time: u64) {
        if time > 0 {
            let paid = |until: Time| Some(until.max(now).saturating_add(time));
            let _ = self.device.fetch_update(Relaxed, Relaxed, paid);
            self.ahead.store(true, Relaxed);
        }
    }

    /// Returns the times until the debt to the limits is paid, and the debt to the device.
    pub fn left(&self, now: Time) -> [u64; 2] {
        [&self.limits, &self.device].map(|paid| paid.load(Relaxed).saturating_sub(now))
    }

    /// Adds a waiting operation. Returns the cost that it counts for, which [`Debt::leave`] takes.
    pub fn join(&self, worth: u64) -> u64 {
        let worth = worth.min(MAX_OPERATION_NS);
        self.queued_ns.fetch_add(worth, Relaxed);
        self.waiting.fetch_add(1, Relaxed);
        worth
    }

    /// Removes a waiting operation. `worth`: what [`Debt::join`] returned.
    pub fn leave(&self, worth: u64) {
        self.queued_ns.fetch_sub(worth, Relaxed);
        self.waiting.fetch_sub(1, Relaxed);
    }

    pub fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    /// Returns until when the disk's queues must take no requests. `is_ahead` returns whether the
    /// disk exceeds its share while another disk waits for the device.
    #[inline]
    pub fn paused_until(&self, now: Time, is_ahead: impl FnOnce() -> bool) -> Option<Time> {
        let paid = self.limits.load(Relaxed).max(self.device.load(Relaxed));
        if paid > now {
            return Some(paid);
        }
        if self.ahead.load(Relaxed) {
            if is_ahead() {
                return Some(now + CHECK_PERIOD_NS);
            }
            self.ahead.store(false, Relaxed);
        }
        (self.queued_ns.load(Relaxed) > MAX_QUEUED_NS).then(|| now + CHECK_PERIOD_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceProfile, Host, Knobs, Limit, Limits, Operation, OperationKind};

    const NOW: Time = 1_000_000_000;
    const SECOND: u64 = 1_000_000_000;

    fn write(bytes: u64) -> Operation {
        Operation { kind: OperationKind::Write, bytes, sequential: false, requests: 1 }
    }

    fn bps(rate: u64) -> Knobs {
        let bps = Some(Limit { rate, max: None, length: std::time::Duration::from_secs(1) });
        Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() }
    }

    #[test]
    fn a_forced_operation_is_owed_to_the_limits_of_the_disk() {
        let share = Host::default().share(None, None, &bps(1000));
        assert_eq!(share.paused_until(NOW), None);
        for _ in 0..3 {
            let _ = share.force(NOW, &write(1000));
        }
        let paid = share.paused_until(NOW).unwrap();
        assert!((NOW + 29 * SECOND / 10..=NOW + 3 * SECOND).contains(&paid), "{paid}");
        assert_eq!(share.paused_until(paid), None);
        // A debt is paid sooner after a change to a faster limit. A removed limit has no debt.
        share.set(&bps(100_000), NOW);
        assert!(share.paused_until(NOW).is_none_or(|paid| paid <= NOW + SECOND / 20));
        share.set(&Knobs::default(), NOW);
        assert_eq!(share.paused_until(NOW), None);
    }

    #[test]
    fn a_change_of_the_limits_forgives_no_debt_of_forced_operations() {
        let share = Host::default().share(None, None, &bps(1000));
        let now = 1000 * SECOND;
        let _ = share.force(now, &write(10_000));
        share.set(&bps(2000), now);
        let paid = share.paused_until(now).unwrap();
        assert!((now + 4 * SECOND..=now + 5 * SECOND).contains(&paid), "{paid}");
    }

    #[test]
    fn a_forced_operation_is_owed_to_the_neighbours_on_the_device() {
        let host = Host::default();
        let device = Some(("d", &DeviceProfile::FLASH));
        let share = || host.share(device, None, &Knobs::default()).on_reactor();
        let (one, two) = (share(), share());
        let read = Operation { kind: OperationKind::Read, ..write(4096) };
        let alone = one.ask(NOW, &read).unwrap();
        one.done(NOW, alone);
        let _ = one.force(NOW, &read);
        assert_eq!(
            one.paused_until(NOW),
            None,
            "a disk that has the device to itself owes nothing"
        );
        let beside = two.ask(NOW, &read).unwrap();
        two.done(NOW, beside);
        for _ in 0..1000 {
            let _ = one.force(NOW, &read);
        }
        let cost = one.device().unwrap().costs().of(&read);
        assert!(one.paused_until(NOW).unwrap() >= NOW + 1000 * cost);
        assert_eq!(two.paused_until(NOW), None);
    }

    /// The debt in nanoseconds relies on an assumed speed of the device. A disk that still waits
    /// shows that the device has not caught up.
    #[test]
    fn queues_of_a_disk_over_its_share_pause_while_another_disk_waits() {
        let host = Host::default();
        let device = Some(("d", &DeviceProfile::FLASH));
        let share = || host.share(device, None, &Knobs::default()).on_reactor();
        let (one, two) = (share(), share());
        let read = Operation { kind: OperationKind::Read, ..write(4096) };
        for share in [&one, &two] {
            share.done(NOW, share.ask(NOW, &read).unwrap());
        }
        let forced: Vec<_> = (0..1000).map(|_| one.force(NOW, &read)).collect();
        let granted: Vec<_> = std::iter::from_fn(|| two.ask(NOW, &read)).collect();
        let token = std::sync::Arc::default();
        two.wait(NOW, &read, &token, std::task::Waker::noop());
        let later = NOW + 3600 * SECOND;
        assert_eq!(one.paused_until(later), Some(later + CHECK_PERIOD_NS));
        // The device completes the operations, and the waiting disk begins.
        forced.into_iter().for_each(|grant| one.done(NOW, grant));
        granted.into_iter().for_each(|grant| two.done(NOW, grant));
        assert!(token.take_grant());
        assert_eq!(one.paused_until(later), None);
    }

    /// The cost of the waiting operations bounds what a drain admits.
    #[test]
    fn many_waiting_operations_hold_the_queues_back() {
        let share = Host::default().share(None, None, &bps(1000));
        let mut queue: Vec<u64> = (0..30).map(|_| share.join_queue(&write(1000))).collect();
        assert_eq!(share.paused_until(NOW), None, "half a minute of waiting is allowed");
        queue.push(share.join_queue(&write(1)));
        assert_eq!(share.paused_until(NOW), Some(NOW + CHECK_PERIOD_NS));
        queue.push(share.join_queue(&write(u64::MAX)));
        queue.drain(..).for_each(|worth| share.leave_queue(worth));
        assert_eq!(share.paused_until(NOW), None);
    }
}
