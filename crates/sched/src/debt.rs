//! Debt of a disk: cost that was admitted before its limits and its share allowed it, because a
//! queue was drained.
//!
//! In: operations that a drain admitted, operations that wait, and the disk's share of the device.
//! Out: until when the disk's queues take no requests.
//!
//! What must hold
//! - Over any time a disk that is drained again and again gets what its limits and its share allow,
//!   plus what one drain admits. The latter is bounded: while operations of more than
//!   [`MAX_QUEUED_NS`] wait, a queue takes one batch at a time. A drain also admits the operations
//!   of NBD and ublk clients that wait. Only the bounds of their exports limit these.
//! - Only what a drain has admitted holds the queues. Other operations of the disk, such as those
//!   of an NBD client, do not lengthen the debt.
//! - An operation that does not begin is no part of a debt, in whatever order reactors admit and
//!   refund operations.
//! - The debt to the device counts only while other disks use the device. The disk's share of the
//!   device pays it. After a change of weights the smaller share counts. While another disk waits,
//!   the device's virtual time must pass the cost as well, because the share of the time relies on
//!   an assumed speed.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Time;

/// Largest cost of a disk's waiting operations, in nanoseconds of its limits or share. If they cost
/// more, a queue with requests in flight takes no more. This bounds what a drain admits, and so the
/// time until the debt is paid.
pub(crate) const MAX_QUEUED_NS: u64 = 30_000_000_000;
/// Largest cost that one waiting operation counts for, in nanoseconds.
const MAX_OPERATION_NS: u64 = 1 << 50;
/// Pause before a queue checks the cost of the waiting operations again, in nanoseconds.
const CHECK_PERIOD_NS: u64 = 20_000_000;
/// At least this part of the device pays a debt, whatever the weights are, while no other disk
/// waits. Without it, one operation of the lowest weight would hold a queue for days beside a
/// neighbour that hardly uses the device.
pub(crate) const MIN_PART: f64 = 0.05;

/// The debt of a disk; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Debt {
    /// Time when the debt to the limits is paid.
    limits: AtomicU64,
    /// Whether there is a debt to the device, and that debt.
    owes_device: AtomicBool,
    device: Mutex<DeviceDebt>,
    /// Cost of the waiting operations, in nanoseconds.
    queued_ns: AtomicU64,
    /// Number of operations that wait for limits or for the device.
    waiting: AtomicU64,
}

/// Cost that a disk owes to its device, in nanoseconds. Two clocks pay it.
#[derive(Debug, Default)]
struct DeviceDebt {
    /// What the disk's share of the time has not covered yet.
    by_time: u64,
    /// What the device's virtual time has not passed yet.
    by_order: u64,
    /// Time and virtual time until which the debt is paid, and what paid it last. 0: nothing yet.
    time: Time,
    virtual_time: u64,
    rate: f64,
    worth: f64,
}

/// What pays a debt to a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payment {
    /// The device's virtual time, and the cost in nanoseconds that a unit of it pays.
    pub virtual_time: u64,
    pub worth: f64,
    /// The disk's share of the device, in nanoseconds of cost a nanosecond.
    pub rate: f64,
}

/// How a disk with a debt stands among the disks of its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub payment: Payment,
    /// Cost by which a disk may exceed its share, in nanoseconds.
    pub margin: u64,
    /// Whether other disks use the device, and whether one of them waits for it.
    pub others_work: bool,
    pub others_wait: bool,
}

impl DeviceDebt {
    /// Takes off what the disk's share has covered since the last call. If the share has changed
    /// meanwhile, the smaller one counts: a guest may choose the moment of the call.
    fn pay(&mut self, now: Time, payment: &Payment) {
        let least = |last: f64, new: f64| if last > 0.0 { last.min(new) } else { new };
        let by_time = now.saturating_sub(self.time) as f64 * least(self.rate, payment.rate);
        self.by_time = self.by_time.saturating_sub(by_time as u64);
        self.time = self.time.max(now);
        // Virtual times wrap around. Another thread may have paid with a later one.
        let passed = payment.virtual_time.wrapping_sub(self.virtual_time) as i64;
        if passed > 0 || self.by_order == 0 {
            let by_order = passed.max(0) as f64 * least(self.worth, payment.worth);
            self.by_order = self.by_order.saturating_sub(by_order as u64);
            self.virtual_time = payment.virtual_time;
        }
        (self.rate, self.worth) = (payment.rate, payment.worth);
    }

    /// Returns the time until the disk's share covers the debt, in nanoseconds.
    fn time_left(&self, payment: &Payment) -> u64 {
        (self.by_time as f64 / payment.rate).ceil() as u64
    }
}

impl Debt {
    /// Extends the debt to the limits until `until`, the time when they admit the next operation
    /// after one that a drain has admitted. `opens` returns this time anew.
    pub fn owe_limits(&self, until: Time, opens: impl Fn() -> Time) {
        self.limits.fetch_max(until, AcqRel);
        // Another reactor may have refunded an operation that `until` contains.
        self.limits_changed(opens);
    }

    /// Shortens the debt to the limits after a change of the limits, or after a refund. `opens`
    /// returns the time when they admit the next operation.
    pub fn limits_changed(&self, opens: impl Fn() -> Time) {
        // A drain on another reactor may charge the limits after `opens`. Then it has changed the
        // debt, and `opens` is called again. The debt is stored even if it stays the same: either
        // the drain sees the refund, or this call sees the debt.
        let shorter = |limits: Time| Some(limits.min(opens()));
        let _ = self.limits.fetch_update(AcqRel, Acquire, shorter);
    }

    /// Adds nanoseconds of cost to the debt to the device: for the disk's share of the time, and
    /// for the virtual time.
    pub fn owe_device(&self, now: Time, [by_time, by_order]: [u64; 2], payment: &Payment) {
        if by_time > 0 || by_order > 0 {
            let mut debt = self.device();
            debt.pay(now, payment);
            debt.by_time = debt.by_time.saturating_add(by_time);
            debt.by_order = debt.by_order.saturating_add(by_order);
            self.owes_device.store(true, Relaxed);
        }
    }

    /// Takes `cost` nanoseconds off the debt to the device, because the operation does not begin.
    pub fn forgive_device(&self, cost: u64) {
        let mut debt = self.device();
        debt.by_time = debt.by_time.saturating_sub(cost);
        debt.by_order = debt.by_order.saturating_sub(cost);
    }

    fn device(&self) -> MutexGuard<'_, DeviceDebt> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time until the debt to the limits is paid, in nanoseconds.
    pub fn limits_left(&self, now: Time) -> u64 {
        self.limits.load(Relaxed).saturating_sub(now)
    }

    /// Returns the debt to the device, in nanoseconds: the time until it is paid, and its cost for
    /// the disk's share of the time and for the virtual time.
    pub fn device_left(&self, now: Time, payment: &Payment) -> [u64; 3] {
        let mut debt = self.device();
        debt.pay(now, payment);
        [debt.time_left(payment), debt.by_time, debt.by_order]
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

    /// Returns until when the disk's queues must take no requests, because a debt is not paid.
    /// `standing` returns how the disk stands on its device.
    #[inline]
    pub fn paid_at(&self, now: Time, standing: impl FnOnce() -> Option<Standing>) -> Option<Time> {
        let limits = Some(self.limits.load(Relaxed)).filter(|paid| *paid > now);
        if !self.owes_device.load(Relaxed) {
            return limits;
        }
        limits.max(standing().and_then(|standing| self.device_paid_at(now, &standing)))
    }

    #[cold]
    fn device_paid_at(&self, now: Time, standing: &Standing) -> Option<Time> {
        let mut debt = self.device();
        debt.pay(now, &standing.payment);
        let is_ahead = debt.by_order > standing.margin;
        if standing.others_wait && is_ahead {
            return Some(now + CHECK_PERIOD_NS);
        }
        if debt.by_time == 0 {
            // Others that work may wait in a moment.
            if !is_ahead || !standing.others_work {
                *debt = DeviceDebt::default();
                self.owes_device.store(false, Relaxed);
            }
            return None;
        }
        // The debt stays: the other disks may begin to work again.
        let until = now.saturating_add(debt.time_left(&standing.payment));
        standing.others_work.then_some(until)
    }

    /// Returns when to check again, if so many operations wait that a drain would admit too much.
    #[inline]
    pub fn full_until(&self, now: Time) -> Option<Time> {
        (self.queued_ns.load(Relaxed) > MAX_QUEUED_NS).then(|| now + CHECK_PERIOD_NS)
    }
}

#[cfg(test)]
mod refunds;
#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::task::Waker;

    use super::*;
    use crate::{
        DeviceProfile, Grant, Host, Knobs, Limit, Limits, Operation, OperationKind, ReactorShare,
        WaitToken,
    };

    pub(super) const NOW: Time = 1_000_000_000;
    pub(super) const SECOND: u64 = 1_000_000_000;
    pub(super) const READ: Operation =
        Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };

    /// Returns two disks that have just used a device.
    pub(super) fn neighbours() -> [ReactorShare; 2] {
        let host = Host::default();
        let device = Some(("d", &DeviceProfile::FLASH));
        let disks = [(); 2].map(|()| host.share(device, None, &Knobs::default()).on_reactor());
        for disk in &disks {
            disk.done(NOW, disk.ask(NOW, &READ).unwrap());
        }
        disks
    }

    fn weight(weight: u32) -> Knobs {
        Knobs { weight, ..Knobs::default() }
    }

    pub(super) fn write(bytes: u64) -> Operation {
        Operation { kind: OperationKind::Write, bytes, sequential: false, requests: 1 }
    }

    pub(super) fn bps(rate: u64) -> Knobs {
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
    fn a_forced_operation_is_owed_to_no_device_without_neighbours() {
        let host = Host::default();
        let alone = host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
        for _ in 0..1000 {
            let _ = alone.force(NOW, &write(1 << 20));
        }
        assert_eq!(alone.paused_until(NOW), None);
        // Nor to one that comes later.
        let later = host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
        let later = later.on_reactor();
        later.done(NOW, later.ask(NOW, &READ).unwrap());
        assert_eq!(alone.paused_until(NOW), None);
    }

    /// The group admits it later, and then the disk's own limit is charged.
    #[test]
    fn an_operation_that_its_group_refuses_costs_the_disk_nothing() {
        let host = Host::default();
        let slow = bps(1000);
        let share = host.share(None, Some(("g", &slow)), &bps(1 << 30));
        let flow = share.new_flow();
        // So small that the disk owes the group nothing of it.
        let small = write(40);
        assert_eq!(share.limit(NOW, &small, &flow), Ok(()));
        let own = share.opens_own();
        for _ in 0..100 {
            assert!(share.limit(NOW, &small, &flow).is_err());
        }
        assert!(!share.owes_group());
        assert_eq!(share.opens_own(), own);
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
        let alone = one.ask(NOW, &READ).unwrap();
        one.done(NOW, alone);
        let _ = one.force(NOW, &READ);
        assert_eq!(
            one.paused_until(NOW),
            None,
            "a disk that has the device to itself owes nothing"
        );
        let beside = two.ask(NOW, &READ).unwrap();
        two.done(NOW, beside);
        for _ in 0..1000 {
            let _ = one.force(NOW, &READ);
        }
        let cost = one.device().unwrap().costs().of(&READ);
        assert!(one.paused_until(NOW).unwrap() >= NOW + 1000 * cost);
        assert_eq!(two.paused_until(NOW), None);
    }

    /// The debt in nanoseconds relies on an assumed speed of the device. A disk that still waits
    /// shows that the device has not caught up.
    #[test]
    fn queues_of_a_disk_over_its_share_pause_while_another_disk_waits() {
        let [one, two] = neighbours();
        let forced: Vec<_> = (0..1000).map(|_| one.force(NOW, &READ)).collect();
        let mut granted = vec![two.ask(NOW, &READ).unwrap()];
        // The other disk works, and does not wait at this moment.
        let later = NOW + 3600 * SECOND;
        assert_eq!(one.paused_until(later), None);
        granted.extend(std::iter::from_fn(|| two.ask(NOW, &READ)));
        let token = Arc::default();
        two.wait(NOW, &READ, &token, Waker::noop());
        assert_eq!(one.paused_until(later), Some(later + CHECK_PERIOD_NS));
        // The device completes the operations, and the waiting disk begins.
        forced.into_iter().for_each(|grant| one.done(NOW, grant));
        granted.into_iter().for_each(|grant| two.done(NOW, grant));
        assert!(token.take_grant());
        assert_eq!(one.paused_until(later), None);
    }

    /// An NBD client of the disk always waits, so the disk stays over its share.
    #[test]
    fn operations_of_another_client_of_the_disk_do_not_lengthen_the_debt() {
        let disks = neighbours();
        for _ in 0..1000 {
            disks[0].done(NOW, disks[0].force(NOW, &READ));
        }
        let granted = std::iter::from_fn(|| disks[1].ask(NOW, &READ));
        let mut running: VecDeque<(usize, Grant)> = granted.map(|grant| (1, grant)).collect();
        let begin = |disk: usize| {
            let token = Arc::<WaitToken>::default();
            disks[disk].wait(NOW, &READ, &token, Waker::noop());
            (disk, token)
        };
        let mut waiting = [begin(1), begin(1), begin(0)];
        // The disk's share of the time has covered the debt.
        let later = NOW + 3600 * SECOND;
        let mut ended = 0;
        while disks[0].paused_until(later).is_some() {
            let (disk, grant) = running.pop_front().expect("an idle device admits an operation");
            disks[disk].done(NOW, grant);
            ended += 1;
            assert!(ended < 1100, "the other disk has had its share");
            for place in &mut waiting {
                let (disk, token) = place.clone();
                if token.take_grant() {
                    running.push_back((disk, disks[disk].granted(NOW, NOW, &READ, &token)));
                    *place = begin(disk);
                }
            }
        }
        assert!(ended > 800, "only {ended} operations of the other disk");
        assert!(disks.iter().all(|disk| disk.figures().waiting > 0));
    }

    #[test]
    fn a_debt_to_the_device_holds_no_queue_while_the_other_disks_rest() {
        let [one, two] = neighbours();
        one.done(NOW, one.force(NOW, &write(4 << 30)));
        assert!(one.paused_until(NOW).unwrap() > NOW + 5 * SECOND);
        let later = NOW + SECOND;
        assert_eq!(one.paused_until(later), None);
        two.done(later, two.ask(later, &READ).unwrap());
        assert!(one.paused_until(later).unwrap() > later + SECOND, "the debt stays");
    }

    #[test]
    fn a_debt_to_the_device_is_paid_at_the_present_weights() {
        let [one, _two] = neighbours();
        one.done(NOW, one.force(NOW, &write(4 << 30)));
        let left = || one.paused_until(NOW).unwrap() - NOW;
        let before = left();
        one.set(&weight(300), NOW);
        // Three quarters of the device instead of a half.
        assert!((before * 6 / 10..before * 7 / 10).contains(&left()), "{} of {before}", left());
    }

    /// A guest can choose when its queue asks, so it must gain nothing by that choice.
    #[test]
    fn after_a_change_of_the_share_the_smaller_share_pays_the_time_before() {
        let payment = |virtual_time, part: f64| Payment { virtual_time, worth: part, rate: part };
        for [before, after] in [[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]] {
            let (debt, smaller) = (Debt::default(), f64::min(before, after));
            let owed = 10 * SECOND;
            debt.owe_device(NOW, [owed, owed], &payment(0, before));
            let left = |now, virtual_time, part| {
                let [_, by_time, by_order] = debt.device_left(now, &payment(virtual_time, part));
                [by_time, by_order]
            };
            // A second of the time and of the virtual time has passed.
            let paid = (SECOND as f64 * smaller) as u64;
            let first = left(NOW + SECOND, SECOND, after);
            assert_eq!(first, [owed - paid; 2], "{before} before, {after} after");
            // From then on the new share counts.
            let paid = paid + (SECOND as f64 * after) as u64;
            let second = left(NOW + 2 * SECOND, 2 * SECOND, after);
            assert_eq!(second, [owed - paid; 2], "{before} before, {after} after");
        }
    }

    /// The neighbour hardly uses the device. At the weights alone the debt would last 47 hours.
    #[test]
    fn a_part_of_the_device_pays_the_debt_of_the_lowest_weight() {
        let [one, two] = neighbours();
        one.set(&weight(1), NOW);
        two.set(&weight(10_000), NOW);
        let grant = one.force(NOW, &write(1 << 40));
        let cost = grant.cost_ns;
        one.done(NOW, grant);
        let left = one.paused_until(NOW).unwrap() - NOW;
        assert!((19 * cost..=21 * cost).contains(&left), "{left} ns for {cost} ns");
    }

    #[test]
    fn a_forced_operation_that_does_not_begin_is_no_debt() {
        let [one, two] = neighbours();
        let forced: Vec<_> = (0..1000).map(|_| one.force(NOW, &READ)).collect();
        assert!(one.paused_until(NOW).is_some());
        forced.into_iter().for_each(|grant| one.refund(NOW, &READ, grant));
        assert_eq!(one.paused_until(NOW), None);
        // The disk is within its share again, so it need not wait for a full window.
        let _granted: Vec<_> = std::iter::from_fn(|| two.ask(NOW, &READ)).collect();
        assert!(one.ask(NOW, &READ).is_some());
        // The limits have what they had before.
        let share = Host::default().share(None, None, &bps(1000));
        let forced = [(); 10].map(|()| share.force(NOW, &write(1000)));
        assert!(share.paused_until(NOW).unwrap() > NOW + 9 * SECOND);
        forced.into_iter().for_each(|grant| share.refund(NOW, &write(1000), grant));
        assert_eq!(share.paused_until(NOW), None);
    }

    /// The cost of the waiting operations bounds what a drain admits.
    #[test]
    fn many_waiting_operations_hold_the_queues_back() {
        let share = Host::default().share(None, None, &bps(1000));
        let mut queue: Vec<u64> = (0..30).map(|_| share.join_queue(&write(1000))).collect();
        assert_eq!(share.paused_until(NOW), None, "half a minute of waiting is allowed");
        queue.push(share.join_queue(&write(1)));
        assert_eq!(share.paused_until(NOW), Some(NOW + CHECK_PERIOD_NS));
        assert_eq!(share.owes_until(NOW), None, "a queue with nothing in flight goes on");
        queue.push(share.join_queue(&write(u64::MAX)));
        queue.drain(..).for_each(|worth| share.leave_queue(worth));
        assert_eq!(share.paused_until(NOW), None);
    }
}
