//! The pages that a guest grants: mapped into this process, or copied by the hypervisor.
//!
//! In: grant references from the guest. Out: a [`Region`] of guest memory, accessed like any other;
//! or copied bytes, with a status for each copy.
//!
//! What must hold
//! - Either all pages of a mapping are mapped, or none. They stay mapped as long as the region
//!   exists. The guest cannot revoke a mapped page.
//! - This process never writes to a page that is mapped read-only: the kernel prevents it.
//! - A copy accesses only the segments and offsets that its caller named, inside one page of the
//!   guest.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{self, CopySegment, PAGE};
use super::machine::Domain;
use crate::mem::memory::Region;
use crate::mem::segments::Segments;

/// Grants of one domain, through a file that only they use. When the file is closed, the kernel
/// unmaps the grants that are still mapped.
pub struct Grants(GrantDevice);

enum GrantDevice {
    Kernel { file: Arc<OwnedFd>, domain: u16 },
    Simulated(Arc<Domain>),
}

/// Releases the grants of a mapping, after its memory was unmapped.
pub(crate) enum Release {
    Kernel { file: Arc<OwnedFd>, index: u64, count: u32 },
    Simulated { domain: Arc<Domain>, references: Vec<u32> },
}

impl Drop for Release {
    fn drop(&mut self) {
        match self {
            Release::Kernel { file, index, count } => {
                let request = abi::Unmap { index: *index, count: *count, pad: 0 };
                // SAFETY: the kernel reads a structure of this size. The pages are no longer mapped
                // in this process.
                let done = unsafe {
                    libc::ioctl(file.as_raw_fd(), abi::GNTDEV_UNMAP_GRANT_REF, &raw const request)
                };
                if done < 0 {
                    tracing::error!(
                        "cannot unmap {count} pages of a guest: {}",
                        io::Error::last_os_error()
                    );
                }
            }
            Release::Simulated { domain, references } => domain.release(references),
        }
    }
}

impl Grants {
    pub(super) fn open(domain: u16) -> io::Result<Self> {
        let file =
            rustix::fs::open("/dev/xen/gntdev", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Grants(GrantDevice::Kernel { file: Arc::new(file), domain }))
    }

    pub(super) fn of(domain: Arc<Domain>) -> Self {
        Grants(GrantDevice::Simulated(domain))
    }

    /// Maps pages contiguously, readable and (with `write`) writable. If one page cannot be mapped,
    /// none is. The region's guest addresses begin at 0.
    pub fn map(&self, references: &[u32], write: bool) -> io::Result<Region> {
        let len = references.len() * PAGE;
        let (base, release) = match &self.0 {
            GrantDevice::Kernel { file, domain } => map_device(file, *domain, references, write)?,
            GrantDevice::Simulated(domain) => {
                let base = domain.map(references, write)?;
                (
                    base,
                    Release::Simulated { domain: domain.clone(), references: references.to_vec() },
                )
            }
        };
        // SAFETY: the mapping has this length, was created above, and nothing else uses it.
        Ok(unsafe { Region::granted(base, len, Box::new(release)) })
    }

    /// Makes the copies of a batch in one call, and sets a status for each. After an error some
    /// copies may have been made, and there are no statuses.
    pub fn copy(&self, batch: &mut CopyBatch) -> io::Result<()> {
        match &self.0 {
            GrantDevice::Kernel { file, .. } => {
                let CopyBatch { segments, .. } = batch;
                let count = segments.len() as u32;
                let request = abi::Copy { count, pad: 0, segments: segments.as_mut_ptr() as u64 };
                // SAFETY: the kernel reads and writes `count` segments. Each refers to memory that
                // lives until the batch is cleared (see CopyBatch), and to a page of the guest.
                let done = unsafe {
                    libc::ioctl(file.as_raw_fd(), abi::GNTDEV_GRANT_COPY, &raw const request)
                };
                if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            }
            GrantDevice::Simulated(domain) => {
                domain.copy(&mut batch.segments);
                Ok(())
            }
        }
    }

    /// Returns the number of the domain that grants the pages.
    fn domain(&self) -> u16 {
        match &self.0 {
            GrantDevice::Kernel { domain, .. } => *domain,
            GrantDevice::Simulated(domain) => domain.number(),
        }
    }
}

fn map_device(
    file: &Arc<OwnedFd>,
    domain: u16,
    references: &[u32],
    write: bool,
) -> io::Result<(NonNull<u8>, Release)> {
    let count = u32::try_from(references.len())
        .ok()
        .filter(|count| *count > 0)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let mut words = abi::map_words(domain, references);
    // SAFETY: the kernel reads as many words as the first one says, and writes the second.
    let done =
        unsafe { libc::ioctl(file.as_raw_fd(), abi::GNTDEV_MAP_GRANT_REF, words.as_mut_ptr()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    let release = Release::Kernel { file: file.clone(), index: words[1], count };
    let protection = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let len = references.len() * PAGE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            protection,
            MapFlags::SHARED,
            file.as_fd(),
            words[1],
        )
    }?;
    let base =
        NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
    Ok((base, release))
}

/// Status of a copy: 0, or a negative number of Xen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyStatus(pub i16);

impl CopyStatus {
    pub fn is_ok(self) -> bool {
        self.0 == 0
    }
}

/// Copies between pages of a guest and memory of this process, made in one call. It is reusable:
/// its vectors keep their capacity.
#[derive(Default)]
pub struct CopyBatch {
    segments: Vec<CopySegment>,
    /// Keep alive the memory that `segments` refer to.
    owners: Vec<Segments>,
}

impl CopyBatch {
    /// Adds a copy of `len` bytes between page `reference` of the guest, at `offset`, and `memory`,
    /// at `at`. `to_guest`: from `memory` into the page. Returns false, and adds nothing, if the
    /// range is not inside one page.
    ///
    /// Panics if the range is not inside `memory`, which is a buffer of this process: callers
    /// compute these lengths, never a guest.
    #[must_use]
    pub fn push(
        &mut self,
        grants: &Grants,
        memory: &Segments,
        at: usize,
        (reference, offset, len): (u32, u16, u16),
        to_guest: bool,
    ) -> bool {
        if len == 0 || usize::from(offset) + usize::from(len) > PAGE {
            return false;
        }
        let there = abi::foreign(grants.domain(), reference, offset);
        let here = memory.contiguous(at, len.into()) as u64;
        let (source, target, flags) = if to_guest {
            (here, there, abi::COPY_TO_GRANT)
        } else {
            (there, here, abi::COPY_FROM_GRANT)
        };
        self.segments.push(CopySegment { source, target, len, flags, status: 0, pad: 0 });
        self.owners.push(memory.slice(0, 0));
        true
    }

    pub fn len(&self) -> usize {
        self.segments.len()
    }

    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Returns the statuses of the copies, in the order in which they were added.
    pub fn statuses(&self) -> impl Iterator<Item = CopyStatus> + '_ {
        self.segments.iter().map(|segment| CopyStatus(segment.status))
    }

    pub fn clear(&mut self) {
        self.segments.clear();
        self.owners.clear();
    }
}
