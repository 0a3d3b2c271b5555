//! A queue of a ublk device on its reactor: a task for each tag.
//!
//! ```text
//!   task: fetch ─► parse ─► disk ─► commit the answer and fetch ─► ...
//! ```
//! The kernel has merged adjacent requests already, and guarantees no order between requests. So
//! each task handles one request after another, independent of the other tasks. What must hold:
//! - A request that was fetched is committed once, also if the server leaves the queue meanwhile,
//!   because no other server gets that request.
//! - Requests that are not fetched when the server leaves the queue belong to the next server.
//! - Requests allocate no memory.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Poll;

use blockyard_disk::{Disk, LocalDisk, Op, Request, Status, Token};
use blockyard_ring::ublk::{Device, Fetch, Queue, QueueError, Tag};
use blockyard_ring::{Handle, PendingReply, Remote, Reply, Segments, TaskId};

use super::request::{errno, parse};
use crate::budget::{Budget, REQUEST};

/// State that the queues of a device share with the thread that started them.
pub(super) struct Shared {
    pub disk: Arc<Disk>,
    /// Each write must be durable before its answer, because the kernel sends no flushes.
    pub durable: AtomicBool,
    /// Number of queues that are served.
    pub live: AtomicU32,
    /// Number of requests, of bytes in these requests, and of bytes that this process has copied.
    pub requests: AtomicU64,
    pub bytes: AtomicU64,
    pub copied: AtomicU64,
    /// Callback for the end of the last queue if another process has stopped the device.
    pub ended: Box<dyn Fn() + Send + Sync>,
}

/// An export, by the address of its [`Shared`], and the number of one of its queues. The number of
/// the device does not do: when a device is removed, another one may get its number.
type Key = (usize, u16);

/// The queues of a reactor.
#[derive(Default)]
struct DeviceQueues(RefCell<HashMap<Key, Rc<DeviceQueue>>>);

impl DeviceQueues {
    fn find(handle: &Handle, key: Key) -> Option<Rc<DeviceQueue>> {
        handle.local::<DeviceQueues>().0.borrow().get(&key).cloned()
    }
}

fn key(shared: &Arc<Shared>, number: u16) -> Key {
    (Arc::as_ptr(shared) as usize, number)
}

/// A queue and its tasks, one for each tag.
struct DeviceQueue {
    handle: Handle,
    key: Key,
    shared: Arc<Shared>,
    served: Rc<LocalDisk>,
    driver_queue: Rc<Queue>,
    tasks: RefCell<Vec<TaskId>>,
    running: Cell<u32>,
    draining: Cell<bool>,
    budget: Budget,
    /// The server leaves the queue to the next one.
    leaving: Rc<Cell<bool>>,
    counts: Cell<(u64, u64, u64)>,
    waiting: RefCell<Option<Reply<()>>>,
}

/// Handle of a running queue.
pub(super) struct QueueHandle {
    remote: Remote,
    key: Key,
}

impl QueueHandle {
    /// Makes a queue on a reactor. Call [`QueueHandle::fetch`] for all queues of the device next,
    /// and then [`QueueHandle::map`] for all of them.
    pub fn new(
        remote: Remote,
        device: &Device,
        number: u16,
        shared: &Arc<Shared>,
    ) -> Result<Self, QueueError> {
        let key = key(shared, number);
        let (device, shared) = (device.clone(), shared.clone());
        let made = remote.ask(move |handle, reply| {
            let made = DeviceQueue::make(handle, &device, number, shared);
            // The character device stays open while a clone of `device` exists.
            drop(device);
            reply.send(made);
        });
        made.unwrap_or_else(|| Err(gone().into())).map(|()| QueueHandle { remote, key })
    }

    /// Fetches the first requests from the driver. The returned reply arrives when the reactor has
    /// submitted the commands.
    pub fn fetch(&self) -> PendingReply<()> {
        let key = self.key;
        self.remote.ask_later(move |handle, reply| {
            let (queue, reactor) = (DeviceQueues::find(handle, key), handle.clone());
            handle.spawn(async move {
                if let Some(queue) = queue {
                    queue.fetch();
                }
                reactor.yield_now().await;
                reply.send(());
            });
        })
    }

    /// Maps the queue's requests, after all queues of the device have fetched (see
    /// `blockyard_ring::ublk::Queue`).
    pub fn map(&self) -> std::io::Result<()> {
        let key = self.key;
        let mapped = self.remote.ask(move |handle, reply| {
            let queue = DeviceQueues::find(handle, key);
            reply.send(queue.ok_or_else(gone).and_then(|queue| queue.driver_queue.map()));
        });
        mapped.unwrap_or_else(|| Err(gone()))
    }

    /// Makes requests pass throttles without waiting from now on.
    pub fn drain(&self) {
        self.with(|queue| queue.drain());
    }

    /// Waits until the driver stops the device, and this queue ends with it.
    pub fn wait(&self) {
        self.end(|_| ());
    }

    /// Finishes the requests that have begun, and leaves all others to the next server.
    pub fn leave(&self) {
        self.end(|queue| queue.leave());
    }

    fn end(&self, f: impl FnOnce(&Rc<DeviceQueue>) + Send + 'static) {
        let key = self.key;
        self.remote.ask(move |handle, reply| DeviceQueue::reply_at_end(handle, key, reply, f));
    }

    fn with(&self, f: impl FnOnce(&Rc<DeviceQueue>) + Send + 'static) {
        let key = self.key;
        self.remote.run(move |handle| {
            let queue = DeviceQueues::find(handle, key);
            if let Some(queue) = queue {
                f(&queue);
            }
        });
    }
}

fn gone() -> std::io::Error {
    std::io::Error::other("the queue or its reactor has ended")
}

impl DeviceQueue {
    fn make(
        handle: &Handle,
        device: &Device,
        number: u16,
        shared: Arc<Shared>,
    ) -> Result<(), QueueError> {
        if let Err(e) = blockyard_ring::host::set_io_flusher() {
            tracing::debug!("cannot mark the reactor as an I/O flusher (PR_SET_IO_FLUSHER): {e}");
        }
        let served = LocalDisk::local(handle, &shared.disk)?;
        let driver_queue = Queue::new(handle, device, number)?;
        let key = key(&shared, number);
        let budget = Budget::of(handle, &shared.disk);
        shared.live.fetch_add(1, Ordering::SeqCst);
        let queue = Rc::new(DeviceQueue {
            handle: handle.clone(),
            key,
            shared,
            served,
            driver_queue,
            tasks: RefCell::default(),
            running: Cell::new(0),
            draining: Cell::new(false),
            budget,
            leaving: Rc::default(),
            counts: Cell::default(),
            waiting: RefCell::new(None),
        });
        handle.local::<DeviceQueues>().0.borrow_mut().insert(key, queue);
        Ok(())
    }

    fn fetch(self: &Rc<Self>) {
        self.running.set(self.driver_queue.depth().into());
        let tasks = (0..self.driver_queue.depth()).map(|number| {
            let tag = self.driver_queue.tag(number);
            let task = Rc::new(TagTask {
                tag,
                leaving: self.leaving.clone(),
                status: Cell::new(Ok(())),
                segments: Cell::default(),
            });
            // Fetch before the task runs, so that the driver has all commands when the device
            // starts.
            let first = task.tag.fetch();
            self.handle.spawn(task.run(self.clone(), first))
        });
        self.tasks.borrow_mut().extend(tasks);
    }

    /// Sends `reply` when the queue has ended. `f` may make it end.
    fn reply_at_end(handle: &Handle, key: Key, reply: Reply<()>, f: impl FnOnce(&Rc<Self>)) {
        match DeviceQueues::find(handle, key) {
            Some(queue) => {
                *queue.waiting.borrow_mut() = Some(reply);
                // A queue that has never fetched has no requests to wait for.
                if queue.running.get() == 0 { queue.end() } else { f(&queue) }
            }
            None => reply.send(()),
        }
    }

    fn drain(&self) {
        if !self.draining.replace(true) {
            self.served.suspend_for_next();
        }
    }

    fn leave(&self) {
        self.leaving.set(true);
        self.served.release_paused();
        self.tasks.borrow().iter().for_each(|task| self.handle.wake(*task));
    }

    fn count(&self, bytes: u64, copied: u64) {
        let (requests, all, all_copied) = self.counts.get();
        self.counts.set((requests + 1, all + bytes, all_copied + copied));
    }

    /// Counts the end of a task. The last task to end also ends the queue.
    fn task_ended(&self) {
        self.running.set(self.running.get() - 1);
        if self.running.get() == 0 {
            self.end();
        }
    }

    fn end(&self) {
        let queue = self.handle.local::<DeviceQueues>().0.borrow_mut().remove(&self.key);
        drop(queue);
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

/// Handles the requests of one tag, one after another.
struct TagTask {
    tag: Tag,
    /// See [`DeviceQueue`].
    leaving: Rc<Cell<bool>>,
    status: Cell<Status>,
    /// Segment list, kept so that requests reuse its vector.
    segments: Cell<Segments>,
}

/// Identifies the task of a request.
struct TagToken(Rc<TagTask>);

impl Token for TagToken {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        self.0.status.set(status);
        self.0.segments.set(segments);
    }

    fn may_wait(&self) -> bool {
        !self.0.leaving.get()
    }
}

impl TagTask {
    async fn run(self: Rc<Self>, queue: Rc<DeviceQueue>, first: Fetch) {
        queue.handle.label(&format!(
            "disk {}, ublk queue {}",
            queue.shared.disk.name(),
            queue.key.1
        ));
        let mut fetch = first;
        while next(&queue, &mut fetch).await {
            let result = self.serve(&queue).await;
            fetch = self.tag.commit(result);
        }
        drop(fetch);
        queue.task_ended();
    }

    /// Serves the fetched request. Returns the number of bytes done, or a negative errno.
    async fn serve(self: &Rc<Self>, queue: &DeviceQueue) -> i32 {
        let fua = queue.shared.durable.load(Ordering::Relaxed);
        let descriptor = match self.tag.descriptor() {
            Ok(descriptor) => descriptor,
            Err(e) => {
                tracing::error!(
                    disk = queue.shared.disk.name(),
                    queue = queue.key.1,
                    "cannot map its requests: {e}"
                );
                return -rustix::io::Errno::IO.raw_os_error();
            }
        };
        let (op, offset, len) = match parse(&descriptor, self.tag.most(), fua) {
            Ok(asked) => asked,
            Err(e) => return -e.raw_os_error(),
        };
        let moves = matches!(op, Op::Read | Op::Write { .. });
        // Wait if this queue has used up its budget, so that the reactor serves its other queues.
        queue.budget.admit(&queue.handle, REQUEST, if moves { len } else { 0 }).await;
        let mut segments = self.segments.take();
        if moves {
            self.tag.fill(&mut segments, len as usize);
        } else {
            segments.release();
        }
        let request =
            Request::new(op, offset, len, segments, queue.handle.now(), TagToken(self.clone()));
        queue.served.serve(request).await.answer();
        let (failed, copied) = self.tag.take_outcome();
        queue.count(if moves { len } else { 0 }, copied);
        match self.status.get() {
            Err(failure) => -errno(failure).raw_os_error(),
            Ok(()) if failed => -rustix::io::Errno::IO.raw_os_error(),
            Ok(()) if moves => len as i32,
            Ok(()) => 0,
        }
    }
}

/// Waits for a request. Returns false if the device is stopped, or if the server leaves the queue.
async fn next(queue: &DeviceQueue, fetch: &mut Fetch) -> bool {
    let fetched = poll_fn(|cx| match Pin::new(&mut *fetch).poll(cx) {
        Poll::Pending if queue.leaving.get() => Poll::Ready(None),
        fetched => fetched.map(Some),
    });
    match fetched.await {
        Some(Ok(())) => true,
        // The device was stopped.
        Some(Err(e)) if e.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => false,
        Some(Err(e)) => {
            tracing::error!(
                disk = queue.shared.disk.name(),
                queue = queue.key.1,
                "the ublk driver refuses a command: {e}"
            );
            // A tag without a task would block the requests that get the tag, so leave the whole
            // queue.
            queue.leave();
            false
        }
        None => false,
    }
}

#[cfg(test)]
mod simulated;
