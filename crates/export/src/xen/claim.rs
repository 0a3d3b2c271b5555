//! Prevents two servers from serving one device: by a lock, and by the name of its image.
//!
//! In: the options of a device, and its disk. Out: the lock of the device, or the process that
//! holds the lock. What must hold: a server without the lock changes nothing of the device.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockyard_disk::{Disk, Source};
use blockyard_ring::host::Lock;
use blockyard_storage::file::lock::{LockError, take_lock};

use super::XenOptions;
use super::nodes::NodeError;

/// The lock of a device, a file in the folder of records. The kernel releases the lock at the
/// latest when this process ends.
pub struct Claim {
    /// `None`: no folder is configured, so there is no lock.
    file: Option<(PathBuf, File)>,
}

impl Claim {
    /// Takes the lock. Waits if the server that holds the lock was killed. Returns an error if that
    /// server is alive.
    pub fn take(options: &XenOptions) -> Result<Self, NodeError> {
        let XenOptions { domain, device, records, .. } = options;
        let Some(folder) = records else { return Ok(Claim { file: None }) };
        let path = folder.join(format!("{domain}-{device}.lock"));
        let failed = |error| match error {
            LockError::Held(server) => NodeError::Served(server),
            LockError::Io(source) => NodeError::Lock { path: path.clone(), source },
        };
        loop {
            let open = File::options().write(true).create(true).truncate(false).open(&path);
            let file = open.map_err(|e| failed(e.into()))?;
            take_lock(&path, file.as_fd(), Lock::Exclusive).map_err(failed)?;
            // The last server may have removed the file when its device ended.
            if is_at(&file, &path) {
                return Ok(Claim { file: Some((path, file)) });
            }
        }
    }

    /// Removes the lock file, because the device has ended.
    pub fn remove(self) {
        if let Some((path, _file)) = self.file {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(file), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (file.dev(), file.ino()) == (there.dev(), there.ino())
}

/// Returns the names of a disk's images, the topmost first. A disk without files
/// has its own name. Returns an empty list if the disk has lost its image.
pub fn images(disk: &Disk) -> Vec<String> {
    let name = |path: &Path| {
        path.canonicalize().unwrap_or_else(|_| path.into()).to_string_lossy().into_owned()
    };
    let source = disk.source();
    match (&source, source.file()) {
        (Source::Gone { .. }, _) => Vec::new(),
        (Source::Chain(chain), _) => {
            chain.layers().iter().map(|layer| name(layer.file.path())).collect()
        }
        (_, Some(file)) => vec![name(file.path())],
        (_, None) => vec![disk.name().into()],
    }
}
