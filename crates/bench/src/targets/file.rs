//! A file or a block device, by plain system calls, as a program on the host or in a guest uses
//! them.
//!
//! In: a path. Out: a [`Target`]. What must hold: a durable write is durable by itself (O_DSYNC),
//! as the kernel promises it.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result};
use blockyard_ring::host;
use rustix::fs::OFlags;

use super::{Access, SECTOR, Target};

pub struct File {
    file: fs::File,
    size: u64,
    block: u64,
}

impl File {
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        let mut flags = OFlags::empty();
        flags.set(OFlags::DIRECT, access.direct);
        flags.set(OFlags::DSYNC, access.durable);
        let mut options = fs::OpenOptions::new();
        let file =
            options.read(true).write(access.writes).custom_flags(flags.bits() as i32).open(path)?;
        let size = host::file_size(&file)?;
        let block = if access.direct {
            let geometry = host::geometry(&file)?;
            anyhow::ensure!(
                geometry.direct_offset > 0,
                "there is no O_DIRECT here: leave out --direct"
            );
            u64::from(geometry.direct_offset).max(SECTOR)
        } else {
            SECTOR
        };
        Ok(File { file, size, block })
    }
}

impl Target for File {
    fn size(&self) -> u64 {
        self.size
    }

    fn block(&self) -> u64 {
        self.block
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        self.file
            .read_exact_at(bytes, offset)
            .with_context(|| format!("reading {len} bytes at offset {offset}"))
    }

    fn write(&mut self, offset: u64, bytes: &mut [u8], _durable: bool) -> Result<()> {
        let len = bytes.len();
        self.file
            .write_all_at(bytes, offset)
            .with_context(|| format!("writing {len} bytes at offset {offset}"))
    }
}
