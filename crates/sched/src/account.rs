//! One disk's account: the counters that the device and the disk's reactors share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Time;
use crate::cost::Reserved;
use crate::group::Group;
use crate::knobs::Knobs;
use crate::reserve::Reserve;
use crate::wait_list::before;

/// The counters of a disk that its device reads, too. The first cache line (64 bytes) has the
/// fields that every operation uses.
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
    pub in_flight: InFlight,
    pub group: Option<Arc<Group>>,
    /// Whether the disk has had operations in this control period or the last one.
    pub awake: AtomicBool,
    /// Whether an operation of the disk had to wait in this control period or the last one. Only
    /// such disks count in the window.
    pub is_queued: AtomicBool,
    /// Whether the disk was over its share in the last control period.
    pub is_over_share: AtomicBool,
    /// Whether the device's control periods visit the disk.
    pub is_active: AtomicBool,
    /// Whether the disk is held until a probe ends.
    pub held: AtomicBool,
    /// Whether the disk itself has a reservation.
    is_reserved: AtomicBool,
    /// Whether the disk has had operations in the last seconds.
    pub present: AtomicBool,
    /// The weight that the operator has set.
    own_weight: AtomicU32,
    // Most operations do not use the fields from here on.
    pub reserve: Reserve,
    /// Time until which the disk begins no operation in its turn ([`crate::device`]).
    pub gap_until: AtomicU64,
    /// Number of the disk's large operations in flight ([`crate::device`]), and whether one has
    /// completed since the last control period.
    pub large_in_flight: AtomicU32,
    pub had_large: AtomicBool,
    /// The value of `gap_until` that a waiting operation knows.
    pub gap_timed: AtomicU64,
    /// Number of operations that had to wait in this control period, and of those that began after
    /// a wait, or without [`crate::ReactorShare::ask`].
    pub waits: AtomicU64,
    begun: AtomicU64,
    /// Cost in this control period that no single operation has, in nanoseconds.
    more_cost_ns: AtomicU64,
    /// What each reactor has counted.
    counters: Mutex<Vec<Reader>>,
    /// Time of the last period in which the disk had operations and was within its share.
    pub within_at: AtomicU64,
    /// Cost that the disk had in flight in the last period, if it was within its share: its part of
    /// the window.
    pub within_held: AtomicU64,
    /// [`Account::margin`] while the disk has such a part and is in the queue.
    short_margin: AtomicU64,
    /// Time of the last period in which the disk had operations.
    pub busy_at: AtomicU64,
    /// The disk's key among the resting disks ([`crate::device`]).
    pub rested_at: AtomicU64,
    pub name: OnceLock<String>,
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

/// Operations in flight of one disk: their number and their cost in the window. One word holds
/// both, because each operation changes both, and an atomic change costs 5 ns.
#[derive(Debug, Default)]
pub(crate) struct InFlight(AtomicU64);

/// Bits of [`InFlight`] for the cost. The other 20 bits hold the number, which is below a million.
const COST_BITS: u32 = 44;

impl InFlight {
    /// Largest cost of one operation in nanoseconds: 34 ms. Half a million operations of this cost
    /// have room.
    pub const MAX_COST_NS: u64 = 1 << 25;

    /// Adds an operation. Returns the number and the cost of the operations before it.
    #[inline]
    pub fn add(&self, cost_ns: u64) -> (u64, u64) {
        Self::split(self.0.fetch_add((1 << COST_BITS) + cost_ns, Relaxed))
    }

    #[inline]
    pub fn remove(&self, cost_ns: u64) {
        self.0.fetch_sub((1 << COST_BITS) + cost_ns, Relaxed);
    }

    /// Returns the number of operations, and their cost in nanoseconds.
    #[inline]
    pub fn get(&self) -> (u64, u64) {
        Self::split(self.0.load(Relaxed))
    }

    #[inline]
    fn split(word: u64) -> (u64, u64) {
        (word >> COST_BITS, word & ((1 << COST_BITS) - 1))
    }
}

/// What one reactor counts of a disk, since the disk is open there. Only this reactor writes, so an
/// addition is a load and a store. The device reads it once a control period.
#[repr(align(64))]
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Number of operations that began without a wait.
    begun: AtomicU64,
    // Of the operations that completed: the number, the cost, the service time, the time since
    // arrival, and the baseline service time (all in nanoseconds).
    served: AtomicU64,
    cost_ns: AtomicU64,
    service_ns: AtomicU64,
    latency_ns: AtomicU64,
    baseline_ns: AtomicU64,
    /// Of these operations, the number without a known baseline.
    unknown: AtomicU64,
    /// The part of the service time that a stall of the device caused, in nanoseconds.
    stalled_ns: AtomicU64,
}

impl Counters {
    #[inline]
    fn add(counter: &AtomicU64, more: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(more), Relaxed);
    }

    /// Counts an operation that was admitted at once.
    #[inline]
    pub fn began(&self) {
        Self::add(&self.begun, 1);
    }

    /// Counts a completed operation: its cost, service time, latency and baseline service time. An
    /// operation without a known baseline (0) counts as not slowed down.
    #[inline]
    pub fn served(&self, cost_ns: u64, service_ns: u64, latency_ns: u64, baseline_ns: u64) {
        Self::add(&self.served, 1);
        Self::add(&self.cost_ns, cost_ns);
        Self::add(&self.service_ns, service_ns);
        Self::add(&self.latency_ns, latency_ns);
        let known = if baseline_ns > 0 { baseline_ns } else { latency_ns };
        Self::add(&self.baseline_ns, known);
        if baseline_ns == 0 {
            Self::add(&self.unknown, 1);
        }
    }

    /// Counts the nanoseconds of a service time that a stall of the device caused.
    pub fn stalled(&self, stalled_ns: u64) {
        Self::add(&self.stalled_ns, stalled_ns);
    }

    fn all(&self) -> [u64; 8] {
        let times = [&self.cost_ns, &self.service_ns, &self.latency_ns, &self.baseline_ns];
        let [cost_ns, service_ns, latency_ns, baseline_ns] = times;
        let counts = [&self.begun, &self.served, &self.unknown];
        let [begun, served, unknown] = counts;
        [begun, served, cost_ns, service_ns, latency_ns, baseline_ns, unknown, &self.stalled_ns]
            .map(|counter| counter.load(Relaxed))
    }
}

/// The device's view of one reactor's counters: what they had at the end of the last period.
#[derive(Debug, Default)]
struct Reader {
    counters: Arc<Counters>,
    last: [u64; 8],
}

impl Reader {
    /// Returns whether the reactor has dropped the counters, and the device has taken all counts.
    fn is_spent(&self) -> bool {
        Arc::strong_count(&self.counters) == 1 && self.counters.all() == self.last
    }
}

/// Counters of one control period; see [`Account`].
pub(crate) struct Counts {
    pub busy: bool,
    /// Whether an operation had to wait.
    pub has_waited: bool,
    /// Whether most of the disk's operations had to wait.
    pub mostly_waited: bool,
    /// Whether the disk had a large operation in flight, or was in the gap after one.
    pub is_large: bool,
    pub cost_ns: u64,
    pub served: u64,
    /// Times without what stalls of the device caused.
    pub service_ns: u64,
    pub latency_ns: u64,
    pub baseline_ns: u64,
    pub unknown: u64,
}

impl Counts {
    /// Returns what the disk may have used of the device in the control period. The cost of a large
    /// operation may be far too low, so a disk with one may have used the device all the time.
    pub fn used(&self, elapsed: u64) -> u64 {
        if self.is_large { self.cost_ns.max(elapsed) } else { self.cost_ns }
    }
}

impl Account {
    pub fn new(knobs: &Knobs, group: Option<Arc<Group>>) -> Self {
        let account = Account {
            start_tag: AtomicU64::default(),
            virtual_rate: AtomicU64::default(),
            margin: AtomicU64::default(),
            waiting: AtomicU64::default(),
            in_flight: InFlight::default(),
            group,
            awake: AtomicBool::default(),
            is_queued: AtomicBool::default(),
            is_over_share: AtomicBool::default(),
            is_active: AtomicBool::default(),
            held: AtomicBool::default(),
            is_reserved: AtomicBool::default(),
            present: AtomicBool::default(),
            own_weight: AtomicU32::default(),
            reserve: Reserve::default(),
            gap_until: AtomicU64::default(),
            large_in_flight: AtomicU32::default(),
            had_large: AtomicBool::default(),
            gap_timed: AtomicU64::default(),
            waits: AtomicU64::default(),
            begun: AtomicU64::default(),
            more_cost_ns: AtomicU64::default(),
            counters: Mutex::default(),
            within_at: AtomicU64::default(),
            within_held: AtomicU64::default(),
            short_margin: AtomicU64::default(),
            busy_at: AtomicU64::default(),
            rested_at: AtomicU64::default(),
            name: OnceLock::new(),
            number: OnceLock::new(),
            weight: AtomicU64::default(),
            rate: AtomicU64::new(1f64.to_bits()),
            due: AtomicU64::new(1f64.to_bits()),
            latency_target: AtomicU64::default(),
            sums: Sums::default(),
        };
        account.set(knobs);
        account.set_weight(f64::from(account.own_weight()), 0);
        account
    }

    /// Changes the knobs.
    pub fn set(&self, knobs: &Knobs) {
        self.own_weight.store(knobs.weight.clamp(1, Knobs::MAX_WEIGHT), Relaxed);
        self.reserve.set(knobs);
        self.is_reserved.store(self.reserve.is_set(), Relaxed);
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

    /// Sets the effective weight. Returns whether it has changed. `device`: the device's virtual
    /// time. By what the disk is ahead of it, it was charged at the old weight.
    pub fn set_weight(&self, weight: f64, device: u64) -> bool {
        let weight = weight.max(MIN_WEIGHT);
        let old = self.weight();
        if old > 0.0 && old != weight {
            let rescaled = |own: u64| {
                let lead = own.wrapping_sub(device) as f64 * (old / weight);
                before(device, own).then(|| device.wrapping_add(lead as u64))
            };
            let _ = self.start_tag.fetch_update(Relaxed, Relaxed, rescaled);
        }
        self.weight.store(weight.to_bits(), Relaxed);
        self.virtual_rate
            .store(((1u64 << (20 + FRACTION_BITS)) as f64 / weight).round() as u64, Relaxed);
        old != weight
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

    /// Returns the disk's share of the device in the last period, in nanoseconds of cost a
    /// nanosecond.
    pub fn rate(&self) -> f64 {
        f64::from_bits(self.rate.load(Relaxed))
    }

    /// Returns how long the disk's share of the device takes to cover `cost`. Both are in
    /// nanoseconds.
    pub fn time_of(&self, cost: u64) -> u64 {
        (cost as f64 / self.rate()) as u64
    }

    /// Returns the cost in nanoseconds that a unit of virtual time is worth to the disk.
    pub fn worth(&self) -> f64 {
        self.weight() / f64::from(1u32 << 20)
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
        self.is_reserved.load(Relaxed)
            || self.group.as_ref().is_some_and(|group| group.reserve.is_set())
    }

    /// Returns whether an operation of the disk, or of its group, is due by reservation.
    #[inline]
    pub fn reservation_is_due(&self, now: Time) -> bool {
        self.reserve.is_due(now)
            || self.group.as_ref().is_some_and(|group| group.reserve.is_due(now))
    }

    /// Returns whether the reservation of the disk or of its group is not met for now.
    pub fn reservation_is_behind(&self, now: Time) -> bool {
        self.reserve.is_behind(now)
            || self.group.as_ref().is_some_and(|group| group.reserve.is_behind(now))
    }

    /// Counts an admitted operation against the reservations of the disk and its group.
    #[inline]
    pub fn charge_reservation(&self, now: Time, reserved: Reserved) {
        if self.is_reserved.load(Relaxed) {
            self.reserve.charge(now, reserved);
        }
        if let Some(group) = &self.group {
            group.reserve.charge(now, reserved);
        }
    }

    /// Returns counters for a further reactor.
    pub fn new_counters(&self) -> Arc<Counters> {
        let counters = Arc::<Counters>::default();
        let mut readers = self.counters();
        // No control period visits a disk without operations, so nothing else removes the counters
        // of reactors that have closed it.
        readers.retain(|reader| !reader.is_spent());
        readers.push(Reader { counters: counters.clone(), ..Reader::default() });
        counters
    }

    fn counters(&self) -> MutexGuard<'_, Vec<Reader>> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an operation that did not begin by [`crate::ReactorShare::ask`].
    pub fn began(&self) {
        self.begun.fetch_add(1, Relaxed);
    }

    /// Counts cost in addition to that of requests.
    pub fn costs_more(&self, cost_ns: u64) {
        self.more_cost_ns.fetch_add(cost_ns, Relaxed);
    }

    /// Returns whether the disk has used at most its share plus the margin. `device`: the device's
    /// virtual time.
    #[inline]
    pub fn is_within_share(&self, device: u64) -> bool {
        let mut margin = self.margin.load(Relaxed);
        if self.is_queued.load(Relaxed) && self.within_held.load(Relaxed) > 0 {
            margin = margin.min(self.short_margin.load(Relaxed));
        }
        let end = device.wrapping_add(margin);
        !before(end, self.start_tag.load(Relaxed))
            && self.waiting.load(Relaxed) == 0
            && !self.held.load(Relaxed)
    }

    /// Sets the cost, in nanoseconds, by which the disk may exceed its share.
    pub fn set_margin(&self, cost: u64) {
        self.margin.store(self.virtual_cost(cost), Relaxed);
    }

    /// Returns the cost, in nanoseconds, by which the disk may exceed its share.
    pub fn margin(&self) -> u64 {
        (self.margin.load(Relaxed) as f64 * self.worth()) as u64
    }

    /// Reverts the charge of an operation that does not begin.
    pub fn refund(&self, cost: u64) {
        self.start_tag.fetch_sub(self.virtual_cost(cost), Relaxed);
    }

    /// Returns whether the disk's next operation takes room that the disks in the queue share. A
    /// disk within its share keeps its part of the window while it waits, and fills it first.
    #[inline]
    pub fn takes_room(&self) -> bool {
        self.is_queued.load(Relaxed) && !self.has_part_left()
    }

    /// Returns whether the disk has less in flight than its part of the window.
    pub fn has_part_left(&self) -> bool {
        self.in_flight.get().1 < self.within_held.load(Relaxed)
    }

    /// Sets the disk's part of the window, in nanoseconds of cost, and the cost by which the disk
    /// may exceed its share while it waits now and then. A larger lead would be paid back by long
    /// waits.
    pub fn set_part(&self, held: u64, lead: u64) {
        self.within_held.store(held, Relaxed);
        self.short_margin.store(self.virtual_cost(lead), Relaxed);
    }

    /// Returns whether the disk was over its share in the last control period, or had to wait.
    pub fn is_over_share(&self) -> bool {
        self.is_over_share.load(Relaxed) || self.is_queued.load(Relaxed)
    }

    /// Returns whether no operation of the disk is in flight or waits.
    pub fn is_idle(&self) -> bool {
        self.in_flight.get().0 == 0 && self.waiting.load(Relaxed) == 0
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

    /// Returns what was counted in the control period that ends.
    pub fn take_counts(&self, now: Time, elapsed: u64) -> Counts {
        let mut sums = [0u64; 8];
        self.counters().retain_mut(|reader| {
            // A reactor drops its counters after it has counted for the last time.
            let is_used = Arc::strong_count(&reader.counters) > 1;
            let all = reader.counters.all();
            for ((sum, all), last) in sums.iter_mut().zip(all).zip(&mut reader.last) {
                *sum = sum.wrapping_add(all.wrapping_sub(*last));
                *last = all;
            }
            is_used
        });
        let [begun, served, cost_ns, service_ns, latency_ns, baseline_ns, unknown, stalled_ns] =
            sums;
        let begun = begun + self.begun.swap(0, Relaxed);
        let waits = self.waits.swap(0, Relaxed);
        let counts = Counts {
            busy: false,
            is_large: self.had_large.swap(false, Relaxed)
                || self.large_in_flight.load(Relaxed) > 0
                || now < self.gap_until.load(Relaxed).saturating_add(elapsed),
            has_waited: waits > 0 || self.waiting.load(Relaxed) > 0,
            mostly_waited: waits * 2 > begun || (begun == 0 && self.waiting.load(Relaxed) > 0),
            cost_ns: cost_ns.saturating_add(self.more_cost_ns.swap(0, Relaxed)),
            served,
            service_ns: service_ns.saturating_sub(stalled_ns),
            latency_ns: latency_ns.saturating_sub(stalled_ns),
            baseline_ns,
            unknown,
        };
        let busy = counts.cost_ns > 0 || counts.served > 0 || !self.is_idle();
        if busy {
            self.busy_at.store(now, Relaxed);
        }
        self.sums.service_ns.fetch_add(service_ns, Relaxed);
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
mod tests;
