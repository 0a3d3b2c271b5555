//! Marks what a queue writes into guest memory, for live migration.
//!
//! In: the guest addresses of data, status bytes and parts of the ring, after they were written.
//! Out: bits in the front end's log ([`DirtyLog`]). What must hold: data and status are marked
//! before the used index that shows them to the guest, and all is marked before the queue reports
//! that it has stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_ring::{DirtyLog, GuestMemory, Segments};

use crate::vhost_user::notify::Call;
use crate::vhost_user::virtqueue::{Part, Written};

/// What a queue marks, and where. A queue that marks nothing has none.
pub struct Marks {
    /// `None`: the front end has not set a log yet.
    pub log: Option<Arc<DirtyLog>>,
    /// Mark data, status bytes and descriptors (VHOST_F_LOG_ALL).
    pub data: bool,
    /// Mark writes to the used ring (VHOST_VRING_F_LOG), as if the ring were at this guest address.
    pub used: Option<u64>,
    /// Something was written for which the log has no bit, or while there was no log.
    pub missed: Arc<AtomicBool>,
    /// Signals the front end that the log has changed (VHOST_USER_SET_LOG_FD).
    pub changed: Call,
}

impl Marks {
    fn mark(&self, addr: u64, len: u64) {
        if !self.log.as_ref().is_some_and(|log| log.mark(addr, len)) {
            self.missed.store(true, Ordering::SeqCst);
        }
    }

    /// Marks what the device has written for a chain: the status at a guest address, and the data
    /// of `segments` if the device fills them.
    pub(super) fn chain(
        &self,
        memory: &GuestMemory,
        (status, fills): (u64, bool),
        segments: &Segments,
    ) {
        if !self.data {
            return;
        }
        if fills {
            let known = segments.guest_ranges(|addr, len| self.mark(addr, len));
            // The addresses are not known any more, so any page may have changed.
            if !known {
                memory.regions().iter().for_each(|r| self.mark(r.guest(), r.size()));
            }
        }
        self.mark(status, 1);
    }

    /// Marks a part of the ring.
    pub(super) fn ring(&self, written: Written, descriptors: u64) {
        let base = match written.part {
            Part::Used => self.used,
            Part::Descriptors => (self.data || self.used.is_some()).then_some(descriptors),
        };
        if let Some(base) = base {
            self.mark(base.wrapping_add(written.offset as u64), written.len as u64);
        }
    }
}
