//! A domain of a [`super::Machine`]: the front end's side.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::{copy_of, lock};
use crate::devices::xen::Channel;
use crate::devices::xen::abi::{COPY_TO_GRANT, CopySegment, PAGE};
use crate::mem::memory::{Region, SharedSlice};

/// Xen's error numbers for copies.
const BAD_REFERENCE: i16 = -3;
const BAD_COPY: i16 = -10;

/// A simulated domain.
pub struct Domain {
    number: u16,
    memory: Arc<Region>,
    file: OwnedFd,
    grants: Mutex<Grants>,
    channels: Mutex<HashMap<u32, Ends>>,
    counts: Counters,
}

/// Counters of back ends' grant operations on a domain: calls, and the pages or segments in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantCounts {
    pub map_calls: u64,
    pub mapped: u64,
    pub unmap_calls: u64,
    pub copy_calls: u64,
    pub copied: u64,
}

impl GrantCounts {
    /// Returns the number of calls of all kinds.
    pub fn calls(&self) -> u64 {
        self.map_calls + self.unmap_calls + self.copy_calls
    }
}

#[derive(Default)]
struct Counters {
    map_calls: AtomicU64,
    mapped: AtomicU64,
    unmap_calls: AtomicU64,
    copy_calls: AtomicU64,
    copied: AtomicU64,
}

#[derive(Default)]
struct Grants {
    last: u32,
    granted: HashMap<u32, Grant>,
}

struct Grant {
    page: usize,
    read_only: bool,
    mapped: u32,
}

/// The eventfds of a channel, and whether a back end has bound it.
struct Ends {
    front: Arc<OwnedFd>,
    back: Arc<OwnedFd>,
    bound: bool,
}

/// The front end's side of a channel.
pub struct FrontChannel {
    pub port: u32,
    front: Arc<OwnedFd>,
    back: Arc<OwnedFd>,
}

impl FrontChannel {
    /// Returns a descriptor that becomes readable with each event.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        copy_of(&self.front)
    }

    /// Takes the events that have arrived. Returns their number.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.front, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    pub fn notify(&self) {
        let _ = rustix::io::write(&self.back, &1u64.to_ne_bytes());
    }
}

impl Domain {
    pub(super) fn new(number: u16, pages: usize) -> io::Result<Self> {
        let len = (pages * PAGE) as u64;
        let (memory, file) = Region::memfd("domain", 0, 0, len).map_err(io::Error::other)?;
        let (grants, channels, counts) = Default::default();
        Ok(Domain { number, memory: Arc::new(memory), file, grants, channels, counts })
    }

    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the domain's whole memory.
    pub fn memory(&self) -> SharedSlice {
        self.memory.slice()
    }

    /// Grants page number `page`. Returns the grant reference.
    pub fn grant(&self, page: usize, read_only: bool) -> u32 {
        let mut grants = lock(&self.grants);
        // The first references are reserved, as in Xen.
        grants.last = grants.last.max(7) + 1;
        let reference = grants.last;
        grants.granted.insert(reference, Grant { page, read_only, mapped: 0 });
        reference
    }

    /// Revokes a grant. Returns false if the page is mapped; then it stays granted.
    pub fn revoke(&self, reference: u32) -> bool {
        let mut grants = lock(&self.grants);
        let is_mapped = grants.granted.get(&reference).is_some_and(|grant| grant.mapped > 0);
        !is_mapped && grants.granted.remove(&reference).is_some()
    }

    /// Returns the number of the domain's pages that back ends have mapped.
    pub fn mapped(&self) -> u32 {
        lock(&self.grants).granted.values().map(|grant| grant.mapped).sum()
    }

    /// Returns the counters of back ends' grant operations.
    pub fn counts(&self) -> GrantCounts {
        let Counters { map_calls, mapped, unmap_calls, copy_calls, copied } = &self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GrantCounts {
            map_calls: of(map_calls),
            mapped: of(mapped),
            unmap_calls: of(unmap_calls),
            copy_calls: of(copy_calls),
            copied: of(copied),
        }
    }

    /// Creates a channel that a back end may bind.
    pub fn channel(&self) -> io::Result<FrontChannel> {
        let event = || {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new)
        };
        let (front, back) = (event()?, event()?);
        let mut channels = lock(&self.channels);
        let port = channels.keys().max().map_or(1, |last| last + 1);
        channels.insert(port, Ends { front: front.clone(), back: back.clone(), bound: false });
        Ok(FrontChannel { port, front, back })
    }

    /// Unbinds the channel, so that the next back end can bind it.
    pub(in crate::devices::xen) fn unbind(&self, port: u32) {
        lock(&self.channels).entry(port).and_modify(|ends| ends.bound = false);
    }

    pub(super) fn bind(self: &Arc<Self>, port: u32) -> io::Result<Channel> {
        let mut channels = lock(&self.channels);
        let ends = channels
            .get_mut(&port)
            .filter(|ends| !ends.bound)
            .ok_or(io::ErrorKind::InvalidInput)?;
        ends.bound = true;
        // After binding, an event is pending, as in Xen.
        let _ = rustix::io::write(&ends.back, &1u64.to_ne_bytes());
        Ok(Channel::pair(ends.back.clone(), ends.front.clone(), self.clone(), port))
    }

    /// Maps pages contiguously.
    pub(in crate::devices::xen) fn map(
        &self,
        references: &[u32],
        write: bool,
    ) -> io::Result<NonNull<u8>> {
        let mut grants = lock(&self.grants);
        let page = |reference: &u32| {
            let grant =
                grants.granted.get(reference).filter(|grant| !(write && grant.read_only))?;
            // The front end may have granted pages that it does not have.
            (grant.page < self.memory.size() as usize / PAGE).then_some(grant.page)
        };
        let pages = references.iter().map(page).collect::<Option<Vec<_>>>();
        let pages = pages.filter(|pages| !pages.is_empty()).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let len = pages.len() * PAGE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
        }?;
        for (at, page) in pages.iter().enumerate() {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: it replaces one page of the mapping above, which nothing else uses yet.
            let mapped = unsafe {
                rustix::mm::mmap(
                    base.cast::<u8>().add(at * PAGE).cast(),
                    PAGE,
                    protection,
                    flags,
                    self.file.as_fd(),
                    (page * PAGE) as u64,
                )
            };
            if let Err(e) = mapped {
                // SAFETY: the mapping was created above.
                let _ = unsafe { rustix::mm::munmap(base, len) };
                return Err(e.into());
            }
        }
        self.counts.map_calls.fetch_add(1, Ordering::Relaxed);
        self.counts.mapped.fetch_add(pages.len() as u64, Ordering::Relaxed);
        for reference in references {
            grants.granted.entry(*reference).and_modify(|grant| grant.mapped += 1);
        }
        NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))
    }

    /// Counts the pages as unmapped.
    pub(in crate::devices::xen) fn release(&self, references: &[u32]) {
        self.counts.unmap_calls.fetch_add(1, Ordering::Relaxed);
        let mut grants = lock(&self.grants);
        for reference in references {
            grants.granted.entry(*reference).and_modify(|grant| grant.mapped -= 1);
        }
    }

    /// Makes the copies of a batch as Xen does.
    pub(in crate::devices::xen) fn copy(&self, segments: &mut [CopySegment]) {
        self.counts.copy_calls.fetch_add(1, Ordering::Relaxed);
        self.counts.copied.fetch_add(segments.len() as u64, Ordering::Relaxed);
        segments.iter_mut().for_each(|segment| self.copy_segment(segment));
    }

    fn copy_segment(&self, segment: &mut CopySegment) {
        let to_guest = segment.flags == COPY_TO_GRANT;
        let (there, here) = if to_guest {
            (segment.target, segment.source)
        } else {
            (segment.source, segment.target)
        };
        let (reference, offset, len) = (there as u32, (there >> 32) as u16, u64::from(segment.len));
        let grants = lock(&self.grants);
        let Some(grant) =
            grants.granted.get(&reference).filter(|grant| !(to_guest && grant.read_only))
        else {
            return segment.status = BAD_REFERENCE;
        };
        let at = (grant.page * PAGE) as u64 + u64::from(offset);
        let Some(page) =
            self.memory.piece(at, len).filter(|_| usize::from(offset) + len as usize <= PAGE)
        else {
            return segment.status = BAD_COPY;
        };
        let (source, target) =
            if to_guest { (here as *const u8, page) } else { (page.cast_const(), here as *mut u8) };
        // SAFETY: one pointer is inside the domain's memory, the other inside a buffer that the
        // batch keeps and that is long enough (see CopyBatch::push). They are different mappings.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len as usize) };
        segment.status = 0;
    }
}
