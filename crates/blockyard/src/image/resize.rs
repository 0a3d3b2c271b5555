//! `image resize`.

use anyhow::anyhow;
use blockyard_image::qcow2::Preallocation;
use blockyard_image::tools::{self, NewSize};
use blockyard_image::{ChainOptions, SECTOR};
use blockyard_program::ending::Failure;
use clap::Args;

use super::settings::preallocation;
use super::{FolderArgs, ImageArgs, failed, open, print, size};

#[derive(Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Bytes of its disk, such as 10G; or how many more (+1G) or fewer (-1G).
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true, value_parser = change)]
    size: Change,
    /// The disk may become smaller: what lies beyond its new end is lost.
    #[arg(long)]
    shrink: bool,
    /// Space that is taken for what is new: off, metadata (qcow2's tables), falloc, or full (zeroes
    /// are written).
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = mode)]
    preallocation: Preallocation,
    /// Print nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    folders: FolderArgs,
}

#[derive(Clone, Copy)]
enum Change {
    To(u64),
    More(u64),
    Fewer(u64),
}

fn change(text: &str) -> Result<Change, String> {
    Ok(match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => Change::More(size::parse(more)?),
        (_, Some(fewer)) => Change::Fewer(size::parse(fewer)?),
        _ => Change::To(size::parse(text)?),
    })
}

fn mode(text: &str) -> Result<Preallocation, String> {
    preallocation(text).ok_or_else(|| "it is off, metadata, falloc or full".into())
}

pub fn run(options: &ResizeArgs) -> Result<(), Failure> {
    let reading = options.folders.reading(&options.image.file, options.image.format);
    let chain =
        open(&ChainOptions { read_only: false, only_locked: true, cut_outside: true, ..reading })?;
    let old = chain.size();
    let new = match options.size {
        Change::To(size) => Some(size),
        Change::More(more) => old.checked_add(more).filter(|&size| size <= i64::MAX as u64),
        Change::Fewer(fewer) => old.checked_sub(fewer),
    };
    let wrong = |what: String| anyhow!("image {}: {what}", options.image.file.display());
    let size = new
        .filter(|&size| size > 0)
        .ok_or_else(|| wrong(format!("it has {old} bytes: that cannot be its size")))?;
    if !size.is_multiple_of(SECTOR) {
        return Err(wrong(format!("{size} bytes are no whole sectors of {SECTOR}")).into());
    }
    let wanted = NewSize { size, shrink: options.shrink, preallocation: options.preallocation };
    tools::resize(&chain, wanted).map_err(failed)?;
    if options.quiet { Ok(()) } else { print("Image resized.\n") }
}
