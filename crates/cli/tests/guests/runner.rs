//! The guests' tools: what the runner leaves behind when it is stopped at a bad moment, and which
//! modules QEMU loads.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::{Daemon, Folder, TOOL, guests, run, until};

/// Stops the runner's process group, as an interrupted benchmark does. This includes the `rm` that
/// the runner has just started.
#[test]
fn a_runner_that_is_stopped_during_cleanup_completes_it() {
    let folder = Folder::new();
    let (bin, temporary, script, removing) =
        (folder.join("bin"), folder.join("t"), folder.join("script"), folder.join("removing"));
    [&bin, &temporary].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    std::fs::write(&script, "true\n").unwrap();
    // An `rm` that signals when it starts, and waits for a line.
    let path = folder.join("go");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // Also open for reading, because opening a FIFO without a reader blocks.
    let mut go = File::options().read(true).write(true).open(&path).unwrap();
    let rm = format!(
        "#!/bin/sh\n: >'{}'\nread -r line <'{}'\nexec /bin/rm \"$@\"\n",
        removing.display(),
        path.display()
    );
    folder.script("bin/rm", &rm);

    let mut command = Command::new(guests().join("uml"));
    command.args(["--timeout", "60"]).arg(&script).env("TMPDIR", &temporary).process_group(0);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let mut runner = Daemon::start(&mut command);
    until("the guest has ended", TOOL, || removing.exists());
    kill_process_group(Pid::from_raw(runner.pid() as i32).unwrap(), Signal::TERM).unwrap();
    runner.until_signals_are_taken();
    // The runner may start it again.
    go.write_all(&[b'\n'; 100]).unwrap();
    runner.ended(TOOL);
    let left: Vec<_> =
        std::fs::read_dir(&temporary).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// Modules of another QEMU on the host do not match. QEMU would exit or lack devices. (Modules
/// below /var/run/qemu are looked up by the exact version, and match.)
#[test]
fn qemu_loads_no_modules_of_the_host() {
    let folder = Folder::new();
    let (trace, tool) = (folder.join("trace"), guests().join("tool"));
    let mut strace = Command::new(&tool);
    strace.args(["strace", "-f", "-qq", "-e", "trace=access,open,openat", "-o"]).arg(&trace);
    strace.arg(&tool).args(["qemu-system-x86_64", "-M", "none", "-device", "help"]);
    run(&mut strace, TOOL).good();
    let trace = std::fs::read_to_string(&trace).unwrap();
    assert!(
        trace.contains("/qemu-bundle/usr/lib/x86_64-linux-gnu/qemu/"),
        "it looks for modules elsewhere"
    );
    let of_host: Vec<_> =
        trace.lines().filter(|l| l.contains("\"/usr/lib/x86_64-linux-gnu/qemu/")).collect();
    assert!(of_host.is_empty(), "{of_host:#?}");
}
