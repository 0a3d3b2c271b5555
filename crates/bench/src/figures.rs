//! `blockyard bench median` and `percentile`: a quantile of durations that `bench rate` printed,
//! for each range of sizes.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use blockyard_program::output::OutputError;

use crate::samples::{self, bins};
use crate::statistics::quantile;

/// Where the samples are.
#[derive(Clone, Debug, clap::Args)]
pub struct Input {
    /// What `bench rate` printed [default: standard input]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// The median duration for each size. Prints size in bytes, duration in seconds, number of
/// operations. More than 32 sizes are put together, a quarter of an octave wide.
#[derive(Clone, Debug, clap::Args)]
pub struct Median {
    #[command(flatten)]
    pub input: Input,
}

/// A percentile of the durations for each size, printed as `median` does.
#[derive(Clone, Debug, clap::Args)]
pub struct Percentile {
    /// From 0 to 100
    #[arg(value_name = "N", value_parser = parse_percent)]
    pub percent: f64,
    #[command(flatten)]
    pub input: Input,
}

fn parse_percent(text: &str) -> Result<f64> {
    let percent: f64 = text.parse()?;
    anyhow::ensure!((0.0..=100.0).contains(&percent), "a percentile is from 0 to 100");
    Ok(percent)
}

pub fn median(options: &Median) -> Result<()> {
    print(&options.input, 0.5)
}

pub fn percentile(options: &Percentile) -> Result<()> {
    print(&options.input, options.percent / 100.0)
}

fn print(input: &Input, q: f64) -> Result<()> {
    let (name, reader): (String, Box<dyn BufRead>) = match &input.file {
        Some(path) => {
            let name = path.display().to_string();
            let file = std::fs::File::open(path).with_context(|| format!("opening {name}"))?;
            (name, Box::new(BufReader::new(file)))
        }
        None => ("standard input".into(), Box::new(std::io::stdin().lock())),
    };
    let samples = samples::read(reader).context(name)?;
    let mut out = std::io::stdout().lock();
    for bin in bins(&samples) {
        writeln!(out, "{} {:.9} {}", bin.bytes, quantile(&bin.seconds, q), bin.seconds.len())
            .map_err(OutputError::from)?;
    }
    Ok(())
}
