//! Lanes: tasks that each carry one request after another to the disk and back. They are reused, so
//! that the steady state allocates nothing.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;

use blockyard_disk::{Failure, Op, Request};
use blockyard_nbd::wire::{self, errno};
use blockyard_ring::{Segments, TaskId};

use super::block_status::{self, Contexts};
use super::connection::{Connection, Owed, ZEROED_AT_A_TIME};
use super::reply::{Body, error_of};

/// Bytes that are read at a time of what a client wants cached.
const CACHED_AT_A_TIME: u64 = 1 << 20;

/// The lanes of a connection.
pub struct Lanes {
    connection: Rc<Connection>,
    /// Those that have nothing to do.
    idle: RefCell<Vec<Rc<Lane>>>,
}

#[derive(Default)]
struct Lane {
    work: Cell<Option<Work>>,
    task: Cell<TaskId>,
    closed: Cell<bool>,
}

/// What one lane does at a time.
pub enum Work {
    /// `flushes`: what it changed is durable before its answer, which the operation does not see to
    /// by itself.
    Request {
        request: Request<Owed>,
        flushes: bool,
    },
    Status {
        request: wire::Request,
        only: Option<Contexts>,
    },
    Cache(wire::Request),
    /// A long write of zeroes.
    Zeroes {
        request: wire::Request,
        op: Op,
    },
}

impl Lanes {
    pub fn new(connection: Rc<Connection>) -> Rc<Self> {
        Rc::new(Lanes { connection, idle: RefCell::default() })
    }

    /// Starts `work` here and now.
    pub fn give(self: &Rc<Self>, work: Work) {
        let idle = self.idle.borrow_mut().pop();
        let lane = idle.unwrap_or_else(|| Lane::start(self));
        lane.work.set(Some(work));
        self.connection.handle.poll_now(lane.task.get());
    }

    /// Ends the lanes that have nothing to do.
    pub fn close(&self) {
        for lane in self.idle.borrow_mut().drain(..) {
            lane.closed.set(true);
            self.connection.handle.wake(lane.task.get());
        }
    }
}

impl Lane {
    fn start(lanes: &Rc<Lanes>) -> Rc<Self> {
        let lane = Rc::new(Lane::default());
        lane.task.set(lanes.connection.handle.spawn(lane.clone().run(Rc::downgrade(lanes))));
        lane
    }

    async fn run(self: Rc<Self>, lanes: Weak<Lanes>) {
        loop {
            let next = poll_fn(|_| match self.work.take() {
                Some(work) => Poll::Ready(Some(work)),
                None if self.closed.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            let Some(work) = next.await else { return };
            // Whoever waits for an answer keeps its connection.
            let Some(lanes) = lanes.upgrade() else { return };
            let connection = &lanes.connection;
            match work {
                Work::Request { request, flushes } => {
                    let mut finished = connection.served.serve(request).await;
                    if flushes {
                        finished = finished.and(connection.served.settle().await);
                    }
                    finished.answer();
                }
                Work::Status { request, only } => Box::pin(connection.status(request, only)).await,
                Work::Cache(request) => {
                    Box::pin(connection.in_pieces(request, Op::Read, CACHED_AT_A_TIME)).await
                }
                Work::Zeroes { request, op } => match Box::pin(connection.may_zero(&request, op))
                    .await
                {
                    Ok(()) => Box::pin(connection.in_pieces(request, op, ZEROED_AT_A_TIME)).await,
                    Err(error) => connection.reply(&request, Err(error), Body::None),
                },
            }
            lanes.idle.borrow_mut().push(self.clone());
        }
    }
}

impl Connection {
    async fn status(&self, request: wire::Request, only: Option<Contexts>) {
        let contexts = only.as_ref().unwrap_or(&self.terms.contexts);
        let block = self.terms.exported.block.minimum.into();
        let yields = &self.handle;
        match block_status::chunks(
            &self.served,
            contexts,
            &request,
            self.terms.headers,
            block,
            yields,
        )
        .await
        {
            Ok(chunks) => self.reply(&request, Ok(()), Body::Chunks(chunks)),
            Err(error) => self.reply(&request, Err(error), Body::None),
        }
    }

    /// What is to be fast is refused as a whole, before its first piece is done: as far as that can
    /// be known.
    async fn may_zero(&self, request: &wire::Request, op: Op) -> Result<(), u32> {
        let Op::WriteZeroes { unmap, fast: true, .. } = op else { return Ok(()) };
        let (mut at, end) = (request.offset, request.offset + request.len);
        while at < end && !self.broken.get() && !self.ended.get() {
            let len = (end - at).min(ZEROED_AT_A_TIME);
            self.served
                .may_zero_fast(at, len, unmap)
                .await
                .map_err(|failure| error_of(failure, op))?;
            at += len;
            self.handle.yield_now().await;
        }
        Ok(())
    }

    /// A request that may take long, piece by piece, as long as the client is there. What is read,
    /// the client will want: it is in the page cache then, or in the overlay (copy-on-read).
    async fn in_pieces(&self, request: wire::Request, op: Op, piece: u64) {
        let (mut at, end) = (request.offset, request.offset + request.len);
        let mut status = Ok(());
        while at < end && status.is_ok() {
            if self.broken.get() || self.ended.get() {
                status = Err(errno::ESHUTDOWN);
                break;
            }
            let len = (end - at).min(piece);
            let buffered = if op == Op::Read { len as usize } else { 0 };
            let buffer = match op {
                Op::Read => self.buffers.take(&self.handle, buffered, self.account()).await,
                _ => Segments::default(),
            };
            let done = Rc::new(Cell::new(None));
            let part = Request::new(op, at, len, buffer, self.handle.now(), Passing(done.clone()));
            self.served.serve(part).await.answer();
            let (ended, buffer) = done.take().unwrap_or((Err(Failure::Io), Segments::default()));
            if op == Op::Read {
                self.buffers.give_back(buffer, buffered, self.account());
            }
            status = ended.map_err(|failure| error_of(failure, op));
            at += len;
            // What is answered on the spot must not keep the reactor from its other tasks.
            self.handle.yield_now().await;
        }
        self.reply(&request, status, Body::None);
    }
}

/// The token of a part of a request.
struct Passing(Rc<Cell<Option<(blockyard_disk::Status, Segments)>>>);

impl blockyard_disk::Token for Passing {
    fn answer(self, status: blockyard_disk::Status, segments: Segments) {
        self.0.set(Some((status, segments)));
    }
}
