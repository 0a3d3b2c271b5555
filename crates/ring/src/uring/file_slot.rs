//! A file's descriptor on one ring, and its entry in the ring's table of registered files.
//!
//! In: a descriptor, and the executor that uses it ([`FileTable`]). Out: what an operation on the
//! file names, and which transfers a kernel worker must make.
//!
//! What must hold: an operation in flight keeps its slot, and so the descriptor. A slot that is
//! dropped frees its entry, and leaves the count of files.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

/// A file descriptor that a ring reads and writes.
pub(crate) type Descriptor = Arc<dyn AsFd + Send + Sync>;

/// The executor that uses a file: the files that its ring knows.
pub(crate) trait FileTable: Clone {
    /// Enters `fd` into the ring's table. `None`: the table is full or missing.
    fn register_file(&self, fd: i32) -> Option<u32>;

    /// Frees an entry of the table.
    fn unregister_file(&self, index: u32);

    /// Adds to the number of files that are open for writing.
    fn count_files(&self, by: i32);
}

/// A file's descriptor on one ring. Operations in flight keep it alive.
pub(crate) struct FileSlot<T: FileTable> {
    fd: Descriptor,
    /// Number of `fd`, cached so that operations need no dynamic call.
    raw: i32,
    registered: Option<u32>,
    handle: T,
    /// Whether the file is counted as open for writing.
    counted: bool,
    /// Number of bytes above which a kernel worker must make a transfer.
    longest: usize,
    /// Whether a kernel worker must make all transfers.
    leaves_all: Cell<bool>,
}

impl<T: FileTable> FileSlot<T> {
    /// Creates a slot for a file or block device. `counted`: it is open for writing. `longest`:
    /// number of bytes above which a kernel worker must make a transfer.
    pub fn new(handle: &T, fd: Descriptor, counted: bool, longest: usize) -> Self {
        if counted {
            handle.count_files(1);
        }
        let raw = fd.as_fd().as_raw_fd();
        FileSlot {
            registered: handle.register_file(raw),
            fd,
            raw,
            handle: handle.clone(),
            counted,
            longest,
            leaves_all: Cell::new(false),
        }
    }

    /// Creates a slot for a file that is not counted as open for writing: a socket, a character
    /// device.
    pub fn uncounted(handle: &T, fd: Descriptor) -> Self {
        Self::new(handle, fd, false, usize::MAX)
    }

    #[inline]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    #[inline]
    pub fn descriptor(&self) -> &Descriptor {
        &self.fd
    }

    #[inline]
    pub fn handle(&self) -> &T {
        &self.handle
    }

    #[inline]
    pub fn raw(&self) -> i32 {
        self.raw
    }

    #[inline]
    pub fn registered(&self) -> Option<u32> {
        self.registered
    }

    /// Returns whether a kernel worker must transfer `bytes` bytes. On submission the kernel would
    /// copy them from or to the page cache, or zero the memory of a hole, on this thread, and the
    /// reactor's other queues would wait.
    #[inline]
    pub fn leaves_to_worker(&self, bytes: usize) -> bool {
        bytes > self.longest || self.leaves_all.get()
    }

    /// Sets whether a kernel worker must make all transfers.
    #[inline]
    pub fn leave_all_to_worker(&self, leaves: bool) {
        self.leaves_all.set(leaves);
    }
}

impl<T: FileTable> Drop for FileSlot<T> {
    fn drop(&mut self) {
        if self.counted {
            self.handle.count_files(-1);
        }
        if let Some(index) = self.registered {
            self.handle.unregister_file(index);
        }
    }
}
