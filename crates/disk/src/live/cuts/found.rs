//! What a start finds after a power cut.

use blockyard_image::qcow2::check::{Repair, check};
use blockyard_image::{Format, ImageFile, Raw};
use blockyard_ring::{Executor, Segments};

use crate::backend::{Backend, Source};

/// A disk after a power cut, which a start can open, with images that are consistent.
pub struct Found {
    /// The contents of the disk.
    pub bytes: Vec<u8>,
    /// The names of its images, the topmost first.
    pub images: Vec<String>,
    /// Whether the topmost image is a qcow2 image without data.
    pub is_top_empty: bool,
    /// Whether a backup had its name.
    pub has_target: bool,
}

impl Found {
    pub fn of(executor: &Executor, source: &Source) -> Result<Self, String> {
        let (handle, of) = (executor.handle().clone(), source.clone());
        let found = executor.block_on(async move {
            let len = of.capacity() as usize;
            let backend = Backend::open(&handle, &of).map_err(|e| e.to_string())?;
            let (segments, read) = backend.read(Segments::buffer(len), 0).await;
            read.map_err(|e| format!("cannot read the disk: {e}"))?;
            let mut bytes = vec![0; len];
            segments.copy_out(0, &mut bytes);
            let (mut images, mut is_top_empty) = (Vec::new(), false);
            let mut note = async |file: &ImageFile, format| {
                let name = file.path().file_name().unwrap_or_default().to_string_lossy();
                let is_first = images.is_empty();
                images.push(name.to_string());
                if format != Format::Qcow2 {
                    return Ok(());
                }
                let raw = Raw::open(file, &handle).map_err(|e| e.to_string())?;
                let report = check(&raw, None, Repair::No).await.map_err(|e| e.to_string())?;
                is_top_empty |= is_first && report.allocated_clusters == 0;
                match report.corruptions + report.check_errors {
                    0 => Ok(()),
                    _ => Err(format!("{name} is corrupt: {:?}", report.findings)),
                }
            };
            match &of {
                Source::Chain(chain) => {
                    for layer in chain.layers() {
                        note(&layer.file, layer.format).await?;
                    }
                }
                of => note(of.file().ok_or("no image")?, Format::Raw).await?,
            }
            Ok(Found { bytes, images, is_top_empty, has_target: false })
        });
        found.map_err(|e| format!("a read hangs: {e}"))?
    }
}
