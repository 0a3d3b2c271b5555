//! The journal that a dead server has left.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_ring::SharedWords;

use super::log::{CLAIMED, FINISHED, GENERATION, Log, SLOTS, Session, counts_not, start_of};
use super::record::{self, Record, WORDS, words_of};

/// A journal without its server.
#[derive(Debug)]
pub struct Recovered {
    words: Arc<SharedWords>,
    file: Option<File>,
    session: Session,
    /// See [`Log::with_room`].
    room: [usize; 2],
}

impl Recovered {
    pub fn new(words: Arc<SharedWords>, file: Option<File>, session: Session) -> Self {
        Recovered { words, file, session, room: [SLOTS; 2] }
    }

    /// Sets the memory for later records, as [`Log::with_room`].
    pub fn with_room(self, room: [usize; 2]) -> Self {
        Recovered { room, ..self }
    }

    pub fn session(&self) -> Session {
        self.session
    }

    /// Returns whether the server had written all changes to the image's file, to close the image.
    pub fn is_finished(&self) -> bool {
        self.words[FINISHED].load(Ordering::Acquire) != 0
    }

    /// Returns whether the journal may have changes that the image's file lacks. It has none if the
    /// server died after the last write-back, or before the first change.
    pub fn has_changes(&self) -> bool {
        !self.is_finished() && self.records().map_or(true, |records| !records.is_empty())
    }

    /// Returns all records, in an order in which a later record of a key replaces an earlier one.
    /// Slots that a dead thread has claimed and not filled are left out: their changes were not
    /// answered.
    pub fn records(&self) -> io::Result<Vec<Record>> {
        let generation = |half: usize| self.words[GENERATION[half]].load(Ordering::Acquire);
        let mut halves = [0, 1].map(|half| (generation(half), half)).to_vec();
        halves.retain(|(generation, half)| *generation != 0 && !counts_not(&self.words, *half));
        halves.sort_unstable();
        let mut records = Vec::new();
        for (generation, half) in halves {
            let salt = record::salt(self.session.number, generation);
            let claimed = self.words[CLAIMED[half]].load(Ordering::Acquire).min(SLOTS as u64);
            let words = self.read(start_of(half), claimed as usize * WORDS)?;
            let record = |(slot, words): (u64, &[u64])| {
                Record::decode(words.try_into().expect("a record's words"), salt, slot)
            };
            records.extend((0..).zip(words.chunks_exact(WORDS)).filter_map(record));
        }
        Ok(records)
    }

    /// Reads words. A file is not read through its mapping: to touch memory that was never
    /// allocated may need space that a full tmpfs does not have.
    fn read(&self, from: usize, len: usize) -> io::Result<Vec<u64>> {
        let Some(file) = &self.file else {
            let words = &self.words[from..from + len];
            return Ok(words.iter().map(|word| word.load(Ordering::Acquire)).collect());
        };
        let mut bytes = vec![0; len * 8];
        file.read_exact_at(&mut bytes, from as u64 * 8)?;
        Ok(words_of(&bytes))
    }

    /// Continues the session: later changes follow the records that there are.
    pub fn resume(self) -> Log {
        Log::over(self.words, self.file, self.session).with_room(self.room)
    }
}
