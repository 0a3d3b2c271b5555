//! Files that are replaced as a whole.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Replaces a file: writes a new file, and renames it to `path`. After a power cut the path has the
/// old contents or the new ones.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension(format!("new.{}", std::process::id()));
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || {
        let mut file = std::fs::File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        std::fs::File::open(folder)?.sync_all()
    };
    let written = write().inspect_err(|_| drop(std::fs::remove_file(&new)));
    written.with_context(|| format!("writing {}", path.display()))
}
