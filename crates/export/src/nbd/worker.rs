//! Workers: reusable tasks. Each worker carries out one job after another: a request, or a part of
//! the protocol that needs the disk. Reuse avoids allocations in the steady state.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::Poll;

use blockyard_disk::{Op, Request};
use blockyard_nbd::wire;
use blockyard_ring::{Segments, TaskId};

use super::block_status::{self, Contexts};
use super::connection::{Connection, RequestToken, ZEROED_AT_A_TIME};
use super::reply::{Body, error_of};
use crate::budget::REQUEST;
use crate::connections;

/// Bytes of a cache request (NBD_CMD_CACHE) that the worker reads at a time.
const CACHED_AT_A_TIME: u64 = 256 << 10;

/// The workers of a connection.
pub struct Workers {
    connection: Rc<Connection>,
    /// Workers without a job.
    idle: RefCell<Vec<Rc<Worker>>>,
}

#[derive(Default)]
struct Worker {
    job: Cell<Option<Job>>,
    task: Cell<TaskId>,
    closed: Cell<bool>,
}

/// The work of a worker for one request.
pub enum Job {
    /// `flushes`: sync the disk before the reply, because the operation itself does not make its
    /// data durable.
    Request {
        request: Request<RequestToken>,
        flushes: bool,
    },
    Status {
        request: wire::Request,
        only: Option<Contexts>,
    },
    Cache(wire::Request),
    /// A write of zeroes that the worker splits into pieces.
    Zeroes {
        request: wire::Request,
        op: Op,
    },
}

impl Workers {
    pub fn new(connection: Rc<Connection>) -> Rc<Self> {
        Rc::new(Workers { connection, idle: RefCell::default() })
    }

    /// Gives `job` to an idle worker, or to a new one, and polls it at once.
    pub fn start(self: &Rc<Self>, job: Job) {
        let idle = self.idle.borrow_mut().pop();
        let worker = idle.unwrap_or_else(|| Worker::start(self));
        worker.job.set(Some(job));
        self.connection.handle.poll_now(worker.task.get());
    }

    /// Ends the idle workers. A busy worker ends after its job.
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
            // A worker with a job keeps the connection alive.
            let Some(workers) = workers.upgrade() else { return };
            let connection = &workers.connection;
            match job {
                Job::Request { request, flushes } => {
                    let mut finished = connection.served.serve(request).await;
                    if flushes {
                        finished = finished.and(connection.served.flush_unsynced().await);
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
        let (headers, work) = (self.terms.headers, (&self.handle, &self.pieces));
        let found =
            block_status::chunks(&self.served, contexts, &request, headers, block, work).await;
        match found {
            Ok(chunks) => self.reply(&request, Ok(()), Body::Chunks(chunks)),
            Err(error) => self.reply(&request, Err(error), Body::None),
        }
    }

    /// Checks, as far as possible, that all pieces of a fast write of zeroes will be fast, before
    /// the first piece begins. Returns the error for the whole request if a piece would be slow.
    async fn may_zero(&self, request: &wire::Request, op: Op) -> Result<(), u32> {
        let Op::WriteZeroes { unmap, fast: true, .. } = op else { return Ok(()) };
        let (mut at, end) = (request.offset, request.offset + request.len);
        while at < end && self.goes_on() {
            let len = (end - at).min(ZEROED_AT_A_TIME);
            self.served
                .may_zero_fast(at, len, unmap)
                .await
                .map_err(|failure| error_of(failure, op))?;
            at += len;
            self.handle.yield_now().await;
            self.pieces.admit(&self.handle, REQUEST, 0).await;
        }
        Ok(())
    }

    /// Handles a long request piece by piece, until it is complete or the client is gone. For a
    /// cache request, the worker reads the data and drops it. The data is then in the page cache,
    /// or in the overlay (copy-on-read).
    async fn in_pieces(self: &Rc<Self>, request: wire::Request, op: Op, piece: u64) {
        let (mut at, end) = (request.offset, request.offset + request.len);
        let mut status = Ok(());
        while at < end && status.is_ok() {
            if !self.goes_on() {
                return self.abandon(&request);
            }
            let len = (end - at).min(piece);
            let buffered = if op == Op::Read { len as usize } else { 0 };
            let buffer = match op {
                Op::Read => self.buffers.take(&self.handle, buffered, self.usage()).await,
                _ => Segments::default(),
            };
            let (part, at_work) = ((op, at, len), self.clone());
            let may_wait = move || at_work.goes_on();
            let (ended, buffer) =
                connections::serve_one(&self.handle, &self.served, part, buffer, may_wait).await;
            if op == Op::Read {
                self.buffers.give_back(buffer, buffered, self.usage());
            }
            status = ended.map_err(|failure| error_of(failure, op));
            at += len;
            // Pieces that complete at once must not keep the reactor from its other tasks.
            self.handle.yield_now().await;
            self.pieces.admit(&self.handle, REQUEST, buffered as u64).await;
        }
        self.reply(&request, status, Body::None);
    }
}
