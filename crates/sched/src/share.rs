//! One disk's account: its share of a device, its reservation, its limits, and its statistics.
//!
//! In: an operation and the current time. Out: whether its limits and its share admit it. The fast
//! path uses a few atomic counters on cache lines of the disk, which only the reactors that serve
//! this disk share.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Waker;

use crate::Time;
use crate::account::{Account, Counters};
use crate::carried::{MAX_DEBT_NS, MAX_SUM_NS, ShareState};
use crate::cost::Operation;
use crate::debt::{Debt, MIN_PART};
use crate::device::{Device, Grant};
use crate::group::Group;
use crate::knobs::Knobs;
use crate::limit::{Flow, Limiter, Owed};
use crate::wait_list::WaitToken;

/// Time after which a disk that owes something to its group looks again.
const OWED_CHECK_NS: u64 = 10_000_000;

/// Statistics of a share since its disk was opened. All except `weight`, `waiting` and `queued` are
/// in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Effective weight: the disk's own weight, or its part of the group's weight.
    pub weight: f64,
    /// Device time while the disk was busy: what its share allowed, what it used, and what it left
    /// to others.
    pub owed_ns: u64,
    pub used_ns: u64,
    pub donated_ns: u64,
    /// Time that the disk's operations waited for its limits, and for the device.
    pub limited_ns: u64,
    pub waited_ns: u64,
    /// Sum of the service times of the disk's operations, and of their baseline service times.
    pub service_ns: u64,
    pub baseline_ns: u64,
    /// Number of operations that wait now: for the device, and for limits or the device.
    pub waiting: u64,
    pub queued: u64,
}

/// A disk's share; see the module documentation. The device forgets the disk when this is dropped.
#[derive(Debug)]
pub struct Share {
    account: Arc<Account>,
    limiter: Limiter,
    /// The disk's flow in the limits of its group.
    group_flow: Option<Arc<Flow>>,
    /// What the disk owes to the limits of its group.
    owed: Owed,
    device: Option<Arc<Device>>,
    debt: Debt,
    /// End offset of the disk's last operation in bytes, on a rotational device.
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
            owed: Owed::default(),
            device,
            debt: Debt::default(),
            position: AtomicU64::new(u64::MAX),
        }
    }

    /// Sets the disk's name, for reports. The first name stays.
    pub fn set_name(&self, name: &str) {
        let _ = self.account.name.set(name.to_string());
    }

    pub fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    pub fn group(&self) -> Option<&Arc<Group>> {
        self.account.group()
    }

    /// Returns the share for a reactor that serves the disk.
    pub fn on_reactor(self: &Arc<Self>) -> ReactorShare {
        ReactorShare {
            account: self.account.clone(),
            counters: self.account.new_counters(),
            device: self.device.clone(),
            share: self.clone(),
            one_thread: PhantomData,
        }
    }

    /// Changes the knobs.
    pub fn set(&self, knobs: &Knobs, now: Time) {
        self.account.set(knobs);
        self.limiter.set(&knobs.limits);
        self.group_flow.as_ref().inspect(|flow| flow.set_weight(knobs.weight));
        self.group_changed(now);
        // The change may give operations that already wait a reservation.
        self.claim(now);
    }

    /// Applies a change of the group's knobs.
    pub(crate) fn group_changed(&self, now: Time) {
        // A debt is paid at the new rates. What is owed to limits that are gone is forgotten.
        self.pay_group(now);
        self.debt.limits_changed(|| self.limiter.opens());
        match &self.device {
            Some(device) => device.reweigh(now),
            None => {
                self.account.set_weight(f64::from(self.account.own_weight()), 0);
            }
        }
    }

    /// Returns whether an operation begins where the disk's last one ended. None: the device
    /// handles several sequential streams of a disk. A rotational device handles one, because its
    /// heads seek between two streams.
    #[inline]
    pub fn follows(&self, offset: u64, bytes: u64) -> Option<bool> {
        let device = self.device.as_ref()?;
        device
            .is_rotational()
            .then(|| self.position.swap(offset.saturating_add(bytes), Relaxed) == offset)
    }

    /// Returns whether the disk has no limits and shares no device, so that every operation is
    /// admitted.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.device.is_none() && self.is_unlimited()
    }

    #[inline]
    pub fn is_unlimited(&self) -> bool {
        self.limiter.is_unlimited()
            && self.account.group.as_ref().is_none_or(|group| group.limiter.is_unlimited())
    }

    /// Adds a flow: a stream of operations that waits for the disk's limits in order of arrival.
    pub fn new_flow(&self) -> Arc<Flow> {
        self.limiter.join(Knobs::WEIGHT)
    }

    /// Charges the first operation of a flow to the limits of the disk and its group. Returns the
    /// time to retry if a limit refuses it.
    #[inline]
    pub fn limit(&self, now: Time, operation: &Operation, flow: &Flow) -> Result<(), Time> {
        let Some(group) = self.account.group() else {
            return self.limiter.take(now, operation, Some(flow));
        };
        group.pay_orphans(now);
        if Limiter::is_owed(operation, &self.owed) {
            // A burst may allow at once what is owed.
            let next = self.pay_group(now);
            if Limiter::is_owed(operation, &self.owed) {
                return Err(next.unwrap_or(now).min(now + OWED_CHECK_NS));
            }
        }
        self.limiter.take(now, operation, Some(flow))?;
        let taken = group.limiter.take_part(now, operation, self.group_flow.as_deref(), &self.owed);
        taken.inspect_err(|_| self.refund_own_limits(operation, Some(flow)))
    }

    /// Returns whether the disk must pay what it owes to its group ([`Share::pay_group`]). Until
    /// then it begins nothing that uses the limits to which it owes.
    #[inline]
    pub fn owes_group(&self) -> bool {
        self.group_flow.is_some() && !self.owed.is_zero()
    }

    /// Pays what the disk owes to the limits of its group, as far as its turn among the disks of
    /// the group allows. Returns the time to call this again, or `None` if all is paid.
    pub fn pay_group(&self, now: Time) -> Option<Time> {
        self.group_limiter()?.pay(now, self.group_flow.as_deref(), &self.owed)
    }

    /// Adds an operation to the device's wait list. When it is admitted, `token` reports it
    /// ([`WaitToken::take_grant`]) and `waker` is woken. The waker may be woken before that. Then,
    /// and at the returned time, call [`Share::claim`].
    pub fn wait(
        &self,
        now: Time,
        operation: &Operation,
        token: &Arc<WaitToken>,
        waker: &Waker,
    ) -> Option<Time> {
        let device = self.device.as_ref()?;
        let probe = device.wait(&self.account, now, operation, token, waker);
        self.next_claim(now).into_iter().chain(probe).min()
    }

    /// Returns when the reservation is due for the last waiting operation.
    fn next_claim(&self, now: Time) -> Option<Time> {
        let ahead = self.account.waiting.load(Relaxed);
        let group = self.account.group.as_ref().and_then(|group| group.reserve.next(now, ahead));
        let own = self.account.reserve.next(now, ahead);
        own.into_iter().chain(group).min()
    }

    /// Admits waiting operations for which the reservation is due, or which a probe has held.
    /// Returns when to call this again.
    pub fn claim(&self, now: Time) -> Option<Time> {
        let probe = self.device.as_ref()?.claim(&self.account, now);
        self.next_claim(now).into_iter().chain(probe).min()
    }

    /// Records that an operation which waited for the device was cancelled before it was admitted.
    /// Refunds what its limits have charged.
    pub fn withdraw(&self, now: Time, operation: &Operation) {
        self.refund_limits(operation, false);
        if let Some(device) = &self.device {
            device.withdraw(now);
        }
    }

    /// Returns the grant of an operation that was admitted after a wait. Give it to
    /// [`ReactorShare::done`].
    /// `asked`: time of arrival.
    pub fn granted(
        &self,
        asked: Time,
        now: Time,
        operation: &Operation,
        token: &WaitToken,
    ) -> Grant {
        self.device.as_ref().map_or_else(Grant::default, |device| {
            device.granted(&self.account, asked, now, operation, token)
        })
    }

    /// Reverts an admission, because the operation does not begin.
    pub fn refund(&self, now: Time, operation: &Operation, grant: Grant) {
        self.refund_limits(operation, grant.owes_limits);
        if grant.owes_device {
            self.debt.forgive_device(grant.cost_ns);
        }
        if let Some(device) = &self.device {
            device.refund(&self.account, now, &grant);
        }
    }

    /// Refunds an operation to the disk's own limits. A drain on another reactor may have charged
    /// them meanwhile, so that the debt contains the operation.
    fn refund_own_limits(&self, operation: &Operation, flow: Option<&Flow>) {
        if !self.limiter.is_unlimited() {
            self.limiter.refund(operation, flow);
            self.debt.limits_changed(|| self.limiter.opens());
        }
    }

    /// Refunds an operation to the limits of the disk and its group. `is_forced`: a drain has
    /// admitted it before the limits did.
    fn refund_limits(&self, operation: &Operation, is_forced: bool) {
        self.refund_own_limits(operation, None);
        if let Some(group) = self.group_limiter() {
            let reduce = |limit, most| match is_forced {
                true => self.owed.remove_from(limit, most),
                false => self.owed.take_back(limit, most),
            };
            group.refund_part(operation, self.group_flow.as_deref(), reduce);
        }
    }

    /// Charges a sync of the device. It does not wait, because other requests may wait for it.
    pub fn sync(&self, now: Time) -> Grant {
        self.device.as_ref().map_or_else(Grant::default, |device| device.sync(&self.account, now))
    }

    /// Returns whether the disk or its group has a reservation.
    pub fn has_reservation(&self) -> bool {
        self.account.has_reservation()
    }

    /// Returns whether other disks use the device.
    #[inline]
    pub fn has_neighbours(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_shared())
    }

    /// Charges the operations and bytes that the image made beyond its requests: metadata and
    /// copies.
    pub fn charge_more(&self, operations: u64, bytes: u64) {
        if let Some(device) = &self.device {
            let cost = device.costs().of_more(operations, bytes);
            device.charge_more(&self.account, cost);
        }
    }

    /// Adds the nanoseconds that an operation waited for the limits, and for the device.
    #[inline]
    pub fn note_waits(&self, limited_ns: u64, waited_ns: u64) {
        if limited_ns > 0 {
            self.account.sums.limited_ns.fetch_add(limited_ns, Relaxed);
        }
        if waited_ns > 0 {
            self.account.sums.waited_ns.fetch_add(waited_ns, Relaxed);
        }
    }

    /// Returns the time from which the disk's own limits admit an operation.
    #[cfg(test)]
    pub(crate) fn opens_own(&self) -> Time {
        self.limiter.opens()
    }

    fn group_limiter(&self) -> Option<&Limiter> {
        self.account.group.as_ref().map(|group| &group.limiter)
    }

    /// Admits an operation that cannot wait, because its queue is drained. Its cost becomes a debt
    /// to the limits and to the device.
    pub fn force(&self, now: Time, operation: &Operation) -> Grant {
        self.debt.owe_limits(self.limiter.force(now, operation), || self.limiter.opens());
        if let Some(group) = self.group_limiter() {
            group.owe(operation, &self.owed);
        }
        let mut grant = self.device.as_ref().map_or_else(Grant::default, |device| {
            let mut grant = device.force(&self.account, now, operation);
            // A disk that has the device to itself owes nothing.
            grant.owes_device = device.is_shared();
            if grant.owes_device {
                self.owe_device(device, now, grant.cost_ns);
            }
            grant
        });
        grant.owes_limits = true;
        grant
    }

    /// Admits the operations that wait for the device, because a queue of the disk is drained.
    /// Their cost becomes a debt to the device.
    pub fn release(&self, now: Time) {
        if let Some(device) = &self.device {
            let owe = |cost| self.owe_device(device, now, cost);
            self.debt.forgive_device(device.release(&self.account, now, owe));
        }
    }

    /// Adds `cost` nanoseconds to the debt to the device.
    fn owe_device(&self, device: &Device, now: Time, cost: u64) {
        self.debt.owe_device(now, [cost; 2], &device.payment(&self.account));
    }

    /// Records that an operation waits. Returns its cost in nanoseconds for [`Share::leave_queue`].
    pub fn join_queue(&self, operation: &Operation) -> u64 {
        let limits = self
            .limiter
            .cost_ns(operation)
            .max(self.group_limiter().map_or(0, |group| group.cost_ns(operation)));
        let device =
            self.device.as_ref().map_or(0, |device| device.duration_of(&self.account, operation));
        self.debt.join(limits.max(device))
    }

    /// Records that an operation of `cost_ns` no longer waits.
    pub fn leave_queue(&self, cost_ns: u64) {
        self.debt.leave(cost_ns);
    }

    /// Returns until when the disk's queues must take no requests: a debt is not paid yet, or so
    /// many operations wait that a drain would admit too much. None: they may take requests.
    #[inline]
    pub fn paused_until(&self, now: Time) -> Option<Time> {
        self.owes_until(now).or_else(|| self.debt.full_until(now))
    }

    /// Like [`Share::paused_until`] for a queue without a request in flight: only a debt holds it.
    /// Otherwise clients that always have many operations waiting, such as those of NBD, would hold
    /// it for ever.
    #[inline]
    pub fn owes_until(&self, now: Time) -> Option<Time> {
        if self.group_flow.is_some() && self.owed.is_forced() {
            return Some(now + OWED_CHECK_NS);
        }
        let device = self.device.as_ref();
        self.debt.paid_at(now, || device.map(|device| device.standing(&self.account, now)))
    }

    /// Moves the state of the share to the next server. No operation of the disk is in flight.
    pub fn hand_over(&self, now: Time) -> ShareState {
        let device_debt = self.device.as_ref().map(|device| {
            let payment = device.payment(&self.account);
            self.debt.device_left(now, &payment)
        });
        let [device_debt_ns, cost, order] = device_debt.unwrap_or_default();
        let owes_device = cost > 0 || order > 0;
        let group = self.account.group();
        let group_forced = (!self.owed.is_zero()).then(|| self.owed.forced());
        let figures = self.figures();
        ShareState {
            limits: self.limiter.hand_over(now),
            group: group.map(|group| group.name().into()),
            group_limits: group.map(|group| group.limiter.hand_over(now)).unwrap_or_default(),
            group_owed: self.owed.hand_over(),
            group_forced,
            group_orphans: group.map(|group| group.orphans.hand_over()).unwrap_or_default(),
            limits_debt_ns: self.debt.limits_left(now),
            device_debt_ns,
            device_debt_cost_ns: owes_device.then_some(cost),
            device_debt_order_ns: owes_device.then_some(order),
            owed_ns: figures.owed_ns,
            used_ns: figures.used_ns,
            donated_ns: figures.donated_ns,
            limited_ns: figures.limited_ns,
            waited_ns: figures.waited_ns,
            service_ns: figures.service_ns,
            baseline_ns: figures.baseline_ns,
        }
    }

    /// Continues from the state of another server's share. Call it once, before the first
    /// operation.
    pub fn continue_from(&self, now: Time, state: &ShareState) {
        self.limiter.continue_from(now, &state.limits);
        if let Some(group) = self.account.group()
            && state.group.as_deref() == Some(group.name())
        {
            group.limiter.continue_from(now, &state.group_limits);
            group.limiter.continue_owed(&state.group_owed, &self.owed);
            group.limiter.continue_owed(&state.group_orphans, &group.orphans);
            self.owed.continue_forced(state.group_forced.as_ref());
        }
        let until = now.saturating_add(state.limits_debt_ns.min(MAX_DEBT_NS));
        // The debt is not longer than the limits of this server make it.
        self.debt.owe_limits(until, || self.limiter.opens());
        if let Some(device) = &self.device {
            // An older server knew only the time. At least this much of it is cost.
            let least = (state.device_debt_ns as f64 * MIN_PART) as u64;
            let cost = state.device_debt_cost_ns.unwrap_or(least).min(MAX_DEBT_NS);
            let order = state.device_debt_order_ns.unwrap_or(cost).min(MAX_DEBT_NS);
            self.debt.owe_device(now, [cost, order], &device.payment(&self.account));
        }
        let sums = &self.account.sums;
        for (sum, more) in [
            (&sums.owed_ns, state.owed_ns),
            (&sums.used_ns, state.used_ns),
            (&sums.donated_ns, state.donated_ns),
            (&sums.limited_ns, state.limited_ns),
            (&sums.waited_ns, state.waited_ns),
            (&sums.service_ns, state.service_ns),
            (&sums.baseline_ns, state.baseline_ns),
        ] {
            sum.fetch_add(more.min(MAX_SUM_NS), Relaxed);
        }
    }

    /// Returns the statistics since the disk was opened, in this server or an earlier one.
    pub fn figures(&self) -> Figures {
        let get = |sum: &AtomicU64| sum.load(Relaxed);
        let sums = &self.account.sums;
        Figures {
            weight: match &self.device {
                Some(device) => device.weight_of(&self.account),
                None => self.account.weight(),
            },
            owed_ns: get(&sums.owed_ns),
            used_ns: get(&sums.used_ns),
            donated_ns: get(&sums.donated_ns),
            limited_ns: get(&sums.limited_ns),
            waited_ns: get(&sums.waited_ns),
            service_ns: get(&sums.service_ns),
            baseline_ns: get(&sums.baseline_ns),
            waiting: get(&self.account.waiting),
            queued: self.debt.waiting(),
        }
    }
}

/// A share as one reactor uses it. It counts without atomic additions, so only one thread at a time
/// may have it.
#[derive(Debug)]
pub struct ReactorShare {
    account: Arc<Account>,
    counters: Arc<Counters>,
    device: Option<Arc<Device>>,
    share: Arc<Share>,
    /// [`Counters`] have one writer, so this type is not `Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Deref for ReactorShare {
    type Target = Arc<Share>;

    fn deref(&self) -> &Arc<Share> {
        &self.share
    }
}

impl ReactorShare {
    /// Asks the device to admit an operation. None: it must [`Share::wait`].
    #[inline]
    pub fn ask(&self, now: Time, operation: &Operation) -> Option<Grant> {
        match &self.device {
            Some(device) => device.ask((&self.account, &self.counters), now, operation),
            None => Some(Grant::default()),
        }
    }

    /// Lets an admitted operation take no part of the device's window from now on, because it lasts
    /// much longer than the device works for it. The caller charges that work separately.
    pub fn leave_room(&self, now: Time, grant: &mut Grant) {
        if let Some(device) = &self.device {
            device.leave_room(&self.account, now, grant);
        }
    }

    /// Records that an admitted operation has completed.
    #[inline]
    pub fn done(&self, now: Time, grant: Grant) {
        if let Some(device) = &self.device {
            device.done((&self.account, &self.counters), now, grant);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(group) = self.account.group() {
            self.owed.move_to(&group.orphans);
        }
        if let Some(device) = &self.device {
            device.leave(self.account.number());
        }
    }
}
