//! `make install`: what it puts where, from programs that are built.

use std::path::Path;
use std::process::Command;

use crate::BENCH;
use crate::common::{BLOCKYARD, Folder, TOOL, blockyard, run};

/// The programs, and the pages that their help names.
#[test]
fn an_installation_has_the_pages_that_its_help_names() {
    let folder = Folder::new();
    let (target, tree) = (folder.join("target"), folder.join("tree"));
    std::fs::create_dir_all(target.join("release")).unwrap();
    for program in [BLOCKYARD, BENCH] {
        std::fs::copy(
            program,
            target.join("release").join(Path::new(program).file_name().unwrap()),
        )
        .unwrap();
    }
    let mut make = Command::new("make");
    make.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    make.args(["-s", "install", "PREFIX=/usr"]).arg(format!("DESTDIR={}", tree.display()));
    run(make.env("CARGO_TARGET_DIR", &target), TOOL).good();

    let program = tree.join("usr/bin/blockyard");
    run(Command::new(&program).arg("--version"), TOOL).good();
    // `blockyard bench` executes blockyard-bench, and both have their pages and completions.
    let bench = run(Command::new(&program).args(["bench", "rate", "--help"]), TOOL).good();
    assert!(bench.contains("Usage: blockyard bench rate [OPTIONS] <OPERATION>"), "{bench}");
    let page =
        std::fs::read_to_string(tree.join("usr/share/man/man1/blockyard-bench-rate.1")).unwrap();
    assert!(page.contains("Random seeks") && page.contains("max\\-size"), "{page}");
    let script =
        std::fs::read_to_string(tree.join("usr/share/bash-completion/completions/blockyard"))
            .unwrap();
    assert!(
        script.contains("blockyard__subcmd__bench__subcmd__rate)") && script.contains("--max-size")
    );

    let help = blockyard(["serve", "--help"]).good();
    let named: Vec<_> = help.split(|c: char| c.is_whitespace() || "(),".contains(c)).collect();
    let named = named.iter().filter_map(|word| word.strip_prefix("docs/")?.split_once(".md"));
    let pages: Vec<_> =
        named.map(|(page, _)| format!("usr/share/doc/blockyard/docs/{page}.md")).collect();
    assert!(pages.len() > 1, "the help names no page");
    pages.iter().for_each(|page| assert!(tree.join(page).exists(), "{page} is not installed"));
    let missing = missing_targets(&tree.join("usr/share/doc/blockyard"));
    assert!(missing.is_empty(), "links of installed pages to what is not installed: {missing:#?}");
}

/// Returns the links of all pages in the folder that lead to no installed file.
fn missing_targets(folder: &Path) -> Vec<String> {
    let mut missing = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            missing.extend(missing_targets(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = std::fs::read_to_string(&path).unwrap();
            let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            let files = links.filter_map(|(link, _)| link.split('#').next());
            let local = files.filter(|file| !file.is_empty() && !file.contains("://"));
            let gone = local.filter(|file| !folder.join(file).exists());
            missing.extend(gone.map(|file| format!("{}: {file}", path.display())));
        }
    }
    missing
}
