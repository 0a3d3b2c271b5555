//! Receives the requests of a connection in its transmission phase, and hands them to the disk.
//!
//! ```text
//!   socket ─► run: inbox, header, payload ─► workers (a task for each request) ─► disk
//!   socket ◄─ send: all answers that are there, in one write ◄─── answers ◄──────┘
//! ```
//! Requests of one connection run side by side, and are answered as they end. What must hold: the
//! number of requests in flight is bounded; after a broken header nothing more is taken; the end of
//! the connection is the end of its last request.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Instant;

use blockyard_disk::{Op, Request, Source};
use blockyard_nbd::wire::{self, Headers, cmd, errno, flag};
use blockyard_ring::{Handle, Segments, Signal, TaskId};

use super::block_status;
use super::connection::{Connection, Owed, is_heavy};
use super::inbox::Inbox;
use super::reply::Body;
use super::room::GUARANTEED;
use super::stream::Stream;
use super::terms::Terms;
use super::worker::{Job, Workers};
use crate::budget::{self, Budget, REQUEST};

/// Requests of one connection that are on their way at a time.
const MOST_IN_FLIGHT: u32 = 128;
/// Requests that begin before the clock is read.
const LOOK: u32 = 8;
/// Bytes of a read that is begun before the next one is looked at.
const LARGE: u64 = 128 << 10;
/// Bytes that were read and not sent, beyond which no large read is begun.
const MOST_UNSENT: u64 = 1 << 20;
/// Bytes of payload beyond which a client that may not send them is not listened to any more.
const MOST_SKIPPED: u64 = 64 << 20;

pub struct Receiver {
    connection: Rc<Connection>,
    workers: Rc<Workers>,
    /// The task that sends answers.
    sender: Cell<TaskId>,
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

impl Receiver {
    pub fn new(handle: &Handle, stream: Rc<Stream>, terms: Terms) -> io::Result<Self> {
        let connection = Connection::new(handle, stream, terms)?;
        let disk = &connection.terms.exported.disk;
        let budget = Budget::of(handle, disk);
        let scrubs =
            matches!(disk.source(), Source::Null { .. } | Source::Delay { file: None, .. });
        let workers = Workers::new(connection.clone());
        let (sender, wrote) = Default::default();
        Ok(Receiver { connection, workers, sender, budget, wrote, scrubs })
    }

    /// Serves the client until it goes, and all that it asked for is done.
    pub async fn run(self, inbox: Inbox) -> End {
        let handle = &self.connection.handle;
        handle.label(&format!("disk {}, over NBD", self.connection.terms.exported.disk.name()));
        let sending = Signal::new(handle);
        let (connection, done) = (self.connection.clone(), sending.clone());
        let sender = handle.spawn(async move {
            connection.send().await;
            done.ring();
        });
        self.sender.set(sender);
        let end = match self.take_requests(inbox).await {
            Ok(()) => End::Gone,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => End::Broken(e.to_string()),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
                ) =>
            {
                End::Gone
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                End::Broken("it went in the middle of a request".into())
            }
            Err(e) => End::Broken(e.to_string()),
        };
        self.connection.ended.set(true);
        self.connection.to_send.ring();
        sending.wait().await;
        self.workers.close();
        if self.wrote.get() {
            // What it did not flush is not to be lost for that.
            let _ = self.connection.served.settle().await;
        }
        end
    }

    async fn take_requests(&self, mut inbox: Inbox) -> io::Result<()> {
        let connection = &*self.connection;
        let headers = connection.terms.headers;
        loop {
            while let Some(bytes) = inbox.take::<32>(headers.request_bytes()) {
                let request = wire::Request::parse(headers, &bytes).map_err(|magic| {
                    invalid(format!(
                        "a request begins with {magic:#010x}, which is no request's magic"
                    ))
                })?;
                if request.command == cmd::DISC || connection.broken.get() {
                    return Ok(());
                }
                while connection.in_flight.get() >= MOST_IN_FLIGHT {
                    connection.sent.wait().await;
                }
                while self.budget.is_spent(connection.handle.iteration()) {
                    connection.handle.yield_now().await;
                }
                connection.in_flight.set(connection.in_flight.get() + 1);
                connection.unanswered.set(connection.unanswered.get() + 1);
                connection.idle.came();
                let begun = self.begin(request, &mut inbox).await;
                begun.inspect_err(|_| connection.went())?;
                let large_read = request.len >= LARGE && request.command == cmd::READ;
                self.book(&request);
                if self.has_lasted() || large_read {
                    connection.handle.yield_now().await;
                }
                if large_read {
                    // From the page cache it is answered at once: its data go out while they are in
                    // the processor's cache. A disk that takes its time is to have the next one
                    // meanwhile.
                    while connection.unsent.get() > MOST_UNSENT && connection.unanswered.get() == 0
                    {
                        connection.sent.wait().await;
                    }
                }
            }
            if connection.broken.get() {
                return Ok(());
            }
            if !connection.replies.borrow().is_empty() {
                // What was answered at once goes out before the kernel is asked for more.
                connection.handle.poll_now(self.sender.get());
            }
            let empty = inbox.is_empty();
            if !inbox.fill(&connection.stream).await? {
                return if empty { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Books a request that began.
    fn book(&self, request: &wire::Request) {
        let moves = matches!(request.command, cmd::READ | cmd::WRITE);
        self.budget.spend(
            self.connection.handle.iteration(),
            REQUEST,
            if moves { request.len } else { 0 },
        );
    }

    /// Whether other tasks of the reactor go on before the next request, because the turn has
    /// lasted.
    fn has_lasted(&self) -> bool {
        self.connection.in_flight.get().is_multiple_of(LOOK)
            && budget::is_over(self.connection.handle.now(), Instant::now())
    }

    /// Starts a request; its payload is read first. An error: it was not answered, and what follows
    /// cannot be understood.
    async fn begin(&self, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        let wire::Request { command, len, .. } = request;
        let connection = &*self.connection;
        let judged = connection.terms.judge(&request);
        if is_heavy(&request) {
            while connection.heavy.get() {
                connection.sent.wait().await;
            }
            connection.heavy.set(true);
        }
        if command == cmd::WRITE {
            return self.begin_write(request, judged, inbox).await;
        }
        let mut effect = len;
        let mut only = None;
        let extended = connection.terms.headers == Headers::Extended;
        if command == cmd::BLOCK_STATUS && extended && request.flags & flag::PAYLOAD_LEN != 0 {
            if len > block_status::MOST_PAYLOAD {
                return self.refuse_payload(request, inbox).await;
            }
            let payload = self.owed(inbox.exactly(&connection.stream, len as usize)).await?;
            let Some(asked) = connection.terms.contexts.narrowed(&payload) else {
                connection.reply(&request, Err(errno::EINVAL), Body::None);
                return Ok(());
            };
            (effect, only) = (asked.0, Some(asked.1));
        } else if extended && request.flags & flag::PAYLOAD_LEN != 0 {
            return self.refuse_payload(request, inbox).await;
        }
        if let Err(error) = judged {
            connection.reply(&request, Err(error), Body::None);
            return Ok(());
        }
        match command {
            cmd::READ => {
                let buffer = connection.take(len as usize).await;
                if connection.broken.get() {
                    // Nobody will take it: all that was asked for before is let go, and this with
                    // it.
                    connection.give_back(buffer, len as usize);
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if self.scrubs {
                    buffer.zero(0, buffer.len());
                }
                self.hand_on(request, Op::Read, buffer);
            }
            cmd::FLUSH => self.hand_on(
                wire::Request { offset: 0, len: 0, ..request },
                Op::Flush,
                Segments::default(),
            ),
            cmd::TRIM => self.hand_on(request, Op::Discard, Segments::default()),
            cmd::WRITE_ZEROES => {
                let (unmap, fast) =
                    (request.flags & flag::NO_HOLE == 0, request.flags & flag::FAST_ZERO != 0);
                let fua = request.flags & flag::FUA != 0 || !connection.terms.write_back();
                let op = Op::WriteZeroes { unmap, fua, fast };
                if is_heavy(&request) {
                    self.wrote.set(true);
                    self.workers.start(Job::Zeroes { request, op });
                } else {
                    self.hand_on(request, op, Segments::default());
                }
            }
            cmd::CACHE => self.workers.start(Job::Cache(request)),
            _ => self
                .workers
                .start(Job::Status { request: wire::Request { len: effect, ..request }, only }),
        }
        Ok(())
    }

    async fn begin_write(
        &self,
        request: wire::Request,
        judged: Result<(), u32>,
        inbox: &mut Inbox,
    ) -> io::Result<()> {
        if let Err(error) = judged {
            self.skip(request.len, inbox).await?;
            self.connection.reply(&request, Err(error), Body::None);
            return Ok(());
        }
        let len = request.len as usize;
        let payload = if len > GUARANTEED {
            self.receive_long(len, inbox).await?
        } else {
            let payload = self.connection.take(len).await;
            if let Err(e) =
                self.owed(inbox.payload(&self.connection.stream, &payload, 0..len)).await
            {
                self.connection.give_back(payload, len);
                return Err(e);
            }
            payload
        };
        let fua = request.flags & flag::FUA != 0 || !self.connection.terms.write_back();
        self.hand_on(request, Op::Write { fua }, payload);
        Ok(())
    }

    /// Receives a payload that is longer than what each connection may always hold: room for it is
    /// taken as it arrives.
    async fn receive_long(&self, len: usize, inbox: &mut Inbox) -> io::Result<Segments> {
        let (connection, account) = (&*self.connection, self.connection.account());
        connection.hold(len).await;
        let give_up = || connection.held.set(connection.held.get() - len);
        let mut growing = connection.buffers.growing(len).inspect_err(|_| give_up())?;
        let mut done = 0;
        while done < len {
            let to = connection.buffers.grow(&connection.handle, &mut growing, account).await;
            if let Err(e) =
                self.owed(inbox.payload(&connection.stream, &growing.payload, done..to)).await
            {
                give_up();
                connection.buffers.abandon(growing, account);
                return Err(e);
            }
            done = to;
        }
        Ok(connection.buffers.grown(growing, account))
    }

    /// A request with a payload that it may not have.
    async fn refuse_payload(&self, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        self.skip(request.len, inbox).await?;
        self.connection.reply(&request, Err(errno::EINVAL), Body::None);
        Ok(())
    }

    /// Passes over a payload: what follows it is to be understood.
    async fn skip(&self, len: u64, inbox: &mut Inbox) -> io::Result<()> {
        if len > MOST_SKIPPED {
            return Err(invalid(format!(
                "it sends {len} bytes at once, which may be refused only by reading them"
            )));
        }
        self.owed(inbox.skip(&self.connection.stream, len)).await
    }

    /// What the client owes a request: it is the client's turn.
    async fn owed<T>(&self, payload: impl Future<Output = T>) -> T {
        self.connection.idle.leave();
        let paid = payload.await;
        self.connection.idle.enter();
        paid
    }

    fn hand_on(&self, request: wire::Request, op: Op, segments: Segments) {
        if op != Op::Read && op != Op::Flush {
            self.wrote.set(true);
        }
        let token = Owed { connection: self.connection.clone(), request };
        let flushes = op == Op::Discard && request.flags & flag::FUA != 0;
        let request = Request::new(
            op,
            request.offset,
            request.len,
            segments,
            self.connection.handle.now(),
            token,
        );
        self.workers.start(Job::Request { request, flushes });
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
