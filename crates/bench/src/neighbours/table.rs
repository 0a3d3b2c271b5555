//! Figures for people: a table, and pictures.

use std::fmt::Write;

use super::Played;
use super::figures::{Figure, Goal, Unit, kept, total_of};
use super::rows::{Row, TARGETS};
use crate::plot::svg::Svg;
use crate::plot::{self, Bar, Bars, Chart, Point, ScaleKind, Series};
use crate::report::columns;

/// Formats the results. Rows with the same figures share a table. Figures that miss their goal have
/// a mark.
pub fn table(rows: &[Played]) -> String {
    let names = |row: &Played| row.figures.iter().map(|f| f.name.clone()).collect::<Vec<_>>();
    let mut text = String::new();
    for group in rows.chunk_by(|a, b| names(a) == names(b)) {
        let head = std::iter::once("row".to_string())
            .chain(names(&group[0]).into_iter().map(|n| n.trim().to_string()));
        let mut lines = vec![head.collect::<Vec<_>>()];
        for row in group {
            lines.push(
                std::iter::once(row.row.clone()).chain(row.figures.iter().map(cell)).collect(),
            );
        }
        let goals = group[0].figures.iter().map(|f| goal(f.goal));
        let goals: Vec<_> = std::iter::once("(to be)".to_string()).chain(goals).collect();
        if goals.iter().skip(1).any(|g| !g.is_empty()) {
            lines.push(goals);
        }
        text += &columns(&lines);
        text.push('\n');
    }
    for row in rows {
        let _ = writeln!(text, "{}: {}", row.row, row.about);
    }
    text
}

fn cell(figure: &Figure) -> String {
    let mark = if figure.met() == Some(false) { "!" } else { "" };
    let value = figure.median;
    if value.is_nan() {
        return "-".into();
    }
    match figure.unit {
        Unit::PerSecond => format!("{value:.0}{mark}"),
        Unit::Percent | Unit::Milliseconds | Unit::Microseconds => format!("{value:.1}{mark}"),
        Unit::Number => format!("{value:.3}{mark}"),
    }
}

fn goal(goal: Option<Goal>) -> String {
    match goal {
        Some(Goal::AtLeast(least)) => format!(">= {least}"),
        Some(Goal::AtMost(most)) => format!("<= {most}"),
        None => String::new(),
    }
}

/// Draws the results row by row: rate and 99th percentile latency of the disk beside the thrasher,
/// the frontier, or the disks' shares in rows with weights.
pub fn picture(rows: &[Played]) -> Svg {
    let mut parts = Vec::new();
    for row in rows {
        match row.row.parse() {
            Ok(Row::Thrash(..)) => {
                let title = format!("{}: {}", row.row, row.about);
                let rates = ["alone", "share", "with", "without"];
                parts.push(bars(
                    row,
                    &title,
                    "operations a second",
                    plot::Unit::Plain,
                    &rates,
                    1.0,
                ));
                let times = ["p99 alone", "p99 with", "p99 without"];
                parts.push(bars(
                    row,
                    "",
                    "latency, 99th percentile",
                    plot::Unit::Seconds,
                    &times,
                    1e-6,
                ));
            }
            Ok(Row::Weights(_)) => {
                let title = format!("{}: {}", row.row, row.about);
                let shares = ["share 1", "share 2", "share 4", "share 8"];
                parts.push(bars(
                    row,
                    &title,
                    "part of the device's time (owed: 6.67, 13.3, 26.7, 53.3 in a hundred)",
                    plot::Unit::Plain,
                    &shares,
                    1.0,
                ));
            }
            Ok(Row::Frontier(_)) => parts.push(frontier(row)),
            _ => {}
        }
    }
    Svg::stack(&parts)
}

/// Draws what the polite disk keeps of its share over the total of all disks.
fn frontier(row: &Played) -> Svg {
    let median = |name: String| row.figures.iter().find(|f| f.name == name).map(|f| f.median);
    let point = |scene: &str| {
        Some(Point { x: median(total_of(scene))?, y: median(kept(scene))?, band: None })
    };
    let series = |name: &str, scenes: &[&str], look| Series {
        name: name.into(),
        points: scenes.iter().filter_map(|scene| point(scene)).collect(),
        look,
    };
    let axis = |name: &str| (ScaleKind::Linear, plot::Unit::Plain, name.to_string());
    let chart = Chart {
        title: format!("{}: {}", row.row, row.about),
        x: axis("total of all disks, percent of that without the scheduler"),
        y: axis("the polite disk's rate, percent of its share"),
        series: vec![
            series("latency-target 1.1 to 6", &TARGETS.map(|(scene, _)| scene), 0),
            series("no target", &["with"], 4),
            series("fair-share = false", &["without"], 1),
        ],
        markers: true,
        size: (900.0, 420.0),
    };
    chart.draw()
}

fn bars(row: &Played, title: &str, of: &str, unit: plot::Unit, names: &[&str], scale: f64) -> Svg {
    let found = |name: &&str| row.figures.iter().find(|f| f.name == **name);
    let look = |name: &str| match name.rsplit(' ').next() {
        Some("with") => 4,
        Some("without") => 1,
        Some("share") => 2,
        _ => 3,
    };
    let bar = |figure: &Figure| {
        let values = figure.values.iter().map(|v| v * scale);
        let (low, high) = (
            values.clone().fold(f64::INFINITY, f64::min),
            values.fold(f64::NEG_INFINITY, f64::max),
        );
        Bar {
            name: figure.name.clone(),
            value: figure.median * scale,
            range: Some((low, high)),
            look: look(&figure.name),
        }
    };
    let bars = names.iter().filter_map(found).map(bar).collect();
    Bars { title: title.into(), unit, of: of.into(), bars, width: 900.0 }.draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_goal_is_marked() {
        let figure = |median, goal| Figure {
            name: "kept %".into(),
            unit: Unit::Percent,
            values: vec![median],
            median,
            goal,
        };
        let row = |name: &str, median| Played {
            row: name.into(),
            about: "about".into(),
            figures: vec![figure(median, Some(Goal::AtLeast(95.0)))],
            rounds: Vec::new(),
        };
        let text = table(&[row("thrash-d1", 94.0), row("thrash-d8", 95.0)]);
        let lines: Vec<_> =
            text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[..4],
            ["row kept %", "thrash-d1 94.0!", "thrash-d8 95.0", "(to be) >= 95"]
        );
        assert_eq!(lines[5], "thrash-d1: about");
    }
}
