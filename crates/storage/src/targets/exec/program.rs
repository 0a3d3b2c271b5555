//! Asks a running program.
//!
//! What must hold
//! - Each call ends with an answer or an error. After a line that makes no sense, or the end of the
//!   connection, all calls fail at once, and the program is ended.
//! - A server that is not the owner of the program sends nothing, reads nothing, and neither shuts
//!   the connection down nor ends the process. Its calls wait until it is the owner.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use blockyard_ring::parcel::Parcel;
use blockyard_ring::{Handle as RingHandle, Segments, Signal, Socket, is_canceled};

use super::handed;
use super::process::{Introduction, Position, Process, Started};
use super::protocol::{self, LineError, MOST_LINE, Said};
use crate::targets::Handle;
use crate::targets::ProgramCalls;
use crate::targets::map::{Discard, Extent, Map, Question};

/// Bytes of a read from the program.
const PIECE: usize = 64 << 10;
/// Most bytes that wait for a program to read them.
const MOST_UNREAD: usize = 16 << 20;
/// Most invalidations of a program that wait for requests.
const MOST_INVALIDATIONS: u32 = 1024;

/// Why the calls of a program fail from now on.
#[derive(Debug, thiserror::Error)]
enum EndError {
    #[error("the disk is closed")]
    Closed,
    #[error("another server has the program")]
    HandedOver,
    #[error("it has ended")]
    Exited,
    #[error("it takes no questions: {0}")]
    Write(io::Error),
    #[error("reading its answers: {0}")]
    Read(io::Error),
    #[error("{0}")]
    Line(LineError),
    #[error("it sent a line that is too long")]
    TooLong,
}

/// The map of a program.
pub(crate) struct Program(Rc<Inner>);

struct Inner {
    name: String,
    ring: RingHandle,
    handle: Handle,
    socket: Socket,
    process: RefCell<Process>,
    /// As at its start, with the size that it has now.
    introduction: RefCell<Introduction>,
    /// The beginning of a line that is not whole.
    unread: RefCell<Vec<u8>>,
    /// Set when another server will read what the program sends.
    leaves: Cell<bool>,
    /// Number of tasks that use the socket, or will send a line.
    tasks: Cell<u32>,
    task_ended: Signal,
    invalidations: Cell<u32>,
    calls: RefCell<HashMap<u64, Call>>,
    next: Cell<u64>,
    unsent: RefCell<Vec<u8>>,
    to_send: Signal,
    ended: RefCell<Option<Arc<EndError>>>,
}

/// What the thread of a program's map does with the program.
pub(super) const CALLS: ProgramCalls = ProgramCalls { hand_over: || Box::pin(hand_over()), own };

thread_local! {
    /// The program of this thread. A target has a thread of its own.
    static RUNNING: RefCell<Option<Rc<Inner>>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Call {
    waker: Option<Waker>,
    answer: Option<io::Result<Vec<Extent>>>,
    /// An earlier server has asked, and its request has failed.
    is_dropped: bool,
}

impl Program {
    pub(super) fn begin(
        ring: &RingHandle,
        name: String,
        started: Started,
        handle: Handle,
    ) -> io::Result<Self> {
        let Started { introduction, position, stream, process } = started;
        let Position { next, owed, unread, unsent } = position;
        let dropped = |number| (number, Call { is_dropped: true, ..Call::default() });
        let inner = Rc::new(Inner {
            name,
            ring: ring.clone(),
            handle,
            socket: Socket::new(ring, stream)?,
            process: RefCell::new(process),
            introduction: RefCell::new(introduction),
            unread: RefCell::new(unread),
            leaves: Cell::new(false),
            tasks: Cell::new(0),
            task_ended: Signal::new(ring),
            invalidations: Cell::new(0),
            calls: RefCell::new(owed.into_iter().map(dropped).collect()),
            next: Cell::new(next),
            unsent: RefCell::new(unsent),
            to_send: Signal::new(ring),
            ended: RefCell::default(),
        });
        if inner.process.borrow().is_owned() {
            inner.talk();
        }
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

/// Returns the parcel with which another server continues the program of this thread. No request
/// waits for an answer of the program. If the program has failed, it fails at the next server, too.
async fn hand_over() -> io::Result<Parcel> {
    let Some(inner) = RUNNING.with_borrow(Clone::clone) else {
        return Err(io::Error::other("the disk is closed"));
    };
    inner.hand_over().await
}

/// The program of this thread is this server's alone now: its questions may begin.
fn own() {
    let Some(inner) = RUNNING.with_borrow(Clone::clone) else { return };
    if !inner.process.borrow().is_owned() {
        inner.process.borrow_mut().own();
        inner.talk();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        RUNNING.take();
        self.0.end(EndError::Closed);
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
        let discards = self.0.introduction.borrow().discards;
        match discards {
            true => self.call(|number| protocol::discard(number, &asked)).await,
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Inner {
    fn error(&self) -> io::Error {
        match &*self.ended.borrow() {
            Some(why) => io::Error::other(why.clone()),
            None => io::Error::other("the program has ended"),
        }
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

    /// Begins to send and to read.
    fn talk(self: &Rc<Self>) {
        let (reader, writer) = (self.clone(), self.clone());
        self.spawn(async move { reader.read().await });
        self.spawn(async move { writer.write().await });
    }

    fn spawn(self: &Rc<Self>, work: impl Future<Output = ()> + 'static) {
        self.tasks.set(self.tasks.get() + 1);
        let me = self.clone();
        self.ring.spawn(async move {
            work.await;
            me.tasks.set(me.tasks.get() - 1);
            me.task_ended.ring();
        });
    }

    /// Ends the connection, if this server is its owner. All calls fail.
    fn end(&self, why: EndError) {
        if self.ended.borrow().is_some() {
            return;
        }
        *self.ended.borrow_mut() = Some(why.into());
        if self.process.borrow().is_owned() {
            self.socket.shutdown();
        } else {
            self.socket.leave_open();
        }
        self.to_send.ring();
        self.fail_calls();
    }

    fn fail_calls(&self) {
        let calls = std::mem::take(&mut *self.calls.borrow_mut());
        calls.into_values().filter_map(|call| call.waker).for_each(Waker::wake);
    }

    async fn hand_over(&self) -> io::Result<Parcel> {
        self.leaves.set(true);
        self.socket.cancel();
        self.to_send.ring();
        while self.tasks.get() > 0 {
            self.task_ended.wait().await;
        }
        let process = self.process.borrow().descriptor()?;
        let stream = self.socket.keep()?;
        let owed = |(number, call): (&u64, &Call)| call.answer.is_none().then_some(*number);
        let position = Position {
            next: self.next.get(),
            owed: self.calls.borrow().iter().filter_map(owed).collect(),
            unread: self.unread.take(),
            unsent: self.unsent.take(),
        };
        self.ended.borrow_mut().get_or_insert_with(|| EndError::HandedOver.into());
        self.fail_calls();
        self.process.borrow_mut().release();
        let introduction = self.introduction.borrow();
        Ok(handed::pack(&self.name, &introduction, &position, [stream, process]))
    }

    async fn write(&self) {
        while self.ended.borrow().is_none() && !self.leaves.get() {
            let lines = self.unsent.take();
            if lines.is_empty() {
                self.to_send.wait().await;
                continue;
            }
            let (mut segments, mut done) = (Segments::from_bytes(&lines), 0);
            while done < lines.len() && !self.leaves.get() {
                let (back, written) = self.socket.write(segments, done).await;
                segments = back;
                match written {
                    Ok(len) => done += len,
                    Err(e) if is_canceled(&e) => {}
                    Err(e) => return self.fail(EndError::Write(e)),
                }
            }
            self.unsent.borrow_mut().splice(..0, lines[done..].iter().copied());
        }
    }

    async fn read(self: &Rc<Self>) {
        let mut segments = Segments::buffer(PIECE);
        while !self.leaves.get() {
            let (back, read) = self.socket.read(segments).await;
            segments = back;
            let len = match read {
                Ok(0) => return self.fail(EndError::Exited),
                Ok(len) => len,
                Err(e) if is_canceled(&e) => continue,
                Err(e) => return self.fail(EndError::Read(e)),
            };
            let mut received = std::mem::take(&mut *self.unread.borrow_mut());
            let start = received.len();
            received.resize(start + len, 0);
            segments.copy_out(0, &mut received[start..]);
            let mut done = 0;
            while let Some(end) = received[done..].iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&received[done..done + end]).into_owned();
                done += end + 1;
                if let Err(e) = self.take(&line) {
                    return self.fail(EndError::Line(e));
                }
            }
            received.drain(..done);
            if received.len() > MOST_LINE {
                return self.fail(EndError::TooLong);
            }
            *self.unread.borrow_mut() = received;
        }
    }

    fn take(self: &Rc<Self>, line: &str) -> Result<(), LineError> {
        match protocol::parse(line)? {
            Said::Answer(number, answer) => {
                let mut calls = self.calls.borrow_mut();
                // A call stays until its answer, also after its caller has gone.
                let call = calls.get_mut(&number).ok_or(LineError::Unasked)?;
                if call.is_dropped {
                    calls.remove(&number);
                    return Ok(());
                }
                call.answer = Some(answer.map_err(|reason| io::Error::new(reason.kind, reason)));
                if let Some(waker) = call.waker.take() {
                    waker.wake();
                }
            }
            Said::Size(size) => {
                if !self.handle.set_size(size) {
                    return Err(LineError::Size(size));
                }
                self.introduction.borrow_mut().shape.size = size;
            }
            Said::Invalidate(range) => {
                if self.invalidations.get() == MOST_INVALIDATIONS {
                    return Err(LineError::Invalidations(MOST_INVALIDATIONS));
                }
                self.invalidations.set(self.invalidations.get() + 1);
                let me = self.clone();
                self.spawn(async move {
                    me.handle.invalidate(range.clone()).await;
                    me.invalidations.set(me.invalidations.get() - 1);
                    let _ = me.send(protocol::invalidated(&range).as_bytes());
                });
            }
        }
        Ok(())
    }

    /// The program is of no use any more.
    fn fail(&self, what: EndError) {
        if self.ended.borrow().is_none() {
            tracing::error!("image {}: the program fails, and so does its disk: {what}", self.name);
            self.end(what);
            self.process.borrow().kill();
        }
    }
}
