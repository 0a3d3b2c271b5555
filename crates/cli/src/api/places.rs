//! Paths of new images that a call names.
//!
//! In: the name of a field, and its path. Out: an error that names the field. What must hold: no
//! caller waits longer than [`looks::LIMIT`] for a file system.

use std::path::{Path, PathBuf};

use blockyard_control::{Answer, Kind, Problem, invalid};
use blockyard_disk::Source;
use blockyard_ring::sandbox::is_reserved;

use crate::process::looks;

/// Returns an error if the path does not fit into one line of a message, or if its folder does not
/// exist.
pub fn check(field: &str, path: &str) -> Answer<()> {
    if path.contains(char::is_control) {
        let what = format!("{path:?}: the path of an image has no control characters");
        return Err(invalid(field, &what));
    }
    let folder = folder(Path::new(path));
    if seen(folder, path, |folder| folder.exists())? {
        return Ok(());
    }
    let folder = folder.display();
    let what = format!("{path}: its folder {folder} does not exist: create it first");
    Err(invalid(field, &what))
}

/// Returns an error if the path belongs to the server's configuration.
pub fn check_reserved(field: &str, path: &str) -> Answer<()> {
    if !is_reserved(path.as_ref()) {
        return Ok(());
    }
    let what = format!(
        "{path}: it belongs to the server's configuration or is a program of it, which no disk may \
         use: choose another place"
    );
    Err(invalid(field, &what))
}

/// Returns an error if no new image can be at the path.
pub fn check_free(field: &str, path: &str) -> Answer<()> {
    if path.is_empty() || Source::scheme_of(path.as_ref()).is_some() {
        let what = format!("\"{path}\": a new image is a file of this host: give its path");
        return Err(invalid(field, &what));
    }
    check(field, path)?;
    check_reserved(field, path)?;
    // A link to nothing counts, too.
    if seen(path.as_ref(), path, |file| file.symlink_metadata().is_ok())? {
        let what = format!("{path}: the file exists already: remove it, or choose another path");
        return Err(invalid(field, &what));
    }
    Ok(())
}

/// Returns the folder of a file.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the answer of `look` about a file. `path`: what the caller named.
fn seen(file: &Path, path: &str, look: fn(&PathBuf) -> bool) -> Answer<bool> {
    let owned = file.to_path_buf();
    let seen = looks::look(file, looks::LIMIT, move || look(&owned));
    seen.map_err(|e| Problem::new(Kind::Busy, format!("{path}: {e}")))
}
