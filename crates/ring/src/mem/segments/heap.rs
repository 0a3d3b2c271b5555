//! Heap memory of this process, aligned for O_DIRECT.

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// Memory aligned for O_DIRECT, initially zero.
pub struct AlignedBuf {
    pub(super) ptr: NonNull<u8>,
    pub(super) len: usize,
    source: Source,
}

#[derive(Clone, Copy)]
enum Source {
    Allocator,
    /// A private anonymous mapping.
    Mapping,
}

impl AlignedBuf {
    const ALIGN: usize = 4096;

    /// Allocates `len` zeroed bytes.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { std::alloc::handle_alloc_error(layout) };
        AlignedBuf { ptr, len, source: Source::Allocator }
    }

    /// Returns memory that the kernel allocates page by page, at the first use.
    pub fn mapped(len: usize) -> io::Result<Self> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len.max(1), protection, flags)
        }?;
        let ptr = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(AlignedBuf { ptr, len, source: Source::Mapping })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), Self::ALIGN)
            .expect("a buffer's length fits into the address space")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: allocated with the same layout.
            Source::Allocator => unsafe {
                std::alloc::dealloc(self.ptr.as_ptr(), Self::layout(self.len))
            },
            Source::Mapping => {
                // SAFETY: `mapped` created this mapping with this length. Only `Segments` that own
                // this buffer point into it.
                let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len.max(1)) };
            }
        }
    }
}
