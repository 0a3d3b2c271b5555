//! The throttle of a disk on one reactor: requests wait here for the disk's limits, and for its
//! share of the device.
//!
//! ```text
//!   request ──► limits, in order of arrival ──► share of the device ──► admission ──► image
//! ```
//!
//! In: requests, before anything else is done for them. Out: an [`Admission`] for each request.
//! Crate `sched` computes who may begin; this module does the waiting.
//!
//! What must hold: a disk without limits, on a device of its own, pays nothing. Requests within
//! their limits and their share take no lock. The reads of one reactor pass the limits in order of
//! arrival, and so do the writes. A request that is dropped while it waits leaves nothing behind.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use blockyard_ring::Handle;
use blockyard_sched::{
    Flow, Grant, Operation, OperationKind, ReactorShare, Share, Time, WaitToken,
};

use crate::request::Op;
use crate::statistics::OpKind;

/// Longest sleep of a request that waits for limits. It must notice changes of the limits.
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// Additional sleep, so that one wake-up admits several requests.
const COALESCE: Duration = Duration::from_micros(300);
/// Number of sequential streams that the throttle detects on a reactor.
const STREAMS: usize = 8;

/// Returns the current time for `sched`, the same on all threads.
pub fn sched_time() -> Time {
    time_of(Instant::now())
}

pub(crate) fn time_of(at: Instant) -> Time {
    static START: OnceLock<Instant> = OnceLock::new();
    // Add one second, because a time field that was never set is 0 and must be in the past.
    at.saturating_duration_since(*START.get_or_init(Instant::now)).as_nanos() as u64 + 1_000_000_000
}

pub(crate) struct Throttle {
    share: ReactorShare,
    /// None in simulations without a clock (`Executor::simulated` has one). Then nothing is limited
    /// or shared.
    handle: Option<Handle>,
    /// Whether the disk is a device that may zero a range only by writing it.
    writes_zeroes: bool,
    /// Wait queues for the limits: one for reads, one for all other operations.
    wait_queues: [WaitQueue; 2],
    /// Number of the last request that arrived.
    arrived: Cell<u64>,
    /// Requests up to this number bypass the throttle, because a queue was drained after they
    /// arrived.
    drained: Cell<u64>,
    /// Number of exports that are ending on this reactor. While it is not 0, no request waits.
    suspended: Cell<u32>,
    tokens: RefCell<Vec<Arc<WaitToken>>>,
    /// A task pays what the disk owes to its group.
    pays: Rc<Cell<bool>>,
    /// End offsets of the detected streams, in bytes.
    ends: [Cell<u64>; STREAMS],
    next_end: Cell<usize>,
}

/// Requests that wait for the limits in order of arrival.
struct WaitQueue {
    flow: Arc<Flow>,
    waiting: RefCell<Waiting>,
}

/// Requests by number, mostly in ascending order: a request that has waited for space has an old
/// number. The first one is not withdrawn.
#[derive(Default)]
struct Waiting {
    /// None: the request was withdrawn.
    all: VecDeque<(u64, Option<Waker>)>,
    withdrawn: usize,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn is_first(&self, number: u64) -> bool {
        self.all.front().is_some_and(|(first, _)| *first == number)
    }

    fn push(&mut self, number: u64, waker: Waker) {
        self.all.push_back((number, Some(waker)));
    }

    fn wake_all(&self) {
        self.all.iter().filter_map(|(_, waker)| waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    /// Removes a request, and wakes the first one. A queue that stops may withdraw a thousand
    /// requests of many thousands.
    fn remove(&mut self, number: u64) {
        let waits = |(other, waker): &(u64, Option<Waker>)| *other == number && waker.is_some();
        let at = self.all.binary_search_by_key(&number, |(number, _)| *number).ok();
        let at = at.filter(|at| self.all.get(*at).is_some_and(waits));
        let at = at.or_else(|| self.all.iter().position(waits));
        if let Some((_, waker)) = at.and_then(|at| self.all.get_mut(at)) {
            *waker = None;
            self.withdrawn += 1;
        }
        while self.all.pop_front_if(|(_, waker)| waker.is_none()).is_some() {
            self.withdrawn -= 1;
        }
        if self.withdrawn > self.all.len() / 2 {
            self.all.retain(|(_, waker)| waker.is_some());
            self.withdrawn = 0;
        }
        if let Some((_, Some(next))) = self.all.front() {
            next.wake_by_ref();
        }
    }
}

/// A request that was admitted. Dropping this releases its part of the device.
#[derive(Default)]
pub(crate) struct Admission<'a>(Option<(&'a Throttle, Grant)>);

impl Drop for Admission<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((throttle, grant)) = self.0.take() {
            throttle.share.done(throttle.now(), grant);
        }
    }
}

impl Admission<'_> {
    /// Lets the request take no part of the device from now on, so that its neighbours do not wait
    /// for its end. It lasts much longer than the device works for it.
    pub fn leave_room(&mut self) {
        if let Some((throttle, grant)) = &mut self.0 {
            throttle.share.leave_room(throttle.now(), grant);
        }
    }

    /// Ends the admission before the request. The device does no work for it from now on that is
    /// not charged by itself.
    pub fn end(&mut self) {
        self.set_idle();
        *self = Admission(None);
    }

    /// The device has not worked for the request: the image knew the answer, or refused it.
    #[inline]
    pub fn set_idle(&mut self) {
        if let Some((_, grant)) = &mut self.0 {
            grant.set_idle();
        }
    }

    /// Reverts the admission, because the request does not begin.
    pub fn give_back(mut self, operation: &Operation) {
        if let Some((throttle, grant)) = self.0.take() {
            throttle.share.refund(throttle.now(), operation, grant);
        }
    }
}

impl Throttle {
    pub fn new(share: Arc<Share>, handle: Option<Handle>, writes_zeroes: bool) -> Self {
        let (arrived, drained, suspended, tokens, pays) = Default::default();
        let (ends, next_end) = Default::default();
        let wait_queues =
            [(); 2].map(|()| WaitQueue { flow: share.new_flow(), waiting: RefCell::default() });
        Throttle {
            share: share.on_reactor(),
            handle,
            writes_zeroes,
            wait_queues,
            arrived,
            drained,
            suspended,
            tokens,
            pays,
            ends,
            next_end,
        }
    }

    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Returns whether nothing is limited or shared. Then [`Throttle::enter`] is not needed.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.handle.is_none() || self.share.is_free()
    }

    /// Returns the time of the reactor's iteration.
    #[inline]
    fn now(&self) -> Time {
        self.handle.as_ref().map_or(0, |handle| time_of(handle.now()))
    }

    /// Reads the reactor's clock.
    fn read_clock(&self) -> Time {
        self.handle.as_ref().map_or(0, |handle| time_of(handle.read_clock()))
    }

    /// Wakes the current task after `time`.
    fn wake_after(&self, time: Duration) {
        if let Some(handle) = &self.handle {
            handle.wake_at(handle.read_clock() + time);
        }
    }

    /// Returns the operation that a request makes on the device. A flush costs little by itself;
    /// the sync that it causes is charged to the disk that runs it. Zeroes that the device may have
    /// to write cost as much as a write.
    #[inline]
    pub fn operation(&self, op: Op, offset: u64, bytes: u64, requests: u32) -> Operation {
        let kind = match OpKind::of(op) {
            OpKind::Read => OperationKind::Read,
            OpKind::Write => OperationKind::Write,
            OpKind::Flush => OperationKind::Flush,
            OpKind::Discard => OperationKind::Discard,
            OpKind::WriteZeroes if self.writes_zeroes => OperationKind::Write,
            OpKind::WriteZeroes => OperationKind::WriteZeroes,
        };
        Operation { kind, bytes, sequential: self.follows(offset, bytes), requests }
    }

    /// Returns whether the operation begins where an earlier one ended.
    #[inline]
    fn follows(&self, offset: u64, bytes: u64) -> bool {
        if let Some(follows) = self.share.follows(offset, bytes) {
            return follows;
        }
        let known = self.ends.iter().find(|end| end.get() == offset);
        match known {
            Some(end) => end.set(offset + bytes),
            None => {
                let at = self.next_end.get();
                self.next_end.set((at + 1) % STREAMS);
                self.ends[at].set(offset + bytes);
            }
        }
        known.is_some()
    }

    /// Returns the number of a new request. Call it once, before the first [`Throttle::enter`].
    #[inline]
    pub fn arrive(&self) -> u64 {
        self.arrived.set(self.arrived.get() + 1);
        self.arrived.get()
    }

    #[inline]
    fn bypasses(&self, number: u64) -> bool {
        number <= self.drained.get() || self.suspended.get() > 0
    }

    /// Waits until the limits and the device admit a request. `number`: see [`Throttle::arrive`].
    #[inline]
    pub async fn enter(&self, operation: &Operation, number: u64) -> Admission<'_> {
        if self.is_open() {
            return Admission(None);
        }
        if self.bypasses(number) {
            return Admission(Some((self, self.force(self.now(), operation))));
        }
        let limited = !self.share.is_unlimited() && !self.passes_limits(operation);
        let grant = if limited { None } else { self.share.ask(self.now(), operation) };
        match grant {
            Some(grant) => Admission(Some((self, grant))),
            None => Admission(Some((self, Box::pin(self.wait(operation, number, limited)).await))),
        }
    }

    fn passes_limits(&self, operation: &Operation) -> bool {
        // A flush never waits, because no limit applies to it.
        let queue = self.wait_queue(operation);
        let first = operation.kind == OperationKind::Flush || queue.waiting.borrow().is_empty();
        first && self.limit(self.now(), operation, &queue.flow).is_ok()
    }

    fn limit(&self, now: Time, operation: &Operation, flow: &Flow) -> Result<(), Time> {
        let admitted = self.share.limit(now, operation, flow);
        self.pay_group();
        admitted
    }

    fn force(&self, now: Time, operation: &Operation) -> Grant {
        let grant = self.share.force(now, operation);
        self.pay_group();
        grant
    }

    /// Begins to pay what the disk owes to its group. From then on it pays also while its guest is
    /// idle.
    #[inline]
    fn pay_group(&self) {
        if self.share.owes_group() && !self.pays.replace(true) {
            self.begin_to_pay();
        }
    }

    #[cold]
    fn begin_to_pay(&self) {
        let Some(handle) = &self.handle else { return };
        let (share, clock, pays) =
            (Arc::downgrade(self.share()), handle.clone(), self.pays.clone());
        handle.spawn(async move {
            while let Some(share) = share.upgrade() {
                let now = time_of(clock.read_clock());
                let Some(next) = share.pay_group(now) else { break };
                drop(share);
                clock.sleep(Duration::from_nanos(next - now).min(MAX_SLEEP)).await;
            }
            pays.set(false);
        });
    }

    fn wait_queue(&self, operation: &Operation) -> &WaitQueue {
        &self.wait_queues[usize::from(operation.kind != OperationKind::Read)]
    }

    async fn wait(&self, operation: &Operation, number: u64, limited: bool) -> Grant {
        let arrived = self.read_clock();
        let _pending =
            PendingCost { share: &self.share, cost_ns: self.share.join_queue(operation) };
        let drained = limited && !self.wait_for_limits(operation, number).await;
        let passed = if limited { self.read_clock() } else { arrived };
        if drained {
            self.share.note_waits(passed - arrived, 0);
            return self.force(passed, operation);
        }
        let grant = match if limited { self.share.ask(passed, operation) } else { None } {
            Some(grant) => grant,
            None => self.wait_for_device(operation).await,
        };
        self.share.note_waits(passed - arrived, self.read_clock() - passed);
        grant
    }

    /// Waits until the limits admit the operation, after earlier ones. Returns false if a drain
    /// admits it.
    async fn wait_for_limits(&self, operation: &Operation, number: u64) -> bool {
        let queue = self.wait_queue(operation);
        let mut position = QueuePosition { queue, number: None };
        poll_fn(|cx| {
            if position.number.is_none() {
                position.number = Some(number);
                queue.waiting.borrow_mut().push(number, cx.waker().clone());
            }
            if self.bypasses(number) {
                return Poll::Ready(false);
            }
            if !queue.waiting.borrow().is_first(number) {
                return Poll::Pending;
            }
            match self.limit(self.read_clock(), operation, &queue.flow) {
                Ok(()) => Poll::Ready(true),
                Err(opens) => {
                    let wait = Duration::from_nanos(opens.saturating_sub(self.read_clock()));
                    self.wake_after(wait.saturating_add(COALESCE).min(MAX_SLEEP));
                    Poll::Pending
                }
            }
        })
        .await
    }

    async fn wait_for_device(&self, operation: &Operation) -> Grant {
        let token = self.tokens.borrow_mut().pop().unwrap_or_default();
        let mut wait = DeviceWait { throttle: self, operation, token, begun: false };
        let asked = self.read_clock();
        poll_fn(|cx| {
            let now = self.read_clock();
            let mut claim = None;
            if !wait.begun {
                wait.begun = true;
                claim = self.share.wait(now, operation, &wait.token, cx.waker());
            } else if !wait.token.is_granted() {
                claim = self.share.claim(now);
            }
            if wait.token.take_grant() {
                wait.begun = false;
                return Poll::Ready(self.share.granted(asked, now, operation, &wait.token));
            }
            if let Some(claim) = claim {
                self.wake_after(Duration::from_nanos(claim.saturating_sub(now)));
            }
            Poll::Pending
        })
        .await
    }

    /// Charges a sync of the disk. It counts as in flight until the result is dropped.
    pub fn sync(&self) -> Admission<'_> {
        if self.is_open() {
            return Admission(None);
        }
        Admission(Some((self, self.share.sync(self.now()))))
    }

    /// Admits all waiting requests, because a queue of this disk is drained. Their cost becomes a
    /// debt of the disk ([`Throttle::queue_pause`]).
    pub fn drain(&self) {
        self.drained.set(self.arrived.get());
        self.share.release(self.now());
        self.wait_queues.iter().for_each(|queue| queue.waiting.borrow().wake_all());
    }

    /// Admits every request until [`Throttle::resume`], because an export of the disk ends.
    pub fn suspend(&self) {
        self.suspended.set(self.suspended.get() + 1);
        self.drain();
    }

    /// Returns whether an export of the disk ends on this reactor.
    pub fn is_suspended(&self) -> bool {
        self.suspended.get() > 0
    }

    /// Ends [`Throttle::suspend`].
    pub fn resume(&self) {
        // This reactor may have opened the disk after other reactors called `suspend`.
        self.suspended.set(self.suspended.get().saturating_sub(1));
    }

    /// Returns how long a queue of the disk must wait before it checks again whether it may take
    /// requests. None: it may take requests. `is_idle`: the queue has no request in flight, so the
    /// requests of other queues and clients that wait do not hold it.
    #[inline]
    pub fn queue_pause(&self, is_idle: bool) -> Option<Duration> {
        if self.is_open() {
            return None;
        }
        self.pay_group();
        let (share, now) = (&self.share, self.now());
        let until = if is_idle { share.owes_until(now) } else { share.paused_until(now) }?;
        Some(Duration::from_nanos(until - now).min(MAX_SLEEP))
    }
}

/// The cost of a request that waits for limits or the device; [`Share::paused_until`] counts it.
struct PendingCost<'a> {
    share: &'a Share,
    cost_ns: u64,
}

impl Drop for PendingCost<'_> {
    fn drop(&mut self) {
        self.share.leave_queue(self.cost_ns);
    }
}

/// Position in a wait queue. Dropping it wakes the next request of the queue.
struct QueuePosition<'a> {
    queue: &'a WaitQueue,
    number: Option<u64>,
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.queue.waiting.borrow_mut().remove(number);
        }
    }
}

struct DeviceWait<'a> {
    throttle: &'a Throttle,
    operation: &'a Operation,
    token: Arc<WaitToken>,
    begun: bool,
}

impl Drop for DeviceWait<'_> {
    fn drop(&mut self) {
        let Throttle { share, tokens, .. } = self.throttle;
        if self.begun {
            if self.token.cancel() {
                let now = self.throttle.now();
                share.refund(
                    now,
                    self.operation,
                    share.granted(now, now, self.operation, &self.token),
                );
            } else {
                share.withdraw(self.throttle.now(), self.operation);
            }
            // The token may still be in the device's wait list, so it must not be reused.
            return;
        }
        tokens.borrow_mut().push(self.token.clone());
    }
}

#[cfg(test)]
mod tests;
