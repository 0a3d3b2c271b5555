//! The journals of changed metadata: which store this process uses.
//!
//! In: `--state-folder`, `--crash-safety`. Out: the setting of each disk. If the folder cannot be
//! used, the server says so once, and goes on without journals. It also says if the folder is full.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use blockyard_image::journal::{CrashSafety, JournalStore, SafetyMode, StateFolder};

/// What `--crash-safety` asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrashMode {
    #[default]
    Journal,
    Flush,
    Off,
}

#[derive(Debug, thiserror::Error)]
#[error("\"{0}\" is no crash safety: use journal, flush or off")]
pub struct UnknownCrashMode(String);

impl FromStr for CrashMode {
    type Err = UnknownCrashMode;

    fn from_str(s: &str) -> Result<Self, UnknownCrashMode> {
        match s {
            "journal" => Ok(CrashMode::Journal),
            "flush" => Ok(CrashMode::Flush),
            "off" => Ok(CrashMode::Off),
            _ => Err(UnknownCrashMode(s.into())),
        }
    }
}

/// Free space in bytes below which a journal may not begin: a page and its first records, twice.
const SPACE: u64 = 128 << 10;

static FOLDER: OnceLock<PathBuf> = OnceLock::new();
static STORE: OnceLock<Option<JournalStore>> = OnceLock::new();
/// The path of the folder that is in use, without links.
static IN_USE: OnceLock<PathBuf> = OnceLock::new();

/// Sets the folder of this process. Call it before the first disk is opened.
pub fn use_folder(folder: PathBuf) {
    let _ = FOLDER.set(folder);
}

/// Returns the store of this process, and creates its folder. `None`: the folder cannot be used;
/// the log has the reason once.
fn store() -> Option<JournalStore> {
    STORE
        .get_or_init(|| {
            let folder = FOLDER.get().cloned().unwrap_or_else(StateFolder::default_path);
            match StateFolder::open(folder) {
                Ok(folder) => {
                    warn_if_full(&folder);
                    if let Ok(path) = std::fs::canonicalize(folder.path()) {
                        let _ = IN_USE.set(path);
                    }
                    Some(folder.into())
                }
                Err(e) => {
                    tracing::warn!(
                        "{e}; without journals, qcow2 and COW images lose answered writes that \
                         are not flushed if this server dies (--crash-safety flush avoids that, \
                         and is slower)"
                    );
                    None
                }
            }
        })
        .clone()
}

fn warn_if_full(folder: &StateFolder) {
    if let Ok(Some(free @ ..SPACE)) = folder.free() {
        tracing::warn!(
            "state folder {}: only {free} bytes are free; while it has no space, changed metadata \
             of qcow2 and COW images are flushed before each answer, which is slow",
            folder.path().display()
        );
    }
}

/// Returns the folder of this process's journals, and creates it. If that cannot be used, also
/// returns the folder in which an image that is opened looks for the journal of a dead server.
pub fn folders() -> Vec<PathBuf> {
    let (store, default) = (store(), StateFolder::default_path());
    let own = FOLDER.get().cloned().unwrap_or_else(|| default.clone());
    let is_other = store.is_none() && own != default && default.exists();
    if is_other { vec![own, default] } else { vec![own] }
}

/// Returns the folder that is in use, and creates it. `None`: this process has no journals.
pub fn in_use() -> Option<&'static Path> {
    let _ = store();
    IN_USE.get().map(PathBuf::as_path)
}

/// Returns how the metadata of an image of this mode survive a death of the server. In each mode
/// the journal of a dead server is applied.
pub fn safety(mode: CrashMode) -> CrashSafety {
    let store = store();
    let mode = match mode {
        CrashMode::Journal if store.is_some() => SafetyMode::Journal,
        CrashMode::Flush => SafetyMode::Flush,
        CrashMode::Journal | CrashMode::Off => SafetyMode::Off,
    };
    CrashSafety { mode, store }
}
