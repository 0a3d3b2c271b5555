//! Results for people: a table, and a self-contained page with pictures.
//!
//! ```text
//!   figures   medians and ranges of a work on a system      charts   pictures of them
//!   explain   where the time went, in sentences             page     the HTML
//! ```

pub mod charts;
mod explain;
mod figures;
mod page;

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use blockyard_program::file::replace;

use self::figures::Figures;
pub use self::figures::variation;
use crate::plot::scale::{Unit, short, words};

use crate::results::{Results, Run};

/// Writes `index.html`, and the figures beside it.
pub fn write(results: &Results, folder: &Path) -> Result<()> {
    results.save(folder)?;
    replace(&folder.join("index.html"), page::page(results).as_bytes())
}

/// Returns the unit of a run's figure.
pub fn figure(run: &Run) -> String {
    if run.steps.is_empty() {
        format!("{:.0} a second", run.per_second())
    } else {
        words(run.seconds, Unit::Seconds)
    }
}

/// A line about the columns of the table.
const COLUMNS: [&str; 8] =
    ["system", "ops/s", "MB/s", "median", "p99", "to host", "CPU s/M ops", "guest's cores"];

/// Returns the table of a work: names of columns, and a line for each system.
fn rows(results: &Results, work: &str) -> Vec<Vec<String>> {
    let figures = figures::of(results, work);
    let steps = figures.iter().map(|f| &f.steps).max_by_key(|s| s.len()).filter(|s| !s.is_empty());
    let Some(steps) = steps else {
        let names = COLUMNS.map(String::from).to_vec();
        return [names].into_iter().chain(figures.iter().map(|f| row(f).to_vec())).collect();
    };
    // Columns: seconds of each command, and of all commands.
    let names = ["system".into()]
        .into_iter()
        .chain(steps.iter().map(|s| s.0.clone()))
        .chain(["all, s".into(), "to host".into()]);
    let line = |f: &Figures| {
        let times =
            f.steps.iter().map(|s| format!("{:.3}", s.1)).chain([format!("{:.3}", f.seconds)]);
        let to_host = f.to_host.map_or_else(String::new, |r| format!("{:.2}", 1.0 / r));
        [f.row_name()].into_iter().chain(times).chain([to_host]).collect()
    };
    [names.collect()].into_iter().chain(figures.iter().map(line)).collect()
}

fn row(f: &Figures) -> [String; 8] {
    [
        f.row_name(),
        short(f.per_second),
        short(f.bytes_per_second / 1e6),
        words(f.median, Unit::Seconds),
        words(f.p99, Unit::Seconds),
        f.to_host.map_or_else(String::new, |r| format!("{r:.2}")),
        short(f.cpu_per_million),
        format!("{:.2}", f.guest_cores),
    ]
}

/// Formats rows of cells: the first column is left-aligned, the others are right-aligned.
pub fn columns(rows: &[Vec<String>]) -> String {
    let mut text = String::new();
    let wide = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    for row in rows {
        let mut line = format!("{:<1$}", row[0], wide(0));
        for (column, cell) in row.iter().enumerate().skip(1) {
            let _ = write!(line, "  {cell:>0$}", wide(column));
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Formats the results as text: medians of the rounds. `to host`: operations a second, divided by
/// the host's.
pub fn table(results: &Results) -> String {
    let mut text = String::new();
    for work in results.works() {
        let _ = writeln!(text, "{work}");
        text += &columns(&rows(results, work));
        for sentence in explain::sentences(results, work) {
            let _ = writeln!(text, "  {sentence}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_durability_says_so() {
        let run = |system: &str| Run {
            system: system.into(),
            work: "rate:writesync".into(),
            operations: 100,
            seconds: 1.0,
            ..Run::default()
        };
        let results = Results {
            runs: ["host", "uml-ubd", "uml-ubd-sync"].map(run).into(),
            ..Results::default()
        };
        let names: Vec<_> = rows(&results, "rate:writesync")
            .into_iter()
            .map(|mut row| row.swap_remove(0))
            .collect();
        assert_eq!(names, ["system", "host", "uml-ubd (not durable)", "uml-ubd-sync"]);
        let told = table(&results);
        assert!(
            told.contains(
                "uml-ubd: not durable: it answers flushes without a sync; as fast as the host"
            ),
            "{told}"
        );
    }
}
