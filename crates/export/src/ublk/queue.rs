//! A queue of a ublk device on its reactor: a lane for each tag.
//!
//! ```text
//!   lane: fetch ─► parse ─► disk ─► commit the answer and fetch ─► ...
//! ```
//! The kernel has merged neighbours already, and orders nothing, so each lane is one request after
//! another and knows nothing of the others. What must hold: a request that was fetched is committed
//! once, also when the queue is left meanwhile: nobody else is told of it; what was not fetched by
//! then is left to the next server. Nothing is allocated for a request.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Poll;

use blockyard_disk::{Disk, LocalDisk, Op, Request, Status, Store, Token};
use blockyard_ring::ublk::{Device, Fetch, Queue, QueueError, Tag};
use blockyard_ring::{Answer, Handle, Remote, Reply, Segments, TaskId};

use super::request::{errno, parse};
use crate::budget::{Budget, REQUEST};

/// What the queues of a device share with the thread that started them.
pub(super) struct Shared {
    pub disk: Arc<Disk>,
    /// Each write is durable before its answer, for the kernel asks for no flush.
    pub durable: AtomicBool,
    /// Queues that are served.
    pub live: AtomicU32,
    /// Requests and bytes, and how many of the bytes this process has copied.
    pub requests: AtomicU64,
    pub bytes: AtomicU64,
    pub copied: AtomicU64,
    /// Called by the last queue when the device was ended from outside.
    pub ended: Box<dyn Fn() + Send + Sync>,
}

/// The queues of a reactor, by device and number.
#[derive(Default)]
struct Lines(RefCell<HashMap<(u32, u16), Rc<Line>>>);

impl Lines {
    fn find(handle: &Handle, key: (u32, u16)) -> Option<Rc<Line>> {
        handle.local::<Lines>().0.borrow().get(&key).cloned()
    }
}

/// A queue and its lanes.
struct Line {
    handle: Handle,
    key: (u32, u16),
    shared: Arc<Shared>,
    served: Rc<LocalDisk<Store>>,
    queue: Rc<Queue>,
    tasks: RefCell<Vec<TaskId>>,
    lanes: Cell<u32>,
    draining: Cell<bool>,
    budget: Budget,
    leaving: Cell<bool>,
    counts: Cell<(u64, u64, u64)>,
    waiting: RefCell<Option<Reply<()>>>,
}

/// A running queue, as the control thread knows it.
pub(super) struct QueueHandle {
    remote: Remote,
    key: (u32, u16),
}

impl QueueHandle {
    /// Makes a queue on a reactor. The next steps are [`QueueHandle::fetch`] and
    /// [`QueueHandle::map`], each for all queues of the device.
    pub fn new(
        remote: Remote,
        device: &Device,
        number: u16,
        shared: &Arc<Shared>,
    ) -> Result<Self, QueueError> {
        let key = (device.info().id, number);
        let (device, shared) = (device.clone(), shared.clone());
        let made = remote.ask(move |handle, reply| {
            let made = Line::make(handle, &device, number, shared);
            // The character device stays open as long as any of these lives.
            drop(device);
            reply.send(made);
        });
        made.unwrap_or_else(|| Err(gone().into())).map(|()| QueueHandle { remote, key })
    }

    /// Asks the driver for the first requests. The answer comes when the reactor has submitted the
    /// commands.
    pub fn fetch(&self) -> Answer<()> {
        let key = self.key;
        self.remote.ask_later(move |handle, reply| {
            let (line, reactor) = (Lines::find(handle, key), handle.clone());
            handle.spawn(async move {
                if let Some(line) = line {
                    line.fetch();
                }
                reactor.yield_now().await;
                reply.send(());
            });
        })
    }

    /// Maps the queue's requests, after all queues of the device have fetched: see
    /// `blockyard_ring::ublk::Queue`.
    pub fn map(&self) -> std::io::Result<()> {
        let key = self.key;
        let mapped = self.remote.ask(move |handle, reply| {
            let line = Lines::find(handle, key);
            reply.send(line.ok_or_else(gone).and_then(|line| line.queue.map()));
        });
        mapped.unwrap_or_else(|| Err(gone()))
    }

    /// From here on nothing waits for limits.
    pub fn drain(&self) {
        self.with(|line| {
            if !line.draining.replace(true) {
                line.served.suspend();
            }
        });
    }

    /// Waits until the device is stopped, and the queue with it.
    pub fn wait(&self) {
        self.end(|_| ());
    }

    /// Finishes what was begun, and leaves all else to the next server.
    pub fn leave(&self) {
        self.end(|line| line.leave());
    }

    fn end(&self, f: impl FnOnce(&Rc<Line>) + Send + 'static) {
        let key = self.key;
        self.remote.ask(move |handle, reply| match Lines::find(handle, key) {
            Some(line) => {
                *line.waiting.borrow_mut() = Some(reply);
                // Without lanes it has never fetched.
                if line.lanes.get() == 0 { line.end() } else { f(&line) }
            }
            None => reply.send(()),
        });
    }

    fn with(&self, f: impl FnOnce(&Rc<Line>) + Send + 'static) {
        let key = self.key;
        self.remote.run(move |handle| {
            let line = Lines::find(handle, key);
            if let Some(line) = line {
                f(&line);
            }
        });
    }
}

fn gone() -> std::io::Error {
    std::io::Error::other("the queue or its reactor has ended")
}

impl Line {
    fn make(
        handle: &Handle,
        device: &Device,
        number: u16,
        shared: Arc<Shared>,
    ) -> Result<(), QueueError> {
        if let Err(e) = blockyard_ring::host::set_io_flusher() {
            tracing::debug!(
                "the reactor is not marked as one that writes pages back (PR_SET_IO_FLUSHER): {e}"
            );
        }
        let served = LocalDisk::local(handle, &shared.disk)?;
        let queue = Queue::new(handle, device, number)?;
        let key = (device.info().id, number);
        let budget = Budget::of(handle, &shared.disk);
        shared.live.fetch_add(1, Ordering::SeqCst);
        let line = Rc::new(Line {
            handle: handle.clone(),
            key,
            shared,
            served,
            queue,
            tasks: RefCell::default(),
            lanes: Cell::new(0),
            draining: Cell::new(false),
            budget,
            leaving: Cell::new(false),
            counts: Cell::default(),
            waiting: RefCell::new(None),
        });
        handle.local::<Lines>().0.borrow_mut().insert(key, line);
        Ok(())
    }

    fn fetch(self: &Rc<Self>) {
        self.lanes.set(self.queue.depth().into());
        let lanes = (0..self.queue.depth()).map(|number| {
            let tag = self.queue.tag(number);
            let lane = Rc::new(Lane { tag, status: Cell::new(Ok(())), segments: Cell::default() });
            // Pushed here, so that the driver has all of them when the device is started.
            let first = lane.tag.fetch();
            self.handle.spawn(lane.run(self.clone(), first))
        });
        self.tasks.borrow_mut().extend(lanes);
    }

    fn leave(&self) {
        self.leaving.set(true);
        self.tasks.borrow().iter().for_each(|task| self.handle.wake(*task));
    }

    fn count(&self, bytes: u64, copied: u64) {
        let (requests, all, all_copied) = self.counts.get();
        self.counts.set((requests + 1, all + bytes, all_copied + copied));
    }

    /// A lane has ended; the last one ends the queue.
    fn lane_ended(&self) {
        self.lanes.set(self.lanes.get() - 1);
        if self.lanes.get() == 0 {
            self.end();
        }
    }

    fn end(&self) {
        let line = self.handle.local::<Lines>().0.borrow_mut().remove(&self.key);
        drop(line);
        if self.draining.get() {
            self.served.resume();
        }
        let (requests, bytes, copied) = self.counts.get();
        self.shared.requests.fetch_add(requests, Ordering::Relaxed);
        self.shared.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.shared.copied.fetch_add(copied, Ordering::Relaxed);
        let last = self.shared.live.fetch_sub(1, Ordering::SeqCst) == 1;
        match self.waiting.borrow_mut().take() {
            Some(reply) => reply.send(()),
            None if last && !self.draining.get() => (self.shared.ended)(),
            None => {}
        }
    }
}

/// What carries the requests of one tag, one after another.
struct Lane {
    tag: Tag,
    status: Cell<Status>,
    /// Used again: its vector keeps its room.
    segments: Cell<Segments>,
}

/// Names the lane that a request belongs to.
struct LaneToken(Rc<Lane>);

impl Token for LaneToken {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        self.0.status.set(status);
        self.0.segments.set(segments);
    }
}

impl Lane {
    async fn run(self: Rc<Self>, line: Rc<Line>, first: Fetch) {
        line.handle.label(&format!("disk {}, ublk queue {}", line.shared.disk.name(), line.key.1));
        let mut fetch = first;
        while next(&line, &mut fetch).await {
            let result = self.serve(&line).await;
            fetch = self.tag.commit(result);
        }
        drop(fetch);
        line.lane_ended();
    }

    /// Does what was fetched; bytes done, or minus an errno.
    async fn serve(self: &Rc<Self>, line: &Line) -> i32 {
        let fua = line.shared.durable.load(Ordering::Relaxed);
        let descriptor = match self.tag.descriptor() {
            Ok(descriptor) => descriptor,
            Err(e) => {
                tracing::error!(
                    disk = line.shared.disk.name(),
                    queue = line.key.1,
                    "mapping its requests: {e}"
                );
                return -rustix::io::Errno::IO.raw_os_error();
            }
        };
        let (op, offset, len) = match parse(&descriptor, self.tag.most(), fua) {
            Ok(asked) => asked,
            Err(e) => return -e.raw_os_error(),
        };
        let moves = matches!(op, Op::Read | Op::Write { .. });
        // The reactor's other queues go on before this one serves more than its budget.
        line.budget.admit(&line.handle, REQUEST, if moves { len } else { 0 }).await;
        let mut segments = self.segments.take();
        if moves {
            self.tag.fill(&mut segments, len as usize);
        } else {
            segments.release();
        }
        let request =
            Request::new(op, offset, len, segments, line.handle.now(), LaneToken(self.clone()));
        line.served.serve(request).await.answer();
        let (failed, copied) = self.tag.settle();
        line.count(if moves { len } else { 0 }, copied);
        match self.status.get() {
            Err(failure) => -errno(failure).raw_os_error(),
            Ok(()) if failed => -rustix::io::Errno::IO.raw_os_error(),
            Ok(()) if moves => len as i32,
            Ok(()) => 0,
        }
    }
}

/// Waits for a request. False: the device was stopped, or the queue is left.
async fn next(line: &Line, fetch: &mut Fetch) -> bool {
    let fetched = poll_fn(|cx| match Pin::new(&mut *fetch).poll(cx) {
        Poll::Pending if line.leaving.get() => Poll::Ready(None),
        fetched => fetched.map(Some),
    });
    match fetched.await {
        Some(Ok(())) => true,
        // The device was stopped.
        Some(Err(e)) if e.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => false,
        Some(Err(e)) => {
            tracing::error!(
                disk = line.shared.disk.name(),
                queue = line.key.1,
                "the driver refuses a command: {e}"
            );
            // A queue with a tag that nobody serves would hold up whoever is given it.
            line.leave();
            false
        }
        None => false,
    }
}
