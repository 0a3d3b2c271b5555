//! `blockyard bench` executes the program `blockyard-bench`. A script replaces that program here.

use std::path::Path;
use std::process::Command;

use crate::common::{BLOCKYARD, Finished, Folder, TOOL, run};

/// Script that prints its arguments, one for each line, and ends with status 7.
const SCRIPT: &str = "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n";

/// Returns a folder with the program in `bin`, and without `blockyard-bench`.
fn installed() -> Folder {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.join("bin")).unwrap();
    std::fs::create_dir_all(folder.join("libexec/blockyard")).unwrap();
    install(Path::new(BLOCKYARD), &folder.join("bin/blockyard"));
    folder
}

/// Copies a program by another process. If this process wrote the file, a child of another test
/// could inherit the open descriptor, and executing the file would fail (ETXTBSY).
fn install(from: &Path, to: &Path) {
    run(Command::new("install").arg("-m755").args([from, to]), TOOL).good();
}

fn call(folder: &Folder, arguments: &[&str]) -> Finished {
    let mut command = Command::new(folder.join("bin/blockyard"));
    run(command.args(arguments).env("PATH", folder.join("nothing")), TOOL)
}

#[test]
fn all_arguments_reach_the_other_program() {
    let folder = installed();
    for place in ["libexec/blockyard/blockyard-bench", "bin/blockyard-bench"] {
        std::fs::write(folder.join("script"), SCRIPT).unwrap();
        install(&folder.join("script"), &folder.join(place));
        let done = call(
            &folder,
            &["--log", "debug", "bench", "rate", "--help", "a b", "--", "-x", "bench"],
        );
        assert_eq!(done.status.code(), Some(7), "{place}: {}", done.err);
        assert_eq!(
            done.out.lines().collect::<Vec<_>>(),
            ["--log", "debug", "rate", "--help", "a b", "--", "-x", "bench"]
        );
    }
    for arguments in [&["bench"][..], &["bench", "--help"], &["bench", "--version"]] {
        let done = call(&folder, arguments);
        assert_eq!(
            (done.status.code(), done.out.trim_end()),
            (Some(7), arguments[1..].join(" ").as_str())
        );
    }
}

#[test]
fn without_blockyard_bench_the_error_names_the_searched_folders() {
    let folder = installed();
    let done = call(&folder, &["bench", "rate", "read", "x"]);
    assert_eq!(done.status.code(), Some(1));
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    for part in ["blockyard-bench is missing", "/bin, ", "/libexec/blockyard, PATH"] {
        assert!(done.err.contains(part), "{part}: {}", done.err);
    }
    // Other commands work, and note the missing commands.
    let script = call(&folder, &["completions", "bash"]);
    assert!(script.err.contains("blockyard-bench is missing"), "{}", script.err);
    assert!(script.good().contains("blockyard__subcmd__serve"));
}
