//! The log: a header and two halves of records, in shared words.
//!
//! ```text
//!   page 0   magic, boot, image, session; of each half: generation, number of claimed slots,
//!            whether it counts only without the other half; whether the session has finished
//!   half 0   records
//!   half 1   records
//! ```
//!
//! Records go to the active half. A write-back of metadata switches to the other half first. When
//! it has ended well, all changes of the old half are in the file, and the half is dropped. If it
//! fails, both halves stay, and the next write-back does not switch.
//!
//! Invariants
//! - A thread writes only to slots with allocated memory. So a full tmpfs is no SIGBUS but an
//!   incomplete log ([`Log::is_incomplete`]).
//! - A later change may rely on an earlier one, such as an entry on its table. So after a change
//!   without a record the half takes no more: it is **closed**. The log is incomplete until that
//!   change is in the file. Requests are answered only then.
//! - A write-back of an incomplete log switches too. The new half is **conditional**: it counts
//!   only when the old one is dropped, with the changes without a record in the file. If both
//!   halves are in use already, both are dropped at the end.
//! - The old half stays if a record that the file cannot replace was not repeated in the new one.
//! - If the log is incomplete then, and no record of the new half counts, a later write-back
//!   **restarts** the new half: it has no records again. Otherwise a log that was full once would
//!   stay incomplete after it has space. Each slot has one writer, so no thread may write to the
//!   half. So the half is closed during a whole write-back before that: records are made under
//!   locks that the write-back takes, and a closed half takes no claims.
//! - A replay may put an earlier value over a change that is in the file and has no record. So the
//!   cluster that this change freed stays reserved as long as such a record may exist ([`Ended`]).

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_ring::SharedWords;
use rustix::fs::FallocateFlags;

use super::record::{self, Record, WORDS};

/// Size of a word in bytes.
const WORD: usize = 8;
/// Words of page 0.
pub const HEADER: usize = 512;
/// Words of page 0 with the generation and the number of claimed slots of each half. Each has a
/// cache line of its own.
pub const GENERATION: [usize; 2] = [16, 32];
pub const CLAIMED: [usize; 2] = [24, 40];
/// Words of page 0: whether the half counts only if the older one is dropped.
pub const CONDITIONAL: [usize; 2] = [17, 33];
/// Word of page 0: not 0 if the session has finished, so that the file has all changes.
pub const FINISHED: usize = 48;
/// Word with the newest generation of the session. It never becomes lower, so no two uses of a half
/// have one salt.
const NEWEST: usize = 56;
/// Most records of a half: 8 MiB.
pub const SLOTS: usize = 1 << 18;
/// Number of records from which a write-back is due.
const LONG: u64 = 1 << 15;
/// Memory is allocated in steps of this many records: 16 KiB at first, 64 KiB later.
const FIRST_STEP: usize = 512;
const STEP: usize = 2048;

/// Words of a journal.
pub const TOTAL: usize = HEADER + 2 * SLOTS * WORDS;

/// Returns the first word of a half.
pub fn start_of(half: usize) -> usize {
    HEADER + half * SLOTS * WORDS
}

/// One period in which a server has an image open for writing and changes its metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Session {
    /// Random number.
    pub number: u128,
    /// Number of the host's boot.
    pub boot: u128,
}

/// The log of one session.
#[derive(Debug)]
pub struct Log {
    words: Arc<SharedWords>,
    /// The file of the words. `None`: memory of this process, which needs no allocation.
    file: Option<File>,
    session: Session,
    /// Changed under the lock of `growing`.
    active: AtomicUsize,
    /// Generation of the next half that becomes active.
    generation: AtomicU64,
    /// First generation of this process. A half with an earlier one may have records of a server
    /// that died.
    first: u64,
    /// Salts of the halves' records.
    salts: [AtomicU64; 2],
    /// Number of slots of each half that have allocated memory. 0: the half is closed.
    ready: [AtomicUsize; 2],
    /// The same, also of closed halves.
    allocated: [AtomicUsize; 2],
    /// Whether each half takes no more records. Changed under the lock of `growing`.
    closed: [AtomicBool; 2],
    /// Number of slots of each half for which there can be memory.
    room: [usize; 2],
    growing: Mutex<()>,
    /// Number of changes without a record.
    lost: AtomicU64,
    /// Number of these changes that are in the image's file.
    settled: AtomicU64,
    /// Whether a record could not be repeated since the last write-back began.
    unrepeated: AtomicBool,
    /// Whether the next write-back may restart the active half. Changed under the lock of
    /// `growing`.
    may_restart: AtomicBool,
    /// Whether the log has said that there is no space. A guest must not flood it.
    warned: AtomicBool,
}

/// A write-back in progress.
#[derive(Debug, Default)]
pub struct WriteBack {
    /// Number of changes without a record before.
    lost: u64,
    /// Whether the log was incomplete.
    is_incomplete: bool,
    /// Whether later records go to another half than those of before, or to a restarted one.
    switched: bool,
}

/// What holds after a write-back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Whether the changes of before survive a death of the process. If not although the write-back
    /// went well, records could not be repeated, and a replay would put earlier values over some of
    /// the changes.
    pub survives: bool,
    /// Whether clusters that the changes freed may be used again, because no record names them.
    pub may_release: bool,
}

impl Ended {
    /// Returns the end of a write-back without a log.
    pub fn without_log(ok: bool) -> Self {
        Ended { survives: ok, may_release: ok }
    }
}

impl Log {
    /// Returns a log over words with a written header.
    /// The active half is the newer one. If both are unused, the first one becomes active.
    pub fn over(words: Arc<SharedWords>, file: Option<File>, session: Session) -> Self {
        let generation = GENERATION.map(|at| words[at].load(Ordering::Acquire));
        let mut active = usize::from(generation[1] > generation[0]);
        if counts_not(&words, active) {
            words[GENERATION[active]].store(0, Ordering::Release);
            active = 1 - active;
        }
        words[FINISHED].store(0, Ordering::Relaxed);
        let newest = words[NEWEST].load(Ordering::Acquire);
        let first = generation[0].max(generation[1]).max(newest) + 1;
        let log = Log {
            session,
            active: AtomicUsize::new(active),
            generation: AtomicU64::new(first),
            first,
            salts: generation.map(|of| AtomicU64::new(record::salt(session.number, of))),
            ready: Default::default(),
            allocated: Default::default(),
            closed: Default::default(),
            room: [SLOTS; 2],
            growing: Mutex::default(),
            lost: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            unrepeated: AtomicBool::new(false),
            may_restart: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            words,
            file,
        };
        if generation == [0, 0] {
            log.use_half(0, false);
        }
        log
    }

    /// Returns the log with memory for so many slots of each half, as on a full tmpfs.
    pub fn with_room(self, room: [usize; 2]) -> Self {
        Log { room: room.map(|slots| slots.min(SLOTS)), ..self }
    }

    pub fn session(&self) -> Session {
        self.session
    }

    /// Returns the words, for a store in memory.
    pub fn words(&self) -> &Arc<SharedWords> {
        &self.words
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an unused half the active one, or restarts the active one, of which no record counts.
    /// No thread writes to the half. The caller holds the lock, or is alone.
    fn use_half(&self, half: usize, is_conditional: bool) {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed);
        let allocated = self.allocated[half].load(Ordering::Relaxed);
        self.ready[half].store(allocated, Ordering::Release);
        self.words[CONDITIONAL[half]].store(is_conditional.into(), Ordering::Relaxed);
        self.salts[half].store(record::salt(self.session.number, generation), Ordering::Relaxed);
        self.words[CLAIMED[half]].store(0, Ordering::Relaxed);
        self.words[NEWEST].store(generation, Ordering::Relaxed);
        self.words[GENERATION[half]].store(generation, Ordering::Release);
        // A thread that finds the half open finds all of the above too.
        self.closed[half].store(false, Ordering::Release);
        self.active.store(half, Ordering::Release);
    }

    /// Drops a half. A replay does not see its records any more.
    fn drop_half(&self, half: usize) {
        self.words[GENERATION[half]].store(0, Ordering::Release);
    }

    /// Returns whether a half has no record, because it never had memory for one.
    fn is_empty(&self, half: usize) -> bool {
        let generation = self.words[GENERATION[half]].load(Ordering::Relaxed);
        self.allocated[half].load(Ordering::Relaxed) == 0 && generation >= self.first
    }

    /// Lets a half take no more records. The caller holds the lock.
    fn close(&self, half: usize) {
        self.closed[half].store(true, Ordering::Relaxed);
        self.ready[half].store(0, Ordering::Release);
    }

    /// Adds a record to the active half. If there is no space, the log becomes incomplete.
    #[inline]
    pub fn record(&self, record: Record) {
        if let Err(half) = self.put(record) {
            self.lose(half);
        }
    }

    /// Notes a change without a record.
    #[cold]
    fn lose(&self, half: usize) {
        let _guard = self.lock();
        // A write-back may have switched meanwhile. Changes that rely on this one go to its half.
        self.close(half);
        self.close(self.active.load(Ordering::Relaxed));
        self.lost.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that changes of before the log have no record.
    pub fn lack_earlier(&self) {
        self.lose(self.active.load(Ordering::Relaxed));
    }

    /// Adds a record of a change that has one already, and that the write-back in progress cannot
    /// put into the file. If there is no space, the old half stays.
    pub fn repeat(&self, record: Record) {
        if self.put(record).is_err() {
            self.unrepeated.store(true, Ordering::Release);
        }
    }

    /// Adds a record to the active half. If there is no space, the error is the half.
    #[inline]
    fn put(&self, record: Record) -> Result<(), usize> {
        let half = self.active.load(Ordering::Acquire);
        if self.closed[half].load(Ordering::Acquire) {
            return Err(half);
        }
        let slot = self.words[CLAIMED[half]].fetch_add(1, Ordering::AcqRel) as usize;
        if slot >= self.ready[half].load(Ordering::Acquire) && !self.allocate(half, slot) {
            return Err(half);
        }
        let at = start_of(half) + slot * WORDS;
        let words = record.encode(self.salts[half].load(Ordering::Relaxed), slot as u64);
        for (n, word) in words.into_iter().enumerate().skip(1) {
            self.words[at + n].store(word, Ordering::Relaxed);
        }
        // Publishes the record.
        self.words[at].store(words[0], Ordering::Release);
        Ok(())
    }

    /// Allocates the memory of slots up to `slot`. Returns false if there is none.
    #[cold]
    fn allocate(&self, half: usize, slot: usize) -> bool {
        let _guard = self.lock();
        if self.closed[half].load(Ordering::Relaxed) {
            return false;
        }
        let ready = self.ready[half].load(Ordering::Acquire);
        if slot < ready {
            return true;
        }
        if slot >= self.room[half] {
            return false;
        }
        let step = if slot < FIRST_STEP { FIRST_STEP } else { STEP };
        let until = (slot + 1).next_multiple_of(step).min(self.room[half]);
        let bytes = |slots: usize| ((start_of(half) + slots * WORDS) * WORD) as u64;
        if let Some(file) = &self.file {
            let (from, to) = (bytes(ready), bytes(until));
            if let Err(e) = allocate(file, from, to - from) {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the journal of changed metadata has no space: {e}; metadata are flushed \
                         before each answer until it has"
                    );
                }
                return false;
            }
        }
        self.allocated[half].store(until, Ordering::Relaxed);
        self.ready[half].store(until, Ordering::Release);
        true
    }

    /// Returns whether the log's file has no name any more, so that no later server finds it.
    pub fn is_removed(&self) -> bool {
        let removed = |file| rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink == 0);
        self.file.as_ref().is_some_and(removed)
    }

    pub fn begin_write_back(&self) -> WriteBack {
        let _guard = self.lock();
        let (lost, is_incomplete) = (self.lost.load(Ordering::Acquire), self.is_incomplete());
        self.unrepeated.store(false, Ordering::Release);
        let active = self.active.load(Ordering::Relaxed);
        let other = 1 - active;
        let is_unused = self.words[GENERATION[other]].load(Ordering::Acquire) == 0;
        let may_restart = self.may_restart.swap(false, Ordering::Relaxed);
        let restarts = may_restart && is_incomplete && !is_unused;
        if is_unused {
            self.use_half(other, is_incomplete);
        } else if restarts {
            self.use_half(active, true);
        } else if is_incomplete {
            self.close(active);
        }
        WriteBack { lost, is_incomplete, switched: is_unused || restarts }
    }

    /// Ends a write-back. `ok`: all changes of before are in the file, except those that were
    /// repeated.
    pub fn end_write_back(&self, write_back: WriteBack, ok: bool) -> Ended {
        if !ok {
            return Ended { survives: false, may_release: false };
        }
        let WriteBack { lost, is_incomplete, switched } = write_back;
        let _guard = self.lock();
        let has_lost = self.lost.load(Ordering::Acquire) != lost;
        let active = self.active.load(Ordering::Relaxed);
        if self.unrepeated.load(Ordering::Acquire) {
            // If only a lost record has closed the half, a thread may still write to it. But if
            // this write-back closed it, all writers have left: it took their locks after that.
            let was_closed = is_incomplete && !switched;
            let counts = !counts_not(&self.words, active) && !self.is_empty(active);
            self.may_restart.store(was_closed && !counts, Ordering::Relaxed);
            return Ended { survives: !is_incomplete, may_release: !is_incomplete && !has_lost };
        }
        let old = 1 - active;
        let mut may_release = true;
        if is_incomplete && !switched {
            self.drop_both(old, active);
            // Changes that came meanwhile have no record.
            if has_lost {
                self.close(old);
            }
        } else {
            // The file may have a change that came meanwhile and has no record. A record of an
            // earlier change of the same key may still name the cluster that this change freed.
            may_release = !has_lost || self.is_empty(active);
            // A conditional half counts from now on.
            self.drop_half(old);
            self.give_back(old);
        }
        self.settled.store(lost, Ordering::Release);
        Ended { survives: true, may_release }
    }

    /// Drops both halves, in an order in which what is left between is older than the file, and
    /// without gaps. Makes `old` the active half. The caller holds the lock.
    fn drop_both(&self, old: usize, active: usize) {
        let is_conditional = self.words[CONDITIONAL[active]].load(Ordering::Relaxed) != 0;
        let order = if is_conditional { [active, old] } else { [old, active] };
        order.into_iter().for_each(|half| self.drop_half(half));
        self.give_back(old);
        self.give_back(active);
        self.use_half(old, false);
    }

    /// Gives the memory of an unused half back, except its first part. The caller holds the lock.
    fn give_back(&self, half: usize) {
        let Some(file) = &self.file else { return };
        let allocated = self.allocated[half].load(Ordering::Relaxed);
        if allocated <= FIRST_STEP {
            return;
        }
        self.allocated[half].store(FIRST_STEP, Ordering::Relaxed);
        let ready = self.ready[half].load(Ordering::Relaxed);
        self.ready[half].store(ready.min(FIRST_STEP), Ordering::Release);
        let bytes = |slots: usize| ((start_of(half) + slots * WORDS) * WORD) as u64;
        let (from, len) = (bytes(FIRST_STEP), bytes(allocated) - bytes(FIRST_STEP));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A failure costs only memory.
        let _ = rustix::fs::fallocate(file, flags, from, len);
    }

    /// Notes that the file has all changes. The caller then removes the mark of the session.
    pub fn finish(&self) {
        self.words[FINISHED].store(1, Ordering::Release);
    }

    /// Returns whether a write-back is due.
    #[inline]
    pub fn is_long(&self) -> bool {
        let half = self.active.load(Ordering::Relaxed);
        self.words[CLAIMED[half]].load(Ordering::Relaxed) > LONG
    }

    /// Returns whether a change could not be recorded, and no write-back that began later has put
    /// it into the file.
    #[inline]
    pub fn is_incomplete(&self) -> bool {
        self.lost.load(Ordering::Acquire) != self.settled.load(Ordering::Acquire)
    }
}

/// Returns whether a half does not count, because its condition is not met.
pub fn counts_not(words: &SharedWords, half: usize) -> bool {
    let [own, other] = [half, 1 - half].map(|half| words[GENERATION[half]].load(Ordering::Acquire));
    words[CONDITIONAL[half]].load(Ordering::Acquire) != 0 && other != 0 && own > other
}

/// Allocates a range of a file on tmpfs.
pub fn allocate(file: &File, from: u64, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, from, len)?)
}

#[cfg(test)]
mod tests;
