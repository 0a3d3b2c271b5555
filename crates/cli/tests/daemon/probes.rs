//! The program's static probes (USDT), and the page that lists them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::common::{BLOCKYARD, TOOL, run};

/// Returns the probes in the program's notes: the name, and the number of arguments.
fn probes() -> BTreeSet<(String, usize)> {
    let notes = run(Command::new("readelf").args(["--notes", "--wide", BLOCKYARD]), TOOL).good();
    let field = |line: &str, name: &str| Some(line.split_once(name)?.1.trim().to_string());
    let (mut probes, mut provider, mut name) = (BTreeSet::new(), None, None);
    for line in notes.lines() {
        provider = field(line, " Provider: ").or(provider);
        name = field(line, " Name: ").or(name);
        if let Some(arguments) = field(line, " Arguments: ")
            && provider.as_deref() == Some("blockyard")
        {
            probes.insert((name.clone().unwrap(), arguments.split_whitespace().count()));
        }
    }
    probes
}

#[test]
fn the_program_has_the_probes_of_the_page() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/trace.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let documented: BTreeSet<_> = rows
        .filter_map(|row| {
            let (name, rest) = row.split_once("` | `")?;
            let arguments = rest.split_once("` |")?.0;
            Some((name.to_string(), arguments.split(", ").count()))
        })
        .collect();
    assert!(documented.len() >= 6, "{documented:?}");
    assert_eq!(probes(), documented);
}
