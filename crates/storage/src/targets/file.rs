//! The files that a target uses itself, such as a table.

use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use blockyard_ring::{Lent, Segments, UringFile};

use crate::sim::SimDisk;
use crate::storage::Storage;

/// The files of a target, in the order in which it named them.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Files that only the target uses; see `Target::file`.
    pub own: Vec<OwnFile>,
    /// Lengths of the data files at the start, in bytes.
    pub data_len: Vec<u64>,
}

/// A file that only the target uses, through the page cache. Its methods work on the target's
/// thread.
#[derive(Clone)]
pub struct OwnFile(Rc<Inner>);

struct Inner {
    path: PathBuf,
    medium: Medium,
}

enum Medium {
    Host(UringFile),
    Sim(SimDisk),
}

impl std::fmt::Debug for OwnFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OwnFile").field(&self.0.path).finish()
    }
}

impl OwnFile {
    pub(crate) fn host(path: PathBuf, file: UringFile) -> Self {
        OwnFile(Rc::new(Inner { path, medium: Medium::Host(file) }))
    }

    /// Returns a file on a simulated disk. It is public for `blockyard::testing` only, because a
    /// [`SimDisk`] is no part of the library.
    #[doc(hidden)]
    pub fn simulated(disk: SimDisk) -> Self {
        OwnFile(Rc::new(Inner { path: "simulated".into(), medium: Medium::Sim(disk) }))
    }

    /// Returns the path by which the file was opened.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the length in bytes.
    pub async fn len(&self) -> io::Result<u64> {
        match &self.0.medium {
            Medium::Host(file) => file.len().await,
            Medium::Sim(disk) => disk.len().await,
        }
    }

    /// Returns whether the file has no bytes.
    pub async fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len().await? == 0)
    }

    /// Sets the length in bytes.
    pub async fn set_len(&self, len: u64) -> io::Result<()> {
        match &self.0.medium {
            Medium::Host(file) => file.set_len(len).await,
            Medium::Sim(disk) => disk.set_len(len).await,
        }
    }

    /// Fills `data` from `offset`. Bytes behind the end of the file are zeroes.
    pub async fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let buffer = self.fill(Segments::buffer(data.len()), offset).await?;
        buffer.copy_out(0, data);
        Ok(())
    }

    /// Fills a request's memory from `offset`, without a copy. Bytes behind the end of the file are
    /// zeroes.
    pub async fn read_into(&self, data: &Lent, offset: u64) -> io::Result<()> {
        self.fill(data.segments()?, offset).await.map(drop)
    }

    async fn fill(&self, segments: Segments, offset: u64) -> io::Result<Segments> {
        let (segments, read) = match &self.0.medium {
            Medium::Host(file) => file.read(segments, offset).await,
            Medium::Sim(disk) => disk.read(segments, offset).await,
        };
        let read = read?.min(segments.len());
        segments.zero(read, segments.len() - read);
        Ok(segments)
    }

    /// Writes all of `data` at `offset`. Durable after [`OwnFile::sync`].
    pub async fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.put(Segments::from_bytes(data), offset).await
    }

    /// Writes a request's memory at `offset`, without a copy. Durable after [`OwnFile::sync`].
    pub async fn write_from(&self, data: &Lent, offset: u64) -> io::Result<()> {
        self.put(data.segments()?, offset).await
    }

    async fn put(&self, segments: Segments, offset: u64) -> io::Result<()> {
        let (segments, written) = match &self.0.medium {
            Medium::Host(file) => file.write(segments, offset, false).await,
            Medium::Sim(disk) => disk.write(segments, offset, false).await,
        };
        match written? {
            written if written < segments.len() => Err(io::ErrorKind::WriteZero.into()),
            _ => Ok(()),
        }
    }

    /// Makes all writes durable that ended before this call.
    pub async fn sync(&self) -> io::Result<()> {
        match &self.0.medium {
            Medium::Host(file) => file.sync().await,
            Medium::Sim(disk) => disk.sync().await,
        }
    }
}
