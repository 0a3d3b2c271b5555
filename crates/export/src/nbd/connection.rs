//! State that the tasks of one connection share in its transmission phase: the receiver, the
//! workers and the sender.
//!
//! In: requests, as they begin. Out: replies, as the requests end. What must hold: each request
//! gets one reply. The memory of requests is bounded, and is returned when the reply is sent.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use blockyard_disk::{LocalDisk, Op, Status, Token};
use blockyard_nbd::wire::{self, cmd, errno, flag};
use blockyard_ring::{Handle, Segments, Signal};

use super::buffers::Buffers;
use super::idle::Idle;
use super::quota::Usage;
use super::reply::{Body, Reply, error_of};
use super::stream::Stream;
use super::terms::Terms;
use crate::budget::Budget;

/// Maximum number of bytes of buffers for one connection, so that one client leaves memory for
/// other clients.
const MOST_HELD: usize = 64 << 20;
/// Bytes of a long write of zeroes that the disk handles at a time.
pub const ZEROED_AT_A_TIME: u64 = 1 << 30;

/// The state of one connection in its transmission phase.
pub struct Connection {
    pub handle: Handle,
    pub stream: Rc<Stream>,
    pub terms: Terms,
    pub served: Rc<LocalDisk>,
    pub buffers: Rc<Buffers>,
    /// Replies that the sender has not taken yet.
    pub replies: RefCell<Vec<Reply>>,
    /// Wakes the sender, because `replies` has changed or no further reply will come.
    pub to_send: Signal,
    /// Wakes tasks that wait until a reply is sent.
    pub sent: Signal,
    pub in_flight: Cell<u32>,
    /// Number of requests in flight that the disk has not completed.
    pub unanswered: Cell<u32>,
    /// Bytes in the buffers of requests in flight.
    pub held: Cell<usize>,
    /// Bytes that were read from the disk and are not sent yet.
    pub unsent: Cell<u64>,
    pub idle: Rc<Idle>,
    /// What its requests take in an iteration when they arrive.
    pub budget: Budget,
    /// What its long requests take later, piece by piece.
    pub pieces: Budget,
    /// The connection accepts no more requests.
    pub ended: Cell<bool>,
    /// The client has said that it sends no more requests (NBD_CMD_DISC). It has a right to the
    /// requests before that: they run to their end, unless the export ends.
    pub is_finished: Cell<bool>,
    /// The connection can send nothing more.
    pub broken: Cell<bool>,
    /// A request is in flight that needs much work for few bytes. The connection allows one such
    /// request at a time.
    pub heavy: Cell<bool>,
    /// Headers of requests that this server has taken and leaves to the next one.
    pub left: RefCell<Vec<u8>>,
}

impl Connection {
    pub fn new(handle: &Handle, stream: Rc<Stream>, terms: Terms) -> io::Result<Rc<Self>> {
        let served = LocalDisk::local(handle, &terms.exported.disk)?;
        Ok(Self::on(handle, stream, terms, served))
    }

    /// Like [`Connection::new`], with this reactor's disk.
    pub fn on(
        handle: &Handle,
        stream: Rc<Stream>,
        terms: Terms,
        served: Rc<LocalDisk>,
    ) -> Rc<Self> {
        let disk = terms.exported.disk.clone();
        let idle = Idle::local(handle, &terms.exported);
        stream.count_slow_calls(idle.slow_calls.clone());
        Rc::new(Connection {
            handle: handle.clone(),
            stream,
            terms,
            served,
            buffers: handle.local::<Buffers>(),
            replies: RefCell::default(),
            to_send: Signal::new(handle),
            sent: Signal::new(handle),
            in_flight: Cell::new(0),
            idle,
            budget: Budget::of(handle, &disk),
            pieces: Budget::of(handle, &disk),
            unanswered: Cell::new(0),
            held: Cell::new(0),
            unsent: Cell::new(0),
            ended: Cell::new(false),
            is_finished: Cell::new(false),
            broken: Cell::new(false),
            heavy: Cell::new(false),
            left: RefCell::default(),
        })
    }

    /// Queues the reply to a request, and wakes the sender.
    #[inline]
    pub fn reply(&self, request: &wire::Request, status: Result<(), u32>, body: Body) {
        let reply = Reply { request: *request, status, body };
        self.unsent.set(self.unsent.get() + reply.data_bytes());
        self.unanswered.set(self.unanswered.get() - 1);
        self.replies.borrow_mut().push(reply);
        self.to_send.ring();
    }

    /// Ends a request without payload in the middle of its work. If another server continues the
    /// connection, that server begins the request anew. Otherwise the client gets an error.
    pub fn abandon(&self, request: &wire::Request) {
        if !self.stream.is_leaving() || self.broken.get() {
            return self.reply(request, Err(errno::ESHUTDOWN), Body::None);
        }
        request.put(self.terms.headers, &mut self.left.borrow_mut());
        self.unanswered.set(self.unanswered.get() - 1);
        self.heavy.set(false);
        self.finished();
        self.to_send.ring();
        self.sent.ring();
    }

    /// Records that a request is finished: it was answered, or it cannot be answered.
    pub fn finished(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.idle.leave();
    }

    /// Returns whether the client is connected and may send requests.
    pub fn goes_on(&self) -> bool {
        let is_wanted = self.is_finished.get() && !self.served.is_suspended();
        let ended = self.ended.get() && !is_wanted;
        !self.broken.get() && !self.stream.is_shut() && !ended && !self.stream.is_leaving()
    }

    /// Returns the connection's use of the reactor's buffer quota.
    pub fn usage(&self) -> &Rc<Usage> {
        &self.stream.usage
    }

    /// Waits until this connection may hold `len` more bytes.
    pub async fn hold(&self, len: usize) {
        while self.held.get() > 0 && self.held.get() + len > MOST_HELD {
            self.sent.wait().await;
        }
        self.held.set(self.held.get() + len);
    }

    /// Waits until there is memory for a buffer of `len` bytes, and returns the buffer.
    pub async fn take(&self, len: usize) -> Segments {
        self.hold(len).await;
        self.buffers.take(&self.handle, len, self.usage()).await
    }

    /// Frees a buffer that was taken with `len` bytes.
    pub fn give_back(&self, buffer: Segments, len: usize) {
        self.held.set(self.held.get() - len);
        self.buffers.give_back(buffer, len, self.usage());
    }
}

/// The token of a client's request.
pub struct RequestToken {
    pub connection: Rc<Connection>,
    pub request: wire::Request,
}

impl Token for RequestToken {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        let RequestToken { connection, request } = self;
        let op = match request.command {
            cmd::WRITE => Op::Write { fua: false },
            cmd::WRITE_ZEROES => Op::WriteZeroes {
                unmap: false,
                fua: false,
                fast: request.flags & flag::FAST_ZERO != 0,
            },
            _ => Op::Read,
        };
        let status = status.map_err(|failure| error_of(failure, op));
        let body = match request.command {
            cmd::READ | cmd::WRITE => Body::Buffer(segments),
            _ => Body::None,
        };
        connection.reply(&request, status, body);
    }

    fn may_wait(&self) -> bool {
        self.connection.goes_on()
    }
}

/// Returns whether the request needs much work for few bytes.
pub fn is_heavy(request: &wire::Request) -> bool {
    match request.command {
        cmd::BLOCK_STATUS | cmd::CACHE => true,
        cmd::WRITE_ZEROES => request.len > ZEROED_AT_A_TIME,
        _ => false,
    }
}
