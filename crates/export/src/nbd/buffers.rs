//! The buffers of a reactor's connections.
//!
//! In: lengths of requests. Out: buffers, and the [`Quota`] for them. What must hold: a recycled
//! buffer contains old data, so a payload must fill its buffer before the disk reads the buffer.
//! Memory beyond the quota is at most twice [`KEPT`].

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::{self, Arc};

use blockyard_disk::Disk;
use blockyard_ring::{Handle, Segments};

use super::quota::{DiskUsage, GUARANTEED, Need, Quota, Usage};

/// Maximum number of bytes in free buffers that are kept for reuse. Arriving payloads may also use
/// recycled buffers beyond their quota, up to the same number of bytes.
const KEPT: usize = 32 << 20;
/// Smallest buffer in bytes, and the number of buffer sizes. Each size is twice the next smaller
/// one, up to the longest request.
const SMALLEST: usize = 4096;
const SIZES: usize = 14;

/// The free buffers of a reactor, and the quota for buffers in use.
#[derive(Default)]
pub struct Buffers {
    free: RefCell<[Vec<Segments>; SIZES]>,
    kept: Cell<usize>,
    /// Bytes of recycled buffers that clients are filling.
    lent: Cell<usize>,
    quota: Quota,
    /// What each disk's connections hold.
    disks: RefCell<Vec<(sync::Weak<Disk>, Weak<DiskUsage>)>>,
}

/// The buffer of a long payload. It takes its quota as the payload arrives, so a client that only
/// announces a payload holds nothing.
pub struct Growing {
    pub payload: Segments,
    len: usize,
    taken: usize,
    lent: usize,
}

fn size_class(len: usize) -> usize {
    (len.max(SMALLEST).next_power_of_two() / SMALLEST).trailing_zeros() as usize
}

fn rounded(len: usize) -> usize {
    SMALLEST << size_class(len)
}

impl Buffers {
    /// Waits for quota, and returns a buffer of `len` bytes, at most those of the longest request.
    #[inline]
    pub async fn take(&self, handle: &Handle, len: usize, usage: &Rc<Usage>) -> Segments {
        self.quota.take(handle, usage, rounded(len), Need::Buffer).await;
        self.recycled(len).unwrap_or_else(|| {
            let size = rounded(len);
            // Clearing a long buffer would take the reactor milliseconds. The kernel clears mapped
            // pages as they are used.
            let mapped = (size > GUARANTEED).then(|| Segments::mapped_buffer(size).ok()).flatten();
            let mut buffer = mapped.unwrap_or_else(|| Segments::buffer(size));
            let fits = buffer.refit(len);
            debug_assert!(fits);
            buffer
        })
    }

    fn recycled(&self, len: usize) -> Option<Segments> {
        let mut buffer = self.free.borrow_mut()[size_class(len)].pop()?;
        self.kept.set(self.kept.get() - rounded(len));
        buffer.refit(len).then_some(buffer)
    }

    /// Returns a buffer for a payload of `len` bytes, which takes its quota by [`Buffers::grow`].
    pub fn growing(&self, len: usize) -> io::Result<Growing> {
        let size = rounded(len);
        let recycled = if self.lent.get() + size <= KEPT { self.recycled(len) } else { None };
        let lent = if recycled.is_some() { size } else { 0 };
        let payload = match recycled {
            Some(payload) => payload,
            None => {
                let mut payload = Segments::mapped_buffer(size)?;
                let fits = payload.refit(len);
                debug_assert!(fits);
                payload
            }
        };
        self.lent.set(self.lent.get() + lent);
        Ok(Growing { payload, len, taken: 0, lent })
    }

    /// Waits for quota for the next part of the payload, at most as much as has arrived so far.
    /// Returns the length up to which the buffer may be filled.
    pub async fn grow(&self, handle: &Handle, growing: &mut Growing, usage: &Rc<Usage>) -> usize {
        let more = growing.taken.clamp(GUARANTEED, rounded(growing.len) - growing.taken);
        self.quota.take(handle, usage, more, Need::Payload).await;
        growing.taken += more;
        growing.taken.min(growing.len)
    }

    /// Returns the buffer of a payload that is complete. The buffer then counts like any other
    /// buffer.
    pub fn grown(&self, growing: Growing, usage: &Rc<Usage>) -> Segments {
        debug_assert_eq!(growing.taken, rounded(growing.len));
        self.lent.set(self.lent.get() - growing.lent);
        self.quota.payload_ended(usage);
        growing.payload
    }

    /// Frees the buffer of a payload that will not be completed.
    pub fn abandon(&self, growing: Growing, usage: &Rc<Usage>) {
        self.lent.set(self.lent.get() - growing.lent);
        self.quota.payload_ended(usage);
        self.quota.give_back(usage, growing.taken);
    }

    /// Calls `alarm` from now on when a request must wait for quota.
    pub fn on_shortage(&self, alarm: fn(&Handle)) {
        self.quota.on_shortage(alarm);
    }

    /// Returns what the connections of a disk hold.
    pub fn of_disk(&self, disk: &Arc<Disk>) -> Rc<DiskUsage> {
        let mut disks = self.disks.borrow_mut();
        disks.retain(|(_, usage)| usage.strong_count() > 0);
        let is_same = |known: &sync::Weak<Disk>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(disk));
        let known = disks.iter().find(|(known, _)| is_same(known));
        known.and_then(|(_, usage)| usage.upgrade()).unwrap_or_else(|| {
            let usage = Rc::<DiskUsage>::default();
            disks.push((Arc::downgrade(disk), Rc::downgrade(&usage)));
            usage
        })
    }

    /// Ends the waits of a connection that ends.
    pub fn end(&self, usage: &Usage) {
        self.quota.end(usage);
    }

    /// Returns whether requests wait for quota.
    pub fn are_short(&self) -> bool {
        self.quota.is_short()
    }

    /// Takes back a buffer that was taken with this length.
    #[inline]
    pub fn give_back(&self, buffer: Segments, len: usize, usage: &Usage) {
        let size = rounded(len);
        if self.kept.get() + size <= KEPT {
            self.kept.set(self.kept.get() + size);
            self.free.borrow_mut()[size_class(len)].push(buffer);
        } else {
            drop(buffer);
        }
        self.quota.give_back(usage, size);
    }

    /// Frees the kept buffers, when the reactor has no connection any more.
    pub fn forget(&self) {
        self.free.borrow_mut().iter_mut().for_each(Vec::clear);
        self.kept.set(0);
    }
}
