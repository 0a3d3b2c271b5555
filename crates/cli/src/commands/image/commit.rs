//! `image commit`: writes an overlay into its backing file.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use blockyard_image::qcow2::Preallocation;
use blockyard_image::tools::{self, NewBacking, NewSize, Progress};
use blockyard_image::{CacheMode, Chain, ChainOptions, Format, Overlaid};
use blockyard_program::ending::Failure;
use clap::Args;

use super::progress::ProgressArgs;
use super::{FolderArgs, ImageArgs, cache, failed, new, open, print, size};

#[derive(Args)]
pub struct CommitArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Commit into this image of the chain instead of the direct backing file. Implies -d.
    ///
    /// Afterwards the images between the two, and all other overlays of BASE, are invalid: delete
    /// or rebase them.
    #[arg(short, long, value_name = "BASE")]
    base: Option<PathBuf>,
    /// Do not empty the overlay after the commit.
    #[arg(short = 'd', long)]
    drop: bool,
    /// Maximum bytes to copy per second, such as 50M.
    #[arg(short, long, value_name = "SIZE",
        value_parser = rate)]
    rate_limit: Option<u64>,
    /// Cache mode of the images. All data is durable when the command ends.
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback",
        value_parser = cache())]
    cache: CacheMode,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

fn rate(text: &str) -> Result<u64, String> {
    size::parse(text)
        .and_then(|rate| if rate > 0 { Ok(rate) } else { Err("it must be more than 0".into()) })
}

pub fn run(options: &CommitArgs) -> Result<(), Failure> {
    let reading = ChainOptions {
        cache: options.cache,
        // Refuse an abandoned overlay before the base is enlarged.
        reads_abandoned: false,
        ..options.folders.reading(&options.image.file, options.image.format)
    };
    tools::apply_journal_of(&reading).map_err(failed)?;
    let mut read_only_chain = open(&reading)?;
    let into = base(options, &read_only_chain)?;
    if into > 1 {
        apply_journals(read_only_chain, into)?;
        read_only_chain = open(&reading)?;
    }
    let (size, format) = (read_only_chain.size(), read_only_chain.top().format);
    let names = read_only_chain.describe();
    if read_only_chain.layers()[into].size() < size {
        grow(read_only_chain, into, size)?;
    } else {
        // Release the chain's read locks, which would conflict with opening it for writing.
        drop(read_only_chain);
    }
    let empty = !options.drop && options.base.is_none();
    // A COW file needs a new header after the commit: see `update_backing_time`.
    let read_only = !empty && format != Format::Cow;
    let committing =
        ChainOptions { read_only, only_locked: true, commit_into: Some(into), ..reading };
    let chain = open(&committing)?;
    if chain.describe() != names {
        return Err(anyhow!(
            "image {}: its backing files changed during the commit: try again",
            options.image.file.display()
        )
        .into());
    }
    let progress = Arc::<Progress>::default();
    let work = || tools::commit(&chain, options.rate_limit, super::threads(), &progress);
    options.show.during(&progress, work).map_err(failed)?;
    if empty {
        tools::make_empty(&chain).map_err(failed)?;
    }
    if format == Format::Cow {
        update_backing_time(&chain)?;
    }
    if options.show.quiet { Ok(()) } else { print("Image committed.\n") }
}

/// Returns the index of the image to commit into, in the chain.
fn base(options: &CommitArgs, chain: &Chain) -> Result<usize, Failure> {
    if chain.layers().len() < 2 {
        return Err(anyhow!(
            "image {}: it has no backing file to commit into",
            options.image.file.display()
        )
        .into());
    }
    let Some(name) = &options.base else { return Ok(1) };
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let meant = [real(name), real(&new::folder(&options.image.file).join(name))];
    let is_meant = |path: &Path| real(path).is_some_and(|path| meant.contains(&Some(path)));
    let found = chain.layers().iter().skip(1).position(|layer| is_meant(layer.file.path()));
    let none = || {
        anyhow!(
            "image {}: {} is not one of its backing files: {}",
            options.image.file.display(),
            name.display(),
            chain.describe()
        )
    };
    Ok(found.with_context(none)? + 1)
}

/// Applies the journals that dead servers have left for the images between the topmost one and the
/// target: the commit also copies their data. The open for the commit applies the target's journal.
fn apply_journals(chain: Arc<Chain>, into: usize) -> Result<(), Failure> {
    let between: Vec<_> = (1..into).map(|depth| alone(&chain, depth)).collect();
    // Release the chain's read locks, which would conflict with opening the images for writing.
    drop(chain);
    between.iter().try_for_each(|image| tools::apply_journal_of(image).map_err(failed))
}

/// Returns the options of an image of the chain, without the images above it.
fn alone(chain: &Chain, depth: usize) -> ChainOptions {
    let layer = &chain.layers()[depth];
    let mut folders = chain.options().folders.clone();
    if folders.is_empty() {
        folders.push(new::folder(&chain.options().path).into());
    }
    let above = &chain.layers()[..depth];
    ChainOptions {
        format: Some(layer.format),
        cache: chain.options().cache,
        folders,
        overlaid: Overlaid::Below(above.iter().map(|above| above.file.path().into()).collect()),
        ..ChainOptions::new(layer.file.path())
    }
}

/// Grows an image of the chain to the size of the topmost one. The new part reads as zeroes, as it
/// does through the chain.
fn grow(chain: Arc<Chain>, into: usize, size: u64) -> Result<(), Failure> {
    let alone = ChainOptions { only_locked: true, ..alone(&chain, into) };
    let meant = chain.layers()[into].file.id();
    // Release the chain's read locks, which would conflict with opening the image for writing.
    drop(chain);
    let opened = open(&alone)?;
    if opened.top().file.id() != meant {
        return Err(anyhow!("image {}: another file replaced it", alone.path.display()).into());
    }
    let wanted = NewSize { size, shrink: false, preallocation: Preallocation::Off };
    tools::resize(&opened, wanted).map_err(failed)
}

/// Writes the new size and modification time of the backing file into a COW file, which checks
/// them at open. The commit changed them.
fn update_backing_time(chain: &Chain) -> Result<(), Failure> {
    let name = chain.top().cow().context("a cow file")?.header().backing.clone();
    let stat = std::fs::metadata(chain.layers()[1].file.path())?;
    let backing = NewBacking::Cow { name, size: stat.len(), mtime: stat.mtime() };
    tools::set_backing(&chain.top().file, backing).map_err(failed)
}
