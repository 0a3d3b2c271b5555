//! A virtqueue on its reactor: takes descriptor chains, hands requests to the disk, publishes used
//! elements, and signals the guest.
//!
//! ```text
//!   kick ─► run: take a batch of chains ─► lanes (a task for each request or run) ─► disk
//!            ▲   publish, signal once  ◄─────────────────────── answers ◄─────────────────────┘
//!            └── after each batch: submit and reap. On slow storage, this is the call that sleeps.
//! ```
//! What must hold:
//! - A chain is answered once, after its last request.
//! - Used elements are published before the in-flight region drops them, and before the guest is
//!   signalled.
//! - After `stop`, nothing more is taken. The reply is sent only when nothing is in flight at the
//!   disk.
//! - Lanes and segment lists are reused, so the steady state allocates nothing.

mod handle;
mod idle;
mod marking;
mod marks;
mod state;
mod token;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_disk::{LocalDisk, Request, Status};
use blockyard_ring::{GuestMemory, Handle, MemoryAlarm, Reply, Segments, Signal, Watch};

use super::device::DeviceState;
use super::inflight::InflightRegion;
use super::notify::Call;
use super::request::{Action, ParseContext, parse, wire_status};
use super::virtqueue::{Head, RingError};
use crate::PollMode;
use crate::budget::{self, Budget, REQUEST};
use crate::lanes::Lanes;
use crate::policy::Counters;
use crate::policy::placement::Placement;
use crate::policy::unkicked::Looks;
use crate::start::StartError;
use crate::{custody, placement};
use state::{Core, Pending, Unanswered};
use token::ChainToken;

pub use handle::QueueHandle;
pub use marks::Marks;

/// Number of chains that the queue takes before it submits their requests and publishes
/// completions. If storage answers at once (page cache, memory), small batches let guest and back
/// end work in parallel. If storage takes time, one submission for many chains is cheaper.
const BATCH_AT_ONCE: usize = 8;
const BATCH_IN_FLIGHT: usize = 64;
/// Number of batches for which storage counts as slow, after a request was still in flight after
/// its submission.
const SLOW_BATCHES: u32 = 64;

/// Maximum number of requests of one queue that the disk handles at a time. The limit bounds
/// memory, and is more than a disk can use.
const MOST_IN_FLIGHT: u32 = 1024;

/// What a queue needs at its start.
pub struct QueueSetup {
    pub index: u16,
    pub device: Arc<DeviceState>,
    pub memory: GuestMemory,
    /// If it is raised, the session ends, and the queue takes nothing more.
    pub alarm: Option<Arc<MemoryAlarm>>,
    pub size: u32,
    /// Guest addresses of the descriptors, the available ring (driver area) and the used ring
    /// (device area).
    pub parts: (u64, u64, u64),
    pub base: u32,
    pub packed: bool,
    pub event_idx: bool,
    pub inflight: Option<InflightRegion>,
    /// `base` is valid, and nothing of the ring is in flight, even if the in-flight region says
    /// otherwise.
    pub is_base_valid: bool,
    /// The ring has a later position than `base`, because another server has served it and died.
    pub is_base_lost: bool,
    pub kick: Option<OwnedFd>,
    /// The front end kicks by messages, so the queue need not poll by a timer if it has no kick
    /// descriptor.
    pub in_band: bool,
    pub call: Call,
    pub error: Option<OwnedFd>,
    pub enabled: bool,
    /// What the queue marks for live migration.
    pub marks: Option<Marks>,
    pub poll: PollMode,
    /// The queue takes no request before [`QueueHandle::release`].
    pub held: bool,
    /// The front end's process, if it is known.
    pub peer: Option<i32>,
}

/// The queues of a reactor, by their numbers.
#[derive(Default)]
struct Queues(RefCell<HashMap<u64, Rc<Queue>>>);

/// A virtqueue that runs on a reactor.
pub struct Queue {
    index: u16,
    handle: Handle,
    device: Arc<DeviceState>,
    served: Rc<LocalDisk>,
    core: RefCell<Core>,
    lanes: Rc<Lanes<ChainToken>>,
    /// Vector for the requests of a batch, kept for reuse.
    requests: RefCell<Vec<Request<ChainToken>>>,
    wake: Signal,
    budget: Budget,
    /// Number of requests that are not answered yet. A discard chain with several ranges counts
    /// once for each range.
    in_flight: Cell<u32>,
    done: Cell<u64>,
    enabled: Cell<bool>,
    held: Cell<bool>,
    /// The front end gave no kick descriptor, so the queue looks at its ring by a timer.
    looks: Option<Looks>,
    stopping: RefCell<Option<Reply<u32>>>,
    /// The queue stops, and leaves chains that have not begun in the in-flight region.
    suspends: Cell<bool>,
}

impl Queue {
    fn start(handle: &Handle, setup: QueueSetup, id: u64) -> Result<(), StartError> {
        let served = LocalDisk::local(handle, &setup.device.disk).map_err(StartError::disk)?;
        let queue = Self::start_on(handle, setup, served)?;
        handle.local::<Queues>().0.borrow_mut().insert(id, queue);
        Ok(())
    }

    /// Starts a queue of a disk that this reactor has open.
    fn start_on(
        handle: &Handle,
        setup: QueueSetup,
        served: Rc<LocalDisk>,
    ) -> Result<Rc<Self>, StartError> {
        let device = setup.device.clone();
        let lanes =
            Lanes::new(handle, served.clone(), move || device.write_back.load(Ordering::Relaxed));
        let mut setup = setup;
        let kick = setup.kick.take();
        let is_unkicked = kick.is_none() && !setup.in_band;
        let counters = Counters::local(handle, &setup.device.disk);
        let looks = is_unkicked.then(|| Looks::new(*idle::START, handle.now(), counters.clone()));
        let placement =
            Placement::new(placement::home(), placement::guest(setup.peer), counters.clone());
        let core = Core::new(&mut setup, placement, handle.now(), counters);
        let (core, unanswered) = core.map_err(|e| StartError::ring("", e))?;
        let queue = Rc::new(Queue {
            index: setup.index,
            handle: handle.clone(),
            served,
            core: RefCell::new(core),
            lanes,
            requests: RefCell::default(),
            wake: Signal::new(handle),
            budget: Budget::of(handle, &setup.device.disk),
            in_flight: Cell::new(0),
            done: Cell::new(0),
            enabled: Cell::new(setup.enabled),
            held: Cell::new(setup.held),
            looks,
            stopping: RefCell::new(None),
            suspends: Cell::new(false),
            device: setup.device,
        });
        let watch = kick.map(|fd| handle.watch(fd));
        handle.spawn(queue.clone().run(watch, unanswered));
        Ok(queue)
    }

    /// Stops the queue. `suspends`: chains that have not begun stay in the in-flight region for the
    /// next back end.
    fn stop(&self, reply: Reply<u32>, suspends: bool) {
        // A held queue of a server that fails before it is the owner begins nothing any more.
        let never_begins = self.held.get() && !custody::is_owner();
        let suspends = (suspends || never_begins) && self.core.borrow().inflight.is_some();
        self.suspends.set(suspends);
        *self.stopping.borrow_mut() = Some(reply);
        if suspends {
            self.lanes.wake();
            self.served.release_paused();
        } else {
            // The front end waits for the requests in flight, so these requests must not wait for a
            // throttle, or for space on the host.
            self.served.drain();
        }
        self.wake.ring();
    }

    async fn run(self: Rc<Self>, mut watch: Option<Watch>, unanswered: Vec<Unanswered>) {
        self.handle.label(&format!("disk {}, queue {}", self.device.disk.name(), self.index));
        self.released().await;
        if !unanswered.is_empty() {
            self.until_paid().await;
        }
        if !self.suspends.get() {
            self.repeat_unanswered(unanswered).await;
        }
        if self.stopping.borrow().is_some() && !self.suspends.get() {
            self.served.drain();
        }
        // The previous back end may have published used elements without a signal.
        self.core.borrow_mut().signal();
        let mut slow = 0;
        let mut gathered = false;
        loop {
            self.wake.clear();
            self.publish();
            let stopping = self.stopping.borrow().is_some();
            if stopping && self.in_flight.get() == 0 {
                break;
            }
            let takes = self.enabled.get()
                && self.in_flight.get() < MOST_IN_FLIGHT
                && self.core.borrow().works();
            let held_back = self.held_back(takes && !stopping);
            if takes && !stopping && held_back.is_none() {
                let taken = self.take(if slow > 0 { BATCH_IN_FLIGHT } else { BATCH_AT_ONCE });
                let spent = self.has_spent(taken);
                if std::mem::take(&mut gathered) {
                    self.core.borrow_mut().polling.gathered(
                        taken,
                        self.handle.now(),
                        self.done.get(),
                    );
                }
                if taken > 0 {
                    self.requests_arrived();
                }
                if spent || (taken > 0 && slow == 0) {
                    self.handle.yield_now().await;
                    // Storage is slow if a request is still in flight after a submission and a
                    // poll.
                    slow = if self.in_flight.get() > 0 {
                        SLOW_BATCHES
                    } else {
                        slow.saturating_sub(1)
                    };
                    continue;
                }
                if taken > 0 {
                    // On slow storage, one system call submits all requests and waits.
                    slow -= 1;
                }
                if let Some(limit) = self.went_empty()
                    && self.busy_poll(limit).await
                {
                    continue;
                }
                if let Some(watch) = &mut watch {
                    watch.arm();
                }
                if !self.core.borrow_mut().enable_kicks() {
                    continue;
                }
            }
            if !self.wake.arm() {
                if let Some(time) = held_back {
                    self.handle.wake_at(self.handle.read_clock() + time);
                }
                self.sleep(takes).await;
            }
            self.disable_kicks();
            if self.in_flight.get() == 0
                && let Some(time) = self.gathers()
            {
                self.handle.sleep(time).await;
                gathered = true;
            }
        }
        self.retire();
    }

    /// Publishes the used elements since the last call, and signals the guest if it wants that.
    #[inline]
    fn publish(&self) {
        let mut core = self.core.borrow_mut();
        let core = &mut *core;
        if core.unpublished > 0 {
            let new = std::mem::take(&mut core.unpublished);
            if let Some(looks) = &self.looks {
                looks.has_worked(self.handle.now());
            }
            core.publish();
            core.log_changed();
            if core.ring.wants_signal() {
                core.signal_of(new);
            }
        }
    }

    /// Returns whether the reactor must serve its other queues before this one takes more.
    #[inline]
    fn has_spent(&self, taken: usize) -> bool {
        self.budget.is_spent(self.handle.iteration())
            || (taken > 0 && budget::is_over(self.handle.now(), self.handle.read_clock()))
    }

    /// Takes up to `most` chains within the iteration's budget. Returns the number of chains taken.
    /// A broken ring stays broken, and the queue takes no chain from it.
    #[inline]
    fn take(self: &Rc<Self>, most: usize) -> usize {
        let mut taken = 0;
        // The vector is kept, so that a batch allocates nothing.
        let mut requests = std::mem::take(&mut *self.requests.borrow_mut());
        while taken < most && !self.budget.is_spent(self.handle.iteration()) {
            let popped = {
                let mut core = self.core.borrow_mut();
                let core = &mut *core;
                core.ring.pop(&mut core.descs)
            };
            match popped {
                Ok(None) => break,
                Ok(Some(head)) => {
                    if let Err(e) = self.begin(head, None, &mut requests) {
                        self.break_ring(&e);
                        break;
                    }
                    taken += 1;
                }
                Err(e) => {
                    self.break_ring(&e);
                    break;
                }
            }
        }
        self.lanes.dispatch(&mut requests);
        *self.requests.borrow_mut() = requests;
        taken
    }

    /// Makes requests of the chain that was popped into `core.descs`. `entry`: the chain's entry in
    /// the in-flight region, if it already has one.
    #[inline]
    fn begin(
        self: &Rc<Self>,
        head: Head,
        entry: Option<u16>,
        requests: &mut Vec<Request<ChainToken>>,
    ) -> Result<(), RingError> {
        let mut core = self.core.borrow_mut();
        let core = &mut *core;
        if core.pending[usize::from(head.id)].parts > 0 {
            return Err(RingError::Id(head.id));
        }
        let fua = !self.device.write_back.load(Ordering::Relaxed);
        let context =
            ParseContext { memory: &core.memory, serial: &self.device.disk.options().serial, fua };
        let mut segments = core.pool.pop().unwrap_or_default();
        let descriptors = core.descs.len() as u32 + REQUEST;
        let parsed = parse(head.id, &core.descs, context, &mut segments)?;
        let entry = entry.unwrap_or_else(|| core.note_taken(head));
        let mut pending = Pending {
            parts: 1,
            failed: None,
            withdrawn: false,
            count: head.count,
            written: 1,
            status: parsed.status,
            fills: false,
            entry,
        };
        let arrived = self.handle.now();
        self.budget.spend(
            self.handle.iteration(),
            descriptors * parsed.action.requests(),
            segments.len() as u64,
        );
        match parsed.action {
            Action::One { op, offset, len } => {
                if op == blockyard_disk::Op::Read {
                    pending.written += len as u32;
                    pending.fills = true;
                }
                core.pending[usize::from(head.id)] = pending;
                self.in_flight.set(self.in_flight.get() + 1);
                let token = ChainToken { queue: self.clone(), id: head.id };
                requests.push(Request::new(op, offset, len, segments, arrived, token));
            }
            Action::Ranges { op, ranges } => {
                pending.parts = ranges.len() as u32;
                core.pending[usize::from(head.id)] = pending;
                self.in_flight.set(self.in_flight.get() + pending.parts);
                for (offset, len) in ranges {
                    let token = ChainToken { queue: self.clone(), id: head.id };
                    requests.push(Request::new(
                        op,
                        offset,
                        len,
                        Segments::default(),
                        arrived,
                        token,
                    ));
                }
            }
            Action::Now { status, written, op } => {
                if let Some(op) = op {
                    self.served.count_refused(op);
                }
                pending.written = written;
                pending.fills = written > 1;
                core.pending[usize::from(head.id)] = pending;
                self.in_flight.set(self.in_flight.get() + 1);
                self.finish(core, head.id, status, segments);
            }
        }
        Ok(())
    }

    #[inline]
    fn answered(&self, id: u16, status: Status, segments: Segments) {
        self.finish(&mut self.core.borrow_mut(), id, status, segments);
    }

    /// Takes back a request that stays in the in-flight region, unanswered.
    fn withdrawn(&self, id: u16, segments: Segments) {
        let mut core = self.core.borrow_mut();
        core.pending[usize::from(id)].withdrawn = true;
        self.finish(&mut core, id, Ok(()), segments);
    }

    #[inline]
    fn finish(&self, core: &mut Core, id: u16, status: Status, mut segments: Segments) {
        self.in_flight.set(self.in_flight.get() - 1);
        let pending = &mut core.pending[usize::from(id)];
        pending.failed = pending.failed.or(status.err());
        pending.parts -= 1;
        let pending = *pending;
        if pending.parts == 0 && pending.withdrawn {
            self.wake.ring();
        } else if pending.parts == 0 {
            self.answer(core, id, pending, &segments);
        }
        // A chain with many ranges returns more segment lists than it took, so limit the pool.
        if core.pool.len() < MOST_IN_FLIGHT as usize {
            segments.release();
            core.pool.push(segments);
        }
    }

    /// Answers a chain whose last request has ended. `segments`: the chain's data.
    #[inline]
    fn answer(&self, core: &mut Core, id: u16, pending: Pending, segments: &Segments) {
        let status = pending.failed.map_or(Ok(()), Err);
        // The front end may have removed this memory since the chain was parsed. Then no guest can
        // read the status.
        let _ = core.memory.write_byte(pending.status, wire_status(status));
        core.mark_chain(&pending, segments);
        let written = if status.is_ok() { pending.written } else { 1 };
        core.push_used(Head { id, count: pending.count }, pending.entry, written);
        self.done.set(self.done.get() + 1);
        self.wake.ring();
    }

    /// Starts the requests that the previous back end left unanswered, within the budget of each
    /// iteration.
    async fn repeat_unanswered(self: &Rc<Self>, unanswered: Vec<Unanswered>) {
        if !unanswered.is_empty() {
            self.device.log.info(
                self.device.disk.name(),
                Some(self.index),
                format_args!(
                    "{} requests were in flight when the last back end ended: repeating them",
                    unanswered.len()
                ),
            );
        }
        let mut requests = Vec::new();
        for chain in unanswered {
            if self.in_flight.get() >= MOST_IN_FLIGHT {
                self.lanes.dispatch(&mut requests);
                self.until_room().await;
            }
            if self.suspends.get() {
                // The rest stays in the region.
                break;
            }
            let head = self.core.borrow_mut().retake(&chain);
            if let Err(e) =
                head.and_then(|head| self.begin(head, Some(chain.entry()), &mut requests))
            {
                self.break_ring(&e);
                break;
            }
            let mut has_taken = 1;
            while self.has_spent(std::mem::take(&mut has_taken)) {
                self.lanes.dispatch(&mut requests);
                self.handle.yield_now().await;
            }
        }
        self.lanes.dispatch(&mut requests);
    }

    /// Waits until another request may be in flight, or until the queue must suspend.
    async fn until_room(&self) {
        loop {
            self.wake.clear();
            self.publish();
            if self.in_flight.get() < MOST_IN_FLIGHT || self.suspends.get() {
                return;
            }
            if !self.wake.arm() {
                self.sleep(false).await;
            }
        }
    }

    /// Stops this queue until it is started again, and logs the reason. Happens once for a ring,
    /// because the queue does not read a broken ring any more.
    fn break_ring(&self, error: &RingError) {
        let mut core = self.core.borrow_mut();
        core.broken = true;
        self.device.log.warn(
            self.device.disk.name(),
            Some(self.index),
            format_args!(
                "the guest broke its ring; the queue stops until the guest resets it: {error}"
            ),
        );
        if let Some(fd) = core.error.take() {
            self.device.signals.send_error(fd);
        }
    }

    /// Asks the guest to send no kicks. Does not write to a disabled ring, because the guest may
    /// have freed its memory.
    #[inline]
    fn disable_kicks(&self) {
        if self.enabled.get() {
            self.core.borrow_mut().disable_kicks();
        }
    }

    /// Ends the queue. Must be called when nothing is in flight.
    fn retire(&self) {
        let mut core = self.core.borrow_mut();
        if let Some(processors) = core.placement.moves(false, placement::is_away()) {
            placement::move_to(processors);
        }
        if self.enabled.get() {
            core.disable_kicks();
        }
        self.lanes.close();
        if let Some(reply) = self.stopping.borrow_mut().take() {
            reply.send(core.ring.base());
        }
    }
}

#[cfg(test)]
mod tests;
