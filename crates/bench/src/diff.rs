//! `blockyard bench diff`: whether a second set of results is slower than the first, beyond the
//! noise.
//!
//! In: two files of results. Out: for each work on each system the ratio of rates (new to old) and
//! its 95% confidence interval; exit status 1 when a row is slower beyond it, or is missing. What
//! must hold: the interval is from the rounds themselves (percentile bootstrap of the ratio of
//! medians), with a seed of its own, so that the same files give the same answer.

use std::path::PathBuf;

use anyhow::Result;
use blockyard_program::output;
use serde::Serialize;

use crate::client::workload::Random;
use crate::results::{Results, Run};
use crate::statistics::{median, quantile, sorted};

/// Compares two sets of results. Exit status: 0 nothing is slower, 1 a row is slower beyond the
/// noise or missing in the new results, 2 failed.
#[derive(Clone, Debug, clap::Args)]
pub struct DiffOptions {
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// A slow-down that is tolerated, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
    pub tolerate: f64,
    #[arg(long)]
    pub json: bool,
}

/// One work on one system.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub work: String,
    pub system: String,
    /// Rate of the new results, divided by that of the old results.
    pub ratio: f64,
    /// The 95% confidence interval of the ratio.
    pub interval: (f64, f64),
    pub slower: bool,
}

const RESAMPLES: usize = 4000;

/// Prints the rows. Returns true if none is slower, and none is missing in the new results.
pub fn run(options: &DiffOptions) -> Result<bool> {
    let (old, new) = (Results::load(&options.old)?, Results::load(&options.new)?);
    let rows = rows(&old, &new, options.tolerate / 100.0);
    anyhow::ensure!(!rows.is_empty(), "the two have no work on a system in common");
    let missing = missing(&old, &new);
    if options.json {
        output::print(format_args!("{}\n", serde_json::to_string(&rows)?))?;
    } else {
        output::print(format_args!(
            "{:<24} {:<24} {:>7}  95% interval\n",
            "work", "system", "new/old"
        ))?;
        for row in &rows {
            let verdict = if row.slower { "  SLOWER" } else { "" };
            let (low, high) = row.interval;
            output::print(format_args!(
                "{:<24} {:<24} {:>7.3}  {low:.3} to {high:.3}{verdict}\n",
                row.work, row.system, row.ratio
            ))?;
        }
    }
    // Not in the JSON, which is a list of compared rows.
    for (work, system) in &missing {
        let line = format!("{work:<24} {system:<24} {:>7}  MISSING in the new results", "-");
        match options.json {
            true => output::note(line),
            false => output::print(format_args!("{line}\n"))?,
        }
    }
    Ok(missing.is_empty() && rows.iter().all(|r| !r.slower))
}

/// Returns each work on a system that only the old results have.
pub fn missing<'a>(old: &'a Results, new: &Results) -> Vec<(&'a str, &'a str)> {
    let has = |results: &Results, work, system| results.of(work, system).next().is_some();
    let mut missing = Vec::new();
    for work in old.works() {
        let systems = old.systems().into_iter();
        let gone = systems.filter(|s| has(old, work, s) && !has(new, work, s));
        missing.extend(gone.map(|system| (work, system)));
    }
    missing
}

pub fn rows(old: &Results, new: &Results, tolerate: f64) -> Vec<Row> {
    let mut rows = Vec::new();
    for work in old.works() {
        for system in old.systems() {
            let rates = |results: &Results| {
                results.of(work, system).map(Run::per_second).collect::<Vec<_>>()
            };
            let (before, after) = (rates(old), rates(new));
            if before.is_empty() || after.is_empty() {
                continue;
            }
            let ratio = median(after.iter().copied()) / median(before.iter().copied());
            let interval = interval(&before, &after);
            // With one or two rounds on a side the noise is unknown.
            let known = before.len() > 2 && after.len() > 2;
            let slower = known && interval.1 < 1.0 - tolerate;
            rows.push(Row { work: work.into(), system: system.into(), ratio, interval, slower });
        }
    }
    rows
}

fn interval(before: &[f64], after: &[f64]) -> (f64, f64) {
    let mut random = Random::new(0x5eed, 0);
    let mut draw = |from: &[f64]| {
        let picked = (0..from.len())
            .map(|_| from[random.below(from.len() as u64) as usize])
            .collect::<Vec<_>>();
        median(picked)
    };
    let ratios = sorted((0..RESAMPLES).map(|_| draw(after) / draw(before)));
    (quantile(&ratios, 0.025), quantile(&ratios, 0.975))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(rates: &[f64]) -> Results {
        let run = |rate: &f64| Run {
            system: "s".into(),
            work: "w".into(),
            seconds: 1.0,
            operations: *rate as u64,
            ..Run::default()
        };
        Results { runs: rates.iter().map(run).collect(), ..Results::default() }
    }

    fn slower(old: &[f64], new: &[f64], tolerate: f64) -> bool {
        rows(&results(old), &results(new), tolerate)[0].slower
    }

    #[test]
    fn noise_is_told_from_a_loss() {
        let old = [1000.0, 1010.0, 990.0, 1005.0, 995.0];
        assert!(!slower(&old, &old, 0.0));
        assert!(!slower(&old, &[1004.0, 991.0, 1008.0, 996.0, 1001.0], 0.0));
        assert!(slower(&old, &[900.0, 910.0, 890.0, 905.0, 895.0], 0.0));
        assert!(!slower(&old, &[900.0, 910.0, 890.0, 905.0, 895.0], 0.2));
        assert!(
            !slower(&[1000.0, 500.0, 2000.0], &[900.0, 450.0, 1800.0], 0.0),
            "so noisy that 10% are nothing"
        );
        assert!(!slower(&[1000.0], &[500.0], 0.0), "one round does not show the noise");
        assert!(rows(&results(&[1.0]), &Results::default(), 0.0).is_empty());
        assert_eq!(missing(&results(&[1.0]), &Results::default()), [("w", "s")]);
        assert!(missing(&results(&[1.0]), &results(&[2.0])).is_empty());
        assert!(missing(&Results::default(), &results(&[2.0])).is_empty());
    }
}
