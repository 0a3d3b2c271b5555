//! Counts the operations of files that were opened through a handle.

use std::cell::Cell;
use std::rc::Rc;

use crate::policy::{Counters, WriteFigures};

/// Counts the operations of files that were opened through a handle; see
/// [`crate::Handle::metered`].
#[derive(Debug, Default)]
pub struct Meter {
    operations: Cell<u64>,
    bytes: Cell<u64>,
    writes: Rc<Counters>,
}

impl Meter {
    /// Returns the number of operations that were started, and the bytes that they transfer.
    pub fn counted(&self) -> (u64, u64) {
        (self.operations.get(), self.bytes.get())
    }

    /// Returns what the write policies decided for the files.
    pub fn writes(&self) -> WriteFigures {
        self.writes.figures()
    }

    pub(crate) fn counters(&self) -> Rc<Counters> {
        self.writes.clone()
    }

    #[inline]
    pub(crate) fn count(&self, bytes: usize) {
        self.operations.set(self.operations.get() + 1);
        self.bytes.set(self.bytes.get() + bytes as u64);
    }
}
