//! The token of a request: it returns the answer to the request's chain.

use std::rc::Rc;

use blockyard_disk::{Status, Token};
use blockyard_ring::Segments;

use super::Queue;

/// Identifies the chain of a request.
pub(super) struct ChainToken {
    pub queue: Rc<Queue>,
    pub id: u16,
}

impl Token for ChainToken {
    #[inline]
    fn answer(self, status: Status, segments: Segments) {
        self.queue.answered(self.id, status, segments);
    }

    fn may_wait(&self) -> bool {
        self.queue.stopping.borrow().is_none()
    }

    fn is_withdrawn(&self) -> bool {
        self.queue.suspends.get()
    }

    fn is_repeated_later(&self) -> bool {
        self.queue.core.borrow().inflight.is_some()
    }

    fn take_back(self, segments: Segments) {
        self.queue.withdrawn(self.id, segments);
    }
}
