//! The identity of a file of this host, whatever its name.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FileType, Stat};
use serde::{Deserialize, Serialize};

/// A file by its inode, or a block device by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileId {
    File { device: u64, inode: u64 },
    BlockDevice { number: u64 },
}

impl FileId {
    /// Returns the identity from a `stat` result.
    pub fn of(stat: &Stat) -> Self {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => FileId::BlockDevice { number: stat.st_rdev },
            _ => FileId::File { device: stat.st_dev, inode: stat.st_ino },
        }
    }

    /// Returns the file that a path leads to.
    pub fn of_path(path: &Path) -> io::Result<Self> {
        Ok(FileId::of(&rustix::fs::stat(path)?))
    }

    /// Returns the file of a descriptor.
    pub fn of_fd(fd: impl AsFd) -> io::Result<Self> {
        Ok(FileId::of(&rustix::fs::fstat(fd)?))
    }
}
