//! `image convert`: copies disks into a new image.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use blockyard_image::tools::{self, ConvertOptions, Part, Progress};
use blockyard_image::{CacheMode, ChainOptions, Format, OpenedFiles};
use blockyard_program::ending::Failure;
use clap::Args;

use super::new::{self, Backing};
use super::output::{NewFile, Sources};
use super::progress::ProgressArgs;
use super::settings::{self, Settings};
use super::{FolderArgs, cache, failed, format, format_of, open, print, size, threads};

#[derive(Args)]
pub struct ConvertArgs {
    /// Images to read, and the new image. Several sources are concatenated.
    #[arg(value_name = "SOURCE... TARGET", num_args = 1.., required = true)]
    files: Vec<PathBuf>,
    /// Format of all sources [default: from each file name].
    #[arg(short = 'f', long = "format", visible_alias = "source-format",
        value_parser = format())]
    source_format: Option<Format>,
    /// Format of the new image [default: from the file name].
    #[arg(short = 'O', long = "target-format",
        value_parser = format())]
    target_format: Option<Format>,
    /// Options of the new image, key=value,...; -o help lists them.
    #[arg(short = 'o', long = "options", visible_alias = "target-options", value_name = "LIST")]
    options: Vec<String>,
    /// Compress the clusters of a new qcow2 image.
    #[arg(short, long)]
    compress: bool,
    /// Copy an internal snapshot of the source, by its name or ID.
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Make the new image an overlay of this image, with only the data that differs.
    ///
    /// A relative name is relative to the new image's folder.
    #[arg(short = 'B', long, value_name = "NAME")]
    backing: Option<String>,
    /// Format of the backing file [default: from the file name].
    #[arg(short = 'F', long,
        value_parser = format())]
    backing_format: Option<Format>,
    /// Write into an existing target, which must be large enough.
    #[arg(short, long, conflicts_with_all = ["options", "force", "backing"])]
    no_create: bool,
    /// Minimum run of zero bytes to leave out of the new image. 0 writes all zeroes.
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE", default_value = "4k",
        value_parser = size::parse)]
    sparse: u64,
    /// Requests in flight for each thread.
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Accepted for compatibility with qemu-img. Writes are always out of order.
    #[arg(short = 'W', long, hide = true)]
    out_of_order: bool,
    /// Cache mode of the sources.
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback",
        value_parser = cache())]
    source_cache: CacheMode,
    /// Cache mode of the new image. It is durable when the command ends.
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback",
        value_parser = cache())]
    target_cache: CacheMode,
    /// Replace the target if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

impl ConvertArgs {
    fn target(&self) -> &Path {
        &self.files[self.files.len() - 1]
    }

    fn sources(&self) -> Result<Vec<Part>, Failure> {
        let named = |text: &String| {
            let (_, name) = text
                .split_once('=')
                .filter(|(key, _)| key.starts_with("snapshot."))
                .unwrap_or(("", text));
            name.to_string()
        };
        let all = self.files[..self.files.len() - 1].iter();
        all.map(|path| {
            let reading = self.folders.reading(path, self.source_format);
            let snapshot = self.snapshot.as_ref().map(named);
            let chain = open(&ChainOptions { cache: self.source_cache, snapshot, ..reading })?;
            if self.snapshot.is_some() && chain.top().qcow2().is_none() {
                return Err(Failure::usage(anyhow!(
                    "-l: {} is not a qcow2 image: it has no snapshots",
                    path.display()
                )));
            }
            Ok(Part::whole(chain))
        })
        .collect()
    }
}

pub fn run(options: &ConvertArgs) -> Result<(), Failure> {
    if options.files.len() < 2 {
        return Err(Failure::usage(anyhow!(
            "TARGET is missing: give the new image after {}",
            options.target().display()
        )));
    }
    let format = format_of(options.target(), options.target_format)?;
    if let Some(help) = settings::help(format, &options.options) {
        return print(&help);
    }
    let settings = Settings::parse(format, &options.options).map_err(Failure::usage)?;
    settings.refuse_size("the source: use `image resize` afterwards").map_err(Failure::usage)?;
    if options.compress && (format != Format::Qcow2 || settings.has("data_file")) {
        return Err(Failure::usage(anyhow!(
            "-c: only qcow2 images without an external data file have compressed clusters"
        )));
    }
    let source = options.sources()?;
    let backing = Backing::find(
        options.backing.as_deref(),
        options.backing_format,
        &settings,
        options.target(),
    );
    let backing = backing.map_err(Failure::usage)?;
    if options.no_create {
        return copy(options, &source, OpenedFiles::default(), format, backing.as_ref(), false);
    }
    let (mut sources, mut chain) = (Sources::default(), None);
    source.iter().for_each(|part| sources.add_chain(&part.chain));
    match &backing {
        Some(backing) if options.force => {
            chain = Some(backing.chain(&options.folders, options.target())?)
        }
        Some(backing) => {
            backing.size(&options.folders)?;
        }
        None => {}
    }
    chain.iter().for_each(|chain| sources.add_chain(chain));
    let new = new::plan(&settings, tools::size_of(&source), backing.as_ref(), options.target())
        .map_err(Failure::usage)?;
    let mut file = NewFile::create(options.target(), options.force, &sources)?;
    file.make(new, &sources)?;
    let fresh = file.is_fresh(format);
    copy(options, &source, file.files(), format, backing.as_ref(), fresh)?;
    Ok(file.finish()?)
}

/// Copies the sources into the target, which exists, and makes it durable. `fresh`: the target
/// reads as zeroes.
fn copy(
    options: &ConvertArgs,
    source: &[Part],
    files: OpenedFiles,
    format: Format,
    backing: Option<&Backing>,
    fresh: bool,
) -> Result<(), Failure> {
    let mut folders = options.folders.backing_folders.clone();
    if let Some(backing) = backing {
        // The user gave its name, so its folder is allowed.
        folders.extend([new::folder(options.target()).into(), new::folder(&backing.path).into()]);
    }
    let target = open(&ChainOptions {
        format: Some(format),
        cache: options.target_cache,
        folders,
        files,
        ..ChainOptions::new(options.target())
    })?;
    let (has, needs) = (target.size(), tools::size_of(source));
    if has < needs {
        return Err(
            anyhow!("{} has {has} bytes; {needs} are needed", options.target().display()).into()
        );
    }
    let how = ConvertOptions {
        threads: threads(),
        at_a_time: options.parallel.into(),
        sparse: options.sparse,
        compress: options.compress,
        fresh,
    };
    let progress = Arc::<Progress>::default();
    let work =
        || tools::convert(source, &target, &how, &progress).and_then(|()| tools::close(&target));
    options.show.during(&progress, work).map_err(failed)
}
