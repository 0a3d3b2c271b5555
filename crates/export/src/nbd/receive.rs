//! Receives the requests of a connection in its transmission phase, and hands them to the disk.
//!
//! ```text
//!   socket ─► run: inbox, header, payload ─► workers (a task for each request) ─► disk
//!   socket ◄─ send: all replies that are ready, in one write ◄─── replies ◄──────┘
//! ```
//! Requests of one connection run concurrently, and each is answered when it ends. What must hold:
//! the number of requests in flight is bounded. After an invalid header, the server reads no
//! further request. The connection ends after its last request.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Instant;

use blockyard_disk::{Op, Request, Source};
use blockyard_nbd::wire::{self, Headers, cmd, errno, flag};
use blockyard_ring::{Handle, Segments, Signal, TaskId};

use super::block_status;
use super::connection::{Connection, RequestToken, is_heavy};
use super::inbox::Inbox;
use super::quota::GUARANTEED;
use super::reply::Body;
use super::spool::Spool;
use super::stream::Stream;
use super::terms::Terms;
use super::worker::{Job, Workers};
use crate::budget::{self, REQUEST};
use crate::connections;

/// Maximum number of requests of one connection in flight.
const MOST_IN_FLIGHT: u32 = 128;
/// Number of requests between two checks of the clock.
const REQUESTS_PER_CHECK: u32 = 8;
/// Minimum length in bytes of a read after which the reactor serves other tasks before the next
/// request.
const LARGE: u64 = 128 << 10;
/// Maximum number of bytes that were read and not sent yet. Above it, the connection begins no
/// large read.
const MOST_UNSENT: u64 = 1 << 20;
/// Longest payload in bytes that the server skips after an error. If the payload is longer, the
/// server disconnects the client.
const MOST_SKIPPED: u64 = 64 << 20;

/// The receiving side of a connection.
pub struct Receiver {
    connection: Rc<Connection>,
    workers: Rc<Workers>,
    /// The task that sends replies.
    sender: Cell<TaskId>,
    wrote: Cell<bool>,
    /// The disk does not write into read buffers (see [`Source::Null`]), so the server must clear
    /// them before each read.
    scrubs: bool,
}

/// Reason why the connection reads no more requests.
pub enum End {
    /// The client ended the connection.
    Gone,
    Broken(String),
    /// Another server continues the connection, with these bytes first.
    Left(Option<Spool>),
}

impl Receiver {
    pub fn new(handle: &Handle, stream: Rc<Stream>, terms: Terms) -> io::Result<Self> {
        Ok(Self::on(Connection::new(handle, stream, terms)?))
    }

    /// Receives the requests of this connection.
    pub fn on(connection: Rc<Connection>) -> Self {
        let disk = &connection.terms.exported.disk;
        let scrubs =
            matches!(disk.source(), Source::Null { .. } | Source::Delay { file: None, .. });
        let workers = Workers::new(connection.clone());
        let (sender, wrote) = Default::default();
        Receiver { connection, workers, sender, wrote, scrubs }
    }

    /// Serves the client until it disconnects and all its requests are done.
    pub async fn run(self, mut inbox: Inbox) -> End {
        let handle = &self.connection.handle;
        handle.label(&format!("disk {}, over NBD", self.connection.terms.exported.disk.name()));
        let sending = Signal::new(handle);
        let (connection, done) = (self.connection.clone(), sending.clone());
        let sender = handle.spawn(async move {
            connection.send().await;
            done.ring();
        });
        self.sender.set(sender);
        let taken = match self.connection.stream.send_unsent().await {
            Ok(()) => self.take_requests(&mut inbox).await,
            Err(e) => Err(e),
        };
        let end = match taken {
            Ok(()) => End::Gone,
            Err(e) if self.connection.stream.has_left(&e) => End::Left(None),
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
                End::Broken("it disconnected in the middle of a request".into())
            }
            Err(e) => End::Broken(e.to_string()),
        };
        self.connection.ended.set(true);
        // The client may connect again before the last flush ends.
        if self.connection.unanswered.get() == 0 {
            drop(self.connection.terms.place.take());
        }
        self.connection.served.release_paused();
        self.connection.to_send.ring();
        sending.wait().await;
        self.workers.close();
        if let End::Left(_) = end {
            return self.left(inbox);
        }
        connections::flush_last(&self.connection.served, self.wrote.get()).await;
        end
    }

    /// Returns how the connection ends if another server continues it.
    fn left(&self, inbox: Inbox) -> End {
        let connection = &*self.connection;
        if connection.broken.get() {
            return End::Gone;
        }
        match inbox.into_unread(&connection.stream, &connection.left.borrow()) {
            Ok(unread) => End::Left(unread),
            Err(e) => End::Broken(format!("it cannot be handed over: {e}")),
        }
    }

    async fn take_requests(&self, inbox: &mut Inbox) -> io::Result<()> {
        let connection = &*self.connection;
        let headers = connection.terms.headers;
        loop {
            while !connection.stream.is_leaving()
                && let Some(bytes) = inbox.take::<32>(headers.request_bytes())
            {
                let request = wire::Request::parse(headers, &bytes).map_err(|magic| {
                    invalid(format!(
                        "a request begins with {magic:#010x}, which is not the magic of requests"
                    ))
                })?;
                if request.command == cmd::DISC {
                    connection.is_finished.set(true);
                    return Ok(());
                }
                if connection.broken.get() {
                    return Ok(());
                }
                while connection.in_flight.get() >= MOST_IN_FLIGHT {
                    connection.sent.wait().await;
                }
                while connection.budget.is_spent(connection.handle.iteration()) {
                    connection.handle.yield_now().await;
                }
                connection.in_flight.set(connection.in_flight.get() + 1);
                connection.unanswered.set(connection.unanswered.get() + 1);
                connection.idle.arrived();
                inbox.begin(&bytes, headers.request_bytes());
                let begun = self.begin(request, inbox).await;
                begun.inspect_err(|_| connection.finished())?;
                let large_read = request.len >= LARGE && request.command == cmd::READ;
                self.count(&request);
                if self.is_too_long() || large_read {
                    connection.handle.yield_now().await;
                }
                if large_read {
                    // A read from the page cache completes at once. Send its data while the data is
                    // in the processor's cache. Storage that is slow should get the next request
                    // without this wait.
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
                // Send the replies that are ready before the next read.
                connection.handle.poll_now(self.sender.get());
            }
            let empty = inbox.is_empty();
            if !inbox.fill(&connection.stream).await? {
                return if empty { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Counts a request in the iteration's budget.
    fn count(&self, request: &wire::Request) {
        let moves = matches!(request.command, cmd::READ | cmd::WRITE);
        self.connection.budget.spend(
            self.connection.handle.iteration(),
            REQUEST,
            if moves { request.len } else { 0 },
        );
    }

    /// Returns whether the reactor should serve other tasks before the next request, because the
    /// iteration has lasted too long.
    fn is_too_long(&self) -> bool {
        self.connection.in_flight.get().is_multiple_of(REQUESTS_PER_CHECK)
            && budget::is_over(self.connection.handle.now(), Instant::now())
    }

    /// Starts a request after reading its payload. Returns an error if the request was not answered
    /// and the bytes after it cannot be parsed.
    async fn begin(&self, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        let wire::Request { command, len, .. } = request;
        let connection = &*self.connection;
        let checked = connection.terms.check(&request);
        if is_heavy(&request) {
            while connection.heavy.get() {
                connection.sent.wait().await;
            }
            connection.heavy.set(true);
        }
        if command == cmd::WRITE {
            return self.begin_write(request, checked, inbox).await;
        }
        let mut effect = len;
        let mut only = None;
        let extended = connection.terms.headers == Headers::Extended;
        if command == cmd::BLOCK_STATUS && extended && request.flags & flag::PAYLOAD_LEN != 0 {
            if len > block_status::MOST_PAYLOAD {
                return self.refuse_payload(request, inbox).await;
            }
            let payload =
                self.await_payload(inbox.exactly(&connection.stream, len as usize)).await?;
            let Some(asked) = connection.terms.contexts.narrowed(&payload) else {
                connection.reply(&request, Err(errno::EINVAL), Body::None);
                return Ok(());
            };
            (effect, only) = (asked.0, Some(asked.1));
        } else if extended && request.flags & flag::PAYLOAD_LEN != 0 {
            return self.refuse_payload(request, inbox).await;
        }
        if let Err(error) = checked {
            connection.reply(&request, Err(error), Body::None);
            return Ok(());
        }
        match command {
            cmd::READ => {
                let buffer = connection.take(len as usize).await;
                if connection.stream.is_leaving() {
                    // The quota may be exceeded. The next server begins the request.
                    connection.give_back(buffer, len as usize);
                    connection.abandon(&request);
                    return Ok(());
                }
                if connection.broken.get() || connection.stream.is_shut() {
                    // The reply cannot be sent, so free the buffer and end the connection.
                    connection.give_back(buffer, len as usize);
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if self.scrubs {
                    buffer.zero(0, buffer.len());
                }
                self.submit(request, Op::Read, buffer);
            }
            cmd::FLUSH => self.submit(
                wire::Request { offset: 0, len: 0, ..request },
                Op::Flush,
                Segments::default(),
            ),
            cmd::TRIM => self.submit(request, Op::Discard, Segments::default()),
            cmd::WRITE_ZEROES => {
                let (unmap, fast) =
                    (request.flags & flag::NO_HOLE == 0, request.flags & flag::FAST_ZERO != 0);
                let fua = request.flags & flag::FUA != 0 || !connection.terms.write_back();
                let op = Op::WriteZeroes { unmap, fua, fast };
                if is_heavy(&request) {
                    self.wrote.set(true);
                    self.workers.start(Job::Zeroes { request, op });
                } else {
                    self.submit(request, op, Segments::default());
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
        checked: Result<(), u32>,
        inbox: &mut Inbox,
    ) -> io::Result<()> {
        if let Err(error) = checked {
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
                self.await_payload(inbox.payload(&self.connection.stream, &payload, 0..len)).await
            {
                self.connection.give_back(payload, len);
                return Err(e);
            }
            payload
        };
        let fua = request.flags & flag::FUA != 0 || !self.connection.terms.write_back();
        self.submit(request, Op::Write { fua }, payload);
        Ok(())
    }

    /// Receives a payload that is longer than the guaranteed memory of a connection. Takes memory
    /// from the quota as the payload arrives.
    async fn receive_long(&self, len: usize, inbox: &mut Inbox) -> io::Result<Segments> {
        let (connection, usage) = (&*self.connection, self.connection.usage());
        connection.hold(len).await;
        let release = || connection.held.set(connection.held.get() - len);
        let mut growing = connection.buffers.growing(len).inspect_err(|_| release())?;
        let mut done = 0;
        while done < len {
            let to = connection.buffers.grow(&connection.handle, &mut growing, usage).await;
            if let Err(e) = self
                .await_payload(inbox.payload(&connection.stream, &growing.payload, done..to))
                .await
            {
                release();
                connection.buffers.abandon(growing, usage);
                return Err(e);
            }
            done = to;
        }
        Ok(connection.buffers.grown(growing, usage))
    }

    /// Refuses a request that must not have a payload.
    async fn refuse_payload(&self, request: wire::Request, inbox: &mut Inbox) -> io::Result<()> {
        self.skip(request.len, inbox).await?;
        self.connection.reply(&request, Err(errno::EINVAL), Body::None);
        Ok(())
    }

    /// Skips a payload, so that the following bytes can be parsed.
    async fn skip(&self, len: u64, inbox: &mut Inbox) -> io::Result<()> {
        if len > MOST_SKIPPED {
            return Err(invalid(format!(
                "it sends a payload of {len} bytes that is not allowed, and too long to skip"
            )));
        }
        self.await_payload(inbox.skip(&self.connection.stream, len)).await
    }

    /// Awaits bytes of a request's payload. The connection counts as idle during this wait.
    async fn await_payload<T>(&self, payload: impl Future<Output = T>) -> T {
        self.connection.idle.leave();
        let received = payload.await;
        self.connection.idle.enter();
        received
    }

    fn submit(&self, request: wire::Request, op: Op, segments: Segments) {
        if op != Op::Read && op != Op::Flush {
            self.wrote.set(true);
        }
        let token = RequestToken { connection: self.connection.clone(), request };
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
