//! Workers: tasks that each carry one request after another to the disk and back. They are reused,
//! so that the steady state allocates nothing.

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

/// The workers of a connection.
pub struct Workers {
    connection: Rc<Connection>,
    /// Those that have nothing to do.
    idle: RefCell<Vec<Rc<Worker>>>,
}

#[derive(Default)]
struct Worker {
    job: Cell<Option<Job>>,
    task: Cell<TaskId>,
    closed: Cell<bool>,
}

/// What one worker does at a time.
pub enum Job {
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

impl Workers {
    pub fn new(connection: Rc<Connection>) -> Rc<Self> {
        Rc::new(Workers { connection, idle: RefCell::default() })
    }

    /// Starts `job` here and now.
    pub fn start(self: &Rc<Self>, job: Job) {
        let idle = self.idle.borrow_mut().pop();
        let worker = idle.unwrap_or_else(|| Worker::start(self));
        worker.job.set(Some(job));
        self.connection.handle.poll_now(worker.task.get());
    }

    /// Ends the workers that have nothing to do.
    pub fn close(&self) {
        for worker in self.idle.borrow_mut().drain(..) {
            worker.closed.set(true);
            self.connection.handle.wake(worker.task.get());
        }
    }
}

impl Worker {
    fn start(workers: &Rc<Workers>) -> Rc<Self> {
        let worker = Rc::new(Worker::default());
        worker
            .task
            .set(workers.connection.handle.spawn(worker.clone().run(Rc::downgrade(workers))));
        worker
    }

    async fn run(self: Rc<Self>, workers: Weak<Workers>) {
        loop {
            let next = poll_fn(|_| match self.job.take() {
                Some(job) => Poll::Ready(Some(job)),
                None if self.closed.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            let Some(job) = next.await else { return };
            // Whoever waits for an answer keeps its connection.
            let Some(workers) = workers.upgrade() else { return };
            let connection = &workers.connection;
            match job {
                Job::Request { request, flushes } => {
                    let mut finished = connection.served.serve(request).await;
                    if flushes {
                        finished = finished.and(connection.served.settle().await);
                    }
                    finished.answer();
                }
                Job::Status { request, only } => Box::pin(connection.status(request, only)).await,
                Job::Cache(request) => {
                    Box::pin(connection.in_pieces(request, Op::Read, CACHED_AT_A_TIME)).await
                }
                Job::Zeroes { request, op } => match Box::pin(connection.may_zero(&request, op))
                    .await
                {
                    Ok(()) => Box::pin(connection.in_pieces(request, op, ZEROED_AT_A_TIME)).await,
                    Err(error) => connection.reply(&request, Err(error), Body::None),
                },
            }
            workers.idle.borrow_mut().push(self.clone());
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
