//! The files of a disk's images, also while the images are not open.
//!
//! In: the files when they were last open. Out: whether a commit into an image of another disk
//! would change this one.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::{Chain, ChainLayer, FileId, ImageFile};

/// The files of a disk's images, which need not be open, topmost image first.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerFiles(Vec<LayerFile>);

/// A file of an image. `id`: None if it is no file of this host.
#[derive(Clone, Debug)]
struct LayerFile {
    path: PathBuf,
    id: Option<FileId>,
}

impl LayerFile {
    fn of(file: &Arc<ImageFile>) -> Self {
        LayerFile { path: file.path().into(), id: file.id() }
    }

    /// Returns whether both may be the same file. Images of other hosts have only their names. The
    /// identity of a file that is not open changes when its file system is mounted again.
    fn may_be(&self, other: &LayerFile) -> bool {
        self.path == other.path || (self.id.is_some() && self.id == other.id)
    }
}

impl LayerFiles {
    pub(crate) fn of<'a>(files: impl Iterator<Item = &'a Arc<ImageFile>>) -> Self {
        LayerFiles(files.map(LayerFile::of).collect())
    }

    fn has(&self, file: &Arc<ImageFile>) -> bool {
        let file = LayerFile::of(file);
        self.0.iter().any(|own| own.may_be(&file))
    }

    /// Returns whether a change of the image below the topmost one of `chain` would change a disk
    /// with these files. The topmost image hides such a change, if the disk has that image, too.
    pub(crate) fn show_backing_of(&self, chain: &Chain) -> bool {
        let [top, backing, ..] = chain.layers() else { return false };
        of_layer(backing).any(|file| self.has(file)) && !self.has(&top.file)
    }
}

/// Returns the files of one image.
pub(crate) fn of_layer(layer: &ChainLayer) -> impl Iterator<Item = &Arc<ImageFile>> {
    [Some(&layer.file), layer.data.as_ref()].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_the_same_by_identity_or_by_name() {
        let file = |path: &str, id| LayerFile { path: path.into(), id };
        let id = FileId::of_path("/".as_ref()).ok();
        let other_id = FileId::of_path("/proc".as_ref()).ok();
        for (one, other, may_be) in [
            (file("/a", id), file("/b", id), true),
            (file("/a", id), file("/b", other_id), false),
            (file("/a", id), file("/a", other_id), true),
            (file("nbd://host/a", None), file("nbd://host/a", None), true),
            (file("nbd://host/a", None), file("nbd://host/b", None), false),
            (file("/a", id), file("/b", None), false),
        ] {
            assert_eq!(one.may_be(&other), may_be, "{one:?} {other:?}");
        }
    }
}
