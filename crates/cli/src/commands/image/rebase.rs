//! `image rebase`: changes the backing file of an overlay.

use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use blockyard_image::tools::{self, NewBacking, Progress, RebaseOptions};
use blockyard_image::{CacheMode, Chain, ChainOptions, FileId, Format};
use blockyard_program::ending::Failure;
use clap::Args;

use super::new::Backing;
use super::progress::ProgressArgs;
use super::{FolderArgs, ImageArgs, cache, failed, format, format_of, open, threads};

#[derive(Args)]
pub struct RebaseArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// New backing file. An empty name removes the backing file and copies its data into the image.
    ///
    /// A relative name is relative to the image's folder.
    #[arg(short, long, value_name = "NAME")]
    backing: String,
    /// Format of the backing file [default: from the file name].
    #[arg(short = 'F', long,
        value_parser = format())]
    backing_format: Option<Format>,
    /// Change only the name in the header, for a backing file that was moved or renamed.
    ///
    /// The new file must have the same data as the old one, otherwise the disk changes. Neither
    /// file has to exist. An overlay that was abandoned can be served again.
    #[arg(short = 'u', long = "unsafe")]
    only_name: bool,
    /// Compress clusters that are copied as a whole (qcow2).
    #[arg(short, long, conflicts_with = "only_name")]
    compress: bool,
    /// Cache mode of the image. All data is durable when the command ends.
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback",
        value_parser = cache())]
    cache: CacheMode,
    /// Cache mode of the new backing file.
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback",
        value_parser = cache())]
    source_cache: CacheMode,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

pub fn run(options: &RebaseArgs) -> Result<(), Failure> {
    let format = format_of(&options.image.file, options.image.format)?;
    let backing = match options.backing.as_str() {
        "" => None,
        name => Some(
            Backing::new(name, options.backing_format, &options.image.file)
                .map_err(Failure::usage)?,
        ),
    };
    let wrong =
        |what: &str| Failure::from(anyhow!("image {}: {what}", options.image.file.display()));
    let new = match (format, &backing) {
        (Format::Raw, _) => return Err(wrong("raw images have no backing files")),
        (Format::Cow, None) => {
            return Err(wrong(
                "a cow image needs a backing file: use `image convert` for an image without one",
            ));
        }
        (Format::Cow, Some(backing)) => {
            let (name, size, mtime) = backing.of_cow()?;
            NewBacking::Cow { name, size, mtime }
        }
        (Format::Qcow2, None) => NewBacking::None,
        (Format::Qcow2, Some(backing)) => {
            let name = backing.stored_name().map_err(Failure::usage)?.into();
            NewBacking::Qcow2 { name, format: backing.format }
        }
    };
    if backing.as_ref().is_some_and(|backing| is_same(&backing.path, &options.image.file)) {
        return Err(wrong("it cannot be its own backing file"));
    }
    if options.compress && format != Format::Qcow2 {
        return Err(Failure::usage(anyhow!("-c: only qcow2 images have compressed clusters")));
    }
    tools::apply_journal(&options.image.file, format).map_err(failed)?;
    if options.only_name {
        tools::set_backing(
            &Arc::new(tools::open_file(&options.image.file, false).map_err(failed)?),
            new,
        )
        .map_err(failed)?;
    } else {
        safely(options, backing.as_ref(), new)?;
    }
    if let Some(backing) = backing {
        backing.warn_if_far(&options.image.file);
    }
    Ok(())
}

/// Changes the backing file, and copies the data that differs, so that the disk stays the same.
fn safely(options: &RebaseArgs, backing: Option<&Backing>, new: NewBacking) -> Result<(), Failure> {
    let base = backing.map(|backing| open_new(options, backing)).transpose()?;
    let writing = ChainOptions {
        read_only: false,
        // The disk stays the same, so bitmaps that record writes stay valid.
        keeps_disk: true,
        cache: options.cache,
        ..options.folders.reading(&options.image.file, options.image.format)
    };
    let chain = open(&writing)?;
    if let (NewBacking::Cow { .. }, Some(base)) = (&new, &base)
        && base.size() != chain.size()
    {
        let what = format!(
            "{} bytes; the backing file of a cow image is as large as its disk: {}",
            base.size(),
            chain.size()
        );
        return Err(anyhow!(
            "image {}: the new backing file has {what}",
            options.image.file.display()
        )
        .into());
    }
    let header = chain.top().qcow2().map(|shared| shared.header());
    if options.compress && header.as_ref().is_some_and(|header| header.has_data_file()) {
        return Err(Failure::usage(anyhow!(
            "-c: clusters in an external data file cannot be compressed"
        )));
    }
    if header.is_some_and(|header| header.raw_data_file()) {
        return Err(anyhow!(
            "image {}: an image with a raw external data file cannot have a backing file",
            options.image.file.display()
        )
        .into());
    }
    let progress = Arc::<Progress>::default();
    let how = RebaseOptions { threads: threads(), compress: options.compress };
    let work = || tools::rebase(&chain, base.as_ref(), how, &progress);
    options.show.during(&progress, work).map_err(failed)?;
    tools::set_backing(&chain.top().file, new).map_err(failed)
}

/// Opens the new backing file. Returns an error if its chain contains the image itself.
fn open_new(options: &RebaseArgs, backing: &Backing) -> Result<Arc<Chain>, Failure> {
    let base = open(&ChainOptions {
        cache: options.source_cache,
        ..backing.reading(&options.folders, &options.image.file)
    })?;
    let own = FileId::of_path(&options.image.file).ok();
    if own.is_some() && base.layers().iter().any(|layer| layer.file.id() == own) {
        let (name, file) = (&backing.name, options.image.file.display());
        return Err(anyhow!(
            "image {file}: it is in the backing chain of {name}: the chain would be a circle"
        )
        .into());
    }
    Ok(base)
}

fn is_same(a: &Path, b: &Path) -> bool {
    FileId::of_path(a).is_ok_and(|a| FileId::of_path(b).is_ok_and(|b| a == b))
}
