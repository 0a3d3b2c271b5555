//! Lanes: tasks that each carry one request, or run of neighbours, after another to the disk and back.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;

use blockyard_disk::{Request, Run, Served, Store};
use blockyard_ring::{Handle, TaskId};

use super::{Queue, Slot};

#[derive(Default)]
pub(super) struct Lane {
    load: Cell<Option<Load>>,
    task: Cell<TaskId>,
    closed: Cell<bool>,
}

/// What one operation does.
pub(super) enum Load {
    One(Request<Slot>),
    Run(Run<Slot>),
}

impl Lane {
    pub fn start(queue: &Rc<Queue>) -> Rc<Self> {
        let lane = Rc::new(Lane::default());
        let task = queue.handle.spawn(lane.clone().run(Rc::downgrade(queue), queue.served.clone()));
        lane.task.set(task);
        lane
    }

    /// Gives an idle lane something to do, and starts it.
    pub fn give(&self, load: Option<Load>, handle: &Handle) {
        self.load.set(load);
        handle.poll_now(self.task.get());
    }

    /// Ends an idle lane.
    pub fn close(&self, handle: &Handle) {
        self.closed.set(true);
        handle.wake(self.task.get());
    }

    async fn run(self: Rc<Self>, queue: Weak<Queue>, served: Rc<Served<Store>>) {
        loop {
            let next = poll_fn(|_| match self.load.take() {
                Some(load) => Poll::Ready(Some(load)),
                None if self.closed.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            match next.await {
                None => return,
                Some(Load::One(request)) => served.serve(request).await.answer(),
                Some(Load::Run(mut run)) => {
                    served.serve_run(&mut run).await;
                    run.finished().for_each(|finished| finished.answer());
                    if let Some(queue) = queue.upgrade() {
                        queue.runs.borrow_mut().push(run);
                    }
                }
            }
            match queue.upgrade() {
                Some(queue) => queue.idle.borrow_mut().push(self.clone()),
                None => return,
            }
        }
    }
}
