//! One open image of a chain: its file, and its format's shared state.

use std::sync::Arc;

use blockyard_storage::ImageFile;

use crate::SECTOR;
use crate::cow;
use crate::layers::format::Format;
use crate::layers::meta::Meta;
use crate::qcow2;

use super::left::LeftImage;
use super::shared::Sharing;

/// An open image of a chain: its file, and its format's shared state.
#[derive(Debug)]
pub struct ChainLayer {
    pub format: Format,
    pub file: Arc<ImageFile>,
    /// External data file of a qcow2 image.
    pub data: Option<Arc<ImageFile>>,
    pub(crate) meta: Meta,
    /// Some: other chains may have the same image open, and nothing writes to it.
    pub(crate) sharing: Option<Sharing>,
}

impl ChainLayer {
    /// Returns an image that other chains may have open, too.
    pub(super) fn shared(sharing: Sharing) -> Self {
        let (format, file, meta) = sharing.image();
        ChainLayer { format, file, data: None, meta, sharing: Some(sharing) }
    }

    /// Returns the shared state, if this is a qcow2 image.
    pub fn qcow2(&self) -> Option<&Arc<qcow2::Shared>> {
        match &self.meta {
            Meta::Qcow2(shared) => Some(shared),
            Meta::Raw | Meta::Cow(_) => None,
        }
    }

    /// Returns the shared state, if this is a COW file.
    pub fn cow(&self) -> Option<&Arc<cow::Shared>> {
        match &self.meta {
            Meta::Cow(shared) => Some(shared),
            Meta::Raw | Meta::Qcow2(_) => None,
        }
    }

    /// Returns whether the image must be closed: metadata in memory differ from the file, or it has
    /// a journal.
    pub fn has_changes(&self) -> bool {
        match &self.meta {
            Meta::Raw => false,
            Meta::Qcow2(shared) => shared.has_changes(),
            Meta::Cow(shared) => shared.has_changes(),
        }
    }

    /// Returns the state of the file for the next server of this host, after
    /// [`Image::leave`](crate::Image::leave). None: the next server must check the image.
    pub fn left(&self) -> Option<LeftImage> {
        let Meta::Qcow2(shared) = &self.meta else { return None };
        let is_whole = !shared.read_only() && self.data.is_none() && !shared.has_unwritten();
        self.file.fd().filter(|_| is_whole).and_then(|fd| LeftImage::of(&**fd))
    }

    /// Returns the size of the virtual disk that this image holds, in bytes, rounded up to whole
    /// sectors.
    pub fn size(&self) -> u64 {
        match &self.meta {
            Meta::Raw => self.file.size().next_multiple_of(SECTOR),
            // The size of a qcow2 image need not be a multiple of the sector size. Bytes between
            // its end and the end of its last sector read as zeroes.
            Meta::Qcow2(shared) => shared.size().next_multiple_of(SECTOR),
            Meta::Cow(shared) => shared.size(),
        }
    }
}

/// Returns the number of images at the bottom of two chains that are the same files in the same
/// formats.
pub(crate) fn shared_layers(a: &[Arc<ChainLayer>], b: &[Arc<ChainLayer>]) -> usize {
    let same = |(a, b): &(&Arc<ChainLayer>, &Arc<ChainLayer>)| {
        a.format == b.format && a.file.id().is_some() && a.file.id() == b.file.id()
    };
    a.iter().rev().zip(b.iter().rev()).take_while(same).count()
}
