//! `image commit`.

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
    /// Commit into this image of the chain, not into the next one; implies -d. The images between
    /// the two, and all other images over that one, are invalid then: throw them away, or rebase
    /// them.
    #[arg(short, long, value_name = "BASE")]
    base: Option<PathBuf>,
    /// Do not empty the image: it keeps its contents, which are in its backing file too.
    #[arg(short = 'd', long)]
    drop: bool,
    /// Copy at most so many bytes in a second, such as 50M.
    #[arg(short, long, value_name = "SIZE", value_parser = rate)]
    rate_limit: Option<u64>,
    /// The cache mode in which the images are opened; what is written is durable at the end.
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback", value_parser = cache())]
    cache: CacheMode,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

fn rate(text: &str) -> Result<u64, String> {
    size::parse(text)
        .and_then(|rate| if rate > 0 { Ok(rate) } else { Err("it is to be more than 0".into()) })
}

pub fn run(options: &CommitArgs) -> Result<(), Failure> {
    let reading = ChainOptions {
        cache: options.cache,
        ..options.folders.reading(&options.image.file, options.image.format)
    };
    let looked_at = open(&reading)?;
    let into = base(options, &looked_at)?;
    let (size, format) = (looked_at.size(), looked_at.top().format);
    let names = looked_at.describe();
    if looked_at.layers()[into].size() < size {
        grow(looked_at, into, size)?;
    } else {
        // Its locks would be in the way.
        drop(looked_at);
    }
    let empty = !options.drop && options.base.is_none();
    // A COW file is written to in any case: see below.
    let read_only = !empty && format != Format::Cow;
    let committing =
        ChainOptions { read_only, only_locked: true, commit_into: Some(into), ..reading };
    let chain = open(&committing)?;
    if chain.describe() != names {
        return Err(anyhow!(
            "image {}: somebody has changed its backing files meanwhile",
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
        know_again(&chain)?;
    }
    if options.show.quiet { Ok(()) } else { print("Image committed.\n") }
}

/// Which image of the chain is meant.
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
            "image {}: {} is none of its backing files: {}",
            options.image.file.display(),
            name.display(),
            chain.describe()
        )
    };
    Ok(found.with_context(none)? + 1)
}

/// Makes an image of the chain as large as the topmost: what is new there is zeroes, as the chain
/// shows it.
fn grow(chain: Arc<Chain>, into: usize, size: u64) -> Result<(), Failure> {
    let layer = &chain.layers()[into];
    let mut folders = chain.options().folders.clone();
    if folders.is_empty() {
        folders.push(new::folder(&chain.options().path).into());
    }
    let alone = ChainOptions {
        format: Some(layer.format),
        only_locked: true,
        cache: chain.options().cache,
        folders,
        overlaid: Overlaid::Below(
            chain.layers()[..into].iter().map(|above| above.file.path().into()).collect(),
        ),
        ..ChainOptions::new(layer.file.path())
    };
    let meant = layer.file.id();
    // Its locks would be in the way.
    drop(chain);
    let opened = open(&alone)?;
    if opened.top().file.id() != meant {
        return Err(
            anyhow!("image {}: another file has its name meanwhile", alone.path.display()).into()
        );
    }
    let wanted = NewSize { size, shrink: false, preallocation: Preallocation::Off };
    tools::resize(&opened, wanted).map_err(failed)
}

/// A COW file knows its backing file by its size and its time, which the commit has changed.
fn know_again(chain: &Chain) -> Result<(), Failure> {
    let name = chain.top().cow().context("a cow file")?.header().backing.clone();
    let stat = std::fs::metadata(chain.layers()[1].file.path())?;
    let backing = NewBacking::Cow { name, size: stat.len(), mtime: stat.mtime() };
    tools::set_backing(&chain.top().file, backing).map_err(failed)
}
