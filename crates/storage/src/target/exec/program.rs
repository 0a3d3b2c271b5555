//! Asks a running program.
//!
//! What must hold: each call ends with an answer or an error. After a line that makes no sense, or
//! the end of the connection, all calls fail at once, and the program is ended.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};

use blockyard_ring::{Handle as RingHandle, Segments, Signal, Socket};

use super::protocol::{self, MOST_LINE, Said};
use super::start::Process;
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
    process: Process,
    /// Whether the program answers discards.
    discards: bool,
    calls: RefCell<HashMap<u64, Call>>,
    next: Cell<u64>,
    unsent: RefCell<Vec<u8>>,
    to_send: Signal,
    ended: RefCell<Option<String>>,
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
        stream: UnixStream,
        process: Process,
        discards: bool,
        handle: Handle,
    ) -> io::Result<Self> {
        let inner = Rc::new(Inner {
            name,
            socket: Socket::new(ring, stream)?,
            process,
            discards,
            calls: RefCell::default(),
            next: Cell::new(1),
            unsent: RefCell::default(),
            to_send: Signal::new(ring),
            ended: RefCell::default(),
        });
        let (reader, writer) = (inner.clone(), inner.clone());
        let spawner = ring.clone();
        ring.spawn(async move { reader.read(&spawner, &handle).await });
        ring.spawn(async move { writer.write().await });
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

impl Drop for Program {
    fn drop(&mut self) {
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
        match self.0.discards {
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

    async fn write(self: Rc<Self>) {
        loop {
            let lines = std::mem::take(&mut *self.unsent.borrow_mut());
            if self.ended.borrow().is_some() {
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

    async fn read(self: Rc<Self>, ring: &RingHandle, handle: &Handle) {
        let (mut segments, mut received) = (Segments::buffer(PIECE), Vec::new());
        loop {
            let (back, read) = self.socket.read(segments).await;
            segments = back;
            let len = match read {
                Ok(0) => return self.fail("it has ended"),
                Ok(len) => len,
                Err(e) => return self.fail(&format!("reading its answers: {e}")),
            };
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
            self.process.kill();
        }
    }
}
