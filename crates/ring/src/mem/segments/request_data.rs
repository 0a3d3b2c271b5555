//! Request data that stays in the kernel: ublk zero copy.
//!
//! The driver registers a request's pages as an entry of the ring's table of buffers. Operations
//! name the entry, with offsets from 0 as addresses. If this process needs the bytes (zeroes for a
//! hole, a compressed cluster, a part of a cluster), it copies them by reads and writes of the
//! character device. Those are system calls that never block.
//!
//! What must hold: this process never dereferences these "addresses". A copy that fails makes the
//! request fail.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Source of zeroes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The data of a tag's current request.
pub(crate) struct RequestData {
    /// Entry in the ring's table of buffers.
    entry: u16,
    file: Arc<OwnedFd>,
    position: u64,
    failed: Cell<bool>,
    copied: Cell<u64>,
}

impl RequestData {
    pub fn new(entry: u16, file: Arc<OwnedFd>, position: u64) -> Self {
        RequestData { entry, file, position, failed: Cell::new(false), copied: Cell::new(0) }
    }

    #[inline]
    pub fn entry(&self) -> u16 {
        self.entry
    }

    /// Returns whether a copy has failed, and the number of bytes copied, since the last call.
    pub fn take_outcome(&self) -> (bool, u64) {
        (self.failed.take(), self.copied.take())
    }

    /// Copies `len` bytes from `from` into the data at `at`.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len` bytes.
    pub unsafe fn write(&self, at: usize, from: *const u8, len: usize) {
        self.copy(at, len, |done, position| {
            // SAFETY: the caller's guarantee; the kernel only reads.
            unsafe {
                libc::pwrite(self.file.as_raw_fd(), from.add(done).cast(), len - done, position)
            }
        });
    }

    /// Copies `len` bytes of the data at `at` to `to`.
    ///
    /// # Safety
    /// `to` must be valid for writes of `len` bytes.
    pub unsafe fn read(&self, at: usize, to: *mut u8, len: usize) {
        self.copy(at, len, |done, position| {
            // SAFETY: the caller's guarantee.
            unsafe { libc::pread(self.file.as_raw_fd(), to.add(done).cast(), len - done, position) }
        });
    }

    /// Writes `len` zeroes to the data at `at`.
    pub fn zero(&self, mut at: usize, mut len: usize) {
        while len > 0 {
            let here = len.min(ZEROES.len());
            // SAFETY: `ZEROES` has at least `here` bytes.
            unsafe { self.write(at, ZEROES.as_ptr(), here) };
            at += here;
            len -= here;
        }
    }

    fn copy(&self, at: usize, len: usize, call: impl Fn(usize, libc::off_t) -> isize) {
        let mut done = 0;
        while done < len {
            match call(done, (self.position + (at + done) as u64) as libc::off_t) {
                n if n > 0 => done += n as usize,
                -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    tracing::debug!(
                        "cannot copy {len} bytes of a ublk request's data: {}",
                        io::Error::last_os_error()
                    );
                    return self.failed.set(true);
                }
            }
        }
        self.copied.set(self.copied.get() + len as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::Segments;

    /// Returns request data of `len` bytes in a file, which replaces the character device.
    fn request(len: usize) -> (Segments, Rc<RequestData>, Arc<OwnedFd>) {
        let file =
            Arc::new(rustix::fs::memfd_create("data", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        rustix::fs::ftruncate(&file, 8192 + len as u64).unwrap();
        let data = Rc::new(RequestData::new(7, file.clone(), 8192));
        let mut segments = Segments::default();
        segments.reset_request(&data, len);
        (segments, data, file)
    }

    #[test]
    fn bytes_are_copied_through_the_device() {
        let (segments, data, file) = request(200_000);
        let slice = segments.slice(1000, 100_000);
        slice.copy_in(4, b"0123456789");
        let mut bytes = [0; 10];
        rustix::io::pread(&file, &mut bytes, 8192 + 1004).unwrap();
        assert_eq!(&bytes, b"0123456789");
        let heap = Segments::buffer(100);
        heap.copy_from(50, &slice, 6, 5);
        heap.copy_out(50, &mut bytes[..5]);
        assert_eq!(&bytes[..5], b"23456");
        slice.copy_from(90_000, &heap, 50, 5);
        slice.copy_from(90_005, &slice, 4, 3);
        let mut all = Segments::from_bytes(b"<");
        all.gather(&slice, 90_000, 8);
        let mut out = [0; 9];
        all.copy_out(0, &mut out);
        assert_eq!(&out, b"<23456012");
        slice.zero(0, 95_000);
        segments.copy_out(0, &mut bytes);
        heap.copy_from(0, &slice, 89_990, 40);
        assert_eq!(heap.find_nonzero(0, 40), None);
        assert!(!data.take_outcome().0);
        assert_eq!(data.take_outcome(), (false, 0), "the outcome is reported once");
    }

    #[test]
    fn a_failed_copy_is_reported() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let data = Rc::new(RequestData::new(0, Arc::new(reader), 0));
        let mut segments = Segments::default();
        segments.reset_request(&data, 100);
        segments.zero(0, 100);
        assert!(data.take_outcome().0);
        let mut bytes = [1; 4];
        segments.copy_out(0, &mut bytes);
        assert!(data.take_outcome().0);
    }
}
