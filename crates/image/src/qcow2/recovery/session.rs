//! The session's mark in the image: which journal belongs to it.
//!
//! The mark is a header extension with the session's number and the boot's, and an autoclear bit
//! that says that it is valid. Each program that follows the specification clears the bit when it
//! opens the image for writing, because it does not know it. So a journal is never replayed over
//! another program's changes. This program's commands that change a closed image clear it too.
//!
//! ```text
//!   first change of metadata ─► create the journal ─► write the mark ─► changes, records
//!   close: write everything back ─► finish the journal ─► clear the bit ─► remove the journal
//! ```
//!
//! Nothing here is synced: a mark must survive the process, not a power cut. The extension's place
//! is made durably when an image gets its first one.

use super::replay;
use crate::error::ImageError;
use crate::journal::{ImageSafety, Log, Session};
use crate::qcow2::encoding::header::{AUTOCLEAR_JOURNAL, EXTENSION_JOURNAL, Extension, Header};
use crate::qcow2::encoding::rewrite::{rewrite, rewrite_first_sector};
use crate::qcow2::reading::view::Qcow2;
use crate::qcow2::state::shared::lock;
use crate::qcow2::state::tables::Entry;
use crate::raw::Raw;

const STRUCTURE: &str = "journal of the image";
/// Bytes of the extension: the session's number and the boot's, both big-endian.
const LENGTH: usize = 32;

/// A session that goes on after the death of its server.
pub(in crate::qcow2) struct Resumed {
    pub log: Log,
    /// Partial clusters: the file cannot say what they hold.
    pub partial: Vec<(u64, Entry)>,
}

impl Header {
    /// Returns the session that the image is marked with, if the mark is valid.
    pub fn session(&self) -> Option<Session> {
        let extension = self.extensions.iter().find(|e| e.kind == EXTENSION_JOURNAL)?;
        let data: [u8; LENGTH] = extension.data.as_slice().try_into().ok()?;
        let number =
            |at: usize| u128::from_be_bytes(data[at..at + 16].try_into().expect("sixteen bytes"));
        let is_valid = self.autoclear & AUTOCLEAR_JOURNAL != 0;
        is_valid.then(|| Session { number: number(0), boot: number(16) })
    }

    fn set_session(&mut self, session: Session) {
        self.autoclear |= AUTOCLEAR_JOURNAL;
        let data = [session.number.to_be_bytes(), session.boot.to_be_bytes()].concat();
        match self.extensions.iter_mut().find(|e| e.kind == EXTENSION_JOURNAL) {
            Some(extension) => extension.data = data,
            None => self.extensions.push(Extension { kind: EXTENSION_JOURNAL, data }),
        }
    }

    /// Makes the image's mark invalid, so that no journal is replayed.
    pub async fn clear_session(&mut self, file: &Raw) -> Result<(), ImageError> {
        if self.autoclear & AUTOCLEAR_JOURNAL == 0 {
            return Ok(());
        }
        self.autoclear &= !AUTOCLEAR_JOURNAL;
        self.write_fixed(file).await
    }
}

/// Returns whether an image of this version can carry a mark. Version 2 has no autoclear bits.
pub(in crate::qcow2) fn can_be_marked(header: &Header) -> bool {
    header.version >= 3
}

/// Replays the journal that a dead server has left for the image, into its file. Returns the
/// session, which goes on. `None`: there is nothing to replay.
pub(in crate::qcow2) async fn recover(
    file: &Raw,
    data: Option<&Raw>,
    header: &mut Header,
    safety: &ImageSafety,
) -> Result<Option<Resumed>, ImageError> {
    let Some(journal) = safety.claim(header.session())? else { return Ok(None) };
    let records = journal.records().map_err(|e| ImageError::io(STRUCTURE, None, "reading", e))?;
    let count = records.len();
    let partial = replay::replay(file, data, header, records).await?;
    tracing::info!("replayed the journal of a server that died: {count} changes of metadata");
    Ok(Some(Resumed { log: journal.resume(), partial }))
}

impl Qcow2 {
    /// Begins the journal if this is the first change of metadata. Each change of an L1 or L2 entry
    /// calls this first. If there can be no journal, metadata are flushed before each answer.
    #[inline]
    pub(in crate::qcow2) async fn begin_journal(&self) {
        if self.shared.journal.must_begin() {
            Box::pin(self.begin_journal_once()).await;
        }
    }

    #[cold]
    async fn begin_journal_once(&self) {
        let journal = &self.shared.journal;
        let _permit = self.shared.changing_header.acquire().await;
        if !journal.must_begin() {
            return;
        }
        let session = match journal.begin() {
            Ok(session) => session,
            Err(e) => return journal.fail(&e),
        };
        match self.mark(session).await {
            Ok(()) => journal.set_marked(),
            Err(e) => journal.fail(&e),
        }
    }

    /// The caller holds the permit of `changing_header`.
    async fn mark(&self, session: Session) -> Result<(), ImageError> {
        let old = self.shared.header();
        let mut new = old.clone();
        new.set_session(session);
        if !rewrite_first_sector(&self.file, &old, &new).await? {
            self.make_room(&old, &mut new).await?;
        }
        *lock(&self.shared.header) = new;
        Ok(())
    }

    /// Gives the extension of the mark its place, durably. If a sync fails, writes of the guest may
    /// be lost, and the header in the file may be either one.
    async fn make_room(&self, old: &Header, new: &mut Header) -> Result<(), ImageError> {
        let _permit = self.shared.syncing.acquire().await;
        let lost = |e| ImageError::io(STRUCTURE, 0, "writing the mark", e);
        self.shared.lost().map_or(Ok(()), Err).map_err(lost)?;
        let made = rewrite(&self.file, old, new).await;
        if let Err(error) = &made
            && let Some(e) = error.io_source()
        {
            self.shared.lose(e);
        }
        made
    }

    /// Ends the journal after everything was written back.
    pub(in crate::qcow2) async fn end_journal(&self) -> Result<(), ImageError> {
        let journal = &self.shared.journal;
        journal.finish();
        if journal.has_log() {
            let _permit = self.shared.changing_header.acquire().await;
            let mut header = self.shared.header();
            header.autoclear &= !AUTOCLEAR_JOURNAL;
            header.write_fixed(&self.file).await?;
            *lock(&self.shared.header) = header;
        }
        journal.end().map_err(|e| ImageError::io(STRUCTURE, None, "removing", e))
    }
}

#[cfg(test)]
mod tests {
    use blockyard_ring::Segments;
    use blockyard_storage::sim::{Sim, SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::Alignment;
    use crate::extent::NoBacking;
    use crate::journal::{CrashSafety, ImageKey, MemoryStore, SafetyMode};
    use crate::qcow2::encoding::bytes::{self, put64};
    use crate::qcow2::{CreateOptions, Qcow2Options, create};

    /// In a crafted header the name of the backing file follows the extensions at once, without an
    /// end marker.
    #[test]
    fn the_mark_does_not_overwrite_the_name_of_the_backing_file() {
        let disk = SimDisk::new(SimImage::zeroed(0), SimConfig::new(1));
        let test = async move {
            let raw = || Raw::on(disk.clone(), Alignment { memory_align: 1, offset_align: 1 });
            let backing = Some(("base.raw".into(), "raw".into()));
            let options = CreateOptions { backing, ..CreateOptions::new(1 << 20) };
            create(&raw(), None, &options).await.unwrap();
            let mut header = Header::read(&raw()).await.unwrap();
            let mark = Extension { kind: EXTENSION_JOURNAL, data: vec![0; LENGTH] };
            header.extensions.push(mark);
            let mut area = header.serialize().unwrap();
            let marker = header.serialize_without_name().unwrap().len() - 8;
            area.drain(marker..marker + 8);
            put64(&mut area, 8, marker as u64);
            bytes::write(&raw(), 0, &area).await.unwrap();

            let header = Header::read(&raw()).await.unwrap();
            assert_eq!(header.backing.as_deref(), Some("base.raw"));
            let store = Some(MemoryStore::default().into());
            let key = ImageKey { device: 1, inode: 2, born: 3 };
            let safety = CrashSafety { mode: SafetyMode::Journal, store }.of(Some(key));
            let options = Qcow2Options { safety, ..Qcow2Options::default() };
            let image = Qcow2::open(header, raw(), None, &options).await.unwrap();
            image.write(&NoBacking, Segments::from_bytes(&[1; 512]), 0).await.1.unwrap();
            let header = Header::read(&raw()).await.unwrap();
            assert!(header.session().is_some());
            assert_eq!(header.backing.as_deref(), Some("base.raw"));
        };
        Sim::new(1).block_on(test).unwrap();
    }
}
