//! `--before`: an earlier build of Blockyard takes its turn in each round, on the same files, right
//! beside this one. The table has a row for each load and each system that is Blockyard.

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
        [Some((system, Build::Now)), before.then_some((system, Build::Before))]
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

/// Formats the rates, p99 and processor time of both builds. A ratio is the median of the rounds'
/// ratios, with the smallest and the largest in brackets.
pub fn markdown(measured: &[Measured]) -> String {
    let head = ["load", "system", "IOPS before", "IOPS", "IOPS: ratio", "p99: ratio", "CPU: ratio"];
    let mut lines = Vec::new();
    for m in measured {
        for (n, system) in m.row.systems.iter().enumerate() {
            let (now, before) = (&m.figures[n], &m.before[n]);
            if before.is_empty() {
                continue;
            }
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
    table_of(&head.map(String::from), &lines)
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
}
