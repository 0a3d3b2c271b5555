//! `image resize`: grows or shrinks a disk.

use anyhow::anyhow;
use blockyard_image::qcow2::Preallocation;
use blockyard_image::tools::{self, NewSize};
use blockyard_image::{ChainOptions, SECTOR};
use blockyard_program::ending::Failure;
use clap::Args;

use super::settings::preallocation;
use super::{FolderArgs, ImageArgs, failed, open, print, size};
use crate::options::values::explain;

#[derive(Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// New size of the disk, such as 10G, or a difference: +1G grows it, -1G shrinks it.
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true, value_parser = change)]
    size: Change,
    /// Allow the disk to shrink. The data after its new end is lost.
    #[arg(long)]
    shrink: bool,
    /// Preallocation of the new space.
    #[arg(long, value_name = "MODE", default_value = "off",
        value_parser = explain(PREALLOCATION, mode))]
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

const PREALLOCATION: &[(&str, &str)] = &[
    ("off", "none"),
    ("metadata", "the tables of qcow2"),
    ("falloc", "space on the file system, by fallocate(2)"),
    ("full", "zeroes are written"),
];

fn mode(text: &str) -> Result<Preallocation, String> {
    preallocation(text).ok_or_else(|| "it must be off, metadata, falloc or full".into())
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
        .ok_or_else(|| wrong(format!("it has {old} bytes: the new size is out of range")))?;
    if !size.is_multiple_of(SECTOR) {
        return Err(wrong(format!("{size} bytes are not whole sectors of {SECTOR} bytes")).into());
    }
    let wanted = NewSize { size, shrink: options.shrink, preallocation: options.preallocation };
    tools::resize(&chain, wanted).map_err(failed)?;
    if options.quiet { Ok(()) } else { print("Image resized.\n") }
}
