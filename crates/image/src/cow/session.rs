//! The session's mark in a COW file: which journal belongs to it.
//!
//! A COW file has no place for other programs' data. The field of the backing file's name is long
//! and ends with zero bytes. The mark lies in the field's last sector, behind the name. User Mode
//! Linux and its tools read the name up to the first zero byte, and never write the rest.
//!
//! Why a journal is safe although another program, such as User Mode Linux's own driver, may write
//! to the file without a change of the mark: a sector has a fixed place in the file, and no program
//! clears a bit of an existing file. So a bit that the journal sets shows what was last written to
//! that sector of the file, by whichever program. A program that makes a file anew (`uml_mkcow`)
//! writes the whole header, and the mark is gone. This program's commands that clear bits or change
//! the header remove the mark.
//!
//! What it is not safe against: a guest that goes on through another driver does not see the
//! sectors of the journal. A later replay adds them to that guest's newer data (`docs/operate.md`).

use blockyard_ring::Segments;

use super::Cow;
use super::header::{HEADER, Header, MARK_LEN};
use crate::SECTOR;
use crate::error::ImageError;
use crate::journal::{ImageSafety, Key, Log, Record, Recovered, Session};
use crate::raw::Raw;

const STRUCTURE: &str = "journal of the COW file";
/// "BLKYSESS", then the session's number and the boot's, all big-endian.
const TAG: u64 = 0x424c_4b59_5345_5353;

/// Reads the mark. `None`: there is none.
pub async fn read_mark(file: &Raw, header: &Header) -> Result<Option<Session>, ImageError> {
    let Some(at) = header.mark_offset() else { return Ok(None) };
    let (segments, read) = file.read(Segments::buffer(MARK_LEN), at).await;
    read.map_err(|e| ImageError::io(HEADER, at, "reading the mark of a journal", e))?;
    let mut bytes = [0; MARK_LEN];
    segments.copy_out(0, &mut bytes);
    let number =
        |at: usize| u128::from_be_bytes(bytes[at..at + 16].try_into().expect("sixteen bytes"));
    let is_mark = bytes[..8] == TAG.to_be_bytes();
    Ok(is_mark.then(|| Session { number: number(8), boot: number(24) }))
}

/// Writes the mark, or zeroes in its place.
async fn write_mark(
    file: &Raw,
    header: &Header,
    session: Option<Session>,
) -> Result<(), ImageError> {
    let at = header.mark_offset().ok_or_else(|| {
        ImageError::refused(HEADER, "the backing file's name leaves no room for a journal's mark")
    })?;
    let bytes = session.map_or(vec![0; MARK_LEN], |Session { number, boot }| {
        [&TAG.to_be_bytes()[..], &number.to_be_bytes(), &boot.to_be_bytes()].concat()
    });
    let (_, written) = file.write(Segments::from_bytes(&bytes), at, false).await;
    written.map_err(|e| ImageError::io(HEADER, at, "writing the mark of a journal", e))
}

/// Removes the mark, so that no journal is replayed.
pub async fn clear_mark(file: &Raw, header: &Header) -> Result<(), ImageError> {
    match read_mark(file, header).await? {
        Some(_) => write_mark(file, header, None).await,
        None => Ok(()),
    }
}

/// Returns the log and the records that a dead server has left for the file.
pub(super) async fn recover(
    file: &Raw,
    header: &Header,
    safety: &ImageSafety,
) -> Result<Option<(Log, Vec<Record>)>, ImageError> {
    let marked = read_mark(file, header).await?;
    let found = safety.claim(marked)?;
    if found.is_none() && marked.is_some() {
        write_mark(file, header, None).await?;
    }
    let read = |journal: Recovered| {
        let records = journal.records();
        let records = records.map_err(|e| ImageError::io(STRUCTURE, None, "reading", e))?;
        Ok((journal.resume(), records))
    };
    found.map(read).transpose()
}

impl Cow {
    /// Sets the bits of a dead server's journal, durably.
    pub(super) async fn replay(&self, records: Vec<Record>) -> Result<(), ImageError> {
        let sectors = self.header().sectors();
        let count = records.len();
        for Record { key, value: [count, _] } in records {
            let Key::Sector(first) = key else { continue };
            if first.checked_add(count).is_none_or(|end| end > sectors) {
                let what =
                    format!("it names {count} sectors from {first}, and there are {sectors}");
                return Err(ImageError::invalid(STRUCTURE, None, what));
            }
            let marked = self.mark(first * SECTOR, count * SECTOR).await;
            marked.map_err(|e| ImageError::io(STRUCTURE, None, "replaying", e))?;
        }
        let flushed = self.flush().await;
        flushed.map_err(|e| ImageError::io(STRUCTURE, None, "flushing its changes", e))?;
        tracing::info!("replayed the journal of a server that died: {count} changes of the bitmap");
        Ok(())
    }

    /// Begins the journal if this is the first change of the bitmap. If there can be no journal,
    /// bits are flushed before each answer.
    #[cold]
    pub(super) async fn begin_journal(&self) {
        let journal = &self.shared.journal;
        let _permit = self.shared.marking.acquire().await;
        if !journal.must_begin() {
            return;
        }
        let session = match journal.begin() {
            Ok(session) => session,
            Err(e) => return journal.fail(&e),
        };
        match write_mark(&self.file, self.header(), Some(session)).await {
            Ok(()) => journal.set_marked(),
            Err(e) => journal.fail(&e),
        }
    }

    /// Ends the journal after everything was written back.
    pub(super) async fn end_journal(&self) -> Result<(), ImageError> {
        self.shared.journal.finish();
        if self.shared.journal.has_log() {
            write_mark(&self.file, self.header(), None).await?;
        }
        let ended = self.shared.journal.end();
        ended.map_err(|e| ImageError::io(STRUCTURE, None, "removing", e))
    }
}
