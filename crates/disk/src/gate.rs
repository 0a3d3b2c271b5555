//! One reactor's side of a disk's gate: counts requests in flight, and holds new ones while the
//! gate is closed.
//!
//! In: requests; the closing and opening, which `closed_gate` asks for. Out: a message when nothing
//! is in flight. What must hold: a request that waits at the gate holds nothing that another
//! request needs. While the gate is open, it costs a request a look at a cell of its own reactor,
//! and a count.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::mpsc;
use std::task::{Poll, Waker};

/// See the module's page.
#[derive(Default)]
pub struct Gate {
    in_flight: Cell<u64>,
    closed: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Who is told when nothing is in flight.
    closer: RefCell<Option<mpsc::Sender<Answer>>>,
}

/// What a reactor tells the thread that closes the gate.
pub(crate) type Answer = std::io::Result<()>;

/// A request on its way, until it is dropped.
pub struct Pass<'a>(&'a Gate);

impl Gate {
    #[inline]
    pub async fn enter(&self) -> Pass<'_> {
        loop {
            if let Some(pass) = self.try_enter() {
                return pass;
            }
            Box::pin(self.wait()).await;
        }
    }

    /// Enters if it is open.
    #[inline]
    pub fn try_enter(&self) -> Option<Pass<'_>> {
        if self.closed.get() {
            return None;
        }
        self.in_flight.set(self.in_flight.get() + 1);
        Some(Pass(self))
    }

    /// Waits until it is open.
    #[cold]
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if !self.closed.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// For a disk that is opened on a reactor while its gate is closed.
    pub(crate) fn begin_closed(&self) {
        self.close(None);
    }

    pub(crate) fn close(&self, closer: Option<mpsc::Sender<Answer>>) {
        self.closed.set(true);
        *self.closer.borrow_mut() = closer;
        self.tell_if_empty();
    }

    pub(crate) fn open(&self) {
        self.closed.set(false);
        *self.closer.borrow_mut() = None;
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    fn tell_if_empty(&self) {
        if self.in_flight.get() == 0
            && let Some(closer) = self.closer.borrow_mut().take()
        {
            let _ = closer.send(Ok(()));
        }
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        if self.0.closed.get() {
            self.0.tell_if_empty();
        }
    }
}
