//! Creates an overlay of an image that a disk still writes to, for a fork of the disk.
//!
//! In: the image, and the path of the overlay. Out: a complete overlay without a name, and later
//! with its name. What must hold: the overlay is durable before it has its name. A process that
//! dies before that leaves no file with the name. The caller gives the overlay its name when
//! nothing writes to the image any more.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_storage::{CacheMode, FileId, ImageFile, OpenOptions, nbd};

use crate::chain::overlay::{OVERLAY, outside_of, stored_name};
use crate::chain::{Allowed, ChainError, ChainOptions};
use crate::error::ImageError;
use crate::layers::format::Format;
use crate::qcow2::CreateOptions;

use super::create::{NewImage, create};
use super::unnamed::UnnamedFile;

/// The image below a new overlay. A disk may still write to it: its contents are not read.
#[derive(Clone, Debug)]
pub struct OverlayBase {
    pub path: PathBuf,
    pub format: Format,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Options if the image is on an NBD server.
    pub nbd: nbd::Options,
}

/// A new overlay. Dropping it removes it, unless it was kept.
pub struct NewOverlay {
    path: PathBuf,
    file: Option<Arc<OwnedFd>>,
    /// None: the overlay has its name.
    unnamed: Option<UnnamedFile>,
    base: ImageFile,
}

impl NewOverlay {
    /// Creates an overlay for `path`, where no file may exist. `folders`: those that may contain
    /// the overlay's backing files, as in [`ChainOptions::folders`].
    pub fn create(
        path: &Path,
        base: &OverlayBase,
        folders: &[PathBuf],
    ) -> Result<Self, ChainError> {
        let wrong = |error| ChainError::Image { path: path.into(), error };
        let open = OpenOptions::new(&base.path, true, CacheMode::Writeback);
        let below = ImageFile::open(&OpenOptions { force_share: true, nbd: base.nbd, ..open })?;
        let folders = folders.to_vec();
        let allowed = Allowed::by(&ChainOptions { folders, ..ChainOptions::new(path) });
        if let Some(outside) = outside_of(&allowed, &below).map_err(wrong)? {
            let what = format!(
                "its backing file {} lies outside the allowed folders: allow its folder (key \
                 backing-folders of the new disk)",
                outside.display()
            );
            return Err(wrong(ImageError::refused(OVERLAY, what)));
        }
        let name = stored_name(&below, path).map_err(wrong)?;
        let new = UnnamedFile::create(path)?;
        let options = CreateOptions::overlay(base.size, name, base.format.to_string());
        let files = new.files();
        create(path, &files, NewImage::Qcow2 { options, data: None })?;
        let (path, file) = (path.into(), files.image);
        Ok(NewOverlay { path, file, unnamed: Some(new), base: below })
    }

    /// Gives the overlay its name, durably, and the mode and, if possible, the owner and the group
    /// of the image below it. Fails if a file exists there.
    pub fn publish(&mut self) -> Result<(), ChainError> {
        let never_given_up = AtomicBool::new(false);
        let new = self.unnamed.take();
        // An overlay that has no name after an error is gone.
        new.map_or(Ok(()), |new| new.publish(&self.base, &never_given_up)).inspect_err(|_| {
            self.file = None;
        })
    }

    /// Keeps the overlay, which has its name.
    pub fn keep(mut self) {
        self.file = None;
    }
}

impl Drop for NewOverlay {
    fn drop(&mut self) {
        let Some(file) = self.file.take().filter(|_| self.unnamed.is_none()) else { return };
        // Another program may have put its own file there.
        if let (Ok(own), Ok(present)) = (FileId::of_fd(&file), FileId::of_path(&self.path))
            && own == present
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::Chain;

    #[test]
    fn an_overlay_has_its_name_when_it_is_published_and_stays_if_it_is_kept() {
        let folder = format!("blockyard-overlay-{}", std::process::id());
        let folder = Path::new("/var/tmp").join(folder);
        std::fs::create_dir_all(folder.join("far")).unwrap();
        let (base, path) = (folder.join("base"), folder.join("new.qcow2"));
        std::fs::write(&base, vec![7; 1 << 20]).unwrap();
        let (format, size, nbd) = (Format::Raw, 1 << 20, nbd::Options::default());
        let below = OverlayBase { path: base, format, size, nbd };
        let new = || NewOverlay::create(&path, &below, &[]).unwrap();
        let published = || {
            let mut new = new();
            assert!(!path.exists());
            new.publish().unwrap();
            new
        };
        drop(new());
        assert!(!path.exists());
        drop(published());
        assert!(!path.exists());
        // The file of another program stays.
        let replaced = published();
        std::fs::rename(&path, folder.join("moved")).unwrap();
        std::fs::write(&path, b"other").unwrap();
        assert!(NewOverlay::create(&path, &below, &[]).is_err());
        drop(replaced);
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        std::fs::remove_file(&path).unwrap();
        // It is taken between creation and publication.
        let mut late = new();
        std::fs::write(&path, b"other").unwrap();
        assert!(late.publish().is_err());
        drop(late);
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        std::fs::remove_file(&path).unwrap();

        published().keep();
        let options = ChainOptions { read_only: true, ..ChainOptions::new(&path) };
        let chain = Chain::open(&options).unwrap();
        assert_eq!((chain.layers().len(), chain.size()), (2, 1 << 20));
        let far = folder.join("far/new.qcow2");
        let refused = NewOverlay::create(&far, &below, &[]).err().unwrap().to_string();
        assert!(refused.contains("lies outside the allowed folders"), "{refused}");
        let mut allowed = NewOverlay::create(&far, &below, std::slice::from_ref(&folder)).unwrap();
        allowed.publish().unwrap();
        drop(allowed);
        assert!(!far.exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
