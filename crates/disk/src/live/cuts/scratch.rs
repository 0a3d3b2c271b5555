//! The folder of a test.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder that is removed with the test. It has the names, locks and records of the files.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Rc<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-live-cuts-{}-{number}", std::process::id());
        let folder = Path::new("/var/tmp").join(name);
        std::fs::create_dir_all(&folder).unwrap();
        Rc::new(Scratch(folder))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
