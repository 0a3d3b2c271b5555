//! `image bitmap`: persistent dirty bitmaps of a qcow2 image, for incremental backups.

use std::path::PathBuf;

use anyhow::anyhow;
use blockyard_image::Format;
use blockyard_image::qcow2::bitmap::edit::{self, Edit};
use blockyard_image::tools::{apply_journal, on_file};
use blockyard_program::ending::Failure;
use clap::Args;

use super::{ImageArgs, failed, format, format_of, size};

#[derive(Args)]
pub struct BitmapArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Name of the bitmap.
    #[arg(value_name = "BITMAP")]
    name: String,
    #[command(flatten)]
    what: BitmapActions,
    /// Image with the bitmap of --merge [default: FILE].
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<PathBuf>,
    /// Format of that image [default: from the file name].
    #[arg(short = 'F', long, requires = "source_file", value_parser = format())]
    source_format: Option<Format>,
    /// Bytes of the disk for each bit of a new bitmap, 512 to 2G [default: the cluster size, but
    /// 4k to 64k].
    #[arg(short, long, value_name = "SIZE", requires = "add", value_parser = size::parse)]
    granularity: Option<u64>,
}

/// Several actions run in this order, in one atomic change.
#[derive(Args)]
#[group(required = true, multiple = true)]
struct BitmapActions {
    /// Remove the bitmap.
    #[arg(long, conflicts_with_all = ["add", "clear", "merge", "enable", "disable"])]
    remove: bool,
    /// Add an empty bitmap that records writes from now on.
    #[arg(long)]
    add: bool,
    /// Clear all bits.
    #[arg(long)]
    clear: bool,
    /// Also set the bits that are set in another bitmap.
    #[arg(long, value_name = "BITMAP")]
    merge: Vec<String>,
    /// Record writes from now on.
    #[arg(long, conflicts_with = "disable")]
    enable: bool,
    /// Stop recording writes.
    #[arg(long)]
    disable: bool,
}

pub fn run(options: &BitmapArgs) -> Result<(), Failure> {
    let file = &options.image.file;
    let source = options.source_file.as_ref().unwrap_or(file);
    let source_format =
        if options.source_file.is_some() { options.source_format } else { options.image.format };
    for (path, format) in [(file, options.image.format), (source, source_format)] {
        if format_of(path, format)? != Format::Qcow2 {
            return Err(anyhow!("image {}: only qcow2 images have bitmaps", path.display()).into());
        }
    }
    let BitmapActions { remove, add, clear, merge, enable, disable } = &options.what;
    let mut edits = Vec::new();
    edits.extend(remove.then_some(Edit::Remove));
    edits.extend(add.then_some(Edit::Add { granularity: options.granularity }));
    edits.extend(clear.then_some(Edit::Clear));
    for name in merge {
        let name = name.clone();
        let bits = on_file(source, true, async move |raw| edit::read(&raw, &name).await)
            .map_err(failed)?;
        edits.push(Edit::Merge(bits));
    }
    edits.extend(enable.then_some(Edit::Record(true)));
    edits.extend(disable.then_some(Edit::Record(false)));
    let name = options.name.clone();
    apply_journal(file, Format::Qcow2).map_err(failed)?;
    on_file(file, false, async move |raw| edit::edit(&raw, &name, &edits).await).map_err(failed)
}
