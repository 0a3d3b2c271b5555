//! An image that a server of this host has left to the next one.
//!
//! An image is checked before it is opened for writing, which reads all of its metadata. A guest
//! that waits for a hand-over need not wait for that: the server before has had the image open.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxFlags};
use serde::{Deserialize, Serialize};

/// The state of an image's file when its last server left it. A file that has been written since
/// has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct LeftImage {
    device: [u32; 2],
    inode: u64,
    size: u64,
    /// Times of the last write, and of the last change of the inode: seconds and nanoseconds since
    /// 1970.
    written: (i64, u32),
    changed: (i64, u32),
}

impl LeftImage {
    /// Returns the state of a file. None: it is no regular file, so its times do not say when it
    /// was written.
    pub(super) fn of(file: impl AsFd) -> Option<Self> {
        let stat =
            rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        if !rustix::fs::FileType::from_raw_mode(stat.stx_mode.into()).is_file() {
            return None;
        }
        Some(LeftImage {
            device: [stat.stx_dev_major, stat.stx_dev_minor],
            inode: stat.stx_ino,
            size: stat.stx_size,
            written: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        })
    }
}
