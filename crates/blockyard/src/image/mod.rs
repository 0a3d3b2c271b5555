//! `blockyard image`: the commands of qemu-img, over `blockyard_image::tools`.
//!
//! ```text
//!   info, map, measure, compare, check  what images are  convert, dd  images into another one
//!   create               new images: options (settings), what is made of them (new), files (output)
//!   commit, rebase       what is in an overlay, and what is below it
//!   resize, snapshot, bitmap, amend  images that stay where they are
//!   progress             bars                  size      sizes as people write them
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
use clap::{Args, Subcommand, ValueEnum};

#[derive(Subcommand)]
pub enum Command {
    /// Make an empty image, or an overlay of another one.
    Create(create::CreateArgs),
    /// Say what an image is: its format, size, backing file, features.
    Info(info::InfoArgs),
    /// Find out whether an image is sound, and repair it. Exit status: 0 sound, 1 failed, 3
    /// corrupt, 4 no danger to data (leaks, or what opening the image mends).
    Check(check::CheckArgs),
    /// Say where the bytes of an image are.
    Map(map::MapArgs),
    /// Say how many bytes a new image would take, empty or with the disk of another one.
    Measure(measure::MeasureArgs),
    /// Say whether two images hold the same disk. Exit status: 0 the same, 1 not the same, 2
    /// failed.
    Compare(compare::CompareArgs),
    /// Make a new image of another format, with the same disk.
    Convert(Box<convert::ConvertArgs>),
    /// Copy a part of a disk into a new image.
    Dd(dd::DdArgs),
    /// Give a disk another size.
    Resize(resize::ResizeArgs),
    /// Write what an overlay holds into its backing file, and empty the overlay.
    Commit(commit::CommitArgs),
    /// Give an overlay another backing file, or none, with the same disk.
    Rebase(rebase::RebaseArgs),
    /// Add, remove, clear, merge, enable and disable bitmaps of a qcow2 image, which record what
    /// was written.
    Bitmap(bitmap::BitmapArgs),
    /// Change options of a qcow2 image where it stands.
    Amend(amend::AmendArgs),
    /// List, take, apply and delete snapshots inside a qcow2 image.
    Snapshot(snapshot::SnapshotArgs),
}

/// Does the command; the exit status when it went well.
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

/// Formats by their names.
pub fn format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(Format::NAMES.map(|(name, _)| name))
        .try_map(|name| name.parse::<Format>())
}

fn cache() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::NAMES.map(|(name, _)| name))
        .try_map(|name| name.parse::<CacheMode>())
}

/// The image that a command is about.
#[derive(Args)]
pub struct ImageArgs {
    /// The image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Its format [default: as its name says].
    #[arg(short, long, value_parser = format())]
    format: Option<Format>,
}

/// How to print.
#[derive(Args)]
pub struct OutputArgs {
    /// Print JSON, as qemu-img does.
    #[arg(long)]
    json: bool,
    /// human or json.
    #[arg(long, value_name = "HOW", default_value = "human", hide_default_value = true)]
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
    /// Backing and data files are opened in this folder and below; may be repeated [default: the
    /// image's own folder].
    #[arg(long = "backing-folder", value_name = "FOLDER")]
    backing_folders: Vec<PathBuf>,
}

/// Whether to read what another program may write to.
#[derive(Args)]
pub struct SharingArgs {
    /// Take no lock: also images that are being written to, such as those of a running server. What
    /// was changed since its last flush may be missing.
    #[arg(short = 'U', long)]
    force_share: bool,
}

impl FolderArgs {
    /// Options to open an image for reading, its page cache included.
    fn reading(&self, path: &Path, format: Option<Format>) -> ChainOptions {
        ChainOptions {
            format,
            read_only: true,
            cache: CacheMode::Writeback,
            folders: self.backing_folders.clone(),
            ..ChainOptions::new(path)
        }
    }
}

/// Opens a chain; not to say a format where one is needed is a mistake in the command.
fn open(options: &ChainOptions) -> Result<Arc<Chain>, Failure> {
    Chain::open(options).map(Arc::new).map_err(failed)
}

/// The format that was said, or that the name tells.
fn format_of(path: &Path, said: Option<Format>) -> Result<Format, Failure> {
    let format = said.or_else(|| Format::of_name(path));
    format.ok_or_else(|| failed(ChainError::Format { path: path.into() }))
}

fn failed(error: ChainError) -> Failure {
    match error {
        ChainError::Format { .. } => Failure::usage(error),
        other => other.into(),
    }
}

/// Prints a whole answer.
fn print(text: &str) -> Result<(), Failure> {
    Ok(blockyard_program::output::print(text)?)
}

fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Threads for work that keeps processors busy.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(8))
}
