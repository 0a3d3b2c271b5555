//! `image dd`: copies a part of a disk into a new image.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::anyhow;
use blockyard_image::tools::{self, ConvertOptions, Part, Progress};
use blockyard_image::{CacheMode, ChainOptions, Format, SECTOR};
use blockyard_program::ending::Failure;
use clap::Args;

use super::new;
use super::output::{NewFile, Sources};
use super::progress::ProgressArgs;
use super::settings::Settings;
use super::{FolderArgs, SharingArgs, failed, format, open, size, threads};

#[derive(Args)]
pub struct DdArgs {
    /// if=FILE: image to read. of=FILE: new image. bs=SIZE: block size in bytes [default: 512].
    /// count=N: blocks to copy [default: to the end of the disk]. skip=N: blocks to skip first.
    #[arg(value_name = "if=FILE of=FILE [bs=SIZE] [count=N] [skip=N]", required = true,
        num_args = 1..)]
    operands: Vec<String>,
    /// Format of the image to read [default: from the file name].
    #[arg(short = 'f', long = "format", value_parser = format())]
    source_format: Option<Format>,
    /// Format of the new image.
    #[arg(short = 'O', long = "target-format", default_value = "raw", value_parser = format())]
    target_format: Format,
    /// Replace the new image if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    #[command(flatten)]
    show: ProgressArgs,
}

struct Operands {
    source: PathBuf,
    target: PathBuf,
    block: u64,
    count: Option<u64>,
    skip: u64,
}

impl Operands {
    fn parse(list: &[String]) -> anyhow::Result<Self> {
        let (mut source, mut target, mut block, mut count, mut skip) =
            (None, None, SECTOR, None, 0);
        for operand in list {
            let (key, value) = operand.split_once('=').unwrap_or((operand, ""));
            let number = || size::parse(value).map_err(|e| anyhow!("{operand}: {e}"));
            match key {
                "if" => source = Some(value.into()),
                "of" => target = Some(value.into()),
                "bs" => block = number()?,
                "count" => count = Some(number()?),
                "skip" => skip = number()?,
                _ => anyhow::bail!(
                    "\"{operand}\": operands are if=FILE, of=FILE, bs=SIZE, count=N and skip=N"
                ),
            }
        }
        anyhow::ensure!(block > 0, "bs=0: a block has at least one byte");
        let missing = |key| anyhow!("{key}=FILE is missing");
        Ok(Operands {
            source: source.ok_or_else(|| missing("if"))?,
            target: target.ok_or_else(|| missing("of"))?,
            block,
            count,
            skip,
        })
    }
}

pub fn run(options: &DdArgs) -> Result<(), Failure> {
    let Operands { source, target, block, count, skip } =
        Operands::parse(&options.operands).map_err(Failure::usage)?;
    let format = options.target_format;
    let chain = open(&ChainOptions {
        force_share: options.sharing.force_share,
        ..options.folders.reading(&source, options.source_format)
    })?;
    let start = skip.saturating_mul(block).min(chain.size());
    let end = count.map_or(chain.size(), |count| {
        start.saturating_add(count.saturating_mul(block)).min(chain.size())
    });
    if !start.is_multiple_of(SECTOR) || !end.is_multiple_of(SECTOR) {
        let what = anyhow!(
            "bytes {start} to {end} are not whole sectors of {SECTOR} bytes: choose another bs"
        );
        return Err(Failure::usage(what));
    }
    let part = Part { chain, range: start..end };
    let settings = Settings::parse(format, &[]).map_err(Failure::usage)?;
    let new = new::plan(&settings, end - start, None, &target).map_err(Failure::usage)?;
    let mut sources = Sources::default();
    sources.add_chain(&part.chain);
    let mut file = NewFile::create(&target, options.force, &sources)?;
    file.make(new, &sources)?;
    let fresh = file.is_fresh(format);
    let image = open(&ChainOptions {
        format: Some(format),
        cache: CacheMode::Writeback,
        files: file.files(),
        ..ChainOptions::new(&target)
    })?;
    let how = ConvertOptions { threads: threads(), fresh, ..ConvertOptions::default() };
    let progress = Arc::<Progress>::default();
    let work =
        || tools::convert(&[part], &image, &how, &progress).and_then(|()| tools::close(&image));
    options.show.during(&progress, work).map_err(failed)?;
    Ok(file.finish()?)
}
