//! The journal that a dead server has left for an image: applied, shown or discarded.
//!
//! Commands that change an image's structures without its disk (snapshots, resizes, checks with
//! repair) apply the journal first, because it belongs to the structures as they are.

use std::path::Path;

use blockyard_storage::{ImageFile, OpenOptions};

use crate::chain::{Chain, ChainError, ChainOptions};
use crate::cow;
use crate::error::{ErrorKind, ImageError};
use crate::journal::{ImageKey, JournalStore, Session, StateFolder, StoreError, missing};
use crate::layers::format::Format;
use crate::qcow2::{Header, IncompleteCluster};
use crate::raw::Raw;
use blockyard_storage::CacheMode;

use super::file::{of_file, raw_of};
use super::reactors::on_reactor;

const STRUCTURE: &str = "journal of the image";

/// Returns the session that an image is marked with.
pub(crate) async fn session_of(raw: &Raw, format: Format) -> Result<Option<Session>, ImageError> {
    match format {
        Format::Raw => Ok(None),
        Format::Qcow2 => Ok(Header::read_for_check(raw).await?.session()),
        Format::Cow => {
            let header = cow::read_header(raw).await?;
            cow::read_mark(raw, &header).await
        }
    }
}

/// The journal that belongs to an image as it is.
pub enum Pending {
    /// The next open for writing replays so many changes.
    Changes(usize),
    /// The image is marked with a journal of this boot, and this folder does not have it.
    Elsewhere(String),
}

async fn journal_of(
    file: &ImageFile,
    raw: &Raw,
    format: Format,
) -> Result<Option<Pending>, ImageError> {
    let Some(session) = session_of(raw, format).await? else { return Ok(None) };
    let may_be_of_this_boot = session.may_be_of_this_boot();
    let elsewhere = |place: String| may_be_of_this_boot.then_some(Pending::Elsewhere(place));
    let refuse = |e: StoreError| ImageError::refused(STRUCTURE, e.to_string()).with_source(e);
    let (store, image) = match place_of(file) {
        Ok(Some(place)) => place,
        Err(e) if may_be_of_this_boot => return Err(refuse(e)),
        Ok(None) | Err(_) => {
            return Ok(elsewhere(StateFolder::default_path().display().to_string()));
        }
    };
    let found = store.find_marked(&image, Some(session)).map_err(refuse)?;
    let Some(journal) = found.filter(|journal| journal.session() == session) else {
        return Ok(elsewhere(store.to_string()));
    };
    let records = journal.records();
    let records = records.map_err(|e| ImageError::io(STRUCTURE, None, "reading", e))?;
    Ok(Some(Pending::Changes(records.len())))
}

fn place_of(file: &ImageFile) -> Result<Option<(JournalStore, ImageKey)>, StoreError> {
    let Some(fd) = file.fd() else { return Ok(None) };
    let key = ImageKey::of(&**fd).map_err(StoreError::Image)?;
    Ok(JournalStore::of_commands()?.map(|store| (store, key)))
}

/// Returns the journal of a dead server, or of one that has the image in use. `None`: there is
/// none. Takes no lock.
pub fn pending_journal(path: &Path, format: Format) -> Result<Option<Pending>, ChainError> {
    let options = OpenOptions::new(path, true, CacheMode::Writeback);
    let file = ImageFile::open(&OpenOptions { force_share: true, ..options })?;
    on_reactor(move |handle| async move {
        let raw = raw_of(&handle, &file)?;
        journal_of(&file, &raw, format).await.map_err(|error| of_file(&file, error))
    })
}

/// Applies the journal of an image, if there is one. Durable on return. Fails if the journal is in
/// another folder or cannot be read: a change of the image would give it up.
pub fn apply_journal(path: &Path, format: Format) -> Result<(), ChainError> {
    apply_journal_of(&ChainOptions { format: Some(format), ..ChainOptions::new(path) })
}

/// Like [`apply_journal`], for the topmost image of a chain with these options.
pub fn apply_journal_of(options: &ChainOptions) -> Result<(), ChainError> {
    let path = options.path.as_path();
    let format = options.format.or_else(|| Format::of_name(path)).unwrap_or(Format::Raw);
    if format == Format::Raw {
        return Ok(());
    }
    match pending_journal(path, format) {
        Ok(Some(Pending::Changes(_))) => {}
        Ok(Some(Pending::Elsewhere(place))) => {
            // The error of an image in use is better.
            let opened = OpenOptions::new(path, false, CacheMode::Writeback);
            ImageFile::open(&OpenOptions { overlaid: options.overlaid.clone(), ..opened })?;
            return Err(ChainError::Image { path: path.into(), error: missing(&place) });
        }
        Ok(None) => return Ok(()),
        // An image of another format, or a damaged one, gets its error from the command itself.
        Err(ChainError::Image { error, .. })
            if matches!(error.kind, ErrorKind::Invalid | ErrorKind::Unsupported) =>
        {
            return Ok(());
        }
        Err(e) => return Err(e),
    }
    let open = |no_backing| {
        let format = Some(format);
        let accept_changed_backing = true;
        Chain::open(&ChainOptions {
            format,
            no_backing,
            accept_changed_backing,
            cache: CacheMode::Writeback,
            folders: options.folders.clone(),
            overlaid: options.overlaid.clone(),
            ..ChainOptions::new(path)
        })
    };
    // Only partially written clusters need the backing image.
    if close(open(true)?)? || close(open(false)?)? {
        return Ok(());
    }
    let error = ImageError::refused(STRUCTURE, "its backing image is needed");
    Err(ChainError::Image { path: path.into(), error })
}

/// Writes everything back and closes the image. Returns false if the backing image is needed.
fn close(chain: Chain) -> Result<bool, ChainError> {
    on_reactor(|handle| async move {
        let wrong = |e| of_file(&chain.top().file, ImageError::io(STRUCTURE, None, "applying", e));
        match chain.image(&handle).map_err(wrong)?.close().await {
            Err(e) if IncompleteCluster::is_in(&e) => Ok(false),
            closed => closed.map(|()| true).map_err(wrong),
        }
    })
}

/// Discards the journal of an image: the disk is as its file says. Returns whether the image was
/// marked with a journal.
pub fn discard_journal(path: &Path, format: Format) -> Result<bool, ChainError> {
    let file = ImageFile::open(&OpenOptions::new(path, false, CacheMode::Writeback))?;
    on_reactor(move |handle| async move {
        let raw = raw_of(&handle, &file)?;
        let wrong = |error| of_file(&file, error);
        let marked = session_of(&raw, format).await.map_err(wrong)?;
        match format {
            Format::Raw => {}
            Format::Qcow2 => {
                let mut header = Header::read_for_check(&raw).await.map_err(wrong)?;
                header.clear_session(&raw).await.map_err(wrong)?;
            }
            Format::Cow => {
                let header = cow::read_header(&raw).await.map_err(wrong)?;
                cow::clear_mark(&raw, &header).await.map_err(wrong)?;
            }
        }
        let io = |what: &'static str| move |e| ImageError::io(STRUCTURE, None, what, e);
        raw.flush().await.map_err(io("syncing the image")).map_err(wrong)?;
        // A journal that cannot be removed is out of date without the mark.
        if let Ok(Some((store, image))) = place_of(&file) {
            // The journal of a device may be that of an image that had its number before.
            if store.find_marked(&image, marked).is_ok_and(|journal| journal.is_some()) {
                store.remove(&image).map_err(io("removing it")).map_err(wrong)?;
            }
        }
        Ok(marked.is_some())
    })
}
