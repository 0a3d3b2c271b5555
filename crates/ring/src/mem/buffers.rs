//! Registered buffers of io_uring: guest memory that is pinned once, not per operation.
//!
//! In: the regions to register ([`crate::Registration`]), and the iovecs of operations. Out: the
//! index of the registered buffer that contains the whole iovec. Without one, the operation uses
//! ordinary addresses, which always works.
//!
//! What must hold
//! - A buffer is found by address. The table keeps a region mapped as long as its buffers can be
//!   found, so an address in it belongs to that region only.
//! - A buffer that an operation names is neither cleared nor given to another region. The kernel
//!   reads the table when it consumes the operation, which is later than its creation.
//! - A removed region's buffers can no longer be found at once. They are cleared after their last
//!   operation is reaped, one in each iteration of the event loop. The kernel unpins the pages
//!   after its own last use.
//! - A region is found only when it is registered as a whole.
//! - Pages stay pinned if a front end gives them back, for example if a balloon punches holes into
//!   the file. The buffer then refers to pages that the guest no longer has. Such front ends must
//!   not be registered; this module cannot detect them.

use std::fmt::{Display, Formatter};
use std::io;
use std::sync::Arc;

use io_uring::{Probe, Submitter, opcode};

use crate::mem::memory::Region;

/// Means "no registered buffer": the operation uses ordinary addresses.
pub(crate) const NONE: u16 = u16::MAX;

/// Number of entries in a ring's table of registered buffers: the kernel's limit.
const ENTRIES: u16 = 16_384;
/// Size of a registered buffer in bytes, at most; the kernel's limit. An iovec that crosses two
/// buffers uses ordinary addresses.
const MOST: usize = 1 << 30;
/// Size of a registered buffer in bytes, at most, except in regions of more than [`MOST_BUFFERS`]
/// of them. The kernel pins so much in 8 ms.
const STEP: usize = 256 << 20;
/// Number of buffers of a region above which they are larger than [`STEP`], so that large regions
/// fit into the table.
const MOST_BUFFERS: usize = 1024;

/// A region of which a part is registered, and its buffers so far.
pub(crate) struct Partial {
    pub region: Arc<Region>,
    pub buffers: Vec<RegisteredBuffer>,
}

impl Partial {
    pub fn new(region: Arc<Region>) -> Self {
        Partial { region, buffers: Vec::new() }
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
pub(crate) struct RegisteredBuffer {
    start: usize,
    end: usize,
    entry: u16,
}

/// A region that at least one registration holds.
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
    /// Largest size of a registered buffer in bytes, unless its region needs larger ones (tests
    /// lower it).
    most: usize,
}

impl Buffers {
    pub fn new() -> Self {
        let (members, found, uses, leaving) = Default::default();
        Buffers { table: Table::None, members, found, uses, leaving, most: STEP }
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

    /// Returns whether [`Buffers::clear_one`] has something to do.
    #[inline]
    pub fn has_clearable(&self) -> bool {
        self.clearable().is_some()
    }

    /// Clears one entry in `leaving` that no operation names any more. Returns false if there is
    /// none.
    pub fn clear_one(&mut self, submitter: &Submitter<'_>) -> bool {
        let Some(at) = self.clearable() else { return false };
        let entry = self.leaving.swap_remove(at);
        self.clear(submitter, entry);
        true
    }

    #[inline]
    fn clearable(&self) -> Option<usize> {
        self.leaving.iter().position(|entry| self.uses[usize::from(*entry)] == 0)
    }

    /// Adds a user to a region that is registered, or was refused. Returns false if the region is
    /// neither.
    pub fn join(&mut self, region: &Arc<Region>) -> bool {
        let member = self.members.iter_mut().find(|m| Arc::ptr_eq(&m.region, region));
        member.map(|member| member.users += 1).is_some()
    }

    /// Removes a user of a region.
    pub fn leave(&mut self, region: &Arc<Region>) {
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
    }

    /// Registers the next buffer of a region. Returns true after the last one.
    pub fn advance(
        &mut self,
        submitter: &Submitter<'_>,
        partial: &mut Partial,
    ) -> Result<bool, Refusal> {
        self.open(submitter)?;
        let span = partial.region.span();
        let even = span.len().div_ceil(MOST_BUFFERS).next_multiple_of(rustix::param::page_size());
        let start = partial.buffers.last().map_or(span.start, |last| last.end);
        let end = span.end.min(start + self.most.max(even).min(MOST));
        let entry = self.put(submitter, start, end)?;
        partial.buffers.push(RegisteredBuffer { start, end, entry });
        Ok(end == span.end)
    }

    /// Makes a region a member: operations find its buffers, or it was refused.
    pub fn settle(&mut self, partial: Partial, registered: Result<(), Refusal>) {
        let Partial { region, buffers } = partial;
        if registered.is_ok() {
            let at = self.found.partition_point(|s| s.start < region.span().start);
            self.found.splice(at..at, buffers);
        } else {
            self.abandon(buffers);
        }
        self.members.push(Member { region, users: 1, registered });
    }

    /// Lets buffers be cleared that no operation could find.
    pub fn abandon(&mut self, buffers: Vec<RegisteredBuffer>) {
        self.leaving.extend(buffers.into_iter().map(|buffer| buffer.entry));
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

    pub fn outcome(&self, regions: &[Arc<Region>]) -> Outcome {
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
