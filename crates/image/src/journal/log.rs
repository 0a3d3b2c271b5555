//! The log: a header and two halves of records, in shared words.
//!
//! ```text
//!   page 0   magic, boot, image, session; of each half: generation, number of claimed slots
//!   half 0   records
//!   half 1   records
//! ```
//!
//! Records go to the active half. A write-back of metadata switches to the other half first. When
//! it has ended well, all changes of the old half are in the file, and the half is dropped. If it
//! fails, both halves stay, and the next write-back does not switch.
//!
//! Invariant: a thread writes only to slots with allocated memory. So a full tmpfs is no SIGBUS but
//! an incomplete log ([`Log::is_incomplete`]).

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
    active: AtomicUsize,
    /// Salts of the halves' records.
    salts: [AtomicU64; 2],
    /// Number of slots of each half that have allocated memory.
    ready: [AtomicUsize; 2],
    growing: Mutex<()>,
    /// Whether a change could not be recorded since the last write-back began.
    incomplete: AtomicBool,
    /// Whether the log has said that there is no space. A guest must not flood it.
    warned: AtomicBool,
}

/// A write-back in progress.
#[derive(Debug, Default)]
pub struct WriteBack {
    was_incomplete: bool,
}

impl Log {
    /// Returns a log over words with a written header.
    /// The active half is the newer one. If both are unused, the first one becomes active.
    pub fn over(words: Arc<SharedWords>, file: Option<File>, session: Session) -> Self {
        let generation = GENERATION.map(|at| words[at].load(Ordering::Acquire));
        let active = usize::from(generation[1] > generation[0]);
        let log = Log {
            session,
            active: AtomicUsize::new(active),
            salts: generation.map(|of| AtomicU64::new(record::salt(session.number, of))),
            ready: Default::default(),
            growing: Mutex::default(),
            incomplete: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            words,
            file,
        };
        if generation == [0, 0] {
            log.use_half(0, 1);
        }
        log
    }

    pub fn session(&self) -> Session {
        self.session
    }

    /// Returns the words, for a store in memory.
    pub fn words(&self) -> &Arc<SharedWords> {
        &self.words
    }

    /// Makes an empty half the active one.
    fn use_half(&self, half: usize, generation: u64) {
        self.salts[half].store(record::salt(self.session.number, generation), Ordering::Relaxed);
        self.words[CLAIMED[half]].store(0, Ordering::Relaxed);
        self.words[GENERATION[half]].store(generation, Ordering::Release);
        self.active.store(half, Ordering::Release);
    }

    /// Adds a record to the active half.
    #[inline]
    pub fn record(&self, record: Record) {
        let half = self.active.load(Ordering::Acquire);
        let slot = self.words[CLAIMED[half]].fetch_add(1, Ordering::AcqRel) as usize;
        if slot >= self.ready[half].load(Ordering::Acquire) && !self.allocate(half, slot) {
            self.incomplete.store(true, Ordering::Release);
            return;
        }
        let at = start_of(half) + slot * WORDS;
        let words = record.encode(self.salts[half].load(Ordering::Relaxed), slot as u64);
        for (n, word) in words.into_iter().enumerate().skip(1) {
            self.words[at + n].store(word, Ordering::Relaxed);
        }
        // Publishes the record.
        self.words[at].store(words[0], Ordering::Release);
    }

    /// Allocates the memory of slots up to `slot`. Returns false if there is none.
    #[cold]
    fn allocate(&self, half: usize, slot: usize) -> bool {
        let _guard = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let ready = self.ready[half].load(Ordering::Acquire);
        if slot < ready {
            return true;
        }
        if slot >= SLOTS {
            return false;
        }
        let step = if slot < FIRST_STEP { FIRST_STEP } else { STEP };
        let until = (slot + 1).next_multiple_of(step).min(SLOTS);
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
        self.ready[half].store(until, Ordering::Release);
        true
    }

    pub fn begin_write_back(&self) -> WriteBack {
        let was_incomplete = self.incomplete.swap(false, Ordering::AcqRel);
        let (old, generation) = {
            let old = self.active.load(Ordering::Acquire);
            (old, self.words[GENERATION[old]].load(Ordering::Relaxed))
        };
        let other = 1 - old;
        if self.words[GENERATION[other]].load(Ordering::Acquire) == 0 {
            self.use_half(other, generation + 1);
        }
        WriteBack { was_incomplete }
    }

    pub fn end_write_back(&self, write_back: WriteBack, ok: bool) {
        if !ok {
            if write_back.was_incomplete {
                self.incomplete.store(true, Ordering::Release);
            }
            return;
        }
        let old = 1 - self.active.load(Ordering::Acquire);
        self.words[GENERATION[old]].store(0, Ordering::Release);
        self.give_back(old);
    }

    /// Gives the memory of an unused half back, except its first part.
    fn give_back(&self, half: usize) {
        let Some(file) = &self.file else { return };
        let _guard = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let ready = self.ready[half].load(Ordering::Acquire);
        if ready <= FIRST_STEP {
            return;
        }
        self.ready[half].store(FIRST_STEP, Ordering::Release);
        let bytes = |slots: usize| ((start_of(half) + slots * WORDS) * WORD) as u64;
        let (from, len) = (bytes(FIRST_STEP), bytes(ready) - bytes(FIRST_STEP));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A failure costs only memory.
        let _ = rustix::fs::fallocate(file, flags, from, len);
    }

    /// Returns whether a write-back is due.
    #[inline]
    pub fn is_long(&self) -> bool {
        let half = self.active.load(Ordering::Relaxed);
        self.words[CLAIMED[half]].load(Ordering::Relaxed) > LONG
    }

    /// Returns whether a change could not be recorded, and no write-back has begun since.
    #[inline]
    pub fn is_incomplete(&self) -> bool {
        self.incomplete.load(Ordering::Acquire)
    }
}

/// Allocates a range of a file on tmpfs.
pub fn allocate(file: &File, from: u64, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, from, len)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Key;

    const SESSION: Session = Session { number: 7, boot: 9 };

    /// A log in memory whose file cannot grow, as on a full tmpfs: it is open for reading only.
    fn full() -> Log {
        let words = Arc::new(SharedWords::anonymous(TOTAL).unwrap());
        Log::over(words, Some(File::open("/dev/null").unwrap()), SESSION)
    }

    fn change(cluster: u64) -> Record {
        Record { key: Key::Cluster(cluster), value: [1 << 16, 0] }
    }

    #[test]
    fn without_space_a_change_makes_the_log_incomplete_and_writes_no_slot() {
        let log = full();
        assert!(!log.is_incomplete());
        log.record(change(1));
        assert!(log.is_incomplete());
        let slot = start_of(0);
        let slot = log.words[slot..slot + WORDS].iter();
        assert!(slot.map(|word| word.load(Ordering::Relaxed)).all(|word| word == 0));
    }

    /// A write-back puts all changes into the image. If it fails, the lost record still counts.
    #[test]
    fn only_a_write_back_that_succeeds_makes_the_log_complete_again() {
        let log = full();
        log.record(change(1));
        let write_back = log.begin_write_back();
        log.end_write_back(write_back, false);
        assert!(log.is_incomplete());
        let write_back = log.begin_write_back();
        log.end_write_back(write_back, true);
        assert!(!log.is_incomplete());
        // A change during a write-back may have come too late for it.
        let write_back = log.begin_write_back();
        log.record(change(2));
        log.end_write_back(write_back, true);
        assert!(log.is_incomplete());
    }
}
