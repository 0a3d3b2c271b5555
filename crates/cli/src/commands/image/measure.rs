//! `image measure`: the size that a new image would need.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use blockyard_image::tools::{self, Measure};
use blockyard_image::{ChainOptions, Format, SECTOR};
use blockyard_program::ending::Failure;
use clap::Args;
use serde_json::{Map, Value};

use super::new::{self, Backing};
use super::settings::{self, Settings};
use super::{FolderArgs, OutputArgs, SharingArgs, failed, format, open, print, print_json, size};

#[derive(Args)]
pub struct MeasureArgs {
    /// Image with the disk to copy.
    #[arg(value_name = "FILE", required_unless_present = "size")]
    file: Option<PathBuf>,
    /// Format of the image [default: from the file name].
    #[arg(short, long, value_parser = format())]
    format: Option<Format>,
    /// Size of an empty disk, instead of FILE (suffixes K, M, G, T).
    #[arg(short, long, value_name = "SIZE", conflicts_with = "file", value_parser = size::parse)]
    size: Option<u64>,
    /// Format of the new image.
    #[arg(short = 'O', long = "target-format", default_value = "raw", value_parser = format())]
    target_format: Format,
    /// Options of the new image, key=value,...; -o help lists them.
    #[arg(short = 'o', long = "options", value_name = "LIST")]
    options: Vec<String>,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(options: &MeasureArgs) -> Result<(), Failure> {
    if let Some(help) = settings::help(options.target_format, &options.options) {
        return print(&help);
    }
    let settings =
        Settings::parse(options.target_format, &options.options).map_err(Failure::usage)?;
    settings.refuse_size("FILE, or --size").map_err(Failure::usage)?;
    let source = options.file.as_ref().map(|file| {
        open(&ChainOptions {
            force_share: options.sharing.force_share,
            ..options.folders.reading(file, options.format)
        })
    });
    let source = source.transpose()?;
    let size = source.as_ref().map(|source| source.size()).or(options.size);
    let size = size.ok_or_else(|| Failure::usage(anyhow!("FILE or --size is missing")))?;
    let size = size.checked_next_multiple_of(SECTOR).filter(|size| *size <= i64::MAX as u64);
    let size = size.ok_or_else(|| Failure::usage(anyhow!("--size: a disk has less than 8 EiB")))?;
    // File names in the options are not opened, because the new image has no folder.
    let nowhere = Path::new("");
    let backing = Backing::find(None, None, &settings, nowhere).map_err(Failure::usage)?;
    let new = new::plan(&settings, size, backing.as_ref(), nowhere).map_err(Failure::usage)?;
    let measure = tools::measure(&new, source.as_ref()).map_err(failed)?;
    if options.output.is_json() {
        print_json(&Value::Object(json(&measure)))
    } else {
        print(&text(&measure))
    }
}

fn text(measure: &Measure) -> String {
    let Measure { required, fully_allocated, bitmaps } = measure;
    let bitmaps = bitmaps.map_or(String::new(), |bytes| format!("bitmaps size: {bytes}\n"));
    format!("required size: {required}\nfully allocated size: {fully_allocated}\n{bitmaps}")
}

fn json(measure: &Measure) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("required".into(), measure.required.into());
    fields.insert("fully-allocated".into(), measure.fully_allocated.into());
    if let Some(bytes) = measure.bitmaps {
        fields.insert("bitmaps".into(), bytes.into());
    }
    fields
}
