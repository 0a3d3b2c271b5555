//! Lanes: reusable tasks. Each lane takes one request, or one run of adjacent requests, to the disk
//! and answers it.
//!
//! In: the batches of a queue. Out: answers, through the requests' tokens. What must hold: each
//! request that the disk handles has a lane of its own. Lanes are reused, so the steady state
//! allocates nothing.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;

use blockyard_disk::{LocalDisk, Request, Run, Token};
use blockyard_ring::{Handle, TaskId};

/// The lanes of one queue.
pub struct Lanes<T: Token> {
    handle: Handle,
    served: Rc<LocalDisk>,
    /// Returns whether the guest sees a volatile write cache now. The value may change while the
    /// disk handles a write.
    has_write_back: Rc<dyn Fn() -> bool>,
    idle: RefCell<Vec<Rc<Lane<T>>>>,
    /// The tasks of all lanes.
    tasks: RefCell<Vec<TaskId>>,
    /// Vectors for runs of adjacent requests, kept for reuse.
    runs: RefCell<Vec<Run<T>>>,
}

struct Lane<T: Token> {
    load: Cell<Option<Load<T>>>,
    task: Cell<TaskId>,
    is_closed: Cell<bool>,
}

/// The work of a lane: one request, or a run of adjacent requests.
enum Load<T: Token> {
    One(Request<T>),
    Run(Run<T>),
}

impl<T: Token + 'static> Lanes<T> {
    /// Returns the lanes of a queue. `has_write_back` returns whether the guest sees a volatile
    /// write cache now.
    pub fn new(
        handle: &Handle,
        served: Rc<LocalDisk>,
        has_write_back: impl Fn() -> bool + 'static,
    ) -> Rc<Self> {
        let (idle, runs, tasks) = Default::default();
        Rc::new(Lanes {
            handle: handle.clone(),
            served,
            has_write_back: Rc::new(has_write_back),
            idle,
            tasks,
            runs,
        })
    }

    /// Gives each request, and each run of adjacent requests, to an idle lane, and polls the lane
    /// at once. Empties `requests`.
    #[inline]
    pub fn dispatch(self: &Rc<Self>, requests: &mut Vec<Request<T>>) {
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
            let lane = lane.unwrap_or_else(|| self.open());
            lane.load.set(load);
            self.handle.poll_now(lane.task.get());
        }
    }

    fn open(self: &Rc<Self>) -> Rc<Lane<T>> {
        let lane = Rc::new(Lane {
            load: Cell::default(),
            task: Cell::default(),
            is_closed: Cell::new(false),
        });
        let (served, has_write_back) = (self.served.clone(), self.has_write_back.clone());
        let task =
            self.handle.spawn(Self::run(Rc::downgrade(self), served, has_write_back, lane.clone()));
        lane.task.set(task);
        self.tasks.borrow_mut().push(task);
        lane
    }

    async fn run(
        lanes: Weak<Self>,
        served: Rc<LocalDisk>,
        has_write_back: Rc<dyn Fn() -> bool>,
        lane: Rc<Lane<T>>,
    ) {
        loop {
            let next = poll_fn(|_| match lane.load.take() {
                Some(load) => Poll::Ready(Some(load)),
                None if lane.is_closed.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            let Some(load) = next.await else { return };
            // The guest may have switched its write cache off since the request began. Then the
            // answer promises durability that the request did not ask for.
            let promises_more = |volatile: bool| volatile && !has_write_back();
            match load {
                Load::One(request) => {
                    let volatile = request.is_volatile();
                    let mut finished = served.serve(request).await;
                    if promises_more(volatile) {
                        finished = finished.and(served.flush_unsynced().await);
                    }
                    finished.answer();
                }
                Load::Run(mut run) => {
                    let volatile = run.is_volatile();
                    served.serve_run(&mut run).await;
                    let synced = if promises_more(volatile) {
                        served.flush_unsynced().await
                    } else {
                        Ok(())
                    };
                    run.finished().for_each(|finished| finished.and(synced).answer());
                    if let Some(lanes) = lanes.upgrade() {
                        lanes.runs.borrow_mut().push(run);
                    }
                }
            }
            match lanes.upgrade() {
                Some(lanes) => lanes.idle.borrow_mut().push(lane.clone()),
                None => return,
            }
        }
    }

    /// Wakes all lanes, because requests are withdrawn.
    pub fn wake(&self) {
        self.tasks.borrow().iter().for_each(|task| self.handle.wake(*task));
    }

    /// Ends the idle lanes, which are tasks that wait for requests. A busy lane ends after its
    /// request.
    pub fn close(&self) {
        for lane in self.idle.borrow_mut().drain(..) {
            lane.is_closed.set(true);
            self.handle.wake(lane.task.get());
        }
    }
}

#[cfg(test)]
mod tests;
