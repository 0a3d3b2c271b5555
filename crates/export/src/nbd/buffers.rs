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

#[cfg(test)]
mod tests {
    use super::super::tests::connected::simulated;
    use super::*;

    const PAGE: usize = 4096;

    fn held(usage: &Usage) -> usize {
        usage.held()
    }

    /// Returns the first bytes of a buffer.
    fn begin(buffer: &Segments) -> [u8; 16] {
        let mut bytes = [0; 16];
        buffer.copy_out(0, &mut bytes);
        bytes
    }

    #[test]
    fn sizes_are_powers_of_two_from_a_page_to_the_longest_request() {
        for (len, size) in [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)] {
            assert_eq!(rounded(len), size, "{len}");
        }
        let longest = blockyard_nbd::wire::MOST_PAYLOAD as usize;
        assert_eq!((rounded(longest), size_class(longest)), (longest, SIZES - 1));
    }

    #[test]
    fn a_buffer_that_was_given_back_serves_the_next_request_of_its_size() {
        simulated(async |handle| {
            let (buffers, usage) = (Buffers::default(), Rc::<Usage>::default());
            let first = buffers.take(&handle, 5000, &usage).await;
            assert_eq!((first.len(), held(&usage)), (5000, 2 * PAGE));
            first.copy_in(0, &[7; 16]);
            buffers.give_back(first, 5000, &usage);
            assert_eq!((buffers.kept.get(), held(&usage)), (2 * PAGE, 0));
            // Another size has no kept buffer.
            let small = buffers.take(&handle, 100, &usage).await;
            assert_eq!((begin(&small), buffers.kept.get()), ([0; 16], 2 * PAGE));
            // The whole buffer is used again, also for a longer request of the same size.
            let again = buffers.take(&handle, 2 * PAGE, &usage).await;
            assert_eq!((again.len(), begin(&again)), (2 * PAGE, [7; 16]));
            assert_eq!((buffers.kept.get(), held(&usage)), (0, 3 * PAGE));
            buffers.give_back(small, 100, &usage);
            buffers.give_back(again, 2 * PAGE, &usage);
            assert_eq!((buffers.kept.get(), held(&usage)), (3 * PAGE, 0));
            buffers.forget();
            assert_eq!(buffers.kept.get(), 0);
            let fresh = buffers.take(&handle, 2 * PAGE, &usage).await;
            assert_eq!(begin(&fresh), [0; 16]);
        });
    }

    #[test]
    fn the_buffers_that_are_kept_are_bounded() {
        simulated(async |handle| {
            const LEN: usize = 8 << 20;
            let (buffers, usage) = (Buffers::default(), Rc::<Usage>::default());
            let mut all = Vec::new();
            for _ in 0..6 {
                all.push(buffers.take(&handle, LEN, &usage).await);
            }
            assert_eq!(held(&usage), 6 * LEN);
            all.into_iter().for_each(|buffer| buffers.give_back(buffer, LEN, &usage));
            assert_eq!((buffers.kept.get(), held(&usage)), (KEPT, 0));
        });
    }

    #[test]
    fn a_payload_takes_its_quota_as_it_arrives() {
        simulated(async |handle| {
            const LEN: usize = 3 << 20;
            let (buffers, usage) = (Buffers::default(), Rc::<Usage>::default());
            let mut growing = buffers.growing(LEN).unwrap();
            assert_eq!((growing.payload.len(), held(&usage)), (LEN, 0), "only announced");
            let mut filled = Vec::new();
            while filled.last() != Some(&LEN) {
                filled.push(buffers.grow(&handle, &mut growing, &usage).await);
                assert_eq!(held(&usage).min(LEN), *filled.last().unwrap());
            }
            // Each step is at most as long as what has arrived before.
            assert_eq!(filled, [256 << 10, 512 << 10, 1 << 20, 2 << 20, LEN]);
            let payload = buffers.grown(growing, &usage);
            assert_eq!(held(&usage), 4 << 20);
            buffers.give_back(payload, LEN, &usage);
            assert_eq!((held(&usage), buffers.kept.get()), (0, 4 << 20));
        });
    }

    #[test]
    fn a_payload_that_does_not_arrive_returns_what_it_holds() {
        simulated(async |handle| {
            const LEN: usize = 3 << 20;
            let (buffers, usage) = (Buffers::default(), Rc::<Usage>::default());
            let mut growing = buffers.growing(LEN).unwrap();
            buffers.grow(&handle, &mut growing, &usage).await;
            buffers.grow(&handle, &mut growing, &usage).await;
            assert_eq!(held(&usage), 512 << 10);
            buffers.abandon(growing, &usage);
            assert_eq!((held(&usage), buffers.lent.get(), buffers.kept.get()), (0, 0, 0));
        });
    }

    /// Clients that announce payloads and send nothing must not hold all buffers that are kept, and
    /// more.
    #[test]
    fn recycled_buffers_that_clients_fill_are_bounded() {
        simulated(async |handle| {
            const LEN: usize = 16 << 20;
            let (buffers, usage) = (Buffers::default(), Rc::<Usage>::default());
            let keep = async |count| {
                let mut all = Vec::new();
                for _ in 0..count {
                    all.push(buffers.take(&handle, LEN, &usage).await);
                }
                all.into_iter().for_each(|buffer| buffers.give_back(buffer, LEN, &usage));
            };
            keep(2).await;
            let lent: Vec<_> = (0..2).map(|_| buffers.growing(LEN).unwrap()).collect();
            assert_eq!((buffers.lent.get(), buffers.kept.get()), (KEPT, 0));
            keep(1).await;
            let third = buffers.growing(LEN).unwrap();
            assert_eq!((third.lent, buffers.lent.get()), (0, KEPT), "it is a new buffer");
            assert_eq!(buffers.kept.get(), LEN, "the kept buffer stays for requests");
            lent.into_iter().chain([third]).for_each(|growing| buffers.abandon(growing, &usage));
            assert_eq!((buffers.lent.get(), held(&usage)), (0, 0));
        });
    }

    #[test]
    fn the_connections_of_a_disk_share_its_usage() {
        use super::super::tests::disk;
        let (buffers, one, other) = (Buffers::default(), disk("one", false), disk("other", false));
        let usage = buffers.of_disk(&one);
        assert!(Rc::ptr_eq(&usage, &buffers.of_disk(&one)));
        assert!(!Rc::ptr_eq(&usage, &buffers.of_disk(&other)));
        drop(usage);
        buffers.of_disk(&other);
        assert!(buffers.disks.borrow().len() == 1, "a disk without connections is forgotten");
    }
}
