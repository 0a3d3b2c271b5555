//! One disk's account: its share of a device, its reservation, its limits, and what became of them.
//!
//! In: an operation, and when. Out: whether its limits and its share let it begin. Everything on
//! that way is a handful of atomic counters on cache lines of the disk's own; they are shared only
//! by the reactors that serve this disk.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use crate::Time;
use crate::cost::Operation;
use crate::debt::Debt;
use crate::device::{Device, Grant};
use crate::group::Group;
use crate::knobs::Knobs;
use crate::limit::{Flow, Limiter};
use crate::reserve::Reserve;
use crate::wait_list::{WaitToken, before};

/// What the device and its disk both look at. What every operation touches stands together, first.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Account {
    /// The virtual time at which its next operation begins.
    pub start_tag: AtomicU64,
    /// Virtual time for a nanosecond of cost: 2^20 / weight, with [`FRACTION`] binary places.
    virtual_rate: AtomicU64,
    /// How far ahead of the device's virtual time its tag may be.
    margin: AtomicU64,
    /// Its operations that wait for the device.
    pub waiting: AtomicU64,
    /// Cost and number of its operations that are on the way.
    pub in_flight: AtomicU64,
    pub operations: AtomicU64,
    // Since the last look: operations that began; those that ended: their cost, number, time in the
    // device and since they were asked for, and what it would have been alone.
    begun: AtomicU64,
    cost: AtomicU64,
    served: AtomicU64,
    service: AtomicU64,
    lived: AtomicU64,
    alone: AtomicU64,
    group: Option<Arc<Group>>,
    /// It has asked for something in the last seconds.
    pub present: AtomicBool,
    own_weight: AtomicU32,
    reserve: Reserve,
    // From here on: for those that wait, and for looks.
    /// Operations that had to wait since the last look.
    pub waits: AtomicU64,
    pub busy_at: AtomicU64,
    number: OnceLock<usize>,
    /// Its own weight, or its part of its group's; the bits of an f64.
    weight: AtomicU64,
    /// Cost of the device that was due to it in a nanosecond, at the last look; the bits of an f64.
    rate: AtomicU64,
    latency_target: AtomicU64,
    sums: Sums,
}

/// Binary places of a pace.
const FRACTION_BITS: u32 = 20;
/// So little at least is any disk's weight: more unequal than this nobody can be.
const MIN_WEIGHT: f64 = 0.01;
/// Smallest rate at which a debt to the device is paid.
const MIN_RATE: f64 = 1e-4;

/// Since the disk was opened.
#[derive(Debug, Default)]
struct Sums {
    owed: AtomicU64,
    used: AtomicU64,
    donated: AtomicU64,
    service: AtomicU64,
    alone: AtomicU64,
    limited: AtomicU64,
    waited: AtomicU64,
}

/// What an account has counted since the last look.
pub(crate) struct Counts {
    pub busy: bool,
    /// It asks for more than its share: most of its operations had to wait.
    pub is_over_share: bool,
    pub cost: u64,
    pub served: u64,
    pub service: u64,
    pub lived: u64,
    pub alone: u64,
}

impl Account {
    fn new(knobs: &Knobs, group: Option<Arc<Group>>) -> Self {
        let account = Account {
            start_tag: AtomicU64::default(),
            virtual_rate: AtomicU64::default(),
            margin: AtomicU64::default(),
            waiting: AtomicU64::default(),
            in_flight: AtomicU64::default(),
            operations: AtomicU64::default(),
            begun: AtomicU64::default(),
            cost: AtomicU64::default(),
            served: AtomicU64::default(),
            service: AtomicU64::default(),
            lived: AtomicU64::default(),
            alone: AtomicU64::default(),
            group,
            present: AtomicBool::default(),
            own_weight: AtomicU32::default(),
            reserve: Reserve::default(),
            waits: AtomicU64::default(),
            busy_at: AtomicU64::default(),
            number: OnceLock::new(),
            weight: AtomicU64::default(),
            rate: AtomicU64::new(1f64.to_bits()),
            latency_target: AtomicU64::default(),
            sums: Sums::default(),
        };
        account.set(knobs);
        account.set_weight(f64::from(account.own_weight()));
        account
    }

    fn set(&self, knobs: &Knobs) {
        self.own_weight.store(knobs.weight.clamp(1, Knobs::MOST_WEIGHT), Relaxed);
        self.reserve.set(knobs);
        self.latency_target.store(knobs.latency_target.map_or(0, |t| t.as_nanos() as u64), Relaxed);
    }

    /// Its place on the device.
    pub fn number(&self) -> usize {
        self.number.get().copied().unwrap_or(usize::MAX)
    }

    pub fn group(&self) -> Option<&Arc<Group>> {
        self.group.as_ref()
    }

    pub fn own_weight(&self) -> u32 {
        self.own_weight.load(Relaxed)
    }

    pub fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Relaxed))
    }

    pub fn set_weight(&self, weight: f64) {
        let weight = weight.max(MIN_WEIGHT);
        self.weight.store(weight.to_bits(), Relaxed);
        self.virtual_rate
            .store(((1u64 << (20 + FRACTION_BITS)) as f64 / weight).round() as u64, Relaxed);
    }

    pub fn set_rate(&self, rate: f64) {
        self.rate.store(rate.max(MIN_RATE).to_bits(), Relaxed);
    }

    /// Nanoseconds in which that much cost is due to it.
    pub fn time_of(&self, cost: u64) -> u64 {
        (cost as f64 / f64::from_bits(self.rate.load(Relaxed))) as u64
    }

    /// Its own, or its group's; 0: none.
    pub fn latency_target(&self) -> u64 {
        match self.latency_target.load(Relaxed) {
            0 => self.group.as_ref().map_or(0, |group| group.latency_target.load(Relaxed)),
            target => target,
        }
    }

    /// What a cost is in virtual time.
    #[inline]
    pub fn virtual_cost(&self, cost: u64) -> u64 {
        let half = 1 << (FRACTION_BITS - 1);
        ((u128::from(cost) * u128::from(self.virtual_rate.load(Relaxed)) + half) >> FRACTION_BITS)
            as u64
    }

    #[inline]
    pub fn has_reservation(&self) -> bool {
        self.reserve.is_set() || self.group.as_ref().is_some_and(|group| group.reserve.is_set())
    }

    #[inline]
    pub fn reservation_is_due(&self, now: Time) -> bool {
        self.reserve.is_due(now)
            || self.group.as_ref().is_some_and(|group| group.reserve.is_due(now))
    }

    #[inline]
    pub fn charge_reservation(&self, now: Time, requests: u32, bytes: u64) {
        self.reserve.charge(now, requests, bytes);
        if let Some(group) = &self.group {
            group.reserve.charge(now, requests, bytes);
        }
    }

    #[inline]
    pub fn began(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    pub fn costs_more(&self, cost: u64) {
        self.cost.fetch_add(cost, Relaxed);
    }

    #[inline]
    pub fn served(&self, cost: u64, service: u64, lived: u64, alone: u64) {
        self.cost.fetch_add(cost, Relaxed);
        self.served.fetch_add(1, Relaxed);
        self.service.fetch_add(service, Relaxed);
        self.lived.fetch_add(lived, Relaxed);
        self.alone.fetch_add(alone, Relaxed);
    }

    /// It has had no more than its share, but for the margin.
    #[inline]
    pub fn is_within_share(&self, device: u64) -> bool {
        let end = device.wrapping_add(self.margin.load(Relaxed));
        !before(end, self.start_tag.load(Relaxed)) && self.waiting.load(Relaxed) == 0
    }

    pub fn set_margin(&self, cost: u64) {
        self.margin.store(self.virtual_cost(cost), Relaxed);
    }

    /// Nothing of it is on the way, or waits.
    pub fn is_idle(&self) -> bool {
        self.operations.load(Relaxed) == 0 && self.waiting.load(Relaxed) == 0
    }

    pub fn is_busy(&self, now: Time, within: u64) -> bool {
        now < self.busy_at.load(Relaxed).saturating_add(within)
    }

    pub fn take_counts(&self, now: Time) -> Counts {
        let (waits, begun) = (self.waits.swap(0, Relaxed), self.begun.swap(0, Relaxed));
        let counts = Counts {
            busy: false,
            is_over_share: waits * 2 > begun || (begun == 0 && self.waiting.load(Relaxed) > 0),
            cost: self.cost.swap(0, Relaxed),
            served: self.served.swap(0, Relaxed),
            service: self.service.swap(0, Relaxed),
            lived: self.lived.swap(0, Relaxed),
            alone: self.alone.swap(0, Relaxed),
        };
        let busy = counts.cost > 0 || counts.served > 0 || !self.is_idle();
        if busy {
            self.busy_at.store(now, Relaxed);
        }
        self.sums.service.fetch_add(counts.service, Relaxed);
        self.sums.alone.fetch_add(counts.alone, Relaxed);
        self.sums.used.fetch_add(counts.cost, Relaxed);
        Counts { busy, ..counts }
    }

    /// What was due to it since the last look, beside what it has used.
    pub fn note_owed(&self, owed: f64, used: u64) {
        let owed = owed as u64;
        self.sums.owed.fetch_add(owed, Relaxed);
        self.sums.donated.fetch_add(owed.saturating_sub(used), Relaxed);
    }
}

/// What became of a disk's share since it was opened; all but `weight` and `waiting` in
/// nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Its weight, or its part of its group's.
    pub weight: f64,
    /// Of the device's time: what was due to it while it was busy, what it used, what it left to
    /// others.
    pub owed: u64,
    pub used: u64,
    pub donated: u64,
    /// How long its operations waited because of its limits, and because of its neighbours.
    pub limited: u64,
    pub waited: u64,
    /// How long the device took for them, and what it would have taken without neighbours.
    pub service: u64,
    pub alone: u64,
    /// Operations that wait now: for the device, and for limits or the device.
    pub waiting: u64,
    pub queued: u64,
}

/// A disk's share: see the top of this file. Given up when dropped.
#[derive(Debug)]
pub struct Share {
    account: Arc<Account>,
    limiter: Limiter,
    /// Among the disks of its group.
    group_flow: Option<Arc<Flow>>,
    device: Option<Arc<Device>>,
    debt: Debt,
    /// Where the disk's last operation ended, on a rotational device.
    position: AtomicU64,
}

impl Share {
    pub fn new(device: Option<Arc<Device>>, group: Option<Arc<Group>>, knobs: &Knobs) -> Self {
        let group_flow = group.as_ref().map(|group| group.limiter.join(knobs.weight));
        let account = Arc::new(Account::new(knobs, group));
        if let Some(device) = &device {
            let _ = account.number.set(device.join(&account));
        }
        Share {
            account,
            limiter: Limiter::new(&knobs.limits),
            group_flow,
            device,
            debt: Debt::default(),
            position: AtomicU64::new(u64::MAX),
        }
    }

    pub fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    pub fn group(&self) -> Option<&Arc<Group>> {
        self.account.group()
    }

    /// Other knobs, from now on.
    pub fn set(&self, knobs: &Knobs, now: Time) {
        self.account.set(knobs);
        self.limiter.set(&knobs.limits);
        self.group_flow.as_ref().inspect(|flow| flow.set_weight(knobs.weight));
        self.group_changed(now);
        // Those who wait already have a reservation now.
        self.claim(now);
    }

    /// Its group has other knobs.
    pub(crate) fn group_changed(&self, now: Time) {
        // A debt is paid at the new rates.
        self.debt.limits_changed(self.limits_open());
        match &self.device {
            Some(device) => device.reweigh(now),
            None => self.account.set_weight(f64::from(self.account.own_weight())),
        }
    }

    /// Whether an operation begins where the disk's last one ended. None: on this device several
    /// streams of a disk may each be sequential. On a rotational device only one is, because
    /// between two of them the heads move.
    #[inline]
    pub fn follows(&self, offset: u64, bytes: u64) -> Option<bool> {
        let device = self.device.as_ref()?;
        device
            .is_rotational()
            .then(|| self.position.swap(offset.saturating_add(bytes), Relaxed) == offset)
    }

    /// Nothing is limited, and nothing shared: there is nobody to ask.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.device.is_none() && self.is_unlimited()
    }

    #[inline]
    pub fn is_unlimited(&self) -> bool {
        self.limiter.is_unlimited()
            && self.account.group.as_ref().is_none_or(|group| group.limiter.is_unlimited())
    }

    /// One of several lines of operations that wait for the disk's limits.
    pub fn new_flow(&self) -> Arc<Flow> {
        self.limiter.join(Knobs::WEIGHT)
    }

    /// Whether the disk's limits, and its group's, let the first operation of a line begin, which
    /// they then have counted; else when to ask again.
    #[inline]
    pub fn limit(&self, now: Time, operation: &Operation, flow: &Flow) -> Result<(), Time> {
        let group = self.group_limiter();
        self.limiter.take(now, operation, Some(flow))?;
        let back = |_: &Time| self.limiter.refund(operation, Some(flow));
        group.map_or(Ok(()), |limiter| {
            limiter.take(now, operation, self.group_flow.as_deref()).inspect_err(back)
        })
    }

    /// Whether the operation may begin; None: it is to [`Share::wait`].
    #[inline]
    pub fn ask(&self, now: Time, operation: &Operation) -> Option<Grant> {
        match &self.device {
            Some(device) => device.ask(&self.account, now, operation),
            None => Some(Grant::default()),
        }
    }

    /// The operation waits for the device; `slot` tells when it may begin ([`WaitToken::take`]), and the
    /// waker is woken then. With a reservation it is also to [`Share::claim`] at the time that is
    /// answered.
    pub fn wait(
        &self,
        now: Time,
        operation: &Operation,
        token: &Arc<WaitToken>,
        waker: &Waker,
    ) -> Option<Time> {
        let device = self.device.as_ref()?;
        device.wait(&self.account, now, operation, token, waker);
        self.next_claim(now)
    }

    /// When the reservation is due for one that waits now.
    fn next_claim(&self, now: Time) -> Option<Time> {
        let ahead = self.account.waiting.load(Relaxed);
        let group = self.account.group.as_ref().and_then(|group| group.reserve.next(now, ahead));
        let own = self.account.reserve.next(now, ahead);
        own.into_iter().chain(group).min()
    }

    /// Lets in those that wait as far as the reservation is due; answers when to look again.
    pub fn claim(&self, now: Time) -> Option<Time> {
        self.device.as_ref()?.claim(&self.account, now);
        self.next_claim(now)
    }

    /// What an operation that was let in after a wait is [`Share::done`] with.
    /// `asked`: when it came.
    pub fn granted(&self, asked: Time, now: Time, operation: &Operation) -> Grant {
        self.device.as_ref().map_or_else(Grant::default, |device| {
            device.granted(&self.account, asked, now, operation)
        })
    }

    #[inline]
    pub fn done(&self, now: Time, grant: Grant) {
        if let Some(device) = &self.device {
            device.done(&self.account, now, grant);
        }
    }

    /// For an operation that was let in, and does not begin.
    pub fn refund(&self, now: Time, operation: &Operation, grant: Grant) {
        self.limiter.refund(operation, None);
        if let Some(group) = &self.account.group {
            group.limiter.refund(operation, self.group_flow.as_deref());
        }
        if let Some(device) = &self.device {
            device.release_grant(&self.account, now, &grant);
        }
    }

    /// The disk makes the device sync what was written: it does not wait, for it may hold what
    /// others wait for, but pays.
    pub fn sync(&self, now: Time) -> Grant {
        self.device.as_ref().map_or_else(Grant::default, |device| device.sync(&self.account, now))
    }

    pub fn has_reservation(&self) -> bool {
        self.account.has_reservation()
    }

    /// Others use the device too.
    #[inline]
    pub fn has_neighbours(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_shared())
    }

    /// Charges what the disk has cost the device beyond its requests: operations and bytes, for
    /// metadata and copies.
    pub fn charge_more(&self, operations: u64, bytes: u64) {
        if let Some(device) = &self.device {
            let cost = device.costs().of_more(operations, bytes);
            self.account.start_tag.fetch_add(self.account.virtual_cost(cost), Relaxed);
            self.account.costs_more(cost);
        }
    }

    /// Notes how long an operation waited because of the limits, and for the device; nanoseconds.
    #[inline]
    pub fn note_waits(&self, limited: u64, waited: u64) {
        if limited > 0 {
            self.account.sums.limited.fetch_add(limited, Relaxed);
        }
        if waited > 0 {
            self.account.sums.waited.fetch_add(waited, Relaxed);
        }
    }

    fn group_limiter(&self) -> Option<&Limiter> {
        self.account.group.as_ref().map(|group| &group.limiter)
    }

    fn limits_open(&self) -> Time {
        self.limiter.opens().max(self.group_limiter().map_or(0, Limiter::opens))
    }

    /// Lets an operation begin that cannot wait: its queue is drained. The limits and the device
    /// are owed for it.
    pub fn force(&self, now: Time, operation: &Operation) -> Grant {
        let opens = self.limiter.force(now, operation);
        let opens =
            opens.max(self.group_limiter().map_or(0, |limiter| limiter.force(now, operation)));
        self.debt.owe_limits(opens);
        let Some(device) = &self.device else { return Grant::default() };
        let grant = device.force(&self.account, now, operation);
        self.debt.owe_device(now, device.time_of(&self.account, grant.cost));
        grant
    }

    /// Lets in what waits for the device, because a queue of the disk is drained. The device is
    /// owed for it.
    pub fn release(&self, now: Time) {
        if let Some(device) = &self.device {
            let cost = device.release(&self.account, now);
            self.debt.owe_device(now, device.time_of(&self.account, cost));
        }
    }

    /// Notes that an operation waits. Returns what it is worth, for [`Share::leave_queue`].
    pub fn join_queue(&self, operation: &Operation) -> u64 {
        let limits = self
            .limiter
            .cost_ns(operation)
            .max(self.group_limiter().map_or(0, |group| group.cost_ns(operation)));
        let device =
            self.device.as_ref().map_or(0, |device| device.duration_of(&self.account, operation));
        self.debt.join(limits.max(device))
    }

    pub fn leave_queue(&self, cost_ns: u64) {
        self.debt.leave(cost_ns);
    }

    /// Returns until when the queues of the disk must take no requests: what a drain let pass is
    /// not paid yet, or so much waits already that a drain would let too much pass. None: they may.
    #[inline]
    pub fn held_back(&self, now: Time) -> Option<Time> {
        self.debt.held_back(now, || {
            self.device.as_ref().is_some_and(|device| device.is_ahead(&self.account))
        })
    }

    pub fn figures(&self) -> Figures {
        let get = |sum: &AtomicU64| sum.load(Relaxed);
        let sums = &self.account.sums;
        Figures {
            weight: self.account.weight(),
            owed: get(&sums.owed),
            used: get(&sums.used),
            donated: get(&sums.donated),
            limited: get(&sums.limited),
            waited: get(&sums.waited),
            service: get(&sums.service),
            alone: get(&sums.alone),
            waiting: get(&self.account.waiting),
            queued: self.debt.waiting(),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            device.leave(self.account.number());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_share_is_lost_to_rounding_in_a_thousand_million_operations() {
        const OPERATIONS: u64 = 1_000_000_000;
        let weights = [1, 7, 977, 9973];
        let costs = [4_001, 12_503, 1_777, 13];
        let accounts =
            weights.map(|weight| Account::new(&Knobs { weight, ..Knobs::default() }, None));
        let steps: [u64; 4] = std::array::from_fn(|i| accounts[i].virtual_cost(costs[i]));
        // They go through the end of the range.
        let mut tags = [u64::MAX - 1_000_000; 4];
        let mut counts = [0u64; 4];
        for _ in 0..OPERATIONS {
            let (mut next, mut tag) = (0, tags[0]);
            for (i, other) in tags.iter().enumerate().skip(1) {
                if before(*other, tag) {
                    (next, tag) = (i, *other);
                }
            }
            tags[next] = tag.wrapping_add(steps[next]);
            counts[next] += 1;
        }
        let used: [f64; 4] = std::array::from_fn(|i| counts[i] as f64 * costs[i] as f64);
        let (all, sum) = (used.iter().sum::<f64>(), weights.iter().sum::<u32>());
        for ((used, weight), cost) in used.iter().zip(weights).zip(costs) {
            let due = all * f64::from(weight) / f64::from(sum);
            // At any moment an operation is under way; nothing else may be missing but a millionth.
            let most = 2.0 * cost.max(4_001 * u64::from(weight)) as f64 + due * 1e-6;
            assert!(
                (used - due).abs() <= most,
                "weight {weight} has used {used} ns, and {due} are due"
            );
        }
    }
}
