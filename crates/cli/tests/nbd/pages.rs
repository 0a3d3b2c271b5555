//! The commands of the pages in docs/, run as the pages print them. Blocks that begin with "```sh"
//! run in the page's order, in one empty folder. Blocks that begin with "```sh guest" run as root
//! of a guest.
//!
//! The pages give `blockyard serve` a terminal of its own. Here it runs in the background, and the
//! script goes on when the server is ready. Measurements take a part of a second here, and use
//! smaller files, because no test looks at their figures.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::pages::{END, SERVE, blocks, guest_script, page};
use crate::common::{BLOCKYARD, Folder, Guest, GuestKind, guests, run, tool_command};

/// Timeout for all commands of a page, on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);

/// Measurements of the pages, and what they are here: options of `blockyard bench` and of fio.
const SHORTER: [(&str, &str); 7] = [
    ("--runtime 1", "--runtime 0.05"),
    ("--runtime 2", "--runtime 0.05"),
    ("runtime=2", "runtime=100ms"),
    ("--seconds 1", "--seconds 0.3"),
    ("--seconds 4", "--seconds 1"),
    ("--size 256m", "--size 64m"),
    ("--size=64m", "--size=16m"),
];

/// Shortens the measurements of `blockyard bench` and of fio.
fn quick(commands: &str) -> String {
    let mut text = commands.to_string();
    for (printed, here) in SHORTER {
        for end in [" ", "\n"] {
            text = text.replace(&format!("{printed}{end}"), &format!("{here}{end}"));
        }
    }
    // A load on a disk begins with 0.2 s that it does not measure.
    let (printed, here) = ("--runtime 0.05", "--runtime 0.05 --warmup 0.05");
    let line = |line: &str| match line.contains("bench client ") {
        true => format!("{}\n", line.replace(printed, here)),
        false => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

/// Shell code that lists the servers that run in the script's folder.
const HERE: &str = r#"
here() {
    local process
    for process in /proc/[0-9]*; do
        [[ $process/cwd -ef . && $(<"$process/comm") = blockyard ]] && echo "${process#/proc/}"
    done
}
"#;

fn runs_as_it_stands(name: &str, programs: &[&str]) {
    let text = format!("\n{}", quick(&blocks(&page(name), "```sh"))).replace("\n! ", "\nnot ");
    assert!(text.lines().count() > 3, "{name} has no commands");
    let folder = Folder::new();
    let bin = wrappers(&folder, programs);
    let guests = guests().canonicalize().unwrap();
    std::os::unix::fs::symlink(guests, folder.join("guests")).unwrap();
    runs(name, &folder, &bin, &text);
}

/// Runs commands in a folder, with `blockyard serve` in the background.
fn runs(name: &str, folder: &Path, bin: &Path, text: &str) {
    // The trap ends daemons also if the script fails. A server that took over from another one is
    // not a job of the script, but runs in its folder. (`fuser api.sock` would also find the
    // servers of other scripts that listen on this relative name.)
    let script = format!(
        "{SERVE}{HERE}trap 'kill $(jobs -p) $(cat *.pid 2>/dev/null) $(here) 2>/dev/null || :' EXIT\n\
         set -x\n{text}{END}"
    );
    std::fs::write(folder.join("script"), script).unwrap();
    let mut command = Command::new("bash");
    command.arg("script").current_dir(folder).env("BLOCKYARD", BLOCKYARD);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let finished = run(&mut command, LIMIT);
    assert!(
        finished.status.success(),
        "{name}: {}\n{}\n{}",
        finished.status,
        finished.out,
        finished.err
    );
    assert!(finished.out.contains("all of it has run"), "{name}: {}", finished.out);
    assert!(!finished.out.contains("verification failed"), "{name}: {}", finished.out);
}

/// Returns a folder with `blockyard` and the peers' programs under their own names.
fn wrappers(folder: &Folder, programs: &[&str]) -> PathBuf {
    let bin = folder.join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(BLOCKYARD, bin.join("blockyard")).unwrap();
    for program in programs {
        let command = tool_command(program);
        let mut text = String::from("#!/bin/sh\n");
        for (name, value) in command.get_envs() {
            text += &format!("export {}={:?}\n", name.display(), value.unwrap());
        }
        text += &format!("exec {:?}", command.get_program());
        command.get_args().for_each(|word| text += &format!(" {word:?}"));
        // nbdkit goes to the background by itself. The script's trap ends nbdkit by this PID file.
        text += if *program == "nbdkit" { " -P nbdkit-$$.pid" } else { "" };
        folder.script(&format!("bin/{program}"), &(text + " \"$@\"\n"));
    }
    bin
}

#[test]
fn readme() {
    runs_as_it_stands("../README.md", &["nbdcopy"]);
}

#[test]
fn api() {
    runs_as_it_stands("api.md", &[]);
}

#[test]
fn own_target() {
    runs_as_it_stands("own-target.md", &[]);
}

#[test]
fn metrics() {
    runs_as_it_stands("metrics.md", &[]);
}

#[test]
fn fio() {
    runs_as_it_stands("fio.md", &["fio"]);
}

#[test]
fn qemu() {
    runs_as_it_stands("qemu.md", &["qemu-img", "qemu-io", "qemu-system-x86_64"]);
}

#[test]
fn libnbd() {
    runs_as_it_stands("libnbd.md", &["nbdinfo", "nbdcopy", "nbdsh", "nbdfuse", "nbdkit"]);
}

#[test]
fn nbd() {
    runs_as_it_stands("nbd.md", &["nbdinfo"]);
}

#[test]
fn operate() {
    runs_as_it_stands("operate.md", &["nbdinfo", "nbdcopy"]);
}

/// Returns the commands of each row of the table of tasks.
fn tasks(page: &str) -> Vec<Vec<&str>> {
    let section = page.split_once("## Tasks of an operator").unwrap().1;
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.map(|row| row.split('`').skip(1).step_by(2).collect()).collect()
}

#[test]
fn tasks_of_an_operator() {
    let page = page("operate.md");
    let tasks = tasks(&page);
    assert!(tasks.len() > 8, "{tasks:?}");
    let too_long = tasks.iter().find(|commands| !matches!(commands.len(), 1 | 2));
    assert_eq!(too_long, None, "each task has at most two commands");
    let commands: String = tasks.iter().flatten().map(|command| format!("{command}\n")).collect();
    let folder = Folder::new();
    let bin = wrappers(&folder, &[]);
    let check = "[[ $(blockyard ctl list | wc -l) == 1 ]]\n";
    runs("operate.md", &folder, &bin, &(blocks(&page, "```sh tasks") + &commands + check));
}

#[test]
fn migrate() {
    runs_as_it_stands("migrate.md", &["nbdinfo", "nbdcopy", "qemu-img"]);
}

#[test]
fn images() {
    runs_as_it_stands("images.md", &[]);
}

#[test]
fn filters() {
    runs_as_it_stands("filters.md", &["fio"]);
}

#[test]
fn configuration() {
    runs_as_it_stands("configuration.md", &[]);
}

#[test]
fn sandbox() {
    runs_as_it_stands("sandbox.md", &[]);
}

#[test]
fn measure() {
    runs_as_it_stands("measure.md", &["fio"]);
}

#[test]
fn compare() {
    runs_as_it_stands("compare.md", &["fio"]);
}

#[test]
fn fair_share() {
    runs_as_it_stands("fair-share.md", &[]);
}

#[test]
fn remote_images() {
    runs_as_it_stands("remote-images.md", &[]);
}

#[test]
fn nbd_tls() {
    runs_as_it_stands("nbd-tls.md", &["nbdinfo", "qemu-img"]);
}

#[test]
fn serve_qemu() {
    runs_as_it_stands("serve-qemu.md", &["qemu-system-x86_64", "qemu-img"]);
}

#[test]
fn serve_uml() {
    runs_as_it_stands("serve-uml.md", &["uml_mkcow"]);
}

#[test]
fn xen() {
    runs_as_it_stands("xen.md", &[]);
}

#[test]
fn systemd() {
    runs_as_it_stands("systemd.md", &[]);
}

#[test]
fn restart() {
    runs_as_it_stands("restart.md", &[]);
}

#[test]
fn every_page_with_commands_has_a_test() {
    let pages = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs"));
    let names = pages.unwrap().map(|page| page.unwrap().file_name().into_string().unwrap());
    let untested: Vec<_> = names
        .filter(|name| name.ends_with(".md") && !blocks(&page(name), "```sh").is_empty())
        .filter(|name| !include_str!("pages.rs").contains(&format!("runs_as_it_stands(\"{name}\"")))
        .collect();
    assert_eq!(untested, [""; 0]);
}

/// The tests of ublk run the blocks of ublk.md.
#[test]
fn the_kernels_nbd_driver() {
    let options = ["--file", BLOCKYARD];
    let mut guest = Guest::start(GuestKind::Uml, options, &guest_script("libnbd.md"), LIMIT);
    guest.expect("all of it has run");
    guest.finish();
}
