//! The files of this host on which a disk's images lie, and whether their paths still lead to them.
//!
//! In: the images that are open. Out: an error if a path leads to another file now; and identities
//! that the next server compares with those of the files that it opens. What must hold: work that
//! opens an image by its path again, or stores the path, does not take another file for it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::journal::ImageKey;
use blockyard_image::{FileId, ImageFile};
use serde::{Deserialize, Serialize};

use crate::backend::Source;
use crate::layer_files::{LayerFiles, of_layer};

/// Paths of the files of a disk's images, and the files that are open, topmost image first.
#[derive(Clone, Debug, Default)]
pub struct ImagePaths(Vec<(PathBuf, FileId)>);

/// Why a path does not lead to the file that is open.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    #[error("image {}: it cannot be opened again: {error}", image.display())]
    NotFound { image: PathBuf, error: io::Error },
    #[error(
        "image {}: another file is there now, or its file system was mounted again",
        .0.display()
    )]
    Replaced(PathBuf),
}

impl ImagePaths {
    fn of<'a>(files: impl Iterator<Item = &'a Arc<ImageFile>>) -> Self {
        ImagePaths(files.filter_map(|file| Some((file.path().into(), file.id()?))).collect())
    }

    /// Returns an error if a path does not lead to the file that is open. Waits for the file
    /// systems.
    pub fn check(&self) -> Result<(), PathError> {
        for (path, open) in &self.0 {
            match FileId::of_path(path) {
                Ok(found) if found == *open => {}
                Ok(_) => return Err(PathError::Replaced(path.clone())),
                Err(error) => return Err(PathError::NotFound { image: path.clone(), error }),
            }
        }
        Ok(())
    }
}

/// Identities of the files of a disk's images, topmost image first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct ImageFiles(Vec<ImageKey>);

impl ImageFiles {
    /// Returns the identities of a disk's open files. None: no file of this host is open.
    pub fn of(source: &Source) -> Option<Self> {
        let keys: io::Result<Vec<_>> = files(source)
            .filter_map(|file| file.fd())
            .map(|fd| ImageKey::as_known(&**fd))
            .collect();
        Some(ImageFiles(keys.ok().filter(|keys| !keys.is_empty())?))
    }

    /// Returns whether these files may contain the same disk as `earlier`: the earlier topmost
    /// image, with overlays of snapshots on it, and with no image below it that was not there. (A
    /// stream removes the images below.)
    pub fn may_continue(&self, earlier: &ImageFiles) -> bool {
        let was_there = |file: &ImageKey| earlier.0.iter().any(|known| known.may_be(file));
        let Some(top) = earlier.0.first() else { return true };
        let found = self.0.iter().position(|file| file.may_be(top));
        found.is_some_and(|top| self.0[top..].iter().all(was_there))
    }
}

/// The identities of a disk's files, found again only after the files have changed.
#[derive(Debug, Default)]
pub struct KnownFiles {
    ids: Vec<FileId>,
    files: Option<ImageFiles>,
}

impl KnownFiles {
    /// Returns the identities of a disk's open files. Makes system calls only if these are not the
    /// files of the call before.
    pub fn of(&mut self, source: &Source) -> Option<ImageFiles> {
        let ids: Vec<_> = files(source).filter_map(|file| file.id()).collect();
        if ids != self.ids || self.files.is_none() {
            self.files = if ids.is_empty() { None } else { ImageFiles::of(source) };
            self.ids = ids;
        }
        self.files.clone()
    }
}

impl Source {
    /// Returns the paths of all files, and the files that are open.
    pub fn paths(&self) -> ImagePaths {
        ImagePaths::of(files(self))
    }

    /// Returns the files of the images. If the images are not open, returns those that were open
    /// before.
    pub(crate) fn layer_files(&self) -> LayerFiles {
        match self {
            Source::Inactive(image) => image.files().clone(),
            source => LayerFiles::of(files(source)),
        }
    }

    /// Like [`Source::paths`], for the files of the topmost image.
    pub fn top_paths(&self) -> ImagePaths {
        match self.chain() {
            Some(chain) => ImagePaths::of(of_layer(chain.top())),
            None => self.paths(),
        }
    }
}

/// Returns the files of the images, topmost image first.
fn files(source: &Source) -> impl Iterator<Item = &Arc<ImageFile>> {
    let layers = source.chain().into_iter().flat_map(|chain| chain.layers());
    layers.flat_map(|layer| of_layer(layer)).chain(source.file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_may_come_and_backing_images_may_leave() {
        let key = |inode| ImageKey { device: 1, inode, born: inode };
        let files = |inodes: &[u64]| ImageFiles(inodes.iter().copied().map(key).collect());
        let earlier = files(&[3, 2, 1]);
        for (later, may) in [
            (&[3, 2, 1][..], true),
            (&[5, 4, 3, 2, 1], true),
            (&[3], true),
            (&[3, 1], true),
            (&[], false),
            (&[4], false),
            (&[2, 1], false),
            (&[4, 2, 1], false),
            (&[3, 2, 4], false),
            (&[3, 4, 2, 1], false),
        ] {
            assert_eq!(files(later).may_continue(&earlier), may, "{later:?}");
        }
        let unborn = ImageFiles(vec![ImageKey { born: 0, ..key(3) }]);
        assert!(unborn.may_continue(&files(&[3])) && files(&[3]).may_continue(&unborn));
        let reborn = ImageFiles(vec![ImageKey { born: 9, ..key(3) }]);
        assert!(!reborn.may_continue(&files(&[3])), "the number is used again");
    }

    #[test]
    fn a_path_that_leads_elsewhere_is_found() {
        let name = format!("blockyard-image-files-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let [path, other] = ["a", "b"].map(|name| folder.join(name));
        [&path, &other].iter().for_each(|path| std::fs::write(path, [0; 4096]).unwrap());
        let source = Source::open(&blockyard_image::ChainOptions::new(&path)).unwrap();
        let (paths, mut known) = (source.paths(), KnownFiles::default());
        paths.check().unwrap();
        let files = known.of(&source).unwrap();
        assert!(files.may_continue(&files));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(paths.check(), Err(PathError::NotFound { .. })));
        std::fs::rename(&other, &path).unwrap();
        assert!(matches!(paths.check(), Err(PathError::Replaced(image)) if image == path));
        let another = Source::open(&blockyard_image::ChainOptions::new(&path)).unwrap();
        assert!(!known.of(&another).unwrap().may_continue(&files));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
