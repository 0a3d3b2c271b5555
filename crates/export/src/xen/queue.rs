//! A queue of a device on its reactor: takes requests from the ring, submits them to the disk,
//! writes responses, notifies.
//!
//! ```text
//!   event ─► run: take a batch ─► map or copy its pages ─► lanes ─► disk
//!             ▲   publish, notify once ◄──────────────────── responses ◄──┘
//! ```
//! What must hold: each taken request gets one response. A response is in the ring before the index
//! that publishes it. After `stop`, the queue takes no request. It replies to `stop` when nothing
//! is in flight and no page of the guest is mapped.

mod copies;
mod pages;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_disk::{Disk, Failure, LocalDisk, Op, Request, Status, Token};
use blockyard_ring::xen::{Channel, Grants};
use blockyard_ring::{Handle, Region, Remote, Reply, Segments, Signal, Watch, park};

use super::abi::{self, Abi, Ask};
use super::ring::Ring;
use crate::budget::{Budget, REQUEST};
use crate::lanes::Lanes;
use crate::log::Log;
use crate::start::StartError;
use copies::Read;
pub use pages::Data;
use pages::{Pages, Prepared};

/// Maximum number of requests that the queue takes before it submits them to the disk.
const BATCH: usize = 32;

/// State that the queues of a device share with the thread that started them.
pub struct Shared {
    pub disk: Arc<Disk>,
    pub log: Log,
    pub counts: Counts,
}

/// Counters of a device's queues, for the log.
#[derive(Debug, Default)]
pub struct Counts {
    pub requests: AtomicU64,
    pub events: AtomicU64,
    pub notifications: AtomicU64,
    pub maps: AtomicU64,
    pub pages: AtomicU64,
    pub copies: AtomicU64,
    pub copied: AtomicU64,
}

/// The parameters of a queue.
pub struct QueueSetup {
    pub index: u16,
    pub shared: Arc<Shared>,
    pub ring: Region,
    pub abi: Abi,
    pub channel: Channel,
    pub grants: Grants,
    pub data: Data,
    /// Whether each write must be durable before its response, because the back end did not offer
    /// flushes to the front end.
    pub fua: bool,
    /// Path of the record of requests in flight, and the key that identifies this ring.
    pub record: Option<(PathBuf, u64)>,
    /// Whether no server has taken requests of this ring that have no response. If not, only a
    /// record of the last server says which requests are in flight.
    pub settled: bool,
}

/// The queues of a reactor, by number.
#[derive(Default)]
struct Queues(RefCell<HashMap<u64, Rc<Queue>>>);

/// Handle of a running queue, for the device's thread.
pub struct QueueHandle {
    remote: Remote,
    id: u64,
}

impl QueueHandle {
    pub fn start(remote: Remote, setup: QueueSetup) -> Result<Self, StartError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let started = remote.ask(move |handle, reply| reply.send(Queue::start(handle, setup, id)));
        started.unwrap_or_else(|| Err(StartError::ended())).map(|()| QueueHandle { remote, id })
    }

    /// Makes the queue take no more requests, waits for the requests in flight, and unmaps
    /// everything.
    pub fn stop(self) {
        let id = self.id;
        self.remote.ask(move |handle, reply| {
            // If the queue is gone, the reply is dropped.
            let queue = handle.local::<Queues>().0.borrow_mut().remove(&id);
            if let Some(queue) = queue {
                queue.stop(reply);
            }
        });
    }
}

struct Queue {
    index: u16,
    handle: Handle,
    shared: Arc<Shared>,
    served: Rc<LocalDisk>,
    ring: RefCell<Ring>,
    channel: Channel,
    pages: RefCell<Pages>,
    /// Whether each write must be durable before its response, because the back end did not offer
    /// flushes to the front end.
    fua: bool,
    lanes: Rc<Lanes<Slot>>,
    requests: RefCell<Vec<Request<Slot>>>,
    pool: RefCell<Vec<Segments>>,
    /// Completed reads. Their data must be copied to the guest.
    reads: RefCell<Vec<Read>>,
    wake: Signal,
    budget: Budget,
    in_flight: Cell<u32>,
    /// A barrier that waits for all earlier requests. All later requests wait for the barrier.
    barrier: Cell<Option<abi::Request>>,
    broken: Cell<bool>,
    stopping: RefCell<Option<Reply<()>>>,
}

/// The front end's request that a response belongs to.
struct Slot {
    queue: Rc<Queue>,
    id: u64,
    operation: u8,
    slot: u32,
    /// Whether this is a part of a request, and another part sends the response.
    part: bool,
    /// Number of a read, if its data is copied to the guest before the response.
    read: Option<u32>,
}

impl Token for Slot {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        let queue = &self.queue;
        queue.in_flight.set(queue.in_flight.get() - 1);
        match self.read {
            Some(number) if status.is_ok() => {
                let (id, operation, slot) = (self.id, self.operation, self.slot);
                queue.reads.borrow_mut().push(Read {
                    id,
                    operation,
                    slot,
                    number,
                    buffer: segments,
                });
                return queue.wake.ring();
            }
            Some(number) => queue.pages.borrow_mut().forget_read(number),
            None => {}
        }
        queue.give_back(segments);
        if !self.part {
            queue.finish(self.id, self.operation, self.slot, wire_status(status));
        }
    }

    fn may_wait(&self) -> bool {
        self.queue.stopping.borrow().is_none()
    }
}

/// Returns whether the request is a barrier. A barrier begins after all earlier requests are
/// complete, and later requests wait for it. (A flush with data is a barrier.)
fn is_barrier(request: &abi::Request) -> bool {
    request.ask == Ask::Barrier || (request.ask == Ask::Flush && request.segments > 0)
}

/// Returns the largest number of bytes that a request transfers.
fn bytes(request: &abi::Request) -> usize {
    request.segments * 4096
}

fn wire_status(status: Status) -> i16 {
    match status {
        Ok(()) => abi::OK,
        Err(Failure::Unsupported) => abi::UNSUPPORTED,
        Err(_) => abi::ERROR,
    }
}

impl Queue {
    fn start(handle: &Handle, setup: QueueSetup, id: u64) -> Result<(), StartError> {
        let QueueSetup { index, shared, ring, abi, channel, grants, data, fua, record, settled } =
            setup;
        let served = LocalDisk::local(handle, &shared.disk).map_err(StartError::disk)?;
        let watch = channel
            .descriptor()
            .map_err(|e| StartError::ring("cannot watch the event channel", e))?;
        let watch = handle.watch(watch);
        let mut ring = Ring::new(Arc::new(ring).slice(), abi);
        let again = match record {
            Some((path, key)) => ring.keep_record(&path, key, settled),
            None => ring.check_known(settled).map(|()| Vec::new()),
        };
        let again = again.map_err(|e| StartError::ring("", e))?;
        let pages = Pages::new(grants, data);
        let budget = Budget::of(handle, &shared.disk);
        // The guest cannot change the cache mode.
        let lanes = Lanes::new(handle, served.clone(), || true);
        let queue = Rc::new(Queue {
            index,
            handle: handle.clone(),
            fua,
            shared,
            served,
            ring: RefCell::new(ring),
            channel,
            pages: RefCell::new(pages),
            lanes,
            requests: RefCell::default(),
            pool: RefCell::default(),
            reads: RefCell::default(),
            wake: Signal::new(handle),
            budget,
            in_flight: Cell::new(0),
            barrier: Cell::new(None),
            broken: Cell::new(false),
            stopping: RefCell::new(None),
        });
        handle.local::<Queues>().0.borrow_mut().insert(id, queue.clone());
        handle.spawn(queue.run(watch, again));
        Ok(())
    }

    fn stop(&self, reply: Reply<()>) {
        // Requests in flight must not wait for a throttle, or for space on the host. Others begin
        // until the queue ends: a barrier's write, and requests of the last server.
        *self.stopping.borrow_mut() = Some(reply);
        self.served.suspend_for_next();
        self.wake.ring();
    }

    async fn run(self: Rc<Self>, mut watch: Watch, again: Vec<abi::Request>) {
        self.handle.label(&format!("disk {}, queue {}", self.shared.disk.name(), self.index));
        self.take_again(again).await;
        // The last back end may have published responses without a notification.
        self.notify();
        loop {
            self.wake.clear();
            self.publish();
            let stopping = self.stopping.borrow().is_some();
            if stopping && self.in_flight.get() == 0 {
                break;
            }
            let takes = !stopping && !self.broken.get();
            // A request that completes frees its buffer, and signals `wake`.
            let takes = takes && self.room() > 0;
            let is_idle = self.in_flight.get() == 0;
            let held_back = if takes { self.served.queue_pause(is_idle) } else { None };
            if takes && held_back.is_none() {
                if self.barrier.get().is_some() {
                    if self.in_flight.get() == 0 {
                        self.serve_barrier().await;
                        continue;
                    }
                } else {
                    if self.take() > 0 || self.budget.is_spent(self.handle.iteration()) {
                        self.handle.yield_now().await;
                        continue;
                    }
                    watch.arm();
                    self.take_event();
                    if !self.ring.borrow_mut().enable_events() {
                        continue;
                    }
                }
            }
            if !self.wake.arm() {
                if let Some(time) = held_back {
                    self.handle.wake_at(self.handle.read_clock() + time);
                }
                park().await;
            }
        }
        let reply = self.retire();
        // Drop the ring's pages and the event channel.
        drop((watch, self));
        if let Some(reply) = reply {
            reply.send(());
        }
    }

    /// Repeats the requests that the last server had taken without a response, one batch per
    /// iteration.
    async fn take_again(self: &Rc<Self>, mut again: Vec<abi::Request>) {
        if again.is_empty() {
            return;
        }
        self.shared.log.info(
            self.shared.disk.name(),
            Some(self.index),
            format_args!(
                "{} requests were in flight when the last server ended: repeating them",
                again.len()
            ),
        );
        // The last server took nothing after a barrier, so there is at most one.
        again.retain(|request| {
            let is_barrier = is_barrier(request);
            if is_barrier {
                self.barrier.set(Some(*request));
            }
            !is_barrier
        });
        let mut rest = &again[..];
        while !rest.is_empty() {
            self.wake.clear();
            self.publish();
            let count = self.fitting(&rest[..rest.len().min(BATCH)]);
            let (batch, later) = rest.split_at(count);
            rest = later;
            if count > 0 {
                self.begin(batch);
                self.handle.yield_now().await;
            } else if !self.wake.arm() {
                park().await;
            }
        }
    }

    /// Returns how many bytes of further requests the queue may take. If nothing is in flight, one
    /// request of any size may be taken.
    fn room(&self) -> usize {
        let least = usize::from(self.in_flight.get() == 0);
        self.pages.borrow().room().max(least)
    }

    /// Returns how many of these requests the queue may take.
    fn fitting(&self, requests: &[abi::Request]) -> usize {
        let mut room = self.room();
        let fits = |request: &&abi::Request| {
            let fits = room > 0;
            room = room.saturating_sub(bytes(request));
            fits
        };
        requests.iter().take_while(fits).count()
    }

    /// Takes an event, which unmasks the next event. The channel fails only if the domain is gone.
    fn take_event(&self) {
        match self.channel.take() {
            Ok(true) => _ = self.shared.counts.events.fetch_add(1, Ordering::Relaxed),
            Ok(false) => {}
            Err(e) => self.break_queue(&format!("its event channel failed: {e}")),
        }
    }

    fn notify(&self) {
        self.shared.counts.notifications.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = self.channel.notify() {
            tracing::debug!(
                disk = self.shared.disk.name(),
                queue = self.index,
                "cannot notify the front end: {e}"
            );
        }
    }

    #[inline]
    fn publish(&self) {
        let mut reads = self.reads.borrow_mut();
        if !reads.is_empty() {
            let mut ring = self.ring.borrow_mut();
            let answer =
                |read: &Read, status| ring.answer(read.id, read.operation, read.slot, status);
            self.pages.borrow_mut().finish_reads(&mut reads, &self.shared.counts, answer);
        }
        drop(reads);
        if self.ring.borrow_mut().publish() {
            self.notify();
        }
    }

    /// Takes a batch of requests within the iteration's budget. Returns their number.
    fn take(self: &Rc<Self>) -> usize {
        let mut batch = self.pages.borrow_mut().batch();
        let iteration = self.handle.iteration();
        let mut room = self.room();
        while batch.len() < BATCH
            && room > 0
            && !self.budget.is_spent(iteration)
            && self.barrier.get().is_none()
        {
            match self.ring.borrow_mut().pop() {
                Ok(None) => break,
                Ok(Some(request)) => {
                    room = room.saturating_sub(bytes(&request));
                    if is_barrier(&request) {
                        self.barrier.set(Some(request));
                    } else {
                        batch.push(request);
                    }
                    self.budget.spend(
                        iteration,
                        REQUEST + request.segments as u32,
                        bytes(&request) as u64,
                    );
                }
                Err(e) => {
                    self.break_queue(&e.to_string());
                    break;
                }
            }
        }
        let taken = batch.len() + usize::from(self.barrier.get().is_some());
        self.shared.counts.requests.fetch_add(taken as u64, Ordering::Relaxed);
        self.begin(&batch);
        self.pages.borrow_mut().keep(batch);
        taken
    }

    /// Starts the disk requests for a batch of the front end's requests, with their pages.
    fn begin(self: &Rc<Self>, batch: &[abi::Request]) {
        let mut pages = self.pages.borrow_mut();
        pages.prepare(batch, &self.shared.counts);
        let mut requests = std::mem::take(&mut *self.requests.borrow_mut());
        for (at, request) in batch.iter().enumerate() {
            let mut segments = self.pool.borrow_mut().pop().unwrap_or_default();
            match self.operation(request, pages.fill(at, request, &mut segments)) {
                Ok((op, len)) => {
                    let read = if op == Op::Read { pages.note_read(at) } else { None };
                    requests.push(self.request(request, op, len, segments, read));
                }
                Err(status) => {
                    self.keep_room(&mut pages, segments);
                    self.finish(request.id, request.operation, request.slot, status);
                }
            }
        }
        pages.end_batch();
        drop(pages);
        self.dispatch(requests);
    }

    fn request(
        self: &Rc<Self>,
        request: &abi::Request,
        op: Op,
        len: u64,
        segments: Segments,
        read: Option<u32>,
    ) -> Request<Slot> {
        self.in_flight.set(self.in_flight.get() + 1);
        // A flush of the front end is one operation. The flush of a barrier is a part, which
        // precedes the barrier's write.
        let part = op == Op::Flush && (request.ask == Ask::Barrier || request.segments > 0);
        let abi::Request { id, operation, slot, .. } = *request;
        let slot = Slot { queue: self.clone(), id, operation, slot, part, read };
        let offset = if op == Op::Flush { 0 } else { request.offset };
        Request::new(op, offset, len, segments, self.handle.now(), slot)
    }

    /// Returns the disk operation of a request and its length in bytes, or the status that refuses
    /// it.
    fn operation(&self, request: &abi::Request, filled: Prepared) -> Result<(Op, u64), i16> {
        let op = match request.ask {
            Ask::Read => Op::Read,
            Ask::Write => Op::Write { fua: self.fua },
            // A flush with data is a barrier, which `serve_barrier` handles.
            Ask::Flush => return Ok((Op::Flush, 0)),
            Ask::Discard(len) => return Ok((Op::Discard, len)),
            Ask::SecureDiscard | Ask::Unknown => return Err(abi::UNSUPPORTED),
            Ask::Barrier | Ask::Bad => return Err(abi::ERROR),
        };
        match filled {
            Prepared::Filled(len) => Ok((op, len)),
            Prepared::Failed => Err(abi::ERROR),
        }
    }

    /// Submits the requests to the disk, and keeps the vector for reuse.
    fn dispatch(&self, mut requests: Vec<Request<Slot>>) {
        self.lanes.dispatch(&mut requests);
        *self.requests.borrow_mut() = requests;
    }

    /// Serves a barrier: flushes earlier writes, and then writes durably. No other request of this
    /// queue is in flight.
    async fn serve_barrier(self: &Rc<Self>) {
        let Some(request) = self.barrier.take() else { return };
        let mut segments = self.pool.borrow_mut().pop().unwrap_or_default();
        let filled = {
            let mut pages = self.pages.borrow_mut();
            pages.prepare(&[request], &self.shared.counts);
            let filled = pages.fill(0, &request, &mut segments);
            pages.end_batch();
            filled
        };
        let flush = self.request(&request, Op::Flush, 0, Segments::default(), None);
        let flushed = self.served.serve(flush).await;
        let status = flushed.status();
        flushed.answer();
        match filled {
            Prepared::Filled(len) if status.is_ok() && len > 0 => {
                let write = self.request(&request, Op::Write { fua: true }, len, segments, None);
                self.served.serve(write).await.answer();
            }
            filled => {
                self.give_back(segments);
                let status =
                    if filled == Prepared::Failed { abi::ERROR } else { wire_status(status) };
                self.finish(request.id, request.operation, request.slot, status);
            }
        }
    }

    fn finish(&self, id: u64, operation: u8, slot: u32, status: i16) {
        self.ring.borrow_mut().answer(id, operation, slot, status);
        self.wake.ring();
    }

    fn give_back(&self, segments: Segments) {
        self.keep_room(&mut self.pages.borrow_mut(), segments);
    }

    /// Releases a request's memory, and keeps its vectors for the next request. Unmaps the pages of
    /// the request, except those that stay mapped.
    fn keep_room(&self, pages: &mut Pages, mut segments: Segments) {
        pages.give_back(&mut segments);
        let mut pool = self.pool.borrow_mut();
        if pool.len() < 2 * BATCH {
            pool.push(segments);
        }
    }

    /// Stops this queue for good, and logs the reason once.
    fn break_queue(&self, why: &str) {
        if !self.broken.replace(true) {
            self.shared.log.warn(
                self.shared.disk.name(),
                Some(self.index),
                format_args!(
                    "the front end broke its ring; the queue stops until the front end reconnects: \
                     {why}"
                ),
            );
        }
    }

    /// Releases everything at the end, when nothing is in flight. Returns the reply to send.
    fn retire(&self) -> Option<Reply<()>> {
        self.lanes.close();
        self.pages.borrow_mut().clear();
        self.pool.borrow_mut().clear();
        let stopping = self.stopping.borrow_mut().take();
        if stopping.is_some() {
            self.served.resume();
        }
        stopping
    }
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
