//! One open image of a chain: its file, and what its format knows.

use std::sync::Arc;

use blockyard_storage::ImageFile;

use crate::SECTOR;
use crate::cow;
use crate::format::Format;
use crate::qcow2;

/// An open image of a chain: its file, and what its format knows.
#[derive(Debug)]
pub struct ChainLayer {
    pub format: Format,
    pub file: Arc<ImageFile>,
    /// qcow2's external data file.
    pub data: Option<Arc<ImageFile>>,
    pub(crate) meta: Meta,
}

/// What reactors share of an open image, as its format has it.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    Raw,
    Qcow2(Arc<qcow2::Shared>),
    Cow(Arc<cow::Shared>),
}

impl ChainLayer {
    pub fn qcow2(&self) -> Option<&Arc<qcow2::Shared>> {
        match &self.meta {
            Meta::Qcow2(shared) => Some(shared),
            Meta::Raw | Meta::Cow(_) => None,
        }
    }

    pub fn cow(&self) -> Option<&Arc<cow::Shared>> {
        match &self.meta {
            Meta::Cow(shared) => Some(shared),
            Meta::Raw | Meta::Qcow2(_) => None,
        }
    }

    /// Bytes of the disk that it describes, in whole sectors.
    pub fn size(&self) -> u64 {
        match &self.meta {
            Meta::Raw => self.file.size().next_multiple_of(SECTOR),
            // A qcow2 image's size need not be whole sectors; what is beyond it reads as zeroes.
            Meta::Qcow2(shared) => shared.size().next_multiple_of(SECTOR),
            Meta::Cow(shared) => shared.size(),
        }
    }
}

/// Returns how many images two chains end with in common: the same files, in the same formats.
pub(crate) fn shared_layers(a: &[Arc<ChainLayer>], b: &[Arc<ChainLayer>]) -> usize {
    let same = |(a, b): &(&Arc<ChainLayer>, &Arc<ChainLayer>)| {
        a.format == b.format && a.file.id().is_some() && a.file.id() == b.file.id()
    };
    a.iter().rev().zip(b.iter().rev()).take_while(same).count()
}
