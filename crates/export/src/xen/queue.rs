//! A queue of a device on its reactor: takes requests out of the ring, hands them to the disk, answers, notifies.
//!
//! ```text
//!   event ─► run: take a batch ─► map or copy its pages ─► lanes ─► disk
//!             ▲   publish, notify once ◄────────────────────── answers ◄──┘
//! ```
//! What must hold: a request that was taken is answered once; an answer is in the ring before the index that shows it; after
//! `stop` nothing is taken, and the reply is sent when nothing is in flight and no page of the guest is mapped.

mod copies;
mod lane;
mod pages;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use blockyard_disk::{Disk, Failure, Op, Request, Run, Served, Status, Store, Token};
use blockyard_ring::xen::{Channel, Grants};
use blockyard_ring::{Handle, Region, Remote, Reply, Segments, Signal, Watch, park};

use super::abi::{self, Abi, Ask};
use super::ring::Ring;
use crate::budget::{Budget, REQUEST};
use crate::log::Log;
use copies::Read;
use lane::{Lane, Load};
pub use pages::Data;
use pages::{Pages, Wanted};

/// Requests taken before what they ask is submitted.
const BATCH: usize = 32;

/// What the queues of a device share with the thread that started them.
pub struct Shared {
    pub disk: Arc<Disk>,
    pub log: Log,
    pub counts: Counts,
}

/// What the queues of a device have done, for the log.
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

/// Everything that a queue is started with.
pub struct QueueSetup {
    pub index: u16,
    pub shared: Arc<Shared>,
    pub ring: Region,
    pub abi: Abi,
    pub channel: Channel,
    pub grants: Grants,
    pub data: Data,
    /// Where the record of what is taken is kept, and what tells this ring from others.
    pub record: Option<(PathBuf, u64)>,
}

thread_local! {
    /// The queues of this reactor, by number.
    static LOCAL: RefCell<HashMap<u64, Rc<Queue>>> = RefCell::default();
}

/// A running queue, as the control thread knows it.
pub struct QueueHandle {
    remote: Remote,
    id: u64,
}

impl QueueHandle {
    pub fn start(remote: Remote, setup: QueueSetup) -> Result<Self, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let started = remote.ask(move |handle, reply| reply.send(Queue::start(handle, setup, id)));
        started.unwrap_or_else(|| Err("the reactor has ended".into())).map(|()| QueueHandle { remote, id })
    }

    /// Takes nothing more, waits for what is in flight, and unmaps all.
    pub fn stop(self) {
        let id = self.id;
        self.remote.ask(move |_, reply| {
            // Without the queue the reply is dropped.
            if let Some(queue) = LOCAL.with_borrow_mut(|l| l.remove(&id)) {
                queue.stop(reply);
            }
        });
    }
}

struct Queue {
    index: u16,
    handle: Handle,
    shared: Arc<Shared>,
    served: Rc<Served<Store>>,
    ring: RefCell<Ring>,
    channel: Channel,
    pages: RefCell<Pages>,
    /// Each write is durable before its answer, because the front end was offered no flush.
    fua: bool,
    idle: RefCell<Vec<Rc<Lane>>>,
    requests: RefCell<Vec<Request<Slot>>>,
    runs: RefCell<Vec<Run<Slot>>>,
    pool: RefCell<Vec<Segments>>,
    /// Finished reads. Their data must be copied to the guest.
    reads: RefCell<Vec<Read>>,
    wake: Signal,
    budget: Budget,
    in_flight: Cell<u32>,
    /// A request that waits for all before it, and that all after it wait for.
    barrier: Cell<Option<abi::Request>>,
    broken: Cell<bool>,
    stopping: RefCell<Option<Reply<()>>>,
}

/// Names the request of the front end that is answered.
struct Slot {
    queue: Rc<Queue>,
    id: u64,
    operation: u8,
    slot: u32,
    /// A part of a request, which another part answers.
    part: bool,
    /// A read whose data are copied to the guest before it is answered.
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
                queue.reads.borrow_mut().push(Read { id, operation, slot, number, buffer: segments });
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
}

/// Whether all before it are answered before it begins, and all after it wait for it. (A flush with data is one.)
fn is_barrier(request: &abi::Request) -> bool {
    request.ask == Ask::Barrier || (request.ask == Ask::Flush && request.segments > 0)
}

fn wire_status(status: Status) -> i16 {
    match status {
        Ok(()) => abi::OK,
        Err(Failure::Unsupported) => abi::UNSUPPORTED,
        Err(_) => abi::ERROR,
    }
}

impl Queue {
    fn start(handle: &Handle, setup: QueueSetup, id: u64) -> Result<(), String> {
        let QueueSetup { index, shared, ring, abi, channel, grants, data, record } = setup;
        let served =
            Served::local(handle, &shared.disk).map_err(|e| format!("opening the disk on its reactor: {e}"))?;
        let watch = channel.descriptor().map_err(|e| format!("watching the event channel: {e}"))?;
        let watch = handle.watch(watch);
        let mut ring = Ring::new(Arc::new(ring).window(), abi);
        let again = match record {
            Some((path, key)) => ring.keep_record(&path, key).map_err(|e| format!("record {}: {e}", path.display()))?,
            None => Vec::new(),
        };
        let pages = Pages::new(grants, data);
        let queue = Rc::new(Queue {
            index,
            handle: handle.clone(),
            fua: !shared.disk.options().cache.write_back(),
            shared,
            served,
            ring: RefCell::new(ring),
            channel,
            pages: RefCell::new(pages),
            idle: RefCell::default(),
            requests: RefCell::default(),
            runs: RefCell::default(),
            pool: RefCell::default(),
            reads: RefCell::default(),
            wake: Signal::new(handle),
            budget: Budget::default(),
            in_flight: Cell::new(0),
            barrier: Cell::new(None),
            broken: Cell::new(false),
            stopping: RefCell::new(None),
        });
        LOCAL.with_borrow_mut(|l| l.insert(id, queue.clone()));
        handle.spawn(queue.run(watch, again));
        Ok(())
    }

    fn stop(&self, reply: Reply<()>) {
        // What is in flight must not wait for a limit.
        self.served.drain();
        *self.stopping.borrow_mut() = Some(reply);
        self.wake.ring();
    }

    async fn run(self: Rc<Self>, mut watch: Watch, again: Vec<abi::Request>) {
        self.handle.label(&format!("disk {}, queue {}", self.shared.disk.name(), self.index));
        self.take_again(again).await;
        // The last back end may have published without telling.
        self.notify();
        loop {
            self.wake.clear();
            self.publish();
            let stopping = self.stopping.borrow().is_some();
            if stopping && self.in_flight.get() == 0 {
                break;
            }
            let takes = !stopping && !self.broken.get();
            let held_back = if takes { self.served.held_back() } else { None };
            if takes && held_back.is_none() {
                if self.barrier.get().is_some() {
                    if self.in_flight.get() == 0 {
                        self.serve_barrier().await;
                        continue;
                    }
                } else {
                    if self.take() > 0 || self.budget.is_spent(self.handle.turn()) {
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
                    self.handle.wake_at(Instant::now() + time);
                }
                park().await;
            }
        }
        let reply = self.retire();
        // The ring's own pages, and the channel.
        drop((watch, self));
        if let Some(reply) = reply {
            reply.send(());
        }
    }

    /// Starts what the last server had taken and not answered, a batch in each turn.
    async fn take_again(self: &Rc<Self>, mut again: Vec<abi::Request>) {
        if again.is_empty() {
            return;
        }
        self.shared.log.info(
            self.shared.disk.name(),
            Some(self.index),
            format_args!("{} requests were in flight when the last server ended: they are done again", again.len()),
        );
        // Nothing was taken after a barrier, so there is one at most.
        again.retain(|request| {
            let is_barrier = is_barrier(request);
            if is_barrier {
                self.barrier.set(Some(*request));
            }
            !is_barrier
        });
        for batch in again.chunks(BATCH) {
            self.begin(batch);
            self.handle.yield_now().await;
        }
    }

    /// Lets the next event come. A channel that fails is of a domain that is gone.
    fn take_event(&self) {
        match self.channel.take() {
            Ok(true) => _ = self.shared.counts.events.fetch_add(1, Ordering::Relaxed),
            Ok(false) => {}
            Err(e) => self.break_queue(&format!("its event channel: {e}")),
        }
    }

    fn notify(&self) {
        self.shared.counts.notifications.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = self.channel.notify() {
            tracing::debug!(disk = self.shared.disk.name(), queue = self.index, "notifying the front end: {e}");
        }
    }

    #[inline]
    fn publish(&self) {
        let mut reads = self.reads.borrow_mut();
        if !reads.is_empty() {
            let mut ring = self.ring.borrow_mut();
            let answer = |read: &Read, status| ring.answer(read.id, read.operation, read.slot, status);
            self.pages.borrow_mut().finish_reads(&mut reads, &self.shared.counts, answer);
        }
        drop(reads);
        if self.ring.borrow_mut().publish() {
            self.notify();
        }
    }

    /// Takes a batch of requests, within the turn's budget; how many it took.
    fn take(self: &Rc<Self>) -> usize {
        let mut batch = self.pages.borrow_mut().batch();
        let turn = self.handle.turn();
        while batch.len() < BATCH && !self.budget.is_spent(turn) && self.barrier.get().is_none() {
            match self.ring.borrow_mut().pop() {
                Ok(None) => break,
                Ok(Some(request)) => {
                    if is_barrier(&request) {
                        self.barrier.set(Some(request));
                    } else {
                        batch.push(request);
                    }
                    self.budget.spend(turn, REQUEST + request.segments as u32, request.segments as u64 * 4096);
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

    /// Makes requests to the disk of those of the front end, with their pages.
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
        // The front end's own flushes come as one operation, those of barriers before their write.
        let part = op == Op::Flush && (request.ask == Ask::Barrier || request.segments > 0);
        let abi::Request { id, operation, slot, .. } = *request;
        let slot = Slot { queue: self.clone(), id, operation, slot, part, read };
        let offset = if op == Op::Flush { 0 } else { request.offset };
        Request::new(op, offset, len, segments, self.handle.now(), slot)
    }

    /// What a request asks of the disk, and of how many bytes; or how it is refused.
    fn operation(&self, request: &abi::Request, filled: Wanted) -> Result<(Op, u64), i16> {
        let op = match request.ask {
            Ask::Read => Op::Read,
            Ask::Write => Op::Write { fua: self.fua },
            // With data it is a barrier.
            Ask::Flush => return Ok((Op::Flush, 0)),
            Ask::Discard(len) => return Ok((Op::Discard, len)),
            Ask::SecureDiscard | Ask::Unknown => return Err(abi::UNSUPPORTED),
            Ask::Barrier | Ask::Bad => return Err(abi::ERROR),
        };
        match filled {
            Wanted::Filled(len) => Ok((op, len)),
            Wanted::Impossible => Err(abi::ERROR),
        }
    }

    /// Gives each request, and each run of neighbours, to a lane that has none, and starts it.
    fn dispatch(self: &Rc<Self>, mut requests: Vec<Request<Slot>>) {
        let mut batch = requests.drain(..);
        loop {
            let load = match self.served.neighbours(batch.as_slice()) {
                0 => break,
                1 => batch.next().map(Load::One),
                many => {
                    let mut run = self.runs.borrow_mut().pop().unwrap_or_default();
                    run.fill(batch.by_ref().take(many));
                    Some(Load::Run(run))
                }
            };
            let lane = self.idle.borrow_mut().pop();
            let lane = lane.unwrap_or_else(|| Lane::start(self));
            lane.give(load, &self.handle);
        }
        drop(batch);
        *self.requests.borrow_mut() = requests;
    }

    /// Flushes what was answered before, writes, and makes that durable. Nothing else of this queue is in flight.
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
            Wanted::Filled(len) if status.is_ok() && len > 0 => {
                let write = self.request(&request, Op::Write { fua: true }, len, segments, None);
                self.served.serve(write).await.answer();
            }
            filled => {
                self.give_back(segments);
                let status = if filled == Wanted::Impossible { abi::ERROR } else { wire_status(status) };
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

    /// Releases a request's memory, and keeps its vectors for the next one. This unmaps pages that nothing else keeps.
    fn keep_room(&self, pages: &mut Pages, mut segments: Segments) {
        pages.give_back(&mut segments);
        let mut pool = self.pool.borrow_mut();
        if pool.len() < 2 * BATCH {
            pool.push(segments);
        }
    }

    /// Stops this queue for good, and says why, once.
    fn break_queue(&self, why: &str) {
        if !self.broken.replace(true) {
            self.shared.log.warn(
                self.shared.disk.name(),
                Some(self.index),
                format_args!("the front end broke its ring, and the queue stops until it connects anew: {why}"),
            );
        }
    }

    /// The end: nothing is in flight.
    fn retire(&self) -> Option<Reply<()>> {
        for lane in self.idle.borrow_mut().drain(..) {
            lane.close(&self.handle);
        }
        self.pages.borrow_mut().clear();
        self.pool.borrow_mut().clear();
        self.stopping.borrow_mut().take()
    }
}
