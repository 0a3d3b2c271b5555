//! The guests' tools themselves: what the runner leaves behind when it is told to end at a bad
//! moment; whose modules QEMU loads.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::{Daemon, Folder, TOOL, guests, run, until};

/// As a benchmark that is interrupted ends it: with all its group, and so with the `rm` that it has
/// just begun.
#[test]
fn told_to_end_while_it_cleans_up_it_does_so_to_the_end() {
    let folder = Folder::new();
    let (bin, temporary, script, removing) =
        (folder.join("bin"), folder.join("t"), folder.join("script"), folder.join("removing"));
    [&bin, &temporary].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    std::fs::write(&script, "true\n").unwrap();
    // One that takes its time, and shows when it begins.
    let slow = format!("#!/bin/sh\n: >'{}'\nsleep 1\nexec /bin/rm \"$@\"\n", removing.display());
    std::fs::write(bin.join("rm"), slow).unwrap();
    std::fs::set_permissions(bin.join("rm"), std::fs::Permissions::from_mode(0o755)).unwrap();

    let mut command = Command::new(guests().join("uml"));
    command.args(["--timeout", "60"]).arg(&script).env("TMPDIR", &temporary).process_group(0);
    command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let mut runner = Daemon::start(&mut command);
    until("the guest has ended", TOOL, || removing.exists());
    kill_process_group(Pid::from_raw(runner.pid() as i32).unwrap(), Signal::TERM).unwrap();
    runner.ended(TOOL);
    let left: Vec<_> =
        std::fs::read_dir(&temporary).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// Modules of another QEMU that is installed on the host do not fit, and QEMU ends or lacks devices
/// then. (What lies below /var/run/qemu is looked up by the exact version, and fits.)
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
