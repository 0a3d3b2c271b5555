//! New files. They have no name until they are complete, so that a command that is interrupted or
//! killed leaves nothing behind.
//!
//! ```text
//!   create ─► checks, locks the file to replace ─► pending: a file without a name ─► finish
//! ```
//! What must hold:
//! - A file is replaced only with `--force`, only if it is not in use, and only if the command does
//!   not read it.
//! - It stays unchanged until the new file is complete and durable. (A block device: until all
//!   options are checked.)
//! - The name is durable when the command ends.

mod attributes;
mod pending;
mod unfinished;

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use blockyard_image::tools::{self, NewImage};
use blockyard_image::{Chain, FileId, Format, OpenedFiles};

use super::new::folder;
use pending::Pending;

/// A new image, and its data file.
pub struct NewFile {
    image: Pending,
    data: Option<Pending>,
    force: bool,
}

impl NewFile {
    /// Starts a new file for `path`. A block device is used as it is. `sources`: files that the
    /// command reads.
    pub fn create(path: &Path, force: bool, sources: &Sources) -> anyhow::Result<Self> {
        sources.refuse(path)?;
        let image = Pending::create(path, force, || {
            anyhow!("{} exists already: use --force to replace it", path.display())
        })?;
        Ok(NewFile { image, data: None, force })
    }

    /// Returns whether the new image reads as zeroes. A device that has the data of the disk may
    /// contain old ones.
    pub fn is_fresh(&self, format: Format) -> bool {
        let has_old_data = match &self.data {
            Some(data) => data.is_device(),
            None => format == Format::Raw && self.image.is_device(),
        };
        !has_old_data
    }

    /// Creates the image in the file, and its external data file.
    pub fn make(&mut self, new: NewImage, sources: &Sources) -> anyhow::Result<()> {
        if let NewImage::Qcow2 { data: Some(data), .. } = &new {
            sources.refuse(data)?;
            if self.image.is_at(data) {
                bail!("data file {}: it cannot be the image itself", data.display());
            }
            let exists = || {
                anyhow!("data file {} exists already: use --force to replace it", data.display())
            };
            let pending = Pending::create(data, self.force, exists);
            self.data =
                Some(pending.map_err(|e| e.context(format!("data file {}", data.display())))?);
        }
        Ok(tools::create(self.image.path(), &self.files(), new)?)
    }

    /// Returns the descriptors of the files, which have no names yet.
    pub fn files(&self) -> OpenedFiles {
        OpenedFiles { image: self.image.file(), data: self.data.as_ref().and_then(Pending::file) }
    }

    /// Gives the files their names. Their contents are durable already. The image comes last,
    /// because it refers to the data file by name.
    pub fn finish(self) -> anyhow::Result<()> {
        let data = self.data.map(Pending::finish).transpose()?;
        let image = self.image.finish();
        if image.is_err()
            && let Some(data) = data
        {
            data.remove();
        }
        image.map(|_| ())
    }
}

/// Files that the command reads, which it must not replace.
#[derive(Default)]
pub struct Sources(Vec<(FileId, PathBuf)>);

impl Sources {
    pub fn add_chain(&mut self, chain: &Chain) {
        let files =
            chain.layers().iter().flat_map(|layer| [Some(&layer.file), layer.data.as_ref()]);
        self.0.extend(files.flatten().filter_map(|file| Some((file.id()?, file.path().into()))));
    }

    pub fn add_path(&mut self, path: &Path) {
        self.0.extend(FileId::of_path(path).ok().map(|id| (id, path.into())));
    }

    fn refuse(&self, path: &Path) -> anyhow::Result<()> {
        let Ok(id) = FileId::of_path(path) else { return Ok(()) };
        match self.0.iter().find(|(source, _)| *source == id) {
            Some((_, source)) => {
                bail!(
                    "{} cannot be replaced: the command reads it, as {}",
                    path.display(),
                    source.display()
                )
            }
            None => Ok(()),
        }
    }
}

/// Returns whether two paths name the same file. The file need not exist yet.
fn same_place(a: &Path, b: &Path) -> bool {
    let folder_of = |path| FileId::of_path(folder(path)).ok();
    match (FileId::of_path(a), FileId::of_path(b)) {
        (Ok(a), Ok(b)) => a == b,
        (Err(_), Err(_)) => {
            a.file_name() == b.file_name()
                && folder_of(a).is_some_and(|id| Some(id) == folder_of(b))
        }
        _ => false,
    }
}
