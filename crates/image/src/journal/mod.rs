//! The journal of metadata changes: lets the next server know what a killed one had answered.
//!
//! A qcow2 image or COW file keeps changed metadata in memory until its guest flushes. If the
//! server dies, the kernel still has all written data, but no file says where they are. So each
//! change is also put into a log in memory that outlives the process: a file on tmpfs, mapped into
//! the server. The next server that opens the image for writing replays the log first.
//!
//! ```text
//!   change of an entry ─► record ─► the active half        flush: switch the halves
//!                                   │                             ─► write metadata
//!   server dies ─► next open: store ─► recovered ─► replay        ─► drop the old half
//!
//!   record   one change: 32 bytes with a checksum
//!   log      two halves of records in shared words
//!   store    the folder of the journals; identity of an image
//!   recovered   what a dead server has left
//! ```
//!
//! What must hold
//! - A change is in the journal before its request is answered. If the journal has no space, or
//!   cannot be created yet, the metadata are flushed before the answer instead
//!   ([`Journal::must_flush`]).
//! - A record is published by one store with release order, so that a dead thread leaves a whole
//!   record or none.
//! - The old half is dropped only after all changes in it are in the image's file, or recorded
//!   again. A record of a change that is in the file already does no harm: later records of the
//!   same key follow it.
//! - The records are those of all changes up to one moment: none follows a change that has none.
//! - A journal belongs to one session of one image: the image's file carries the session's number,
//!   in a place that other writers clear or keep valid (`qcow2/session.rs`, `cow/session.rs`).
//! - A reboot clears the journals. A power cut may lose what was not flushed, and nothing else.

mod log;
mod record;
mod recovered;
mod store;

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::ImageError;

pub use self::log::{Ended, Log, Session, WriteBack};
pub use self::record::{Key, Record};
pub use self::recovered::Recovered;
pub use self::store::{ImageKey, JournalStore, MemoryStore, StateFolder, StoreError};

const STRUCTURE: &str = "journal of the image";

/// Whether no journal of this process may begin.
static HELD: AtomicBool = AtomicBool::new(false);

/// Lets no journal begin, or lets them begin again. Meanwhile changed metadata are flushed before
/// each answer. A server that takes over holds the journals while another one that could not find
/// them may still take its images back.
pub fn hold(is_held: bool) {
    HELD.store(is_held, Ordering::SeqCst);
}

/// What an answered write survives, apart from a power cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SafetyMode {
    /// Nothing more: changed metadata are lost with the process until the next flush.
    #[default]
    Off,
    /// As `Off`. The caller only finds out whether the image opens, and reads no data of the disk.
    Unread,
    /// Metadata are durable before a request that changes them is answered.
    Flush,
    /// Changed metadata are in a journal.
    Journal,
}

/// How images survive a death of the process.
#[derive(Clone, Debug, Default)]
pub struct CrashSafety {
    pub mode: SafetyMode,
    /// Where journals are. `None`: the store of commands ([`JournalStore::of_commands`]), in which
    /// no journal begins unless the image has been claimed there.
    pub store: Option<JournalStore>,
}

/// How one image survives a death of the process.
#[derive(Clone, Debug, Default)]
pub struct ImageSafety {
    mode: SafetyMode,
    /// `None`: storage that is no file of this host, or an image that no guest writes to.
    place: Option<JournalPlace>,
}

/// Where an image's journal is, or would be.
#[derive(Clone, Debug)]
struct JournalPlace {
    store: Option<JournalStore>,
    /// The store in which [`ImageSafety::claim`] has looked. Clones share it. The end of the
    /// journal runs on a reactor, which must not look for a folder.
    claimed: Arc<OnceLock<JournalStore>>,
    image: ImageKey,
}

impl CrashSafety {
    /// Returns the setting for one image. `image` is `None` for storage that is no file of this
    /// host: such an image has no journal.
    pub fn of(&self, image: Option<ImageKey>) -> ImageSafety {
        let place = image.map(|image| {
            let (store, claimed) = (self.store.clone(), Arc::default());
            JournalPlace { store, claimed, image }
        });
        let safety = ImageSafety { mode: self.mode, place };
        if safety.place.is_none() { safety.without_journal() } else { safety }
    }
}

/// Returns the error of an image with a journal that is not in the folder `place`.
pub(crate) fn missing(place: &str) -> ImageError {
    ImageError::refused(
        STRUCTURE,
        format!(
            "a server died while it had the image in use, and there is no journal of its changes \
             in {place}: name the folder that the server used (--state-folder, \
             BLOCKYARD_STATE_FOLDER), /run/blockyard/journals if systemd started it, or give up \
             the changes since its last flush (blockyard image check --discard-journal)"
        ),
    )
}

/// Checks the mark of an image that is opened only for reading. A pending journal is a warning, or
/// an error below an overlay that is written to. There is no warning if the caller reads no data.
pub fn pending(
    marked: Option<&Session>,
    is_below_writer: bool,
    safety: &ImageSafety,
) -> Result<(), ImageError> {
    match marked.is_some_and(Session::may_be_of_this_boot) {
        false => Ok(()),
        true if is_below_writer => Err(ImageError::refused(
            STRUCTURE,
            "a server died while it had the image in use, and its changes since the last flush are \
             in a journal. If they were applied later, the disk would change below its overlay: \
             apply them first (blockyard image check --repair leaks), or give them up (blockyard \
             image check --discard-journal)",
        )),
        true if safety.mode == SafetyMode::Unread => Ok(()),
        true => {
            tracing::warn!(
                "a server has the image in use, or died while it had: changes in its journal are \
                 missing from what is read (`blockyard image check --repair leaks` applies the \
                 journal of a dead server)"
            );
            Ok(())
        }
    }
}

impl ImageSafety {
    /// Returns the setting without a new journal.
    pub fn without_journal(self) -> Self {
        let mode = if self.mode == SafetyMode::Journal { SafetyMode::Off } else { self.mode };
        ImageSafety { mode, ..self }
    }

    pub fn wants_journal(&self) -> bool {
        self.mode == SafetyMode::Journal
    }

    /// Returns the journal that a dead server has left for an image with this mark, whatever the
    /// mode. Removes a journal that is out of date. `None`: there is nothing to replay.
    pub fn claim(&self, marked: Option<Session>) -> Result<Option<Recovered>, ImageError> {
        let Some(JournalPlace { store, claimed, image }) = &self.place else { return Ok(None) };
        if marked.is_none() && !self.wants_journal() {
            return Ok(None);
        }
        let refuse = |e: StoreError| ImageError::refused(STRUCTURE, e.to_string()).with_source(e);
        let store = match store.clone().map_or_else(JournalStore::of_commands, |s| Ok(Some(s))) {
            Ok(Some(store)) => store,
            found => {
                let folder = StateFolder::default_path();
                return match (marked.filter(Session::may_be_of_this_boot), found) {
                    (None, _) => Ok(None),
                    (Some(_), Ok(_)) => Err(missing(&folder.to_string_lossy())),
                    (Some(_), Err(e)) => Err(refuse(e)),
                };
            }
        };
        let store = claimed.get_or_init(|| store);
        let marked = marked.filter(|session| session.boot == store.boot());
        let found = store.find_marked(image, marked).map_err(refuse)?;
        match (marked, found) {
            (None, None) => Ok(None),
            (None, Some(journal)) => {
                // Without changes, the server died before it marked the image, or after it removed
                // the mark.
                if journal.has_changes() {
                    tracing::warn!(
                        "another program has written to the image since the server died that had \
                         it in use: the server's journal is out of date, and is removed"
                    );
                }
                let removed = store.remove(image);
                removed.map_err(|e| ImageError::io(STRUCTURE, None, "removing", e))?;
                Ok(None)
            }
            (Some(session), Some(journal)) if journal.session() == session => Ok(Some(journal)),
            (Some(_), _) => Err(missing(&store.to_string())),
        }
    }

    /// Returns the store and the image's key. Makes no system call, because reactors call it.
    fn place(&self) -> Option<(&JournalStore, &ImageKey)> {
        let JournalPlace { store, claimed, image } = self.place.as_ref()?;
        Some((store.as_ref().or_else(|| claimed.get())?, image))
    }
}

/// The journal of an image that is open for writing. It begins with the first change of metadata,
/// so that a disk without writes has none.
#[derive(Debug)]
pub struct Journal {
    safety: ImageSafety,
    log: OnceLock<Log>,
    /// Whether the image carries the mark of the log's session.
    marked: AtomicBool,
    /// Whether all metadata are flushed before an answer: in mode `flush`, without a log, or after
    /// its end.
    failed: AtomicBool,
    /// Whether the log could not be created. The next change tries again.
    is_late: AtomicBool,
}

impl Journal {
    /// Returns the journal of an image. `log` continues the log that a dead server has left.
    pub fn new(safety: ImageSafety, log: Option<Log>) -> Arc<Self> {
        // A session that goes on has its journal in each mode.
        let flush = log.is_none() && safety.mode == SafetyMode::Flush;
        let failed = AtomicBool::new(flush);
        let marked = AtomicBool::new(log.is_some());
        let log = log.map(OnceLock::from).unwrap_or_default();
        Arc::new(Journal { safety, log, marked, failed, is_late: AtomicBool::new(false) })
    }

    /// Returns whether [`Journal::begin`] must be called before the next change of metadata.
    #[inline]
    pub fn must_begin(&self) -> bool {
        self.safety.wants_journal() && !self.marked() && (!self.failed() || self.is_late())
    }

    /// Creates the log. The caller then marks the image with the session, and calls
    /// [`Journal::set_marked`] or [`Journal::fail`].
    pub fn begin(&self) -> Result<Session, StoreError> {
        if HELD.load(Ordering::SeqCst) {
            return Err(StoreError::Held);
        }
        let (store, image) = self.safety.place().ok_or(StoreError::None)?;
        let log = store.create(image)?;
        if self.is_late() {
            // The answers to earlier changes still wait for a flush.
            log.lack_earlier();
        }
        let session = log.session();
        let _ = self.log.set(log);
        Ok(session)
    }

    /// Notes that the image carries the mark of the session.
    pub fn set_marked(&self) {
        self.marked.store(true, Ordering::Release);
        if self.is_late.swap(false, Ordering::AcqRel) {
            self.failed.store(false, Ordering::Release);
            tracing::info!("changed metadata are in a journal from now on");
        }
    }

    fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Acquire)
    }

    fn marked(&self) -> bool {
        self.marked.load(Ordering::Acquire)
    }

    /// Notes that there is no log: all metadata are flushed before an answer. If the log could not
    /// be created, the next change tries again. If it was created, that is final: its file stays,
    /// because the image may carry the mark although writing it failed.
    pub fn fail(&self, why: &dyn fmt::Display) {
        let is_late = !self.has_log();
        if is_late && self.is_late.swap(true, Ordering::AcqRel) {
            return;
        }
        self.is_late.store(is_late, Ordering::Release);
        if let Some(log) = self.log.get() {
            // The image may have no mark, and from now on the file has all answered changes.
            log.finish();
        }
        tracing::warn!(
            "no journal of changed metadata: {why}; they are flushed before each answer, which is \
             slow"
        );
        self.failed.store(true, Ordering::Release);
    }

    fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Records a change, before the change is visible to other requests. The caller marks its
    /// metadata dirty and holds the lock that a write-back takes before it copies them. If the
    /// write-back finds what is dirty without that lock, the metadata are marked dirty first.
    #[inline]
    pub fn record(&self, record: Record) {
        if let Some(log) = self.log.get() {
            log.record(record);
        }
    }

    /// Repeats the record of a change that the write-back in progress cannot put into the file.
    pub fn repeat(&self, record: Record) {
        if let Some(log) = self.log.get() {
            log.repeat(record);
        }
    }

    /// Begins a write-back of metadata, one at a time. Call it before the changes are copied.
    pub fn begin_write_back(&self) -> WriteBack {
        self.log.get().map_or_else(WriteBack::default, Log::begin_write_back)
    }

    /// Ends a write-back. `ok`: all changes that were copied are in the file.
    pub fn end_write_back(&self, write_back: WriteBack, ok: bool) -> Ended {
        let Some(log) = self.log.get() else { return Ended::without_log(ok) };
        let ended = log.end_write_back(write_back, ok);
        // systemd removes the runtime directory of a user at the end of the last session.
        if ok && !self.failed() && log.is_removed() {
            self.failed.store(true, Ordering::Release);
            tracing::warn!(
                "something has removed the journal of changed metadata: they are flushed before \
                 each answer, which is slow; what is answered from now on survives a death of the \
                 server, after `blockyard image check --discard-journal` on the image"
            );
        }
        ended
    }

    /// Returns whether metadata should be written back soon, because the log is long.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.log.get().is_some_and(Log::is_long)
    }

    /// Returns whether metadata must be durable before a request that changed them is answered.
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.failed() || self.is_incomplete()
    }

    /// Returns whether a change could not be recorded and is not in the file yet.
    pub fn is_incomplete(&self) -> bool {
        self.log.get().is_some_and(Log::is_incomplete)
    }

    /// Returns whether there is a log, so that the image may carry its mark.
    pub fn has_log(&self) -> bool {
        self.log.get().is_some()
    }

    /// Notes that all metadata are written back. The caller then removes the session's mark from
    /// the image, and calls [`Journal::end`].
    pub fn finish(&self) {
        if let Some(log) = self.log.get() {
            log.finish();
        }
    }

    /// Ends the journal and removes its file. The caller has written all metadata back and removed
    /// the session's mark from the image. Later changes are flushed.
    pub fn end(&self) -> io::Result<()> {
        if !self.has_log() {
            return Ok(());
        }
        self.failed.store(true, Ordering::Release);
        match self.safety.place() {
            Some((store, image)) => store.remove(image),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: ImageKey = ImageKey { device: 1, inode: 2, born: 3 };

    fn safety(store: &MemoryStore) -> ImageSafety {
        let store = Some(store.clone().into());
        CrashSafety { mode: SafetyMode::Journal, store }.of(Some(IMAGE))
    }

    fn found(store: &MemoryStore) -> Recovered {
        JournalStore::from(store.clone()).find(&IMAGE).unwrap().unwrap()
    }

    /// The journal is there before the mark, and after it.
    #[test]
    fn a_journal_beside_an_image_without_a_mark_may_have_no_changes() {
        let store = MemoryStore::default();
        let journal = Journal::new(safety(&store), None);
        let session = journal.begin().unwrap();
        assert!(!found(&store).has_changes(), "before the first change");
        journal.set_marked();
        journal.record(Record { key: Key::Cluster(1), value: [1 << 16, 0] });
        assert!(found(&store).has_changes());
        journal.finish();
        assert!(!found(&store).has_changes(), "before the journal is removed");
        // The server died before it removed the mark, and the next one continues the session.
        let left = safety(&store).claim(Some(session)).unwrap().unwrap();
        let _log = left.resume();
        assert!(found(&store).has_changes());
        assert!(safety(&store).claim(None).unwrap().is_none());
        assert!(store.is_empty());
    }

    #[test]
    fn a_journal_of_an_image_that_cannot_be_marked_has_no_changes() {
        let store = MemoryStore::default();
        let journal = Journal::new(safety(&store), None);
        journal.begin().unwrap();
        journal.fail(&"the header cannot be written");
        journal.record(Record { key: Key::Cluster(1), value: [1 << 16, 0] });
        assert!(!found(&store).has_changes());
    }

    /// The server that replayed the journal has no store of its own.
    #[test]
    fn a_journal_ends_in_the_store_in_which_it_was_claimed() {
        let store = MemoryStore::default();
        let journal = Journal::new(safety(&store), None);
        let session = journal.begin().unwrap();
        journal.set_marked();
        journal.record(Record { key: Key::Cluster(1), value: [1 << 16, 0] });
        let own = CrashSafety::default().of(Some(IMAGE));
        let place = own.place.as_ref().unwrap();
        place.claimed.set(store.clone().into()).unwrap();
        let left = JournalStore::from(store.clone()).find_marked(&IMAGE, Some(session)).unwrap();
        let next = Journal::new(own.clone(), left.map(Recovered::resume));
        next.finish();
        next.end().unwrap();
        assert!(store.is_empty());
        assert!(next.must_flush());
    }

    /// A journal that is claimed again, such as after a resize, has the same store.
    #[test]
    fn a_claim_is_known_to_all_clones() {
        let store = MemoryStore::default();
        let (one, none) = (safety(&store), ImageSafety::default());
        let other = one.clone();
        assert!(one.claim(None).unwrap().is_none());
        assert!(other.place.as_ref().unwrap().claimed.get().is_some());
        assert!(none.claim(None).unwrap().is_none());
    }

    #[test]
    fn a_missing_journal_names_the_folder_of_the_service() {
        let text = missing("/dev/shm/x").to_string();
        assert!(
            text.contains("in /dev/shm/x") && text.contains("/run/blockyard/journals"),
            "{text}"
        );
    }
}
