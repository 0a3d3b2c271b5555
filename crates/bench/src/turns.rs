//! `blockyard bench turns`: the order of interleaved rounds, for a script that measures in guests.
//!
//! In: names of rows and systems. Out: a line for each turn. What must hold: the order is that of
//! [`Rounds`], as in all other measurements.

use anyhow::Result;
use blockyard_program::output;

use crate::process::Stop;
use crate::rounds::Rounds;

/// The turns of interleaved rounds.
#[derive(Clone, Debug, clap::Args)]
pub struct TurnsOptions {
    /// How often each system is measured
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Names of the rows
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    rows: Vec<String>,
    /// Names of the systems, which each row has
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    systems: Vec<String>,
}

pub fn run(options: &TurnsOptions) -> Result<()> {
    Ok(output::print(lines(options))?)
}

fn lines(options: &TurnsOptions) -> String {
    let TurnsOptions { rounds, rows, systems } = options;
    let plan = Rounds::new(*rounds, rows.iter().map(|_| systems.len()), &Stop::default());
    let turns = plan.turns();
    let line = |(round, row, system)| format!("{round} {row} {system}\n");
    turns.map(|turn| line((turn.round + 1, &rows[turn.row], &systems[turn.system]))).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: TurnsOptions,
    }

    #[test]
    fn a_line_has_the_round_the_row_and_the_system() {
        let words = ["turns", "--rounds", "2", "--rows", "mix,large", "--systems", "a,b"];
        let lines = lines(&Line::try_parse_from(words).unwrap().options);
        let wanted = [
            "1 mix a",
            "1 mix b",
            "1 large a",
            "1 large b",
            "2 mix b",
            "2 mix a",
            "2 large b",
            "2 large a",
        ];
        assert_eq!(lines.lines().collect::<Vec<_>>(), wanted);
        assert!(Line::try_parse_from(["turns", "--rows", "mix"]).is_err(), "no systems");
    }
}
