//! One disk's account: the counters that the device and the disk's reactors share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use crate::Time;
use crate::group::Group;
use crate::knobs::Knobs;
use crate::reserve::Reserve;
use crate::wait_list::before;

/// The counters of a disk that its device reads, too. The fields that every operation uses come
/// first, on the same cache lines.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Account {
    /// Virtual time at which the disk's next operation begins.
    pub start_tag: AtomicU64,
    /// Virtual time for a nanosecond of cost: 2^20 / weight, with [`FRACTION_BITS`] fraction bits.
    virtual_rate: AtomicU64,
    /// Virtual time by which the start tag may exceed the device's virtual time, while the disk
    /// still counts as within its share.
    margin: AtomicU64,
    /// Number of the disk's operations that wait for the device.
    pub waiting: AtomicU64,
    /// Cost in nanoseconds, and number, of the operations in flight.
    pub in_flight: AtomicU64,
    pub operations: AtomicU64,
    // Counters of the current control period: operations that began; of those that completed, the
    // cost, number, service time, time since arrival, and baseline service time (all in
    // nanoseconds).
    begun: AtomicU64,
    cost_ns: AtomicU64,
    served: AtomicU64,
    service_ns: AtomicU64,
    latency_ns: AtomicU64,
    baseline_ns: AtomicU64,
    /// Of these operations, the number without a known baseline.
    unknown: AtomicU64,
    pub group: Option<Arc<Group>>,
    /// Whether the disk has had operations in this control period or the last one.
    pub awake: AtomicBool,
    /// Whether an operation of the disk had to wait in this control period or the last one. Only
    /// such disks count in the window.
    pub is_queued: AtomicBool,
    /// Whether the disk was over its share in the last control period.
    pub is_over_share: AtomicBool,
    /// Whether the disk is held until a probe ends.
    pub held: AtomicBool,
    /// Time until which the disk begins no operation in its turn ([`crate::device`]).
    pub gap_until: AtomicU64,
    /// The value of `gap_until` that a waiting operation knows.
    pub gap_timed: AtomicU64,
    /// Whether the disk has had operations in the last seconds.
    pub present: AtomicBool,
    /// The weight that the operator has set.
    own_weight: AtomicU32,
    pub reserve: Reserve,
    // The fast path does not use the fields from here on.
    /// Number of operations that had to wait in this control period.
    pub waits: AtomicU64,
    /// Time of the last period in which the disk had operations and was within its share.
    pub within_at: AtomicU64,
    /// Time of the last period in which the disk had operations.
    pub busy_at: AtomicU64,
    /// The disk's number on the device.
    pub number: OnceLock<usize>,
    /// Effective weight: the disk's own weight, or its part of the group's weight. The value holds
    /// the bits of an f64.
    weight: AtomicU64,
    /// The disk's share of the device in the last period, in nanoseconds of cost a nanosecond. The
    /// value holds the bits of an f64.
    rate: AtomicU64,
    /// The disk's part of the device in the last period, 0 to 1, as the bits of an f64.
    due: AtomicU64,
    /// Latency target of the disk, in nanoseconds. 0: no target.
    latency_target: AtomicU64,
    pub sums: Sums,
}

/// Fraction bits of [`Account::virtual_rate`].
const FRACTION_BITS: u32 = 20;
/// Smallest effective weight. It bounds the ratio between two disks' shares.
const MIN_WEIGHT: f64 = 0.01;
/// Smallest rate at which a debt to the device is paid, in cost a nanosecond.
const MIN_RATE: f64 = 1e-4;

/// Totals since the disk was opened; see [`crate::Figures`].
#[derive(Debug, Default)]
pub(crate) struct Sums {
    pub owed_ns: AtomicU64,
    pub used_ns: AtomicU64,
    pub donated_ns: AtomicU64,
    pub service_ns: AtomicU64,
    pub baseline_ns: AtomicU64,
    pub limited_ns: AtomicU64,
    pub waited_ns: AtomicU64,
}

/// Counters of one control period; see [`Account`].
pub(crate) struct Counts {
    pub busy: bool,
    /// Whether an operation had to wait.
    pub has_waited: bool,
    /// Whether most of the disk's operations had to wait.
    pub mostly_waited: bool,
    pub cost_ns: u64,
    pub served: u64,
    pub service_ns: u64,
    pub latency_ns: u64,
    pub baseline_ns: u64,
    pub unknown: u64,
}

impl Account {
    pub fn new(knobs: &Knobs, group: Option<Arc<Group>>) -> Self {
        let account = Account {
            start_tag: AtomicU64::default(),
            virtual_rate: AtomicU64::default(),
            margin: AtomicU64::default(),
            waiting: AtomicU64::default(),
            in_flight: AtomicU64::default(),
            operations: AtomicU64::default(),
            begun: AtomicU64::default(),
            cost_ns: AtomicU64::default(),
            served: AtomicU64::default(),
            service_ns: AtomicU64::default(),
            latency_ns: AtomicU64::default(),
            baseline_ns: AtomicU64::default(),
            unknown: AtomicU64::default(),
            group,
            awake: AtomicBool::default(),
            is_queued: AtomicBool::default(),
            is_over_share: AtomicBool::default(),
            held: AtomicBool::default(),
            gap_until: AtomicU64::default(),
            gap_timed: AtomicU64::default(),
            present: AtomicBool::default(),
            own_weight: AtomicU32::default(),
            reserve: Reserve::default(),
            waits: AtomicU64::default(),
            within_at: AtomicU64::default(),
            busy_at: AtomicU64::default(),
            number: OnceLock::new(),
            weight: AtomicU64::default(),
            rate: AtomicU64::new(1f64.to_bits()),
            due: AtomicU64::new(1f64.to_bits()),
            latency_target: AtomicU64::default(),
            sums: Sums::default(),
        };
        account.set(knobs);
        account.set_weight(f64::from(account.own_weight()));
        account
    }

    /// Changes the knobs.
    pub fn set(&self, knobs: &Knobs) {
        self.own_weight.store(knobs.weight.clamp(1, Knobs::MAX_WEIGHT), Relaxed);
        self.reserve.set(knobs);
        self.latency_target.store(knobs.latency_target.map_or(0, |t| t.as_nanos() as u64), Relaxed);
    }

    /// Returns the disk's number on the device.
    pub fn number(&self) -> usize {
        self.number.get().copied().unwrap_or(usize::MAX)
    }

    pub fn group(&self) -> Option<&Arc<Group>> {
        self.group.as_ref()
    }

    pub fn own_weight(&self) -> u32 {
        self.own_weight.load(Relaxed)
    }

    /// Returns the effective weight.
    pub fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Relaxed))
    }

    /// Sets the effective weight.
    pub fn set_weight(&self, weight: f64) {
        let weight = weight.max(MIN_WEIGHT);
        self.weight.store(weight.to_bits(), Relaxed);
        self.virtual_rate
            .store(((1u64 << (20 + FRACTION_BITS)) as f64 / weight).round() as u64, Relaxed);
    }

    /// Sets the disk's part of the device, 0 to 1, and the device's capacity, in nanoseconds of
    /// cost a nanosecond.
    pub fn set_due(&self, due: f64, capacity: f64) {
        self.due.store(due.max(MIN_RATE).to_bits(), Relaxed);
        self.rate.store((due * capacity).max(MIN_RATE).to_bits(), Relaxed);
    }

    /// Returns the time after which the disk has used no more than its part of it, if it has had
    /// the device for `service` nanoseconds.
    pub fn turn_of(&self, service: u64) -> u64 {
        (service as f64 / f64::from_bits(self.due.load(Relaxed))) as u64
    }

    /// Returns how long the disk's share of the device takes to cover `cost`. Both are in
    /// nanoseconds.
    pub fn time_of(&self, cost: u64) -> u64 {
        (cost as f64 / f64::from_bits(self.rate.load(Relaxed))) as u64
    }

    /// Returns the latency target of the disk or of its group in nanoseconds. 0: none.
    pub fn latency_target(&self) -> u64 {
        match self.latency_target.load(Relaxed) {
            0 => self.group.as_ref().map_or(0, |group| group.latency_target.load(Relaxed)),
            target => target,
        }
    }

    /// Converts a cost to virtual time: divides it by the weight.
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

    /// Returns whether an operation of the disk, or of its group, is due by reservation.
    #[inline]
    pub fn reservation_is_due(&self, now: Time) -> bool {
        self.reserve.is_due(now)
            || self.group.as_ref().is_some_and(|group| group.reserve.is_due(now))
    }

    /// Counts an admitted operation against the reservations of the disk and its group.
    #[inline]
    pub fn charge_reservation(&self, now: Time, requests: u32, bytes: u64) {
        self.reserve.charge(now, requests, bytes);
        if let Some(group) = &self.group {
            group.reserve.charge(now, requests, bytes);
        }
    }

    /// Counts an admitted operation.
    #[inline]
    pub fn began(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    /// Counts cost in addition to that of requests.
    pub fn costs_more(&self, cost_ns: u64) {
        self.cost_ns.fetch_add(cost_ns, Relaxed);
    }

    /// Counts a completed operation: its cost, service time, latency and baseline service time. An
    /// operation without a known baseline (0) counts as not slowed down.
    #[inline]
    pub fn served(&self, cost_ns: u64, service_ns: u64, latency_ns: u64, baseline_ns: u64) {
        self.cost_ns.fetch_add(cost_ns, Relaxed);
        self.served.fetch_add(1, Relaxed);
        self.service_ns.fetch_add(service_ns, Relaxed);
        self.latency_ns.fetch_add(latency_ns, Relaxed);
        let known = if baseline_ns > 0 { baseline_ns } else { latency_ns };
        self.baseline_ns.fetch_add(known, Relaxed);
        if baseline_ns == 0 {
            self.unknown.fetch_add(1, Relaxed);
        }
    }

    /// Returns whether the disk has used at most its share plus the margin. `device`: the device's
    /// virtual time.
    #[inline]
    pub fn is_within_share(&self, device: u64) -> bool {
        let end = device.wrapping_add(self.margin.load(Relaxed));
        !before(end, self.start_tag.load(Relaxed))
            && self.waiting.load(Relaxed) == 0
            && !self.held.load(Relaxed)
    }

    /// Sets the cost, in nanoseconds, by which the disk may exceed its share.
    pub fn set_margin(&self, cost: u64) {
        self.margin.store(self.virtual_cost(cost), Relaxed);
    }

    /// Returns whether the disk was over its share in the last control period, or had to wait.
    pub fn is_over_share(&self) -> bool {
        self.is_over_share.load(Relaxed) || self.is_queued.load(Relaxed)
    }

    /// Returns whether no operation of the disk is in flight or waits.
    pub fn is_idle(&self) -> bool {
        self.operations.load(Relaxed) == 0 && self.waiting.load(Relaxed) == 0
    }

    /// Returns whether the disk had operations in the last `within` nanoseconds.
    pub fn is_busy(&self, now: Time, within: u64) -> bool {
        now < self.busy_at.load(Relaxed).saturating_add(within)
    }

    /// Returns whether the disk was within its share in the last `span` nanoseconds.
    pub fn was_within(&self, now: Time, span: u64) -> bool {
        let at = self.within_at.load(Relaxed);
        at > 0 && now < at.saturating_add(span)
    }

    /// Returns the counters of the control period that ends, and resets them.
    pub fn take_counts(&self, now: Time) -> Counts {
        let (waits, begun) = (self.waits.swap(0, Relaxed), self.begun.swap(0, Relaxed));
        let counts = Counts {
            busy: false,
            has_waited: waits > 0 || self.waiting.load(Relaxed) > 0,
            mostly_waited: waits * 2 > begun || (begun == 0 && self.waiting.load(Relaxed) > 0),
            cost_ns: self.cost_ns.swap(0, Relaxed),
            served: self.served.swap(0, Relaxed),
            service_ns: self.service_ns.swap(0, Relaxed),
            latency_ns: self.latency_ns.swap(0, Relaxed),
            baseline_ns: self.baseline_ns.swap(0, Relaxed),
            unknown: self.unknown.swap(0, Relaxed),
        };
        let busy = counts.cost_ns > 0 || counts.served > 0 || !self.is_idle();
        if busy {
            self.busy_at.store(now, Relaxed);
        }
        self.sums.service_ns.fetch_add(counts.service_ns, Relaxed);
        self.sums.baseline_ns.fetch_add(counts.baseline_ns, Relaxed);
        self.sums.used_ns.fetch_add(counts.cost_ns, Relaxed);
        Counts { busy, ..counts }
    }

    /// Adds to the totals: the cost that was due to the disk in the last period, and the cost that
    /// the disk used.
    pub fn note_owed(&self, owed: f64, used: u64) {
        let owed = owed as u64;
        self.sums.owed_ns.fetch_add(owed, Relaxed);
        self.sums.donated_ns.fetch_add(owed.saturating_sub(used), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_mostly_waits_if_more_than_half_of_its_operations_do() {
        let account = Account::new(&Knobs::default(), None);
        let is_over = |waits: u64, begun: u64, waiting: u64| {
            (0..begun).for_each(|_| account.began());
            account.waits.store(waits, Relaxed);
            account.waiting.store(waiting, Relaxed);
            account.take_counts(1).mostly_waited
        };
        assert!(is_over(6, 10, 0));
        assert!(!is_over(5, 10, 0), "half of them is not most");
        assert!(!is_over(0, 0, 0), "it has done nothing");
        assert!(is_over(0, 0, 1), "all that it has waits");
        assert!(!is_over(0, 1, 1));
    }

    #[test]
    fn a_disk_has_the_reservation_of_its_group() {
        let reserve = Knobs { reserve_iops: Some(100), ..Knobs::default() };
        let group = |knobs: &Knobs| Some(Arc::new(Group::new("group", knobs)));
        for (own, of_group, expected) in [
            (Knobs::default(), None, false),
            (reserve.clone(), None, true),
            (Knobs { reserve_bps: Some(1), ..Knobs::default() }, None, true),
            (Knobs::default(), group(&Knobs::default()), false),
            (Knobs::default(), group(&reserve), true),
            (reserve.clone(), group(&Knobs::default()), true),
        ] {
            assert_eq!(Account::new(&own, of_group).has_reservation(), expected);
        }
    }

    #[test]
    fn shares_stay_exact_over_a_thousand_million_operations() {
        const OPERATIONS: u64 = 1_000_000_000;
        let weights = [1, 7, 977, 9973];
        let costs = [4_001, 12_503, 1_777, 13];
        let accounts =
            weights.map(|weight| Account::new(&Knobs { weight, ..Knobs::default() }, None));
        let steps: [u64; 4] = std::array::from_fn(|i| accounts[i].virtual_cost(costs[i]));
        // Begin close to the largest value, so that the tags wrap around during the test.
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
            // Allow for one operation of each disk in flight, and a millionth for rounding.
            let most = 2.0 * cost.max(4_001 * u64::from(weight)) as f64 + due * 1e-6;
            assert!(
                (used - due).abs() <= most,
                "weight {weight} has used {used} ns, and {due} are due"
            );
        }
    }
}
