//! `--before`: an earlier build of Blockyard takes its turn in each round, on the same files, right
//! beside this one. The table has a row for each load and each system that is Blockyard.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::Result;

use super::{Figures, Measured, Table, TablePlan, cell, grouped, markdown as table_of};
use crate::statistics::median;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Build {
    Now,
    Before,
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Build::Before { ", before" } else { "" })
    }
}

/// Returns the measurements of a row in a round: each system, and those of the earlier build.
pub fn turns(
    table: &dyn Table,
    plan: &TablePlan<'_>,
    row: usize,
    systems: impl Iterator<Item = usize>,
) -> Vec<(usize, Build)> {
    let of = |system| {
        let before = plan.before.is_some() && table.is_ours(row, system);
        let now = before || plan.before.is_none() || !plan.peers.is_empty();
        [now.then_some((system, Build::Now)), before.then_some((system, Build::Before))]
    };
    systems.flat_map(of).flatten().collect()
}

/// Measures with the program of a build.
pub fn with(
    table: &mut dyn Table,
    build: Build,
    plan: &TablePlan<'_>,
    measure: impl FnOnce(&mut dyn Table) -> Result<Figures>,
) -> Result<Figures> {
    let before = plan.before.filter(|_| build == Build::Before);
    let usual = before
        .zip(table.place())
        .map(|(before, place)| std::mem::replace(&mut place.program, before.to_path_buf()));
    let figures = measure(table);
    if let Some((usual, place)) = usual.zip(table.place()) {
        place.program = usual;
    }
    figures
}

/// Formats the figures of both builds: a table of the loads with rates, and one of the others, such
/// as durations. A ratio is that of this build to the earlier one: the median of the rounds'
/// ratios, with the smallest and the largest in brackets.
pub fn markdown(measured: &[Measured]) -> String {
    let tables = [rates(measured), others(measured)];
    tables.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

/// Returns the systems of a row that were measured with both builds.
fn both(m: &Measured) -> impl Iterator<Item = (usize, &String)> {
    m.row.systems.iter().enumerate().filter(|(n, _)| !m.before[*n].is_empty())
}

fn has_rate(m: &Measured, system: usize) -> bool {
    m.before[system].iter().all(|figures| figures.contains_key("iops"))
}

/// Formats rates, p99 and processor time of the loads with a rate.
fn rates(measured: &[Measured]) -> Option<String> {
    let head = ["load", "system", "IOPS before", "IOPS", "IOPS: ratio", "p99: ratio", "CPU: ratio"];
    let mut lines = Vec::new();
    for m in measured {
        for (n, system) in both(m).filter(|(n, _)| has_rate(m, *n)) {
            let (now, before) = (&m.figures[n], &m.before[n]);
            let rate = |rounds: &[Figures]| {
                let rates: Option<Vec<f64>> =
                    rounds.iter().map(|f| f.get("iops").copied()).collect();
                cell(rates.map(median), grouped)
            };
            lines.push(vec![
                m.row.name.clone(),
                system.clone(),
                rate(before),
                rate(now),
                ratio(now, before, "iops"),
                ratio(now, before, "p99_us"),
                ratio(now, before, "cpu_us"),
            ]);
        }
    }
    (!lines.is_empty()).then(|| table_of(&head.map(String::from), &lines))
}

/// Formats each figure of the loads without a rate.
fn others(measured: &[Measured]) -> Option<String> {
    let head = ["load", "system", "figure", "before", "now", "now / before"];
    let mut lines = Vec::new();
    for m in measured {
        for (n, system) in both(m).filter(|(n, _)| !has_rate(m, *n)) {
            let (now, before) = (&m.figures[n], &m.before[n]);
            let keys: BTreeSet<&str> = before.iter().flat_map(|f| f.keys().copied()).collect();
            for key in keys {
                let median_of = |rounds: &[Figures]| {
                    let all: Option<Vec<f64>> =
                        rounds.iter().map(|f| f.get(key).copied()).collect();
                    cell(all.map(median), |figure| format!("{figure:.3}"))
                };
                lines.push(vec![
                    m.row.name.clone(),
                    system.clone(),
                    key.into(),
                    median_of(before),
                    median_of(now),
                    ratio(now, before, key),
                ]);
            }
        }
    }
    (!lines.is_empty()).then(|| table_of(&head.map(String::from), &lines))
}

fn ratio(now: &[Figures], before: &[Figures], key: &str) -> String {
    let pairs = now.iter().zip(before);
    let ratios: Option<Vec<f64>> = pairs.map(|(a, b)| Some(a.get(key)? / b.get(key)?)).collect();
    let Some(ratios) = ratios.filter(|ratios| !ratios.is_empty()) else { return String::new() };
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    format!("{:.2} ({least:.2} to {most:.2})", median(ratios))
}

#[cfg(test)]
mod tests {
    use super::super::Row;
    use super::*;

    #[test]
    fn ratios_are_those_of_rounds() {
        let rounds = |rates: [f64; 3]| rates.map(|rate| Figures::from([("iops", rate)])).to_vec();
        let row = Row { name: "reads".into(), systems: vec!["host".into(), "blockyard".into()] };
        let measured = Measured {
            row,
            number: 0,
            figures: vec![rounds([9.0; 3]), rounds([10.0, 30.0, 12.0])],
            before: vec![Vec::new(), rounds([10.0, 20.0, 16.0])],
        };
        let text = markdown(&[measured]);
        assert_eq!(
            text.lines().nth(2),
            Some("| reads | blockyard | 16 | 12 | 1.00 (0.75 to 1.50) |  |  |"),
            "{text}"
        );
    }

    /// A duration is better if it is less, so its ratio must not stand in a column of rates.
    #[test]
    fn figures_that_are_no_rates_have_a_table_of_their_own() {
        let seconds = |all: [f64; 2]| all.map(|s| Figures::from([("seconds", s)])).to_vec();
        let row = Row { name: "boot".into(), systems: vec!["blockyard".into()] };
        let (figures, before) = (vec![seconds([1.0, 3.0])], vec![seconds([2.0, 2.0])]);
        let boot = Measured { row: row.clone(), number: 0, figures, before };
        let rate = |rate| vec![vec![Figures::from([("iops", rate)])]];
        let load = Measured { row, number: 1, figures: rate(2.0), before: rate(4.0) };
        let text = markdown(&[boot, load]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7, "{text}");
        assert!(lines[2].contains("| 4 | 2 | 0.50 (0.50 to 0.50) |"), "{text}");
        assert_eq!(
            lines[6], "| boot | blockyard | seconds | 2.000 | 2.000 | 1.00 (0.50 to 1.50) |",
            "{text}"
        );
    }
}
