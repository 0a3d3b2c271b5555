//! `blockyard image`: the commands of qemu-img, over `blockyard_image::tools`.
//!
//! ```text
//!   info, map, measure, compare, check   inspect images       convert, dd   copy disks
//!   create      new images: their options (settings), their parameters (new), their files (output)
//!   commit, rebase                       overlays and their backing files
//!   resize, snapshot, bitmap, amend      changes of an image in place
//!   progress    progress bars            size     sizes with units, such as 10G
//! ```
//! In: the command line. Out: text for people, or JSON as qemu-img prints it; an exit status.

mod amend;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod dd;
mod info;
mod map;
mod measure;
mod new;
mod output;
mod progress;
mod rebase;
mod resize;
mod settings;
mod size;
mod snapshot;
mod snapshots;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_image::{CacheMode, Chain, ChainError, ChainOptions, Format};
use blockyard_program::ending::Failure;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum, ValueHint};

#[derive(Subcommand)]
pub enum Command {
    /// Create an empty image, or an overlay of another image.
    Create(create::CreateArgs),
    /// Print format, size, backing file and features of an image.
    Info(info::InfoArgs),
    /// Check the consistency of an image, and repair it.
    ///
    /// Exit status: 0 consistent, 1 failure, 3 corrupt, 4 no data in danger (leaks, or metadata
    /// that opening the image repairs).
    Check(check::CheckArgs),
    /// List the extents of a disk, and where their data is.
    Map(map::MapArgs),
    /// Print the size that a new image would need, empty or with the disk of another image.
    Measure(measure::MeasureArgs),
    /// Compare the disks of two images.
    ///
    /// Exit status: 0 identical, 1 different, 2 failure.
    Compare(compare::CompareArgs),
    /// Copy a disk into a new image, with another format or other options.
    Convert(Box<convert::ConvertArgs>),
    /// Copy a part of a disk into a new image.
    Dd(dd::DdArgs),
    /// Grow or shrink a disk.
    Resize(resize::ResizeArgs),
    /// Write the data of an overlay into its backing file, and empty the overlay.
    Commit(commit::CommitArgs),
    /// Change the backing file of an overlay, or remove it. The disk stays the same.
    Rebase(rebase::RebaseArgs),
    /// Change persistent dirty bitmaps of a qcow2 image, which record writes.
    Bitmap(bitmap::BitmapArgs),
    /// Change options of a qcow2 image in place.
    Amend(amend::AmendArgs),
    /// List, create, apply and delete internal snapshots of a qcow2 image.
    Snapshot(snapshot::SnapshotArgs),
}

/// Runs the command. Returns the exit status if the command succeeds.
pub fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Create(options) => create::run(options).map(|()| 0),
        Command::Info(options) => info::run(options).map(|()| 0),
        Command::Check(options) => check::run(options),
        Command::Map(options) => map::run(options).map(|()| 0),
        Command::Measure(options) => measure::run(options).map(|()| 0),
        Command::Compare(options) => compare::run(options),
        Command::Convert(options) => convert::run(options).map(|()| 0),
        Command::Dd(options) => dd::run(options).map(|()| 0),
        Command::Resize(options) => resize::run(options).map(|()| 0),
        Command::Commit(options) => commit::run(options).map(|()| 0),
        Command::Rebase(options) => rebase::run(options).map(|()| 0),
        Command::Bitmap(options) => bitmap::run(options).map(|()| 0),
        Command::Amend(options) => amend::run(options).map(|()| 0),
        Command::Snapshot(options) => snapshot::run(options).map(|()| 0),
    }
}

/// Returns a parser for image formats.
pub fn format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(Format::NAMES.map(|(name, _)| name))
        .try_map(|name| name.parse::<Format>())
}

/// Returns a parser for cache modes.
fn cache() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::NAMES.map(|(name, _)| name))
        .try_map(|name| name.parse::<CacheMode>())
}

/// The image of a command that has one.
#[derive(Args)]
pub struct ImageArgs {
    /// The image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Format of the image [default: from the file name].
    #[arg(short, long, value_parser = format())]
    format: Option<Format>,
}

/// How to print.
#[derive(Args)]
pub struct OutputArgs {
    /// Print JSON, as qemu-img does.
    #[arg(long)]
    json: bool,
    /// Output format.
    #[arg(long, value_name = "FORMAT", default_value = "human", hide_default_value = true)]
    output: PrintFormat,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum PrintFormat {
    Human,
    Json,
}

impl OutputArgs {
    fn is_json(&self) -> bool {
        self.json || self.output == PrintFormat::Json
    }
}

/// Where backing files may be.
#[derive(Args)]
pub struct FolderArgs {
    /// Open backing and data files only in this folder or below. May be repeated [default: the
    /// image's own folder].
    #[arg(long = "backing-folder", value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    backing_folders: Vec<PathBuf>,
}

/// Whether to read images that another program may write to.
#[derive(Args)]
pub struct SharingArgs {
    /// Take no lock, to read the image of a running server.
    ///
    /// Changes since the server's last flush may be missing.
    #[arg(short = 'U', long)]
    force_share: bool,
}

impl FolderArgs {
    /// Returns options to open an image for reading, through the page cache.
    fn reading(&self, path: &Path, format: Option<Format>) -> ChainOptions {
        ChainOptions {
            format,
            read_only: true,
            cache: CacheMode::Writeback,
            folders: self.backing_folders.clone(),
            reads_abandoned: true,
            ..ChainOptions::new(path)
        }
    }
}

/// Opens a chain. A missing format is a usage error.
fn open(options: &ChainOptions) -> Result<Arc<Chain>, Failure> {
    Chain::open(options).map(Arc::new).map_err(failed)
}

/// Returns the given format, else the format of the file name. Returns a usage error if neither is
/// known.
fn format_of(path: &Path, given: Option<Format>) -> Result<Format, Failure> {
    let format = given.or_else(|| Format::of_name(path));
    format.ok_or_else(|| failed(ChainError::Format { path: path.into() }))
}

fn failed(error: ChainError) -> Failure {
    match error {
        ChainError::Format { .. } => Failure::usage(error),
        other => other.into(),
    }
}

/// Prints text on standard output.
fn print(text: &str) -> Result<(), Failure> {
    Ok(blockyard_program::output::print(text)?)
}

/// Returns text from an image without control characters, which could change what a terminal has
/// shown, or add a line.
fn printable(text: &str) -> String {
    blockyard_ring::text::clean(text)
}

fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Returns the number of threads for CPU-bound work: one for each processor, at most 8.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(8))
}
