//! The requests of one reactor to one export, over one connection at a time.
//!
//! ```text
//!   ask ──► slot: waiting ──► sender: header, data ──► server ──► receiver ──► slot: done
//!              ▲                                         │
//!              └─────── the connection is lost ──────────┘
//! ```
//!
//! One task, the driver, connects, sends, receives and watches. Requests wait while it reconnects,
//! and are then sent again. What must hold:
//! - If a connection ends while no request is in flight, the client tries at once, one time, to
//!   replace it. No request waits for that.
//! - Waiting is bounded. Without progress for [`Options::reconnect`](super::Options::reconnect) all
//!   waiting requests fail. Then new requests fail at once until a connection is back. Progress is
//!   an answer, not a connection.
//! - A write that was acknowledged but not flushed when the connection was lost may be lost with
//!   the server. From then on writes and flushes fail ([`Export::lose`]). The same holds if the
//!   server falls silent with a write in flight, or if this side ends the connection then, because
//!   the server might still do that write after a later one. A server that has closed the
//!   connection, or has reset it, is assumed to do nothing more of what it has not answered.
//! - A sender or receiver that has begun is never dropped. The client shuts the socket down and
//!   lets them run out, because they use the memory of requests that are sent again.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockyard_ring::{Handle, Segments, Signal, Socket};

use super::dial::{Dialed, dial};
use super::export::Export;
use super::receive::Receiver;
use super::slots::{Ask, Piece};
use super::state::{Inner, PIECES, SENT_AT_A_TIME, changes};
use blockyard_nbd::link::Link;
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::wire::{self, cmd};
use blockyard_nbd::{NbdError, NbdErrorKind};

/// Pauses between attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// After a connection that lasted this long, the next attempt begins at once. Otherwise a server
/// that closes each connection after one answer would cause connections and log lines without end.
const LASTING: Duration = Duration::from_secs(1);
/// Maximum number of requests in one send.
const REQUESTS_AT_A_TIME: usize = 64;

/// Why a connection has ended.
#[derive(Default)]
struct Ended {
    why: String,
    /// Whether the server has closed or reset the connection. If not, it may still execute requests
    /// that were sent.
    by_server: bool,
}

impl Ended {
    /// The end of a connection by this side.
    fn here(why: String) -> Self {
        Ended { why, by_server: false }
    }

    fn of(why: String, error: &io::Error) -> Self {
        let by_server = matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        );
        Ended { why, by_server }
    }

    fn of_receiver(error: &NbdError) -> Self {
        let why = error.to_string();
        match error.source.as_ref().and_then(|source| source.downcast_ref()) {
            Some(error) => Ended::of(why, error),
            None => Ended { why, by_server: error.kind == NbdErrorKind::Closed },
        }
    }
}

/// A client of one export on one reactor; see the module documentation.
pub struct Client(Rc<Inner>);

impl Client {
    pub fn new(handle: &Handle, export: &Arc<Export>) -> Self {
        let signal = || Signal::new(handle);
        let inner = Rc::new(Inner {
            export: export.clone(),
            handle: handle.clone(),
            slots: RefCell::default(),
            socket: RefCell::default(),
            send: signal(),
            receive: signal(),
            watch: signal(),
            work: signal(),
            broken: Cell::new(false),
            used: Cell::new(false),
            ended: Cell::new(false),
            progress: Cell::new(Instant::now()),
            trouble: Cell::new(None),
            pause: Cell::new(Duration::ZERO),
            down: RefCell::new(None),
            try_again: Cell::new(false),
            reconnect_idle: Cell::new(false),
            given_up: Cell::new(false),
            acknowledged: Cell::new(0),
            flushed: Cell::new(0),
        });
        handle.spawn(inner.clone().drive());
        Client(inner)
    }

    /// Sends a request and waits for its answer. Returns the segments, which a read has filled.
    pub async fn ask(&self, ask: Ask, segments: Segments) -> (Segments, io::Result<Vec<Piece>>) {
        let inner = &*self.0;
        if let Some(error) = inner.refusal(&ask) {
            return (segments, Err(error));
        }
        let index = inner.begin(ask, segments);
        let mut waiting = Waiting { inner, index: Some(index) };
        let slot = poll_fn(|cx| inner.slots.borrow_mut().poll(index, cx.waker())).await;
        waiting.index = None;
        (slot.segments, slot.error.map_or(Ok(slot.pieces), Err))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let inner = &*self.0;
        inner.ended.set(true);
        let idle = inner.slots.borrow().busy() == 0 && !inner.broken.get();
        if let Some((socket, terms)) = inner.socket.take() {
            // Another client can use the connection if no request is in flight on it.
            match idle.then(|| socket.keep()) {
                Some(Ok((fd, session))) => inner.export.put_idle(Dialed { fd, session, terms }),
                _ => socket.shutdown(),
            }
        }
        inner.break_off();
        inner.work.ring();
    }
}

/// A request that the caller waits for.
struct Waiting<'a> {
    inner: &'a Inner,
    index: Option<u32>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.inner.slots.borrow_mut().abandon(index);
        }
    }
}

impl Inner {
    fn refusal(&self, ask: &Ask) -> Option<io::Error> {
        if ask.command != cmd::READ
            && ask.command != cmd::BLOCK_STATUS
            && let Some(why) = self.export.lost()
        {
            return Some(io::Error::other(why.to_string()));
        }
        let down = self.down.borrow();
        let (why, again) = down.as_ref()?;
        if Instant::now() >= *again {
            self.try_again.set(true);
            self.work.ring();
        }
        Some(unreachable(why))
    }

    fn begin(&self, ask: Ask, segments: Segments) -> u32 {
        let index = self.slots.borrow_mut().begin(ask, segments);
        if self.slots.borrow().busy() == 1 {
            self.progress.set(Instant::now());
            self.receive.ring();
            self.watch.ring();
            if self.reconnect_idle.take() {
                // The reconnect limit of this request begins here.
                self.trouble.set(Some(Instant::now()));
            }
        }
        self.send.ring();
        self.work.ring();
        index
    }

    async fn drive(self: Rc<Self>) {
        while !self.ended.get() {
            if !self.slots.borrow().has_to_send()
                && !self.try_again.take()
                && !self.reconnect_idle.get()
            {
                self.work.wait().await;
                continue;
            }
            match self.connect().await {
                Ok(dialed) => {
                    if self.reconnect_idle.take() {
                        self.log_connected();
                    }
                    let began = Instant::now();
                    let end = self.serve(dialed).await;
                    if began.elapsed() >= LASTING {
                        self.pause.set(Duration::ZERO);
                    }
                    if !self.ended.get() {
                        self.lost_connection(&end);
                    }
                }
                Err(why) if self.reconnect_idle.take() => {
                    if !self.ended.get() {
                        tracing::warn!(
                            "image {}: {why}: reconnecting at the next request",
                            self.export.uri
                        );
                    }
                    self.trouble.set(None);
                    self.pause.set(Duration::ZERO);
                }
                Err(why) => self.give_up(why.to_string()),
            }
        }
    }

    /// Sleeps before the next attempt to connect. If no request has waited for a connection so far,
    /// the first request that waits ends the pause.
    async fn pause(&self, time: Duration) {
        let (reconnect_idle, mut over) = (self.reconnect_idle.get(), pin!(self.handle.sleep(time)));
        poll_fn(|cx| {
            self.work.clear();
            self.work.arm();
            let asked = reconnect_idle && !self.reconnect_idle.get();
            if asked || self.ended.get() { Poll::Ready(()) } else { over.as_mut().poll(cx) }
        })
        .await;
    }

    /// Connects within the remaining time.
    async fn connect(&self) -> Result<Dialed, NbdError> {
        if self.trouble.get().is_none()
            && let Some(idle) = self.export.take_idle()
        {
            return Ok(idle);
        }
        let options = self.export.options;
        let began = Instant::now();
        // While new requests fail at once, make only one attempt here. The caller makes the next
        // one.
        let patience =
            if self.down.borrow().is_some() { Duration::ZERO } else { options.reconnect };
        loop {
            let deadline = || self.trouble.get().unwrap_or(began) + patience;
            let pause = self.pause.get().min(deadline().saturating_duration_since(Instant::now()));
            self.pause.set((self.pause.get() * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE));
            self.pause(pause).await;
            if self.ended.get() {
                return Err(NbdError::new(NbdErrorKind::Closed, "it is no longer in use"));
            }
            let (export, limit) = (self.export.clone(), options.timeout);
            let dialed = self.handle.blocking(move || dial(&export.uri, limit)).await;
            let dialed =
                dialed.map_err(|e| NbdError::of(NbdErrorKind::Io, e)).and_then(|dialed| dialed);
            match dialed.and_then(|dialed| self.export.check(&dialed.terms).map(|()| dialed)) {
                Ok(dialed) => return Ok(dialed),
                Err(why) if Instant::now() >= deadline() => return Err(why),
                Err(why) => {
                    if self.trouble.get().is_none() {
                        self.trouble.set(Some(began));
                        tracing::warn!("image {}: {why}: trying again", self.export.uri);
                    }
                }
            }
        }
    }

    /// Uses a connection until it is lost. Returns why it was lost.
    async fn serve(&self, dialed: Dialed) -> Ended {
        let Dialed { fd, session, terms } = dialed;
        let socket = match Socket::new(&self.handle, fd) {
            Ok(socket) => Link::new(socket, session),
            Err(e) => return Ended::here(format!("opening its socket for io_uring: {e}")),
        };
        self.broken.set(false);
        self.used.set(false);
        self.down.take();
        self.progress.set(Instant::now());
        *self.socket.borrow_mut() = Some((socket.clone(), terms.clone()));
        let receiver = Receiver::new(self, &socket, &terms);
        let (mut sending, mut receiving) =
            (pin!(self.send_all(&socket, &terms)), pin!(receiver.run()));
        let (mut watching, mut reason) = (pin!(self.watch(&socket)), None::<Ended>);
        let (mut sent, mut received) = (false, false);
        let end = poll_fn(|cx| {
            if !sent && let Poll::Ready(end) = sending.as_mut().poll(cx) {
                (sent, reason) = (true, reason.take().or(Some(end)));
            }
            if !received && let Poll::Ready(why) = receiving.as_mut().poll(cx) {
                // The receiver's error says more about the end than the sender's.
                let end = Some(Ended::of_receiver(&why)).filter(|_| !self.broken.get());
                (received, reason) = (true, end.or(reason.take()));
            }
            if reason.is_none()
                && let Poll::Ready(why) = watching.as_mut().poll(cx)
            {
                reason = Some(Ended::here(why.to_string()));
            }
            if reason.is_some() && !self.broken.get() {
                socket.shutdown();
                self.break_off();
                cx.waker().wake_by_ref();
            }
            if sent && received {
                Poll::Ready(reason.take().unwrap_or_default())
            } else {
                Poll::Pending
            }
        });
        let end = end.await;
        self.socket.take();
        end
    }

    async fn send_all(&self, socket: &Link, terms: &Terms) -> Ended {
        loop {
            if self.broken.get() {
                return Ended::default();
            }
            let out = self.gather(terms);
            if out.is_empty() {
                self.send.wait().await;
                continue;
            }
            let mut done = 0;
            while done < out.len() {
                let piece = out.slice(done, (out.len() - done).min(SENT_AT_A_TIME));
                done += piece.len();
                if let Err(e) = socket.write_full(piece).await.1 {
                    return Ended::of(format!("sending: {e}"), &e);
                }
                // The server has accepted a part of a long payload. That counts as progress,
                // although it is no answer.
                if done < out.len() {
                    self.progress.set(Instant::now());
                }
            }
        }
    }

    /// Returns the next requests in wire format.
    fn gather(&self, terms: &Terms) -> Segments {
        let (mut slots, mut headers) = (self.slots.borrow_mut(), Vec::new());
        let mut parts: Vec<(usize, Segments)> = Vec::new();
        let (mut payload, mut pieces) = (0, 0);
        while payload < SENT_AT_A_TIME && pieces < PIECES && parts.len() < REQUESTS_AT_A_TIME {
            let Some((ask, slot)) = slots.next() else { break };
            slot.covers = self.acknowledged.get();
            let Ask { command, flags, offset, len } = ask;
            let more = if command == cmd::WRITE && terms.headers == wire::Headers::Extended {
                wire::flag::PAYLOAD_LEN
            } else {
                0
            };
            let request =
                wire::Request { flags: flags | more, command, cookie: slot.cookie, offset, len };
            request.put(terms.headers, &mut headers);
            let mut data = Segments::default();
            if command == cmd::WRITE {
                if slot.segments.count() > PIECES {
                    data = Segments::buffer(slot.segments.len());
                    data.copy_from(0, &slot.segments, 0, slot.segments.len());
                } else {
                    data.gather(&slot.segments, 0, slot.segments.len());
                }
                (payload, pieces) = (payload + data.len(), pieces + data.count());
            }
            parts.push((headers.len(), data));
        }
        let mut out = Segments::default();
        if headers.is_empty() {
            return out;
        }
        let (headers, mut from) = (Segments::from_bytes(&headers), 0);
        for (to, data) in parts {
            out.gather(&headers, from, to - from);
            out.gather(&data, 0, data.len());
            from = to;
        }
        out
    }

    fn lost_connection(&self, end: &Ended) {
        let why = end.why.as_str();
        if !end.by_server && self.slots.borrow().any_sent(changes) {
            self.export.lose(&format!(
                "the connection was ended here ({why}) with a write in flight, which the server \
                 may still execute"
            ));
        }
        if self.has_unflushed() {
            self.export.lose(&format!("the connection was lost ({why})"));
        }
        let mut slots = self.slots.borrow_mut();
        if slots.busy() == 0 && self.trouble.get().is_none() {
            // Do not reconnect to a server that closes idle connections until there is a request.
            if !self.used.get() {
                return tracing::info!(
                    "image {}: {why}: reconnecting at the next request",
                    self.export.uri
                );
            }
            self.reconnect_idle.set(true);
        }
        slots.send_again();
        if self.trouble.get().is_none() {
            self.trouble.set(Some(Instant::now()));
            tracing::warn!("image {}: {why}: connecting again", self.export.uri);
        }
        if let Some(lost) = self.export.lost() {
            let writes = |ask: &Ask| changes(ask.command) || ask.command == cmd::FLUSH;
            slots.fail(writes, || io::Error::other(lost.to_string()));
        }
        drop(slots);
        if self.trouble.get().is_some_and(|since| since.elapsed() > self.export.options.reconnect) {
            self.give_up(end.why.clone());
        }
    }

    /// Fails all waiting requests, and new ones until the next attempt.
    fn give_up(&self, why: String) {
        let again =
            Instant::now() + LONGEST_PAUSE.min(self.export.options.reconnect.max(FIRST_PAUSE));
        self.down.replace(Some((why.clone(), again)));
        if !self.given_up.replace(true) && !self.ended.get() {
            let limit = self.export.options.reconnect.as_secs_f32();
            tracing::error!(
                "image {}: {why}: no answer for {limit} s: requests fail until it is back",
                self.export.uri
            );
        }
        self.slots.borrow_mut().fail(|_| true, || unreachable(&why));
    }
}

fn unreachable(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("the NBD server cannot be reached: {why}"))
}
