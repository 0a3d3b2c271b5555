//! Registered buffers of io_uring: guest memory that is pinned once, not per operation.
//!
//! In: the regions to register ([`Registration`]), and the iovecs of operations. Out: the index of
//! the registered buffer that contains the whole iovec. Without one, the operation uses ordinary
//! addresses, which always works.
//!
//! What must hold
//! - A buffer is found by address. The table keeps a region mapped as long as its buffers can be
//!   found, so an address in it belongs to that region only.
//! - A buffer that an operation names is neither cleared nor given to another region. The kernel
//!   reads the table when it consumes the operation, which is later than its creation.
//! - A removed region's buffers can no longer be found at once. They are cleared after their last
//!   operation is reaped. The kernel unpins the pages after its own last use.
//! - Pages stay pinned if a front end gives them back, for example if a balloon punches holes into
//!   the file. The buffer then refers to pages that the guest no longer has. Such front ends must
//!   not be registered; this module cannot detect them.

use std::fmt::{Display, Formatter};
use std::io;
use std::sync::Arc;

use io_uring::{Probe, Submitter, opcode};

use crate::executor::Handle;
use crate::memory::{GuestMemory, Region};

/// Means "no registered buffer": the operation uses ordinary addresses.
pub(crate) const NONE: u16 = u16::MAX;

/// Number of entries in a ring's table of registered buffers.
const ENTRIES: u16 = 4096;
/// Size of a registered buffer in bytes, at most; the kernel's limit. An iovec that crosses two
/// buffers uses ordinary addresses.
const MOST: usize = 1 << 30;

/// Guest memory that stays registered with a reactor's ring until this is dropped.
pub struct Registration {
    handle: Handle,
    regions: Vec<Arc<Region>>,
}

impl Registration {
    pub(crate) fn new(handle: &Handle) -> Self {
        Registration { handle: handle.clone(), regions: Vec::new() }
    }

    /// Registers the regions of `memory` that are new, and unregisters those that are gone. A
    /// region is registered as a whole, or not at all.
    pub fn replace(&mut self, memory: &GuestMemory) {
        let new = memory.regions().to_vec();
        let old = std::mem::replace(&mut self.regions, new);
        let has = |regions: &[Arc<Region>], region| regions.iter().any(|r| Arc::ptr_eq(r, region));
        self.handle.buffers(|buffers, submitter| {
            // Unregister first, because the limit on pinned memory may not suffice for the old and
            // the new regions together.
            old.iter().filter(|r| !has(&self.regions, r)).for_each(|r| buffers.leave(submitter, r));
            self.regions.iter().filter(|r| !has(&old, r)).for_each(|r| buffers.enter(submitter, r));
        });
    }

    /// Returns which regions are registered, and why others are not.
    pub fn outcome(&self) -> Outcome {
        self.handle.buffers(|buffers, _| buffers.outcome(&self.regions))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.replace(&GuestMemory::default());
    }
}

/// Why a region is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The ring has no table of registered buffers. Holds the errno.
    NoTable(i32),
    /// The table has no free entry.
    Full,
    /// The pages cannot be pinned. Holds the errno.
    Pin(i32),
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let error = |errno: i32| io::Error::from_raw_os_error(errno);
        match *self {
            Refusal::NoTable(errno) => {
                write!(
                    f,
                    "io_uring has no table of buffers (it needs Linux 5.19): {}",
                    error(errno)
                )
            }
            Refusal::Full => {
                write!(f, "the ring's table of {ENTRIES} buffers (of at most 1 GiB each) is full")
            }
            Refusal::Pin(errno) => {
                let hint = match errno {
                    libc::ENOMEM => " (raise the limit of locked memory: ulimit -l)",
                    libc::EFAULT | libc::EOPNOTSUPP => {
                        " (its file is on a disk, or has a hole that cannot be filled)"
                    }
                    _ => "",
                };
                write!(f, "cannot pin its pages: {}{hint}", error(errno))
            }
        }
    }
}

/// Result of registering guest memory. Its `Display` form is one line for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of registered regions.
    pub regions: usize,
    pub bytes: u64,
    /// Whether vectored operations can use registered buffers too (Linux 6.15).
    pub vectored: bool,
    /// Number of regions that are not registered.
    pub plain: usize,
    /// Why the first unregistered region could not be registered.
    pub refused: Option<Refusal>,
}

impl Display for Outcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        if self.regions > 0 || self.refused.is_none() {
            let (regions, bytes) = (self.regions, self.bytes);
            write!(
                f,
                "guest memory is registered with io_uring: {bytes} bytes in {regions} regions"
            )?;
            if !self.vectored {
                write!(f, ", for requests of one segment (more segments need Linux 6.15)")?;
            }
        }
        match self.refused {
            Some(why) if self.regions > 0 => {
                write!(f, "; {} regions are not: {why}", self.plain)
            }
            Some(why) => write!(
                f,
                "guest memory is not registered with io_uring; requests work without it: {why}"
            ),
            None => Ok(()),
        }
    }
}

/// A registered buffer: its addresses in this process, and its entry in the table.
struct RegisteredBuffer {
    start: usize,
    end: usize,
    entry: u16,
}

/// A region that at least one [`Registration`] holds.
struct Member {
    region: Arc<Region>,
    users: usize,
    registered: Result<(), Refusal>,
}

enum Table {
    /// Not requested yet.
    None,
    Refused(i32),
    Ready {
        free: Vec<u16>,
        vectored: bool,
    },
}

/// The table of registered buffers of one ring, as known to this process.
pub(crate) struct Buffers {
    table: Table,
    members: Vec<Member>,
    /// Buffers that can be found, sorted by address.
    found: Vec<RegisteredBuffer>,
    /// Number of operations that name each entry.
    uses: Vec<u32>,
    /// Entries that can no longer be found, but that operations still name.
    leaving: Vec<u16>,
    /// Largest size of a registered buffer in bytes (tests lower it).
    most: usize,
}

impl Buffers {
    pub fn new() -> Self {
        let (members, found, uses, leaving) = Default::default();
        Buffers { table: Table::None, members, found, uses, leaving, most: MOST }
    }

    /// Returns the entry of the registered buffer that contains all of `iov` (`len` bytes), and
    /// counts one operation on that entry. Returns [`NONE`] if no registered buffer contains it.
    #[inline]
    pub fn take(&mut self, iov: &[libc::iovec], len: usize) -> u16 {
        if self.found.is_empty() {
            return NONE;
        }
        let Some(entry) = self.find(iov, len) else { return NONE };
        self.uses[usize::from(entry)] += 1;
        entry
    }

    /// Counts one operation less on `entry`, because the operation was reaped.
    #[inline]
    pub fn done(&mut self, entry: u16) {
        if entry != NONE {
            self.uses[usize::from(entry)] -= 1;
        }
    }

    #[inline]
    fn find(&self, iov: &[libc::iovec], len: usize) -> Option<u16> {
        let first = iov.first()?;
        let vectored = matches!(self.table, Table::Ready { vectored: true, .. });
        // Segments may overlap, so their total may exceed the buffer. The kernel limits the total.
        if len > MOST || (iov.len() > 1 && !vectored) {
            return None;
        }
        let at = self.found.partition_point(|s| s.start <= first.iov_base as usize);
        let buffer = self.found.get(at.checked_sub(1)?)?;
        let inside = |v: &libc::iovec| {
            let start = v.iov_base as usize;
            (buffer.start..buffer.end).contains(&start) && v.iov_len <= buffer.end - start
        };
        iov.iter().all(inside).then_some(buffer.entry)
    }

    /// Takes `number` free entries, or none. The caller fills and clears them.
    pub fn reserve(&mut self, submitter: &Submitter<'_>, number: u16) -> Result<Vec<u16>, Refusal> {
        self.open(submitter)?;
        let Table::Ready { free, .. } = &mut self.table else { return Err(Refusal::NoTable(0)) };
        let rest = free.len().checked_sub(number.into()).ok_or(Refusal::Full)?;
        Ok(free.split_off(rest))
    }

    /// Returns reserved entries, which must be empty.
    pub fn give_back(&mut self, entries: Vec<u16>) {
        if let Table::Ready { free, .. } = &mut self.table {
            free.extend(entries);
        }
    }

    /// Returns whether [`Buffers::clear_leaving`] has something to do.
    #[inline]
    pub fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Clears the entries in `leaving` whose last operation was reaped.
    pub fn clear_leaving(&mut self, submitter: &Submitter<'_>) {
        for entry in std::mem::take(&mut self.leaving) {
            match self.uses[usize::from(entry)] {
                0 => self.clear(submitter, entry),
                _ => self.leaving.push(entry),
            }
        }
    }

    fn enter(&mut self, submitter: &Submitter<'_>, region: &Arc<Region>) {
        if let Some(member) = self.members.iter_mut().find(|m| Arc::ptr_eq(&m.region, region)) {
            member.users += 1;
            return;
        }
        let registered = self.register(submitter, region);
        self.members.push(Member { region: region.clone(), users: 1, registered });
    }

    fn leave(&mut self, submitter: &Submitter<'_>, region: &Arc<Region>) {
        let Some(at) = self.members.iter().position(|m| Arc::ptr_eq(&m.region, region)) else {
            return;
        };
        self.members[at].users -= 1;
        if self.members[at].users > 0 {
            return;
        }
        // Remove the buffers from the search first: only the member keeps the region mapped, and
        // with it the addresses reserved.
        let span = region.span();
        let gone = self.found.extract_if(.., |s| span.contains(&s.start)).map(|s| s.entry);
        self.leaving.extend(gone);
        self.members.swap_remove(at);
        self.clear_leaving(submitter);
    }

    /// Registers all of a region, in several buffers if the region is large; or nothing of it.
    fn register(&mut self, submitter: &Submitter<'_>, region: &Region) -> Result<(), Refusal> {
        self.open(submitter)?;
        let span = region.span();
        let mut buffers = Vec::new();
        for start in span.clone().step_by(self.most) {
            let end = span.end.min(start + self.most);
            match self.put(submitter, start, end) {
                Ok(entry) => buffers.push(RegisteredBuffer { start, end, entry }),
                Err(why) => {
                    buffers.into_iter().for_each(|s| self.clear(submitter, s.entry));
                    return Err(why);
                }
            }
        }
        let at = self.found.partition_point(|s| s.start < span.start);
        self.found.splice(at..at, buffers);
        Ok(())
    }

    /// Creates the table at the first use, so that rings without registrations have none.
    fn open(&mut self, submitter: &Submitter<'_>) -> Result<(), Refusal> {
        if matches!(self.table, Table::None) {
            let mut probe = Probe::new();
            let _ = submitter.register_probe(&mut probe);
            let vectored = probe.is_supported(opcode::ReadvFixed::CODE)
                && probe.is_supported(opcode::WritevFixed::CODE);
            self.table = match submitter.register_buffers_sparse(ENTRIES.into()) {
                Ok(()) => Table::Ready { free: (0..ENTRIES).rev().collect(), vectored },
                Err(e) => Table::Refused(e.raw_os_error().unwrap_or_default()),
            };
            self.uses = vec![0; ENTRIES.into()];
        }
        match self.table {
            Table::Refused(errno) => Err(Refusal::NoTable(errno)),
            _ => Ok(()),
        }
    }

    /// Registers a range of addresses in a free entry.
    fn put(&mut self, submitter: &Submitter<'_>, start: usize, end: usize) -> Result<u16, Refusal> {
        let Table::Ready { free, .. } = &mut self.table else { return Err(Refusal::NoTable(0)) };
        let entry = free.pop().ok_or(Refusal::Full)?;
        let buffer = libc::iovec { iov_base: start as *mut _, iov_len: end - start };
        // SAFETY: the kernel pins the pages that are mapped there now. Later it uses the addresses
        // only as offsets into these pages, so changes of the mapping do no harm. The pages are
        // guest memory, which other processes may write at any time.
        unsafe { submitter.register_buffers_update(entry.into(), &[buffer], None) }
            .map(|()| entry)
            .map_err(|e| {
                free.push(entry);
                Refusal::Pin(e.raw_os_error().unwrap_or_default())
            })
    }

    /// Clears an entry that no operation names. If that fails, the entry is not used again.
    fn clear(&mut self, submitter: &Submitter<'_>, entry: u16) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty buffer refers to no memory.
        let cleared = unsafe { submitter.register_buffers_update(entry.into(), &[nothing], None) };
        if let (Ok(()), Table::Ready { free, .. }) = (cleared, &mut self.table) {
            free.push(entry);
        }
    }

    fn outcome(&self, regions: &[Arc<Region>]) -> Outcome {
        let vectored = matches!(self.table, Table::Ready { vectored: true, .. });
        let mut outcome = Outcome { regions: 0, bytes: 0, vectored, plain: 0, refused: None };
        for member in
            self.members.iter().filter(|m| regions.iter().any(|r| Arc::ptr_eq(&m.region, r)))
        {
            match member.registered {
                Ok(()) => {
                    outcome.regions += 1;
                    outcome.bytes += member.region.size();
                }
                Err(why) => {
                    outcome.plain += 1;
                    outcome.refused.get_or_insert(why);
                }
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests;
