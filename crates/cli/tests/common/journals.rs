//! Folders for journals.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder on tmpfs, which a server creates. Dropping it removes it.
pub struct StateFolder(PathBuf);

impl StateFolder {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        StateFolder(format!("/dev/shm/by-journal-{}-{number}", std::process::id()).into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the only journal.
    pub fn file(&self) -> PathBuf {
        let entry = std::fs::read_dir(&self.0).unwrap().next();
        entry.unwrap().unwrap().path()
    }

    pub fn journals(&self) -> usize {
        std::fs::read_dir(&self.0).map_or(0, Iterator::count)
    }
}

impl Drop for StateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
