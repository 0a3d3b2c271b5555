//! A connection in its transmission phase: takes requests, hands them to the disk, sends the answers.
//!
//! ```text
//!   socket ─► run: inbox, header, payload ─► lanes (a task for each request) ─► disk
//!   socket ◄─ send: all answers that are there, in one write ◄─── answers ◄──────┘
//! ```
//! Requests of one connection run side by side, and are answered as they end. What must hold: each is answered once; what
//! requests hold is bounded, and given back when the answer is sent; after a broken header nothing more is taken; the end
//! of the connection is the end of its last request.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::{Op, Request, Served, Source, Store};
use blockyard_nbd::wire::{self, Headers, cmd, errno, export, flag};
use blockyard_ring::{Handle, Segments, Signal, TaskId};

use super::buffers::Buffers;
use super::idle::Idle;
use super::inbox::Inbox;
use super::lane::{Lane, Work, ZEROED_AT_A_TIME};
use super::reply::{Body, Reply};
use super::room::{Account, GUARANTEED};
use super::stream::Stream;
use super::{Exported, block_status};
use crate::budget::{self, Budget, REQUEST};

/// Requests of one connection that are on their way at a time.
const MOST_IN_FLIGHT: u32 = 128;
/// Bytes that they hold: one client alone leaves the others room.
const MOST_HELD: usize = 64 << 20;
/// Requests that begin before the clock is read.
const LOOK: u32 = 8;
/// Bytes of a read that is begun before the next one is looked at.
const LARGE: u64 = 128 << 10;
/// Bytes that were read and not sent, beyond which no large read is begun.
const MOST_UNSENT: u64 = 1 << 20;
/// Bytes of payload beyond which a client that may not send them is not listened to any more.
const MOST_SKIPPED: u64 = 64 << 20;

/// What the option phase has settled.
pub struct Terms {
    pub exported: Arc<Exported>,
    pub headers: Headers,
    pub contexts: block_status::Contexts,
}

pub struct Connection {
    pub(super) handle: Handle,
    pub(super) stream: Rc<Stream>,
    pub(super) terms: Terms,
    pub(super) served: Rc<Served<Store>>,
    pub(super) buffers: Rc<Buffers>,
    /// Answers that are to be sent.
    pub(super) replies: RefCell<Vec<Reply>>,
    /// There are some, or there will be none any more.
    pub(super) to_send: Signal,
    /// The task that sends them.
    sender: Cell<TaskId>,
    /// An answer was sent.
    pub(super) sent: Signal,
    pub(super) in_flight: Cell<u32>,
    /// Those of them that the disk has not answered.
    pub(super) unanswered: Cell<u32>,
    /// Bytes of the buffers of requests in flight.
    pub(super) held: Cell<usize>,
    /// Bytes that were read and are not sent yet.
    pub(super) unsent: Cell<u64>,
    pub(super) idle: Rc<Idle>,
    /// Nothing more is taken.
    pub(super) ended: Cell<bool>,
    /// Nothing more can be sent.
    pub(super) broken: Cell<bool>,
    pub(super) lanes: RefCell<Vec<Rc<Lane>>>,
    /// A request is on its way that costs much for few bytes: one at a time.
    pub(super) heavy: Cell<bool>,
    budget: Budget,
    wrote: Cell<bool>,
    /// The disk leaves what is read as it was: see [`Source::Null`].
    scrubs: bool,
}

/// Why nothing more is taken.
pub enum End {
    /// The client said so, or went.
    Gone,
    Broken(String),
}

impl Connection {
    pub fn new(handle: &Handle, stream: Rc<Stream>, terms: Terms) -> io::Result<Rc<Self>> {
        let disk = &terms.exported.disk;
        let served = Served::local(handle, disk)?;
        let budget = Budget::of(handle, disk);
        let scrubs = matches!(disk.source(), Source::Null { .. } | Source::Delay { file: None, .. });
        let idle = Idle::local(handle, &terms.exported);
        Ok(Rc::new(Connection {
            handle: handle.clone(),
            stream,
            terms,
            served,
            buffers: handle.local::<Buffers>(),
            replies: RefCell::default(),
            to_send: Signal::new(handle),
            sender: Cell::default(),
            sent: Signal::new(handle),
            in_flight: Cell::new(0),
            idle,
            unanswered: Cell::new(0),
            held: Cell::new(0),
            unsent: Cell::new(0),
            ended: Cell::new(false),
            broken: Cell::new(false),
            lanes: RefCell::default(),
            heavy: Cell::new(false),
            budget,
            wrote: Cell::new(false),
            scrubs,
        }))
    }

    /// Serves the client until it goes, and all that it asked for is done.
    pub async fn run(self: Rc<Self>, inbox: Inbox) -> End {
        self.handle.label(&format!("disk {}, over NBD", self.terms.exported.disk.name()));
        let sending = Signal::new(&self.handle);
        let (connection, done) = (self.clone(), sending.clone());
        let sender = self.handle.spawn(async move {
            connection.send().await;
            done.ring();
        });
        self.sender.set(sender);
        let end = match self.take_requests(inbox).await {
            Ok(()) => End::Gone,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => End::Broken(e.to_string()),
            Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => End::Gone,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                End::Broken("it went in the middle of a request".into())
            }
            Err(e) => End::Broken(e.to_string()),
        };
        self.ended.set(true);
        self.to_send.ring();
        sending.wait().await;
        for lane in self.lanes.borrow_mut().drain(..) {
            lane.close(&self.handle);
        }
        if self.wrote.get() {
            // What it did not flush is not to be lost for that.
            let _ = self.served.settle().await;
        }
        end
    }

    async fn take_requests(self: &Rc<Self>, mut inbox: Inbox) -> io::Result<()> {
        let headers = self.terms.headers;
        loop {
            while let Some(bytes) = inbox.take::<32>(headers.request_bytes()) {
                let request = wire::Request::parse(headers, &bytes).map_err(|magic| {
                    invalid(format!("a request begins with {magic:#010x}, which is no request's magic"))
                })?;
                if request.command == cmd::DISC || self.broken.get() {
                    return Ok(());
                }
                while self.in_flight.get() >= MOST_IN_FLIGHT {
                    self.sent.wait().await;
                }
                while self.budget.is_spent(self.handle.turn()) {
                    self.handle.yield_now().await;
                }
                self.in_flight.set(self.in_flight.get() + 1);
                self.unanswered.set(self.unanswered.get() + 1);
                self.idle.came();
                let begun = self.begin(request, &mut inbox).await;
                begun.inspect_err(|_| self.went())?;
                let large_read = request.len >= LARGE && request.command == cmd::READ;
                self.book(&request);
                if self.has_lasted() || large_read {
                    self.handle.yield_now().await;
                }
                if large_read {
                    // From the page cache it is answered at once: its data go out while they are in the processor's cache. A
                    // disk that takes its time is to have the next one meanwhile.
                    while self.unsent.get() > MOST_UNSENT && self.unanswered.get() == 0 {
                        self.sent.wait().await;
                    }
                }
            }
            if self.broken.get() {
                return Ok(());
            }
            if !self.replies.borrow().is_empty() {
                // What was answered at once goes out before the kernel is asked for more.
                self.handle.poll_now(self.sender.get());
            }
            let empty = inbox.is_empty();
            if !inbox.fill(&self.stream).await? {
                return if empty { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Books a request that began.
    fn book(&self, request: &wire::Request) {
        let moves = matches!(request.command, cmd::READ | cmd::WRITE);
        self.budget.spend(self.handle.turn(), REQUEST, if moves { request.len } else { 0 });
    }

    /// Whether other tasks of the reactor go on before the next request, because the turn has lasted.
    fn has_lasted(&self) -> bool {
        self.in_flight.get().is_multiple_of(LOOK) && budget::is_over(self.handle.now(), Instant::now())
    }

    /// A request is answered, or cannot be.
    pub(super) fn went(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.idle.leave();
    }

    /// Starts a request; its payload is read first. An error: it was not answered, and what follows cannot be understood.
    async fn begin(self: &Rc<Self>, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        let wire::Request { command, len, .. } = request;
        let judged = self.judge(&request);
        if is_heavy(&request) {
            while self.heavy.get() {
                self.sent.wait().await;
            }
            self.heavy.set(true);
        }
        if command == cmd::WRITE {
            return self.begin_write(request, judged, inbox).await;
        }
        let mut effect = len;
        let mut only = None;
        let extended = self.terms.headers == Headers::Extended;
        if command == cmd::BLOCK_STATUS && extended && request.flags & flag::PAYLOAD_LEN != 0 {
            if len > block_status::MOST_PAYLOAD {
                return self.refuse_payload(request, inbox).await;
            }
            let payload = self.owed(inbox.exactly(&self.stream, len as usize)).await?;
            let Some(asked) = self.terms.contexts.narrowed(&payload) else {
                self.reply(&request, Err(errno::EINVAL), Body::None);
                return Ok(());
            };
            (effect, only) = (asked.0, Some(asked.1));
        } else if extended && request.flags & flag::PAYLOAD_LEN != 0 {
            return self.refuse_payload(request, inbox).await;
        }
        if let Err(error) = judged {
            self.reply(&request, Err(error), Body::None);
            return Ok(());
        }
        match command {
            cmd::READ => {
                let buffer = self.take(len as usize).await;
                if self.broken.get() {
                    // Nobody will take it: all that was asked for before is let go, and this with it.
                    self.give_back(buffer, len as usize);
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if self.scrubs {
                    buffer.zero(0, buffer.len());
                }
                self.hand_on(request, Op::Read, buffer);
            }
            cmd::FLUSH => self.hand_on(wire::Request { offset: 0, len: 0, ..request }, Op::Flush, Segments::default()),
            cmd::TRIM => self.hand_on(request, Op::Discard, Segments::default()),
            cmd::WRITE_ZEROES => {
                let (unmap, fast) = (request.flags & flag::NO_HOLE == 0, request.flags & flag::FAST_ZERO != 0);
                let fua = request.flags & flag::FUA != 0 || !self.write_back();
                let op = Op::WriteZeroes { unmap, fua, fast };
                if is_heavy(&request) {
                    self.wrote.set(true);
                    self.to_lane(Work::Zeroes { request, op });
                } else {
                    self.hand_on(request, op, Segments::default());
                }
            }
            cmd::CACHE => self.to_lane(Work::Cache(request)),
            _ => self.to_lane(Work::Status { request: wire::Request { len: effect, ..request }, only }),
        }
        Ok(())
    }

    async fn begin_write(
        self: &Rc<Self>,
        request: wire::Request,
        judged: Result<(), u32>,
        inbox: &mut Inbox,
    ) -> io::Result<()> {
        if let Err(error) = judged {
            self.skip(request.len, inbox).await?;
            self.reply(&request, Err(error), Body::None);
            return Ok(());
        }
        let len = request.len as usize;
        let payload = if len > GUARANTEED {
            self.receive_long(len, inbox).await?
        } else {
            let payload = self.take(len).await;
            if let Err(e) = self.owed(inbox.payload(&self.stream, &payload, 0..len)).await {
                self.give_back(payload, len);
                return Err(e);
            }
            payload
        };
        let fua = request.flags & flag::FUA != 0 || !self.write_back();
        self.hand_on(request, Op::Write { fua }, payload);
        Ok(())
    }

    /// Receives a payload that is longer than what each connection may always hold: room for it is taken as it arrives.
    async fn receive_long(&self, len: usize, inbox: &mut Inbox) -> io::Result<Segments> {
        self.hold(len).await;
        let mut growing = self.buffers.growing(len).inspect_err(|_| self.held.set(self.held.get() - len))?;
        let mut done = 0;
        while done < len {
            let to = self.buffers.grow(&self.handle, &mut growing, self.account()).await;
            if let Err(e) = self.owed(inbox.payload(&self.stream, &growing.payload, done..to)).await {
                self.held.set(self.held.get() - len);
                self.buffers.abandon(growing, self.account());
                return Err(e);
            }
            done = to;
        }
        Ok(self.buffers.grown(growing, self.account()))
    }

    /// A request with a payload that it may not have.
    async fn refuse_payload(&self, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        self.skip(request.len, inbox).await?;
        self.reply(&request, Err(errno::EINVAL), Body::None);
        Ok(())
    }

    /// Passes over a payload: what follows it is to be understood.
    async fn skip(&self, len: u64, inbox: &mut Inbox) -> io::Result<()> {
        if len > MOST_SKIPPED {
            return Err(invalid(format!("it sends {len} bytes at once, which may be refused only by reading them")));
        }
        self.owed(inbox.skip(&self.stream, len)).await
    }

    /// What the client owes a request: it is the client's turn.
    async fn owed<T>(&self, payload: impl Future<Output = T>) -> T {
        self.idle.leave();
        let paid = payload.await;
        self.idle.enter();
        paid
    }

    pub(super) fn account(&self) -> &Rc<Account> {
        &self.stream.account
    }

    /// Waits until this connection's requests may hold `len` bytes more.
    async fn hold(&self, len: usize) {
        while self.held.get() > 0 && self.held.get() + len > MOST_HELD {
            self.sent.wait().await;
        }
        self.held.set(self.held.get() + len);
    }

    /// A buffer, when there is room for it.
    async fn take(&self, len: usize) -> Segments {
        self.hold(len).await;
        self.buffers.take(&self.handle, len, self.account()).await
    }

    pub(super) fn give_back(&self, buffer: Segments, len: usize) {
        self.held.set(self.held.get() - len);
        self.buffers.give_back(buffer, len, self.account());
    }

    /// Whether the request is one; the answer where it is none.
    fn judge(&self, request: &wire::Request) -> Result<(), u32> {
        let wire::Request { flags, command, offset, len, .. } = *request;
        let extended = self.terms.headers == Headers::Extended;
        let allowed = flag::FUA
            | match command {
                cmd::READ if self.terms.headers != Headers::Simple => flag::DF,
                cmd::WRITE if extended => flag::PAYLOAD_LEN,
                cmd::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
                cmd::BLOCK_STATUS if extended => flag::REQ_ONE | flag::PAYLOAD_LEN,
                cmd::BLOCK_STATUS => flag::REQ_ONE,
                _ => 0,
            };
        if flags & !allowed != 0 {
            return Err(errno::EINVAL);
        }
        let writes = matches!(command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        match command {
            cmd::FLUSH if offset == 0 && len == 0 => return Ok(()),
            cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES | cmd::CACHE | cmd::BLOCK_STATUS => {}
            _ => return Err(errno::EINVAL),
        }
        // (A write has its payload whether its flag says so or not: QEMU's client leaves the flag out.)
        let status_payload = command == cmd::BLOCK_STATUS && flags & flag::PAYLOAD_LEN != 0;
        if writes && self.served.disk().options().read_only {
            return Err(errno::EPERM);
        }
        if matches!(command, cmd::READ | cmd::WRITE) && len > wire::MOST_PAYLOAD.into() {
            return Err(errno::EINVAL);
        }
        if command == cmd::BLOCK_STATUS && (self.terms.contexts.is_empty() || (len == 0 && !status_payload)) {
            return Err(errno::EINVAL);
        }
        let end = if status_payload { Some(offset) } else { offset.checked_add(len) };
        if end.is_none_or(|end| end > self.served.disk().capacity()) {
            let grows = matches!(command, cmd::WRITE | cmd::WRITE_ZEROES);
            return Err(if grows { errno::ENOSPC } else { errno::EINVAL });
        }
        let block = u64::from(self.terms.exported.block.minimum);
        let moves = matches!(command, cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        if moves && (offset | len) & (block - 1) != 0 {
            return Err(errno::EINVAL);
        }
        Ok(())
    }

    /// Without a write cache each write is durable before its answer.
    fn write_back(&self) -> bool {
        self.terms.exported.flags & export::SEND_FLUSH == 0 || self.served.disk().options().cache.write_back()
    }

    fn hand_on(self: &Rc<Self>, request: wire::Request, op: Op, segments: Segments) {
        if op != Op::Read && op != Op::Flush {
            self.wrote.set(true);
        }
        let token = super::reply::Owed { connection: self.clone(), request };
        let flushes = op == Op::Discard && request.flags & flag::FUA != 0;
        let request = Request::new(op, request.offset, request.len, segments, self.handle.now(), token);
        self.to_lane(Work::Request { request, flushes });
    }

    fn to_lane(self: &Rc<Self>, work: Work) {
        let lane = self.lanes.borrow_mut().pop();
        let lane = lane.unwrap_or_else(|| Lane::start(self));
        lane.give(&self.handle, work);
    }
}

/// Whether it costs much for few bytes.
pub fn is_heavy(request: &wire::Request) -> bool {
    match request.command {
        cmd::BLOCK_STATUS | cmd::CACHE => true,
        cmd::WRITE_ZEROES => request.len > ZEROED_AT_A_TIME,
        _ => false,
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
