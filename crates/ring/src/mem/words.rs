//! Shared memory of 64-bit words, which can outlive the process.
//!
//! In: a file, or nothing. Out: a slice of atomic words. What a thread has stored stays in the
//! file's page cache when the process dies, also by SIGKILL.

use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags};

/// Memory of 64-bit words that any thread may read and change.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the memory is mapped until the drop, and all access to it is atomic.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the first `len` words of a file. The kernel ends the process with SIGBUS if it touches
    /// words behind the file's end, or words for which a full file system has no space. So the
    /// caller allocates their space first (`fallocate`).
    pub fn of_file(file: impl AsFd, len: usize) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), Self::bytes(len), protection, flags, file, 0)?
        };
        Self::at(base.cast(), len)
    }

    /// Maps `len` words of memory of this process. They are zero.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: as in `of_file`.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), Self::bytes(len), protection, flags)?
        };
        Self::at(base.cast(), len)
    }

    fn at(base: *mut AtomicU64, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(SharedWords { base, len })
    }

    fn bytes(len: usize) -> usize {
        len.max(1) * size_of::<AtomicU64>()
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `base` is the page-aligned start of a mapping of `len` words, which stays until
        // the drop. Each bit pattern is a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no borrow of it remains.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), Self::bytes(self.len)) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn words_of_a_file_are_in_the_file() {
        let file = rustix::fs::memfd_create(c"words", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 32).unwrap();
        let words = SharedWords::of_file(&file, 4).unwrap();
        words[2].store(0x0102_0304_0506_0708, Ordering::Release);
        drop(words);
        let mut bytes = [0; 32];
        rustix::io::pread(&file, &mut bytes, 0).unwrap();
        assert_eq!(bytes[16..24], 0x0102_0304_0506_0708u64.to_ne_bytes());
        assert_eq!(bytes[..16], [0; 16]);
    }

    #[test]
    fn anonymous_words_are_zero() {
        let words = SharedWords::anonymous(1000).unwrap();
        assert_eq!(words.len(), 1000);
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
}
