//! `image convert`.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_image::tools::{self, ConvertOptions, Progress};
use blockyard_image::{CacheMode, ChainError, ChainOptions, Format};
use clap::Args;

use super::new::NewImage;
use super::output::NewFile;
use super::progress::Show;
use super::{Folders, cache, failed, format, open, size, threads};
use crate::Failure;

#[derive(Args)]
pub struct Options {
    /// The image that is read.
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The new image.
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// The source's format [default: as its name says].
    #[arg(short = 'f', long = "format", visible_alias = "source-format", value_parser = format())]
    source_format: Option<Format>,
    /// The new image's format [default: as its name says].
    #[arg(short = 'O', long = "target-format", value_parser = format())]
    target_format: Option<Format>,
    /// Zeroes are left out where so many bytes of them follow one another; 0: all is written.
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE", default_value = "4k", value_parser = size::parse)]
    sparse: u64,
    /// Requests in flight for each thread.
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// The cache mode in which the source is read.
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback", value_parser = cache())]
    source_cache: CacheMode,
    /// The cache mode in which the new image is written; it is durable at the end.
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback", value_parser = cache())]
    target_cache: CacheMode,
    /// Replace the target if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    folders: Folders,
    #[command(flatten)]
    show: Show,
}

pub fn run(options: &Options) -> Result<(), Failure> {
    let source = open(&ChainOptions {
        cache: options.source_cache,
        ..options.folders.reading(&options.source, options.source_format)
    })?;
    let named = options.target_format.or_else(|| Format::of_name(&options.target));
    let format = named.ok_or_else(|| failed(ChainError::Format { path: options.target.clone() }))?;
    let file = NewFile::create(&options.target, options.force)?;
    let new = NewImage { format, size: source.size() };
    new.make(file.temporary())?;
    let target = open(&ChainOptions {
        format: Some(format),
        cache: options.target_cache,
        folders: options.folders.backing_folders.clone(),
        ..ChainOptions::new(file.temporary())
    })?;
    let progress = Arc::<Progress>::default();
    let how = ConvertOptions {
        threads: threads(),
        at_a_time: options.parallel.into(),
        sparse: options.sparse,
        ..ConvertOptions::default()
    };
    let work = || tools::convert(&source, &target, &how, &progress).and_then(|()| tools::close(&target));
    options.show.during(&progress, work).map_err(failed)?;
    Ok(file.finish()?)
}
