//! The pages that a guest grants: mapped into this process, or copied by the hypervisor.
//!
//! In: grant references, as the guest wrote them. Out: a [`Region`] of guest memory, which is
//! accessed as any other; or bytes that were copied, with a status for each piece. What must hold
//! - A mapping is whole or not at all, and lasts as long as its region. The guest cannot take a
//!   mapped page back.
//! - A page that is mapped to be read only is never written to by this process: the kernel refuses,
//!   as for any memory.
//! - A copy touches the segments and offsets that its caller named, inside one page of the guest,
//!   and nothing else.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{self, CopySegment, PAGE};
use super::machine::Domain;
use crate::memory::Region;
use crate::segments::Segments;

/// Grants of one domain, by a file of their own: what is left when it is closed, the kernel unmaps.
pub struct Grants(GrantDevice);

enum GrantDevice {
    Kernel { file: Arc<OwnedFd>, domain: u16 },
    Simulated(Arc<Domain>),
}

/// What is done to the pages of a mapping when their memory is unmapped.
pub(crate) enum Release {
    Kernel { file: Arc<OwnedFd>, index: u64, count: u32 },
    Simulated { domain: Arc<Domain>, references: Vec<u32> },
}

impl Drop for Release {
    fn drop(&mut self) {
        match self {
            Release::Kernel { file, index, count } => {
                let asked = abi::Unmap { index: *index, count: *count, pad: 0 };
                // SAFETY: the kernel reads a structure of this size. Nothing of this process is
                // mapped there any more.
                let done = unsafe {
                    libc::ioctl(file.as_raw_fd(), abi::GNTDEV_UNMAP_GRANT_REF, &raw const asked)
                };
                if done < 0 {
                    tracing::error!(
                        "unmapping {count} pages of a guest: {}",
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

    /// Maps pages, one behind the other, to be read and (`write`) written. One page that cannot be
    /// mapped is an error of all. The region's guest addresses begin at 0.
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
        // SAFETY: a mapping of this length that nothing else knows, made above.
        Ok(unsafe { Region::granted(base, len, release) })
    }

    /// Makes the copies of a batch, in one call, and leaves a status for each. An error: no copy
    /// was made, or not all were, and there are no statuses.
    pub fn copy(&self, batch: &mut CopyBatch) -> io::Result<()> {
        match &self.0 {
            GrantDevice::Kernel { file, .. } => {
                let CopyBatch { segments, .. } = batch;
                let count = segments.len() as u32;
                let asked = abi::Copy { count, pad: 0, segments: segments.as_mut_ptr() as u64 };
                // SAFETY: the kernel reads and writes as many segments as there are. Each names
                // memory that lives until the batch is cleared (see CopyBatch), and a page that is
                // the guest's.
                let done = unsafe {
                    libc::ioctl(file.as_raw_fd(), abi::GNTDEV_GRANT_COPY, &raw const asked)
                };
                if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            }
            GrantDevice::Simulated(domain) => {
                domain.copy(&mut batch.segments);
                Ok(())
            }
        }
    }

    /// The number of the domain whose pages these are.
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
    // SAFETY: the kernel reads as many words as the first one says there are, and writes the
    // second.
    let done =
        unsafe { libc::ioctl(file.as_raw_fd(), abi::GNTDEV_MAP_GRANT_REF, words.as_mut_ptr()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    let release = Release::Kernel { file: file.clone(), index: words[1], count };
    let protection = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let len = references.len() * PAGE;
    // SAFETY: a fresh mapping at an address of the kernel's choosing aliases no Rust object.
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
        NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
    Ok((base, release))
}

/// How a copy ended: Xen's number, 0 or negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyStatus(pub i16);

impl CopyStatus {
    pub fn is_ok(self) -> bool {
        self.0 == 0
    }
}

/// Copies between pages of a guest and memory of this process, made by one call. Used again: its
/// vector keeps its room.
#[derive(Default)]
pub struct CopyBatch {
    segments: Vec<CopySegment>,
    /// What keeps the memory alive that `segments` name.
    owners: Vec<Segments>,
}

impl CopyBatch {
    /// Adds the copy of `len` bytes between page `reference` of the guest of `grants`, from
    /// `offset`, and `memory`, from `at`. `to_guest`: out of `memory` into the page. False, and
    /// nothing is added: the range is not inside one page.
    ///
    /// Panics if the range is not inside `memory`, which is a buffer of this process: its lengths
    /// are our own sums.
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

    /// How the copies ended, in the order in which they were added.
    pub fn statuses(&self) -> impl Iterator<Item = CopyStatus> + '_ {
        self.segments.iter().map(|segment| CopyStatus(segment.status))
    }

    pub fn clear(&mut self) {
        self.segments.clear();
        self.owners.clear();
    }
}
