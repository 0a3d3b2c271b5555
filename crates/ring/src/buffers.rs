//! Guest memory registered with a ring: its pages are pinned once, and not anew by each operation.
//!
//! In: the regions that somebody wants registered ([`Registration`]), the iovecs of operations.
//! Out: the entry of the ring's table that holds all of an iovec, or none; then the operation goes
//! the plain way, which works always.
//!
//! What must hold
//! - An entry is found by address. The table keeps its region mapped as long as it can be found, so
//!   that an address in it is that region's and nobody else's.
//! - An entry that an operation names is neither emptied nor given to another region: the kernel
//!   looks at the table when it takes an operation in, which is later than the operation was made.
//!   It leaves the search at once, and the table when its last operation was reaped. What the
//!   kernel has pinned it lets go after its own last use.
//! - Pages stay pinned when a front end gives them back (a hole punched into its file: balloons do
//!   that). The entry then means pages that are the guest's no longer: such front ends must not be
//!   registered, and nothing here can tell.

use std::fmt::{Display, Formatter};
use std::io;
use std::sync::Arc;

use io_uring::{Probe, Submitter, opcode};

use crate::executor::Handle;
use crate::memory::{GuestMemory, Region};

/// "No entry": the operation goes the plain way.
pub(crate) const NONE: u16 = u16::MAX;

/// Entries of a ring's table.
const ENTRIES: u16 = 4096;
/// Bytes of one entry; the kernel takes no more. What crosses two entries goes the plain way.
const MOST: usize = 1 << 30;

/// Guest memory that is registered with a reactor's ring for as long as this lives.
pub struct Registration {
    handle: Handle,
    regions: Vec<Arc<Region>>,
}

impl Registration {
    pub(crate) fn new(handle: &Handle) -> Self {
        Registration { handle: handle.clone(), regions: Vec::new() }
    }

    /// Makes `memory` what is registered: what is new comes, what is gone goes. All of a region is
    /// registered, or none.
    pub fn replace(&mut self, memory: &GuestMemory) {
        let new = memory.regions().to_vec();
        let old = std::mem::replace(&mut self.regions, new);
        let has = |regions: &[Arc<Region>], region| regions.iter().any(|r| Arc::ptr_eq(r, region));
        self.handle.buffers(|buffers, submitter| {
            // First out, then in: the limit on pinned memory may have room for one of them only.
            old.iter().filter(|r| !has(&self.regions, r)).for_each(|r| buffers.leave(submitter, r));
            self.regions.iter().filter(|r| !has(&old, r)).for_each(|r| buffers.enter(submitter, r));
        });
    }

    /// What has become of it.
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
    /// The ring has no table of buffers: the errno.
    NoTable(i32),
    /// The table has no room.
    Full,
    /// The pages cannot be pinned: the errno.
    Pin(i32),
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let error = |errno: i32| io::Error::from_raw_os_error(errno);
        match *self {
            Refusal::NoTable(errno) => {
                write!(f, "the ring's table of buffers (Linux 5.19): {}", error(errno))
            }
            Refusal::Full => {
                write!(f, "the ring's table of {ENTRIES} buffers, of 1 GiB at most, is full")
            }
            Refusal::Pin(errno) => {
                let hint = match errno {
                    libc::ENOMEM => " (see ulimit -l)",
                    libc::EFAULT | libc::EOPNOTSUPP => {
                        " (its file is on a disk, or has a hole that cannot be filled)"
                    }
                    _ => "",
                };
                write!(f, "pinning it: {}{hint}", error(errno))
            }
        }
    }
}

/// What was chosen for some guest memory; written out, it is a line for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Regions that are registered, and their bytes.
    pub regions: usize,
    pub bytes: u64,
    /// Operations of several pieces use them too.
    pub vectored: bool,
    /// Regions that are not registered.
    pub plain: usize,
    /// Why not (the first of them).
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
                write!(f, ", for requests of one piece (Linux 6.15 has it for more)")?;
            }
        }
        match self.refused {
            Some(why) if self.regions > 0 => {
                write!(f, "; {} regions are not, and are used without: {why}", self.plain)
            }
            Some(why) => write!(
                f,
                "guest memory is not registered with io_uring, and is used without: {why}"
            ),
            None => Ok(()),
        }
    }
}

/// A piece of a region in the table: addresses of this process, and the entry.
struct Slice {
    start: usize,
    end: usize,
    entry: u16,
}

/// A region that somebody wants registered.
struct Member {
    region: Arc<Region>,
    users: usize,
    registered: Result<(), Refusal>,
}

enum Table {
    /// Nobody has asked for one yet.
    None,
    Refused(i32),
    Ready {
        free: Vec<u16>,
        vectored: bool,
    },
}

/// The table of registered buffers of one ring, as this side knows it.
pub(crate) struct Buffers {
    table: Table,
    members: Vec<Member>,
    /// What can be found, by address.
    slices: Vec<Slice>,
    /// Operations that name each entry.
    uses: Vec<u32>,
    /// Entries that cannot be found any more, and have operations.
    leaving: Vec<u16>,
    /// Bytes of an entry.
    most: usize,
}

impl Buffers {
    pub fn new() -> Self {
        let (members, slices, uses, leaving) = Default::default();
        Buffers { table: Table::None, members, slices, uses, leaving, most: MOST }
    }

    /// The entry that holds all of `iov` (`len` bytes), which has one operation more from here on;
    /// or [`NONE`].
    #[inline]
    pub fn take(&mut self, iov: &[libc::iovec], len: usize) -> u16 {
        if self.slices.is_empty() {
            return NONE;
        }
        let Some(entry) = self.find(iov, len) else { return NONE };
        self.uses[usize::from(entry)] += 1;
        entry
    }

    /// An operation that was given `entry` has been reaped.
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
        // Pieces may lie upon one another, so that they are longer than their entry; the kernel has
        // a limit there.
        if len > MOST || (iov.len() > 1 && !vectored) {
            return None;
        }
        let at = self.slices.partition_point(|s| s.start <= first.iov_base as usize);
        let slice = self.slices.get(at.checked_sub(1)?)?;
        let inside = |v: &libc::iovec| {
            let start = v.iov_base as usize;
            (slice.start..slice.end).contains(&start) && v.iov_len <= slice.end - start
        };
        iov.iter().all(inside).then_some(slice.entry)
    }

    /// Free entries, for somebody else to fill and empty: `number` of them, or none.
    pub fn reserve(&mut self, submitter: &Submitter<'_>, number: u16) -> Result<Vec<u16>, Refusal> {
        self.open(submitter)?;
        let Table::Ready { free, .. } = &mut self.table else { return Err(Refusal::NoTable(0)) };
        let rest = free.len().checked_sub(number.into()).ok_or(Refusal::Full)?;
        Ok(free.split_off(rest))
    }

    /// Reserved entries, which are empty.
    pub fn give_back(&mut self, entries: Vec<u16>) {
        if let Table::Ready { free, .. } = &mut self.table {
            free.extend(entries);
        }
    }

    /// Whether [`Buffers::settle`] has something to do.
    #[inline]
    pub fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Empties the entries whose last operation is done.
    pub fn settle(&mut self, submitter: &Submitter<'_>) {
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
        // Out of the search first: it is the member that keeps the addresses from being somebody
        // else's.
        let span = region.span();
        let gone = self.slices.extract_if(.., |s| span.contains(&s.start)).map(|s| s.entry);
        self.leaving.extend(gone);
        self.members.swap_remove(at);
        self.settle(submitter);
    }

    /// All of a region, in slices; or nothing of it.
    fn register(&mut self, submitter: &Submitter<'_>, region: &Region) -> Result<(), Refusal> {
        self.open(submitter)?;
        let span = region.span();
        let mut slices = Vec::new();
        for start in span.clone().step_by(self.most) {
            let end = span.end.min(start + self.most);
            match self.put(submitter, start, end) {
                Ok(entry) => slices.push(Slice { start, end, entry }),
                Err(why) => {
                    slices.into_iter().for_each(|s| self.clear(submitter, s.entry));
                    return Err(why);
                }
            }
        }
        let at = self.slices.partition_point(|s| s.start < span.start);
        self.slices.splice(at..at, slices);
        Ok(())
    }

    /// Makes the table, at the first use: who registers nothing has none.
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

    /// Puts a piece of a mapping into a free entry.
    fn put(&mut self, submitter: &Submitter<'_>, start: usize, end: usize) -> Result<u16, Refusal> {
        let Table::Ready { free, .. } = &mut self.table else { return Err(Refusal::NoTable(0)) };
        let entry = free.pop().ok_or(Refusal::Full)?;
        let piece = libc::iovec { iov_base: start as *mut _, iov_len: end - start };
        // SAFETY: the kernel pins the pages that are mapped there now, and never looks at the
        // addresses again but to find its way in them; so what becomes of the mapping later
        // endangers nobody. It is guest memory, which every party may write at any time.
        unsafe { submitter.register_buffers_update(entry.into(), &[piece], None) }
            .map(|()| entry)
            .map_err(|e| {
                free.push(entry);
                Refusal::Pin(e.raw_os_error().unwrap_or_default())
            })
    }

    /// Empties an entry that no operation names. If that fails, it is not used again.
    fn clear(&mut self, submitter: &Submitter<'_>, entry: u16) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty piece stands for no memory at all.
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
