//! Second opinion: QEMU checks and reads some of the images.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicU64, Ordering};

use super::chain::{Files, file_name};
use crate::tools;

/// Exit status of `qemu-img check` for an image with leaks and no other errors.
const ONLY_LEAKS: i32 = 3;

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Checks that QEMU finds the topmost image consistent, with `disk` as its contents.
pub fn judge(layers: &[Files], disk: &[u8]) -> Result<(), String> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("blockyard-cuts-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    let folder = Folder(path);
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.0.join(name), bytes).unwrap();
    for (n, files) in layers.iter().enumerate() {
        write(&file_name(n), &files.main.bytes());
        if let Some(data) = &files.data {
            write("data", &data.bytes());
        }
    }
    write("expected", disk);
    let top = file_name(0);
    let check = qemu_img(&folder.0, &["check", "-f", "qcow2", &top]);
    if !matches!(check.status.code(), Some(0 | ONLY_LEAKS)) {
        return Err(format!("qemu-img check: {}", text(&check)));
    }
    let compare = qemu_img(&folder.0, &["compare", "-f", "qcow2", "-F", "raw", &top, "expected"]);
    if !compare.status.success() {
        return Err(format!("qemu-img compare: {}", text(&compare)));
    }
    Ok(())
}

fn qemu_img(folder: &Path, arguments: &[&str]) -> Output {
    tools::output(tools::tool("qemu-img").args(arguments).current_dir(folder))
}

fn text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}: {}{}", output.status, text(&output.stdout), text(&output.stderr))
}
