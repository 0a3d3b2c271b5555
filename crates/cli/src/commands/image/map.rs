//! `image map`: prints one line for each extent, as soon as it is found: there may be millions.

use std::io::{self, BufWriter, Write};

use blockyard_image::tools::{self, Disk, on_reactor};
use blockyard_image::{BlockStatus, ChainOptions};
use blockyard_program::ending::Failure;
use blockyard_program::output::OutputError;
use clap::Args;

use super::{FolderArgs, ImageArgs, OutputArgs, SharingArgs, failed, open, printable, size};

#[derive(Args)]
pub struct MapArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Offset of the first byte.
    #[arg(short, long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    start_offset: u64,
    /// Number of bytes [default: to the end of the disk].
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = size::parse)]
    max_length: Option<u64>,
    #[command(flatten)]
    folders: FolderArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(options: &MapArgs) -> Result<(), Failure> {
    let chain = open(&ChainOptions {
        force_share: options.sharing.force_share,
        cut_outside: true,
        ..options.folders.reading(&options.image.file, options.image.format)
    })?;
    if let Some(why) = chain.cut() {
        tracing::warn!("{why}; the images below it are shown as absent");
    }
    let end = options.start_offset.saturating_add(options.max_length.unwrap_or(u64::MAX));
    let json = options.output.is_json();
    let range = options.start_offset..end;
    let printed = on_reactor(|handle| async move {
        let files = chain.layers().iter().map(|layer| layer.data.as_ref().unwrap_or(&layer.file));
        let mut lines = Lines {
            json,
            files: files.map(|file| printable(&file.path().display().to_string())).collect(),
            out: BufWriter::new(io::stdout()),
            begun: false,
            result: Ok(()),
        };
        let disk = Disk::of(&chain, &handle).await?;
        tools::map(&disk, range, |start, status| lines.show(start, status)).await?;
        Ok(lines.end())
    });
    Ok(printed.map_err(failed)?.map_err(OutputError::from)?)
}

struct Lines<W: Write> {
    json: bool,
    /// File name of each layer.
    files: Vec<String>,
    out: W,
    begun: bool,
    result: io::Result<()>,
}

impl<W: Write> Lines<W> {
    fn show(&mut self, start: u64, status: &BlockStatus) {
        if self.result.is_ok() {
            self.result =
                if self.json { self.object(start, status) } else { self.line(start, status) };
            self.begun = true;
        }
    }

    fn line(&mut self, start: u64, status: &BlockStatus) -> io::Result<()> {
        if !self.begun {
            writeln!(self.out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")?;
        }
        if !status.data || status.zero {
            return Ok(());
        }
        let at = status.offset.map_or("compressed".into(), hex);
        let file = self.files.get(status.depth).map_or("", String::as_str);
        writeln!(self.out, "{:<16}{:<16}{at:<16}{file}", hex(start), hex(status.len))
    }

    fn object(&mut self, start: u64, status: &BlockStatus) -> io::Result<()> {
        let BlockStatus { len, depth, present, zero, data, compressed, offset } = status;
        write!(self.out, "{}", if self.begun { ",\n" } else { "[" })?;
        write!(
            self.out,
            r#"{{ "start": {start}, "length": {len}, "depth": {depth}, "present": {present}, "#
        )?;
        write!(self.out, r#""zero": {zero}, "data": {data}, "compressed": {compressed}"#)?;
        if let Some(offset) = offset {
            write!(self.out, r#", "offset": {offset}"#)?;
        }
        write!(self.out, "}}")
    }

    fn end(mut self) -> io::Result<()> {
        self.result?;
        if self.json {
            writeln!(self.out, "{}", if self.begun { "]" } else { "[]" })?;
        }
        self.out.flush()
    }
}

/// Returns a number as C's `%#x` prints it.
fn hex(number: u64) -> String {
    if number == 0 { "0".into() } else { format!("{number:#x}") }
}
