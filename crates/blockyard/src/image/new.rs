//! New images: what `create` and `convert` make of their options.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use blockyard_image::Format;

/// An image that is to be.
pub struct NewImage {
    pub format: Format,
    /// Bytes of the disk.
    pub size: u64,
}

impl NewImage {
    /// Makes the empty file at `path` that image.
    pub fn make(&self, path: &Path) -> anyhow::Result<()> {
        match self.format {
            Format::Raw => {
                let file = File::options().write(true).open(path)?;
                file.set_len(self.size).with_context(|| format!("making a file of {} bytes", self.size))?;
                Ok(())
            }
            Format::Qcow2 | Format::Cow => anyhow::bail!("{} images cannot be made yet", self.format),
        }
    }
}
