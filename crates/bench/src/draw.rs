//! `blockyard bench plot`: pictures from results, or from what `bench rate` printed.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockyard_program::file::replace;
use clap::ValueEnum;

use crate::plot::{Bars, Chart, svg::Svg};
use crate::report::{self, charts};

use crate::results::Results;
use crate::samples;

/// Draws results again: a report's page, or one picture.
#[derive(Clone, Debug, clap::Args)]
pub struct DrawOptions {
    /// A report's folder or results.json; or files that `bench rate` printed, a curve each
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Output: a folder for the page, or a file NAME.svg or NAME.png for one picture
    #[arg(short, long, value_name = "PATH")]
    pub output: PathBuf,
    /// The picture to draw
    #[arg(long, value_enum, default_value_t = Picture::Size)]
    pub picture: Picture,
    /// Draw only this work [default: all, below one another]
    #[arg(long, value_name = "WORK")]
    pub work: Option<String>,
    /// The picture's title
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Picture {
    /// Duration by size
    Size,
    /// Percentiles
    Latency,
    /// Throughput over time
    Time,
    /// Operations a second
    Rate,
    /// CPU time
    Cpu,
}

pub fn run(options: &DrawOptions) -> Result<()> {
    let extension = options.output.extension().and_then(|e| e.to_str()).unwrap_or_default();
    if !matches!(extension, "svg" | "png") {
        anyhow::ensure!(
            is_results(&options.files[0]),
            "a page is made of results.json; of `bench rate`'s files a picture: say -o NAME.svg"
        );
        std::fs::create_dir_all(&options.output)?;
        return report::write(&Results::load(&options.files[0])?, &options.output);
    }
    let svg =
        if is_results(&options.files[0]) { of_results(options)? } else { of_samples(options)? };
    let bytes = if extension == "png" { crate::plot::png::render(&svg)? } else { svg.into_bytes() };
    replace(&options.output, &bytes)
}

fn is_results(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|e| e == "json")
}

fn of_results(options: &DrawOptions) -> Result<String> {
    anyhow::ensure!(
        options.files.len() == 1,
        "one file of results at a time: `bench diff` compares two"
    );
    let results = Results::load(&options.files[0])?;
    let works = results.works();
    let wanted = match &options.work {
        Some(work) => {
            let all = || works.join(", ");
            vec![
                *works
                    .iter()
                    .find(|w| *w == work)
                    .with_context(|| format!("\"{work}\" is none of {}", all()))?,
            ]
        }
        None => works,
    };
    let pictures: Vec<Svg> =
        wanted.iter().filter_map(|work| picture(&results, work, options)).collect();
    anyhow::ensure!(!pictures.is_empty(), "the results have no such figures");
    let about = options
        .title
        .clone()
        .unwrap_or_else(|| format!("Host against guest: {}", wanted.join(", ")));
    Ok(Svg::stack(&pictures).file(&about))
}

fn picture(results: &Results, work: &str, options: &DrawOptions) -> Option<Svg> {
    let titled =
        |title: String| options.title.as_ref().map_or(title, |own| format!("{own} ({work})"));
    let chart = match options.picture {
        Picture::Size => charts::by_size(results, work),
        Picture::Latency => charts::latencies(results, work),
        Picture::Time => charts::over_time(results, work),
        Picture::Rate | Picture::Cpu => {
            let rate = options.picture == Picture::Rate;
            let bars = if rate { charts::rates(results, work) } else { charts::cpu(results, work) };
            return Some(Bars { title: titled(bars.title.clone()), ..bars }.draw());
        }
    }?;
    Some(Chart { title: titled(chart.title.clone()), ..chart }.draw())
}

fn of_samples(options: &DrawOptions) -> Result<String> {
    let curve = |(number, path): (usize, &PathBuf)| {
        let name = path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let file =
            std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
        let samples = samples::read(std::io::BufReader::new(file))
            .with_context(|| path.display().to_string())?;
        Ok(charts::curve(&name, number, &samples))
    };
    let series = options.files.iter().enumerate().map(curve).collect::<Result<Vec<_>>>()?;
    let chart =
        charts::sizes(options.title.as_deref().unwrap_or("How long one operation takes"), series);
    Ok(chart.draw().file(&chart.title))
}
