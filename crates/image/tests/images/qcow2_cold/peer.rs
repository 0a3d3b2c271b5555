//! QEMU's tools, temporary folders, and this crate's code on a file of the host.

use std::path::PathBuf;
use std::process::Output;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_image::qcow2::check::{self, Limits, Repair, Report};
use blockyard_image::{CacheMode, ImageError, ImageFile, OpenOptions, Raw};
use blockyard_ring::{Executor, Handle, Meter};

use crate::tools;

/// A folder that is removed after the test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir()
            .join(format!("blockyard-cold-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }

    /// Returns a path in the folder, as an argument.
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().into()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(tool: &str, arguments: &[&str]) -> Output {
    tools::output(tools::tool(tool).args(arguments))
}

fn good(tool: &str, arguments: &[&str]) -> String {
    tools::good(tools::tool(tool).args(arguments))
}

/// Runs `qemu-img`, which must succeed; returns its output.
pub fn qemu_img(arguments: &[&str]) -> String {
    good("qemu-img", arguments)
}

/// Runs commands of `qemu-io` on an image.
pub fn qemu_io(path: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", "qcow2"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(path);
    let said = good("qemu-io", &arguments);
    assert!(!said.contains("failed"), "{commands:?}: {said}");
}

/// Like [`qemu_io`], but kills it before it closes the image.
pub fn qemu_io_killed(path: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", "qcow2"];
    commands.iter().chain(&["sigraise 9"]).for_each(|command| arguments.extend(["-c", command]));
    arguments.push(path);
    assert!(!run("qemu-io", &arguments).status.success(), "it was not killed");
}

/// Returns the report of `qemu-img check`, whatever its status.
pub fn qemu_check(path: &str, repair: Option<&str>) -> Report {
    let mut arguments = vec!["check", "-f", "qcow2", "--output", "json"];
    arguments.extend(repair.map(|repair| ["-r", repair]).into_iter().flatten());
    arguments.push(path);
    let output = run("qemu-img", &arguments);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
    let number = |key: &str| json.get(key).and_then(|v| v.as_u64()).unwrap_or(0);
    Report {
        corruptions: number("corruptions"),
        leaks: number("leaks"),
        corruptions_fixed: number("corruptions-fixed"),
        leaks_fixed: number("leaks-fixed"),
        check_errors: number("check-errors"),
        image_end_offset: number("image-end-offset"),
        total_clusters: number("total-clusters"),
        allocated_clusters: number("allocated-clusters"),
        fragmented_clusters: number("fragmented-clusters"),
        compressed_clusters: number("compressed-clusters"),
        ..Report::default()
    }
}

fn open(handle: &Handle, path: &str) -> Raw {
    let options = OpenOptions::new(path, false, CacheMode::Writeback);
    let file = ImageFile::open(&options).unwrap();
    Raw::open(&file, handle).unwrap()
}

/// Runs `work` on the file, opened for writing.
pub fn on_file<T: 'static, F: Future<Output = T>>(
    path: &str,
    work: impl FnOnce(Raw) -> F + 'static,
) -> T {
    let executor = Executor::new().unwrap();
    let raw = open(executor.handle(), path);
    tools::block_on(&executor, async move { work(raw).await })
}

/// Like [`on_file`], with an image and its data file.
pub fn two_files<T: 'static, F: Future<Output = T>>(
    path: &str,
    data: &str,
    work: impl FnOnce(Raw, Raw) -> F + 'static,
) -> T {
    let executor = Executor::new().unwrap();
    let (raw, data) = (open(executor.handle(), path), open(executor.handle(), data));
    tools::block_on(&executor, async move { work(raw, data).await })
}

pub fn try_check(path: &str, repair: Repair) -> Result<Report, ImageError> {
    on_file(path, move |raw| async move { check::check(&raw, None, repair).await })
}

/// Like [`our_check`], with so little memory that it needs many passes.
pub fn check_in_pieces(path: &str, repair: Repair, memory: usize) -> Report {
    let limits = Limits { memory, tables: 1 };
    on_file(path, move |raw| async move { check::check_within(&raw, None, repair, limits).await })
        .unwrap()
}

pub fn our_check(path: &str, repair: Repair) -> Report {
    try_check(path, repair).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Like [`our_check`]. Also returns the number of operations on the file, and their bytes.
pub fn metered_check(path: &str, repair: Repair) -> (Report, (u64, u64)) {
    let (executor, meter) = (Executor::new().unwrap(), Rc::new(Meter::default()));
    let raw = open(&executor.handle().metered(&meter), path);
    let report = tools::block_on(&executor, async move { check::check(&raw, None, repair).await });
    (report.unwrap_or_else(|e| panic!("{path}: {e}")), meter.counted())
}
