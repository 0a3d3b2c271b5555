//! New files: they have no name until they are whole, so that a command that is interrupted or
//! killed leaves nothing.
//!
//! ```text
//!   create ─► checks, locks what is to be replaced ─► pending: a file without a name ─► finish: it gets its name
//! ```
//! What must hold: nothing that exists is replaced unless the user says so, nor while it is in use,
//! nor if the command itself reads it; what is to be replaced stays as it is until the new file is
//! whole and durable (a block device: until all options are checked); the name is durable when the
//! command ends.

mod pending;
mod unfinished;

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use blockyard_image::tools::{self, NewImage};
use blockyard_image::{Chain, FileId, OpenedFiles};

use super::new::folder;
use pending::Pending;

/// A new image, and its data file.
pub struct NewFile {
    image: Pending,
    data: Option<Pending>,
    force: bool,
}

impl NewFile {
    /// Begins a file that is to be at `path`. (A block device is taken as it is.) `sources`: what
    /// the command reads.
    pub fn create(path: &Path, force: bool, sources: &Sources) -> anyhow::Result<Self> {
        sources.refuse(path)?;
        let image = Pending::create(path, force, || {
            anyhow!("{} exists already: say --force to replace it", path.display())
        })?;
        Ok(NewFile { image, data: None, force })
    }

    pub fn is_device(&self) -> bool {
        self.image.is_device()
    }

    /// Makes the image in it, and its data file.
    pub fn make(&mut self, new: NewImage, sources: &Sources) -> anyhow::Result<()> {
        if let NewImage::Qcow2 { data: Some(data), .. } = &new {
            sources.refuse(data)?;
            if self.image.is_at(data) {
                bail!("data file {}: it cannot be the image itself", data.display());
            }
            let exists = || {
                anyhow!("data file {} exists already: say --force to replace it", data.display())
            };
            let pending = Pending::create(data, self.force, exists);
            self.data =
                Some(pending.map_err(|e| e.context(format!("data file {}", data.display())))?);
        }
        Ok(tools::create(self.image.path(), &self.files(), new)?)
    }

    /// Where the files are until they have their names.
    pub fn files(&self) -> OpenedFiles {
        OpenedFiles { image: self.image.file(), data: self.data.as_ref().and_then(Pending::file) }
    }

    /// Gives the files their names; their content is durable already. The image comes last: it
    /// names the data file.
    pub fn finish(self) -> anyhow::Result<()> {
        let data = self.data.map(Pending::finish).transpose()?;
        let image = self.image.finish();
        if image.is_err()
            && let Some(data) = data
        {
            data.take_back();
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

/// Whether two paths name the same place, at which there may be no file yet.
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
