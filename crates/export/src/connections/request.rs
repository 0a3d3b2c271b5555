//! Requests that a task makes one by one: it awaits the answer of each.

use std::cell::Cell;
use std::rc::Rc;

use blockyard_disk::{Failure, LocalDisk, Op, Request, Status, Token};
use blockyard_ring::{Handle, Segments};

type Answer = (Status, Segments);

/// The token of a request. A task awaits its answer.
struct Awaited<W> {
    answer: Rc<Cell<Option<Answer>>>,
    may_wait: W,
}

impl<W: Fn() -> bool> Token for Awaited<W> {
    fn answer(self, status: Status, segments: Segments) {
        self.answer.set(Some((status, segments)));
    }

    fn may_wait(&self) -> bool {
        (self.may_wait)()
    }
}

/// Serves one request. `may_wait` returns whether it may still wait for space on the host. Returns
/// its status and its segments.
pub async fn serve_one(
    handle: &Handle,
    served: &LocalDisk,
    (op, offset, len): (Op, u64, u64),
    segments: Segments,
    may_wait: impl Fn() -> bool + 'static,
) -> Answer {
    let answer = Rc::new(Cell::new(None));
    let token = Awaited { answer: answer.clone(), may_wait };
    let request = Request::new(op, offset, len, segments, handle.now(), token);
    served.serve(request).await.answer();
    answer.take().unwrap_or((Err(Failure::Io), Segments::default()))
}

/// Flushes what a client has written, when its connection ends. A client that disconnects without a
/// flush should not lose its writes.
pub async fn flush_last(served: &LocalDisk, wrote: bool) {
    if wrote {
        let _ = served.flush_unsynced().await;
    }
}
