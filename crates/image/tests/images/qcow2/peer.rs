//! QEMU's tools, and temporary folders.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::tools;

/// A folder that is removed after the test.
pub struct Scratch {
    folder: PathBuf,
    names: std::sync::Mutex<Vec<&'static str>>,
}

impl Scratch {
    pub fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("blockyard-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Scratch { folder, names: Default::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns a path in the folder, as an argument.
    pub fn name(&self, name: &str) -> &'static str {
        let text: &'static str = self.path(name).to_str().unwrap().to_string().leak();
        self.names.lock().unwrap().push(text);
        text
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Runs `qemu-img`, which must succeed; returns its output.
pub fn qemu_img(arguments: &[&str]) -> String {
    tools::good(tools::tool("qemu-img").args(arguments))
}
