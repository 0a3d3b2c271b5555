//! `make install`: what it puts where, from a program that is built.

use std::path::Path;
use std::process::Command;

use crate::common::{BLOCKYARD, Folder, TOOL, blockyard, run};

/// The program without debug information, and the pages that its help names.
#[test]
fn an_installation_has_the_pages_that_its_help_names() {
    let folder = Folder::new();
    let (target, tree) = (folder.join("target"), folder.join("tree"));
    std::fs::create_dir_all(target.join("release")).unwrap();
    std::fs::copy(BLOCKYARD, target.join("release/blockyard")).unwrap();
    let mut make = Command::new("make");
    make.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    make.args(["-s", "install", "PREFIX=/usr"]).arg(format!("DESTDIR={}", tree.display()));
    run(make.env("CARGO_TARGET_DIR", &target), TOOL).good();

    let program = tree.join("usr/bin/blockyard");
    let sections = run(Command::new("readelf").args(["-S", "-W"]).arg(&program), TOOL).good();
    assert!(sections.contains(".text") && !sections.contains(".debug_info"), "{sections}");
    run(Command::new(&program).arg("--version"), TOOL).good();

    let help = blockyard(["serve", "--help"]).good();
    let named: Vec<_> = help.split(|c: char| c.is_whitespace() || "(),".contains(c)).collect();
    let named = named.iter().filter_map(|word| word.strip_prefix("docs/")?.split_once(".md"));
    let pages: Vec<_> = named.map(|(page, _)| format!("usr/share/doc/blockyard/docs/{page}.md")).collect();
    assert!(pages.len() > 1, "the help names no page");
    pages.iter().for_each(|page| assert!(tree.join(page).exists(), "{page} is not installed"));
}
