//! Standard output and standard error that fail, fill up or are not read. Disks are not affected.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, Signal, TOOL, blockyard, listens, run, tool, until,
};
use crate::guest::{Guest, pattern};

const BLOCK: usize = 64 << 10;
const BLOCKS: u64 = 64;

/// Returns a full pipe: a writer would block.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let room = rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
    assert_eq!(rustix::io::write(&writer, &vec![b'x'; room]), Ok(room));
    (reader, writer)
}

/// Starts `blockyard serve` for a qcow2 image with the same file as standard output and standard
/// error, as with `2>&1 |`.
fn serve(folder: &Folder, stream: &OwnedFd) -> Daemon {
    let image = folder.join("disk.qcow2");
    blockyard(["image", "create", "-q", image.to_str().unwrap(), "16M"]).good();
    let both = || Stdio::from(stream.try_clone().unwrap());
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(&image).arg("--vhost-user").arg(folder.join("s"));
    let daemon = Daemon::start_with(command.stdin(Stdio::null()).stdout(both()).stderr(both()));
    until("it listens", SOON, || listens(&folder.join("s")));
    daemon
}

/// Guests connect, write and disconnect, and the daemon ends. The image must have all writes.
fn guests_lose_nothing(folder: &Folder, mut daemon: Daemon) {
    let socket = folder.join("s");
    for visit in 0..4 {
        // Each connection and each SIGUSR1 causes log lines.
        let mut guest = Guest::connect(&socket);
        for block in (visit..BLOCKS).step_by(4) {
            assert_eq!(guest.write(block * (BLOCK / 512) as u64, &pattern(block, BLOCK)), 0);
        }
        daemon.signal(Signal::USR1);
        daemon.signal(Signal::HUP);
        guest.leave();
    }
    let status = daemon.terminate();
    assert!(status.success(), "{status}");
    assert!(!socket.exists(), "it has come to its end");
    let (image, raw) = (folder.join("disk.qcow2"), folder.join("disk.raw"));
    tool("qemu-img", ["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()])
        .good();
    let found = std::fs::read(raw).unwrap();
    for block in 0..BLOCKS {
        let at = block as usize * BLOCK;
        assert!(
            found[at..at + BLOCK] == pattern(block, BLOCK),
            "block {block} was answered, and is not in the image"
        );
    }
}

#[test]
fn a_closed_reader_of_the_log_affects_no_disk() {
    let folder = Folder::new();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let daemon = serve(&folder, &writer);
    drop((reader, writer));
    guests_lose_nothing(&folder, daemon);
}

#[test]
fn a_full_pipe_of_the_log_affects_no_disk() {
    let folder = Folder::new();
    let (_reader, writer) = full_pipe();
    let daemon = serve(&folder, &writer);
    guests_lose_nothing(&folder, daemon);
}

#[test]
fn a_full_file_system_of_the_log_affects_no_disk() {
    let folder = Folder::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let daemon = serve(&folder, &full.into());
    guests_lose_nothing(&folder, daemon);
}

/// A process that goes on after SIGSTOP has several signals at once. Then the kernel runs their
/// handlers on any of its threads, also on those that write the log.
#[test]
fn signals_that_come_at_once_do_not_end_a_server() {
    let folder = Folder::new();
    let mut daemon = Daemon::serve("ram:1M", &folder.join("s"), &[]);
    let status = format!("/proc/{}/status", daemon.pid());
    let is_zero = |set: &str| set.trim().bytes().all(|digit| digit == b'0');
    for _ in 0..50 {
        for signal in [Signal::STOP, Signal::HUP, Signal::USR1, Signal::CONT] {
            daemon.signal(signal);
        }
        until("no signal is pending", SOON, || {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            status.lines().all(|line| line.strip_prefix("ShdPnd:").is_none_or(is_zero))
        });
        assert!(daemon.running(), "{}", daemon.log());
    }
    daemon.stop();
}

#[test]
fn a_failed_start_does_not_block_on_its_message() {
    let (_reader, writer) = full_pipe();
    let mut command = Command::new(BLOCKYARD);
    command.args(["serve", "/not/there", "--vhost-user", "/nonexistent/s"]);
    let mut daemon = Daemon::start_with(command.stdin(Stdio::null()).stderr(Stdio::from(writer)));
    assert_eq!(daemon.ended(SOON).code(), Some(1));
}

/// Returns commands that print on standard output, for files of `folder`.
fn commands(folder: &Folder) -> Vec<Vec<String>> {
    let image = folder.image("disk.raw", 1 << 20);
    let config = folder.join("toml");
    let socket = folder.join("s");
    std::fs::write(&config, format!("[[disk]]\nimage = \"ram:1M\"\nvhost-user = {socket:?}\n"))
        .unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let words = |line: &str| line.split(' ').map(str::to_string).collect::<Vec<_>>();
    vec![
        words("completions bash"),
        [words("image info"), vec![text(&image)]].concat(),
        [words("image map"), vec![text(&image)]].concat(),
        [words("image create"), vec![text(&folder.join("new.raw")), "1M".into()]].concat(),
        [words("serve --check-config --config"), vec![text(&config)]].concat(),
    ]
}

/// Runs the program with this standard output. Returns its status and its standard error.
#[track_caller]
fn run_into(arguments: &[String], out: Stdio) -> (ExitStatus, String) {
    let mut command = Command::new(BLOCKYARD);
    command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(Stdio::piped());
    let mut daemon = Daemon::start_with(&mut command);
    let status = daemon.ended(TOOL);
    (status, daemon.log())
}

#[test]
fn commands_end_without_a_message_if_the_reader_closed_the_pipe() {
    let folder = Folder::new();
    for arguments in commands(&folder) {
        // The reader closes the pipe before the command starts.
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let (status, stderr) = run_into(&arguments, Stdio::from(writer));
        // The status that a shell reports for a program that SIGPIPE ended.
        assert_eq!((status.code(), &*stderr), (Some(141), ""), "{arguments:?}");
    }
    let help =
        run(Command::new("bash").args(["-c", &format!("'{BLOCKYARD}' --help | head -n 1")]), TOOL);
    assert_eq!((help.err.as_str(), help.out.lines().count()), ("", 1));
}

#[test]
fn commands_report_a_write_error_of_standard_output() {
    let folder = Folder::new();
    for arguments in commands(&folder) {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (status, stderr) = run_into(&arguments, Stdio::from(full));
        assert_eq!(status.code(), Some(1), "{arguments:?}: {stderr}");
        let line =
            "blockyard: standard output cannot be written: No space left on device (os error 28)";
        assert_eq!(stderr.lines().last(), Some(line), "{arguments:?}: {stderr}");
    }
}
