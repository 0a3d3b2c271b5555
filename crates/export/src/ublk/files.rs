//! The files of a disk's image: whether io_uring can read and write them directly, and how they
//! must be aligned.

use blockyard_disk::{Disk, Source};
use blockyard_image::ImageFile;

use super::params::max_alignment;

/// Returns whether the image permits zero copy: io_uring reads and writes its files directly into
/// and from the kernel's pages. If the data comes over the network or is in memory, this process
/// copies it anyway. A back end that leaves a read's memory unchanged must not get the kernel's
/// pages, because it would expose their old contents.
pub(super) fn has_files(disk: &Disk) -> bool {
    every_file(disk, ImageFile::has_files)
}

/// Returns whether a new device may have zero copy.
pub(super) fn can_zero_copy(disk: &Disk) -> bool {
    has_files(disk) && memory_alignment(disk).is_none_or(|needed| needed <= max_alignment())
}

/// Returns the alignment of memory, in bytes, that the image's files with O_DIRECT need. `None`: no
/// file of the image uses O_DIRECT.
pub(super) fn memory_alignment(disk: &Disk) -> Option<u32> {
    let mut alignment = None;
    every_file(disk, |file| {
        if file.direct() {
            alignment = alignment.max(Some(file.geometry().direct_memory));
        }
        true
    });
    alignment
}

/// Returns whether `is` holds for every file of the image. An image without files: false.
fn every_file(disk: &Disk, mut is: impl FnMut(&ImageFile) -> bool) -> bool {
    match disk.source() {
        Source::File(file) | Source::Delay { file: Some(file), .. } => is(&file),
        Source::Chain(chain) => {
            let mut files = chain
                .layers()
                .iter()
                .flat_map(|layer| [Some(&layer.file), layer.data.as_ref()])
                .flatten();
            files.all(|file| is(file))
        }
        Source::Ram(_)
        | Source::Null { .. }
        | Source::Delay { file: None, .. }
        | Source::Inactive(_)
        | Source::Gone { .. } => false,
    }
}
