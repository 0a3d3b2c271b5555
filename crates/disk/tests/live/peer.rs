//! QEMU's tools, scratch folders, and disks on files in them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_image::journal::{CrashSafety, MemoryStore, SafetyMode};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_storage::sim::Rng;

/// A folder that is removed with the test. It is on a disk, because /tmp is often in memory,
/// without O_DIRECT.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new("/var/tmp")
            .join(format!("blockyard-live-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the path as a command-line argument.
    pub fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().into()
    }

    /// Serves the image of that name.
    pub fn disk(&self, image: &str) -> Arc<Disk> {
        self.disk_with(image, |_| {})
    }

    pub fn disk_with(&self, image: &str, change: impl FnOnce(&mut DiskOptions)) -> Arc<Disk> {
        self.disk_by(image, change, CrashSafety::default())
    }

    /// Serves an image with its journal in `store`.
    pub fn disk_with_journal(&self, image: &str, store: &MemoryStore) -> Arc<Disk> {
        let (mode, store) = (SafetyMode::Journal, Some(store.clone().into()));
        self.disk_by(image, |_| {}, CrashSafety { mode, store })
    }

    fn disk_by(
        &self,
        image: &str,
        change: impl FnOnce(&mut DiskOptions),
        crash_safety: CrashSafety,
    ) -> Arc<Disk> {
        let (name, serial) = ("live".into(), String::new());
        let mut options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache: CacheMode::default(),
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        change(&mut options);
        let chain = ChainOptions {
            read_only: options.read_only,
            cache: options.cache,
            crash_safety,
            ..ChainOptions::new(self.path(image))
        };
        Arc::new(Disk::new(options, Source::open(&chain).unwrap()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Seconds after which a program of QEMU hangs.
const HANGS: &str = "60";

/// Runs `qemu-img`, which must succeed. Returns its output.
pub fn qemu_img(arguments: &[&str]) -> String {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/tool");
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", HANGS]).arg(tool).arg("qemu-img").args(arguments);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Checks with QEMU that the image is consistent and holds `expected`.
pub fn judge(scratch: &Scratch, image: &str, expected: &[u8]) {
    let (name, copy) = (scratch.name(image), scratch.name(&format!("{image}.expected")));
    std::fs::write(&copy, expected).unwrap();
    if image.ends_with(".qcow2") {
        qemu_img(&["check", "-f", "qcow2", &name]);
    }
    let format = if image.ends_with(".qcow2") { "qcow2" } else { "raw" };
    qemu_img(&["compare", "-f", format, "-F", "raw", &name, &copy]);
    std::fs::remove_file(copy).unwrap();
}

/// Returns random bytes.
pub fn random(len: usize, seed: u64) -> Vec<u8> {
    let (mut rng, mut bytes) = (Rng::new(seed), vec![0; len / 8 * 8]);
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next_u64().to_ne_bytes());
    }
    bytes
}
