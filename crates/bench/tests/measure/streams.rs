//! Measurements with a standard output or standard error that fails, or that has lost its reader.

use std::fs::File;
use std::process::{Command, Stdio};

use super::*;

/// Commands that print on standard output, with files of `folder`.
fn commands(folder: &Folder) -> Vec<Vec<String>> {
    let image = folder.image("disk.raw", 1 << 20).display().to_string();
    let rates = folder.join("rates");
    std::fs::write(&rates, "512 0.001\n512 0.002\n1024 0.001\n").unwrap();
    let lines = [
        "job fileserver --print".into(),
        format!("client --buffered --ops 10 --file {image}"),
        format!("rate read --ops 10 {image}"),
        format!("median {}", rates.display()),
    ];
    lines.map(|line: String| line.split(' ').map(str::to_string).collect()).into()
}

/// Runs a measurement to its end. Its piped output has what it has printed.
fn bench(arguments: &[String], out: Stdio, err: Stdio) -> Finished {
    let mut command = Command::new(BENCH);
    command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(err);
    let mut running = Daemon::start_with(&mut command);
    let status = running.ended(TOOL);
    Finished { status, out: running.out(), err: running.log() }
}

#[test]
fn measurements_end_quietly_when_the_reader_has_gone() {
    let folder = Folder::new();
    for arguments in commands(&folder) {
        // The reader is closed before the command begins.
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let done = bench(&arguments, writer.into(), Stdio::piped());
        let said: Vec<_> = done.err.lines().filter(|line| !line.starts_with("seed ")).collect();
        // The exit status that a shell reports for a program that SIGPIPE ended.
        assert_eq!((done.status.code(), said), (Some(141), vec![]), "{arguments:?}");
    }
}

#[test]
fn measurements_say_that_standard_output_cannot_be_written() {
    let folder = Folder::new();
    for arguments in commands(&folder) {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let done = bench(&arguments, full.into(), Stdio::piped());
        let said = &done.err;
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {said}");
        let line =
            "blockyard: standard output cannot be written: No space left on device (os error 28)";
        assert_eq!(said.lines().last(), Some(line), "{arguments:?}: {said}");
    }
}

#[test]
fn measurements_do_not_fail_for_want_of_standard_error() {
    let folder = Folder::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let image = folder.image("disk.raw", 1 << 20).display().to_string();
    let arguments = ["rate", "read", &image, "--ops", "3"].map(str::to_string);
    let done = bench(&arguments, Stdio::piped(), full.into());
    assert_eq!((done.status.code(), done.out.lines().count()), (Some(0), 3));
}
