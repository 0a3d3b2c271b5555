//! A folder for a unit test, with scripts that stand for programs.

use std::io::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A test that waits longer hangs.
pub const HANG: Duration = Duration::from_secs(60);

/// Waits until `done` returns true.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < HANG, "not within {HANG:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A folder. Dropping it removes it. It is not in /tmp, which may have no O_DIRECT and no holes.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let base = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("by-bench-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap_or_else(|e| panic!("creating {}: {e}", path.display()));
        Scratch(path)
    }

    /// Makes a file, and returns its path.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        std::fs::write(&path, contents).unwrap();
        path
    }

    /// Makes a program of a bash script, and returns its path. Another process writes it: a process
    /// that a second thread starts would inherit the open file, and the kernel starts no program
    /// that is open for writing.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.join(name);
        let mut install = Command::new("install");
        install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped());
        let mut install = install.spawn().unwrap();
        let text = format!("#!/bin/bash\n{text}\n");
        install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(install.wait().unwrap().success(), "writing {}", path.display());
        path
    }

    /// Returns the lines of a file.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.join(name)).unwrap();
        text.lines().map(String::from).collect()
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
