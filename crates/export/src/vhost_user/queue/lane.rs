//! Lanes: tasks that each carry one request, or run of neighbours, after another to the disk and back.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use blockyard_disk::{Request, Run, Served, Store};
use blockyard_ring::TaskId;

use super::{ChainToken, DeviceState, Queue};

/// A task that carries one request, or run of neighbours, after another.
#[derive(Default)]
pub(super) struct Lane {
    pub(super) load: Cell<Option<Load>>,
    pub(super) task: Cell<TaskId>,
    pub(super) closed: Cell<bool>,
}

/// What one operation does.
pub(super) enum Load {
    One(Request<ChainToken>),
    Run(Run<ChainToken>),
}

impl Lane {
    pub(super) async fn run(self: Rc<Self>, queue: Weak<Queue>, device: Arc<DeviceState>, served: Rc<Served<Store>>) {
        loop {
            let next = poll_fn(|_| match self.load.take() {
                Some(load) => Poll::Ready(Some(load)),
                None if self.closed.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            let Some(load) = next.await else { return };
            // The guest switched its write cache off while this was on its way: now the answer promises more.
            let promises_more = |volatile| volatile && !device.write_back.load(Ordering::Relaxed);
            match load {
                Load::One(request) => {
                    let volatile = request.is_volatile();
                    let mut finished = served.serve(request).await;
                    if promises_more(volatile) {
                        finished = finished.and(served.settle().await);
                    }
                    finished.answer();
                }
                Load::Run(mut run) => {
                    let volatile = run.is_volatile();
                    served.serve_run(&mut run).await;
                    let settled = if promises_more(volatile) { served.settle().await } else { Ok(()) };
                    run.finished().for_each(|finished| finished.and(settled).answer());
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
