//! Asks a running program.
//!
//! What must hold: each call ends with an answer or an error. After a line that makes no sense, or
//! the end of the connection, all calls fail at once, and the program is ended.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};

use blockyard_ring::parcel::Parcel;
use blockyard_ring::{Handle as RingHandle, Segments, Signal, Socket, is_canceled};

use super::handed::{self, Introduction, Position};
use super::protocol::{self, MOST_LINE, Said};
use super::start::{Process, Started};
use crate::target::Handle;
use crate::target::map::{Discard, Extent, Map, Question};

/// Bytes of a read from the program.
const PIECE: usize = 64 << 10;
/// Most bytes that wait for a program to read them.
const MOST_UNREAD: usize = 16 << 20;

/// The map of a program.
pub(crate) struct Program(Rc<Inner>);

struct Inner {
    name: String,
    socket: Socket,
    process: RefCell<Process>,
    introduction: Introduction,
    /// The beginning of a line that is not whole.
    unread: RefCell<Vec<u8>>,
    /// Set when another server will read what the program sends.
    leaves: Cell<bool>,
    /// Tasks that use the socket.
    tasks: Cell<u32>,
    quiet: Signal,
    calls: RefCell<HashMap<u64, Call>>,
    next: Cell<u64>,
    unsent: RefCell<Vec<u8>>,
    to_send: Signal,
    ended: RefCell<Option<String>>,
}

thread_local! {
    /// The program of this thread. A target has a thread of its own.
    static RUNNING: RefCell<Option<Rc<Inner>>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Call {
    waker: Option<Waker>,
    answer: Option<io::Result<Vec<Extent>>>,
}

impl Program {
    pub(super) fn begin(
        ring: &RingHandle,
        name: String,
        started: Started,
        handle: Handle,
    ) -> io::Result<Self> {
        let Started { introduction, position, stream, process } = started;
        let inner = Rc::new(Inner {
            name,
            socket: Socket::new(ring, stream)?,
            process: RefCell::new(process),
            introduction,
            unread: RefCell::new(position.unread),
            leaves: Cell::new(false),
            tasks: Cell::new(2),
            quiet: Signal::new(ring),
            calls: RefCell::default(),
            next: Cell::new(position.next),
            unsent: RefCell::default(),
            to_send: Signal::new(ring),
            ended: RefCell::default(),
        });
        let (reader, writer) = (inner.clone(), inner.clone());
        let spawner = ring.clone();
        ring.spawn(async move {
            reader.read(&spawner, &handle).await;
            reader.task_ends();
        });
        ring.spawn(async move {
            writer.write().await;
            writer.task_ends();
        });
        RUNNING.set(Some(inner.clone()));
        Ok(Program(inner))
    }

    async fn call(&self, line: impl FnOnce(u64) -> String) -> io::Result<Vec<Extent>> {
        let inner = &*self.0;
        let number = inner.next.replace(inner.next.get() + 1);
        inner.send(line(number).as_bytes())?;
        inner.calls.borrow_mut().insert(number, Call::default());
        poll_fn(|cx| {
            let mut calls = inner.calls.borrow_mut();
            let Some(call) = calls.get_mut(&number) else {
                return Poll::Ready(Err(inner.error()));
            };
            match call.answer.take() {
                Some(answer) => {
                    calls.remove(&number);
                    Poll::Ready(answer)
                }
                None => {
                    call.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Returns the parcel with which another server continues the program of this thread. The program
/// owes no answer and gets no further question.
pub(crate) async fn hand_over() -> io::Result<Parcel> {
    let Some(inner) = RUNNING.with_borrow(Clone::clone) else {
        return Err(io::Error::other("the program has ended"));
    };
    inner.hand_over().await
}

impl Drop for Program {
    fn drop(&mut self) {
        RUNNING.take();
        self.0.end("the disk is closed");
    }
}

impl Map for Program {
    async fn locate(&self, question: Question) -> io::Result<Vec<Extent>> {
        self.call(|number| protocol::locate(number, &question)).await
    }

    async fn flush(&self, moved: &[Range<u64>]) -> io::Result<()> {
        self.call(|number| protocol::flush(number, moved)).await.map(|_| ())
    }

    async fn discard(&self, asked: Discard) -> io::Result<Vec<Extent>> {
        match self.0.introduction.discards {
            true => self.call(|number| protocol::discard(number, &asked)).await,
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Inner {
    fn error(&self) -> io::Error {
        let why = self.ended.borrow().clone();
        io::Error::other(why.unwrap_or_else(|| "the program has ended".into()))
    }

    fn send(&self, line: &[u8]) -> io::Result<()> {
        if self.ended.borrow().is_some() {
            return Err(self.error());
        }
        let mut unsent = self.unsent.borrow_mut();
        if unsent.len() + line.len() > MOST_UNREAD {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the program does not read"));
        }
        unsent.extend_from_slice(line);
        self.to_send.ring();
        Ok(())
    }

    /// Ends the connection. All calls fail.
    fn end(&self, why: &str) {
        if self.ended.borrow().is_some() {
            return;
        }
        *self.ended.borrow_mut() = Some(why.into());
        self.socket.shutdown();
        self.to_send.ring();
        let calls = std::mem::take(&mut *self.calls.borrow_mut());
        calls.into_values().filter_map(|call| call.waker).for_each(Waker::wake);
    }

    fn task_ends(&self) {
        self.tasks.set(self.tasks.get() - 1);
        self.quiet.ring();
    }

    async fn hand_over(&self) -> io::Result<Parcel> {
        if self.ended.borrow().is_some() {
            return Err(self.error());
        }
        self.leaves.set(true);
        self.socket.cancel();
        self.to_send.ring();
        while self.tasks.get() > 0 {
            self.quiet.wait().await;
        }
        if self.ended.borrow().is_some() {
            return Err(self.error());
        }
        let stream = self.socket.keep()?;
        let process = self.process.borrow().descriptor()?;
        let position = Position { next: self.next.get(), unread: self.unread.borrow().clone() };
        *self.ended.borrow_mut() = Some("another server has the program".into());
        self.process.borrow_mut().release();
        Ok(handed::pack(&self.introduction, &position, stream, process))
    }

    async fn write(self: &Rc<Self>) {
        loop {
            let lines = std::mem::take(&mut *self.unsent.borrow_mut());
            if self.ended.borrow().is_some() {
                return;
            }
            if lines.is_empty() && self.leaves.get() {
                return;
            }
            if lines.is_empty() {
                self.to_send.wait().await;
                continue;
            }
            if let Err(e) = self.socket.write_full(Segments::from_bytes(&lines)).await.1 {
                return self.fail(&format!("it takes no questions: {e}"));
            }
        }
    }

    async fn read(self: &Rc<Self>, ring: &RingHandle, handle: &Handle) {
        let mut segments = Segments::buffer(PIECE);
        while !self.leaves.get() {
            let (back, read) = self.socket.read(segments).await;
            segments = back;
            let len = match read {
                Ok(0) => return self.fail("it has ended"),
                Ok(len) => len,
                Err(e) if is_canceled(&e) => continue,
                Err(e) => return self.fail(&format!("reading its answers: {e}")),
            };
            let mut received = std::mem::take(&mut *self.unread.borrow_mut());
            let start = received.len();
            received.resize(start + len, 0);
            segments.copy_out(0, &mut received[start..]);
            let mut done = 0;
            while let Some(end) = received[done..].iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&received[done..done + end]).into_owned();
                done += end + 1;
                if let Err(what) = self.take(ring, handle, &line) {
                    return self.fail(&what);
                }
            }
            received.drain(..done);
            if received.len() > MOST_LINE {
                return self.fail("it sent a line that is too long");
            }
            *self.unread.borrow_mut() = received;
        }
    }

    fn take(self: &Rc<Self>, ring: &RingHandle, handle: &Handle, line: &str) -> Result<(), String> {
        match protocol::parse(line)? {
            Said::Answer(number, answer) => {
                let mut calls = self.calls.borrow_mut();
                // A call stays until its answer, also after its caller has gone.
                let call = calls.get_mut(&number).ok_or("it answered what nobody asked")?;
                call.answer = Some(answer.map_err(io::Error::other));
                if let Some(waker) = call.waker.take() {
                    waker.wake();
                }
            }
            Said::Invalidate(range) => {
                let (me, handle) = (Rc::downgrade(self), handle.clone());
                ring.spawn(async move {
                    handle.invalidate(range.clone()).await;
                    if let Some(me) = Weak::upgrade(&me) {
                        let _ = me.send(protocol::invalidated(&range).as_bytes());
                    }
                });
            }
        }
        Ok(())
    }

    /// The program is of no use any more.
    fn fail(&self, what: &str) {
        if self.ended.borrow().is_none() {
            tracing::error!("image {}: the program fails, and so does its disk: {what}", self.name);
            self.end(what);
            self.process.borrow().kill();
        }
    }
}
