//! The moments at which a queue marks what it writes ([`Marks`]).

use blockyard_ring::Segments;

use super::marks::Marks;
use super::state::{Core, Pending};
use crate::vhost_user::virtqueue::Written;

impl Core {
    /// Marks the data and the status of a chain.
    #[inline]
    pub(super) fn mark_chain(&self, pending: &Pending, segments: &Segments) {
        if let Some(marks) = &self.marks {
            marks.chain(&self.memory, (pending.status, pending.fills), segments);
        }
    }

    /// Marks a part of the ring that was written.
    #[inline]
    pub(super) fn mark_ring(&self, written: Option<Written>) {
        if let (Some(marks), Some(written)) = (&self.marks, written) {
            marks.ring(written, self.descriptors);
        }
    }

    /// Signals the front end that the log has changed.
    #[inline]
    pub(super) fn log_changed(&mut self) {
        if let Some(marks) = &mut self.marks {
            marks.changed.ring(&self.counters.slow_calls);
        }
    }

    /// Asks for kicks. Returns false if a chain is available already.
    #[inline]
    pub(super) fn enable_kicks(&mut self) -> bool {
        let enabled = self.ring.enable_kicks();
        self.mark_kick_setting();
        enabled
    }

    /// Asks for no kicks.
    #[inline]
    pub(super) fn disable_kicks(&mut self) {
        if self.ring.disable_kicks() {
            self.mark_kick_setting();
        }
    }

    #[inline]
    fn mark_kick_setting(&self) {
        if let Some(marks) = &self.marks {
            marks.ring(self.ring.kick_setting(), self.descriptors);
        }
    }

    /// Replaces what the queue marks.
    pub(super) fn set_marks(&mut self, marks: Option<Marks>) {
        self.marks = marks.map(Box::new);
    }
}
