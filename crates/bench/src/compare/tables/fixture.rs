//! For the tests of tables: measured rows, cells of Markdown, a place with scripts as programs.

use super::workspace::Workspace;
use super::{Figures, Measured, Row};
use crate::scratch::Scratch;

/// Returns the figures of rounds. Each figure has a value for each round.
pub fn rounds<const N: usize>(figures: &[(&'static str, [f64; N])]) -> Vec<Figures> {
    let of_round = |round: usize| figures.iter().map(|(name, all)| (*name, all[round])).collect();
    (0..N).map(of_round).collect()
}

/// Returns a row with the figures of its systems.
pub fn measured(name: &str, systems: &[(&str, Vec<Figures>)]) -> Measured {
    let names = systems.iter().map(|(system, _)| system.to_string()).collect();
    Measured {
        row: Row { name: name.into(), systems: names },
        number: 0,
        figures: systems.iter().map(|(_, rounds)| rounds.clone()).collect(),
        before: vec![Vec::new(); systems.len()],
    }
}

/// Returns the cells of a Markdown table: the head, then each line.
pub fn cells(markdown: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        let line = line.strip_prefix("| ").and_then(|line| line.strip_suffix(" |"));
        line.expect("a line of a table").split(" | ").map(String::from).collect()
    };
    let lines: Vec<_> = markdown.lines().collect();
    assert!(lines[1].starts_with("|---|"), "{markdown}");
    lines.iter().enumerate().filter(|(n, _)| *n != 1).map(|(_, line)| cells(line)).collect()
}

/// A script of the guests' tool, or of Blockyard: writes its arguments into `calls`, a line each
/// call, and makes the file that its last argument names.
pub const RECORD: &str = r#"echo "$@" >>"${0%/*}/calls"; touch "${@: -1}""#;

/// Returns a place in a folder. The scripts `tool` and `blockyard` of the folder are its programs,
/// and `work` has its files.
pub fn place(scratch: &Scratch) -> Workspace {
    std::fs::create_dir(scratch.join("work")).unwrap();
    Workspace::of_programs(scratch.join("work"), scratch.to_path_buf(), scratch.join("blockyard"))
}
