//! Hosts without a permission, O_DIRECT or io_uring, or with a limit.

use std::process::Command;

use blockyard_driver::status;

use crate::common::{
    BLOCKYARD, Daemon, Folder, SOON, TOOL, blockyard, complaints, run, tool_command,
};
use crate::guest::{Guest, pattern};

/// Returns a command for the program without root's CAP_DAC_OVERRIDE.
fn ordinary() -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(BLOCKYARD);
    }
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set",
        "-dac_override,-dac_read_search",
        "--inh-caps",
        "-all",
        BLOCKYARD,
    ]);
    command
}

fn set_mode(path: &std::path::Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn an_image_without_permission_is_refused() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let serve = |more: &[&str]| {
        let mut command = ordinary();
        command.arg("serve").arg(&image).arg("--vhost-user").arg(&socket).args(more);
        command
    };
    set_mode(&image, 0o400);
    let done = run(&mut serve(&[]), SOON);
    assert_eq!((done.status.code(), done.err.lines().count()), (Some(1), 1), "{}", done.err);
    for part in [image.to_str().unwrap(), "no permission", "--read-only"] {
        assert!(done.err.contains(part), "{part}: {}", done.err);
    }
    // The advice in the message works.
    let mut daemon = Daemon::start(&mut serve(&["--read-only"]));
    daemon.wait_ready();
    Guest::connect(&socket).leave();
    daemon.stop();
    set_mode(&image, 0);
    let done = run(&mut serve(&["--read-only"]), SOON);
    assert!(done.status.code() == Some(1) && done.err.contains("no permission"), "{}", done.err);
}

#[test]
fn a_socket_without_permission_is_refused() {
    let folder = Folder::new();
    let image = folder.image("disk", 1 << 20);
    let serve = |socket: &std::path::Path| {
        let done = run(ordinary().arg("serve").arg(&image).arg("--vhost-user").arg(socket), SOON);
        assert_eq!((done.status.code(), done.err.lines().count()), (Some(1), 1), "{}", done.err);
        assert!(done.err.contains("cannot listen on it: Permission denied"), "{}", done.err);
    };
    // The socket of another user, which may be in use. The server does not replace it, although the
    // mode of the folder would allow that.
    let theirs = folder.join("theirs");
    let _listener = std::os::unix::net::UnixListener::bind(&theirs).unwrap();
    set_mode(&theirs, 0);
    serve(&theirs);
    assert!(theirs.exists());
    let closed = folder.join("closed");
    std::fs::create_dir(&closed).unwrap();
    set_mode(&closed, 0o500);
    serve(&closed.join("s"));
    set_mode(&closed, 0o700);
}

#[test]
fn an_image_without_o_direct_is_served_through_the_page_cache() {
    // A file that every Linux has, on a file system without O_DIRECT. Its length is not a multiple
    // of a sector.
    let notes = std::path::Path::new("/sys/kernel/notes");
    let content = std::fs::read(notes).unwrap();
    let folder = Folder::new();
    let socket = folder.join("s");
    for (mode, instead) in [("none", "writeback"), ("directsync", "writethrough")] {
        let daemon = Daemon::serve(notes, &socket, &["--read-only", "--cache", mode]);
        let mut guest = Guest::connect(&socket);
        let mut read = guest.read(0, content.len().next_multiple_of(512)).unwrap();
        assert!(read.drain(content.len()..).all(|b| b == 0), "zeroes fill the last sector");
        assert_eq!(read, content);
        let log = daemon.stop();
        let warnings = complaints(&log);
        assert_eq!(warnings.len(), 1, "{log}");
        for part in
            ["/sys/kernel/notes", "has no O_DIRECT", &format!("as cache mode {instead} would")]
        {
            assert!(warnings[0].contains(part), "{part}: {log}");
        }
    }
    let daemon = Daemon::serve(notes, &socket, &["--read-only", "--cache", "writeback"]);
    assert_eq!(complaints(&daemon.stop()), [""; 0], "without O_DIRECT there is no warning");
}

#[test]
fn o_direct_is_used_if_the_file_system_has_it() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    for (mode, direct) in
        [("none", true), ("directsync", true), ("writeback", false), ("writethrough", false)]
    {
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.write(0, &pattern(7, 4096)), 0);
        let infos = std::fs::read_dir(format!("/proc/{}/fdinfo", daemon.pid())).unwrap();
        let locked = infos.flatten().find_map(|i| {
            let text = std::fs::read_to_string(i.path()).unwrap_or_default();
            text.contains("OFDLCK").then_some(text)
        });
        let info = locked.expect("the image is locked");
        let flags = info.lines().find_map(|l| l.strip_prefix("flags:")).unwrap().trim();
        let o_direct = u64::from(rustix::fs::OFlags::DIRECT.bits());
        assert_eq!(
            u64::from_str_radix(flags, 8).unwrap() & o_direct != 0,
            direct,
            "{mode}: {info}"
        );
        assert_eq!(complaints(&daemon.stop()), [""; 0]);
    }
}

#[test]
fn a_kernel_without_io_uring_is_refused() {
    let folder = Folder::new();
    let socket = folder.join("s");
    for (error, parts) in [
        ("ENOSYS", ["this kernel has no io_uring", "5.15"]),
        ("EPERM", ["io_uring is forbidden here", "kernel.io_uring_disabled"]),
        ("ENOMEM", ["no memory for io_uring", "ulimit -l"]),
    ] {
        let mut strace = tool_command("strace");
        strace.args(["-qq", "-f", "-o", "/dev/null", "-e", "trace=io_uring_setup", "-e"]);
        strace
            .arg(format!("inject=io_uring_setup:error={error}"))
            .args([BLOCKYARD, "serve", "null:1M"]);
        let done = run(strace.arg("--vhost-user").arg(&socket), SOON);
        assert_eq!((done.status.code(), done.out.as_str()), (Some(1), ""), "{}", done.err);
        assert_eq!(done.err.lines().count(), 1, "{}", done.err);
        assert!(parts.iter().all(|p| done.err.contains(p)), "{}", done.err);
    }
    assert!(!socket.exists());
}

/// Prints the error of `io_uring_setup`, or 0. The number of this call is the same on all machines.
const SETUP: &str = "import ctypes\n\
    libc = ctypes.CDLL(None, use_errno=True)\n\
    fd = libc.syscall(425, 64, ctypes.create_string_buffer(120))\n\
    print(ctypes.get_errno() if fd < 0 else 0)";

/// A kernel may count the memory of rings as locked memory. Then the server reports the reason at
/// start. It succeeds without a limit, as in the systemd units.
#[test]
fn a_limit_of_locked_memory_is_reported() {
    let folder = Folder::new();
    let socket = folder.join("s");
    let limited = |limit: &str| {
        let mut command = Command::new("bash");
        command.args(["-c", "ulimit -l $1 && shift && exec \"$@\"", "bash", limit]);
        if rustix::process::geteuid().is_root() {
            command.args(["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-all"]);
        }
        command
    };
    let start = |limit: &str| {
        let mut command = limited(limit);
        command.args([BLOCKYARD, "serve", "ram:1M", "--name", "m", "--vhost-user"]).arg(&socket);
        Daemon::start(&mut command)
    };
    let error = run(limited("0").args(["python3", "-c", SETUP]), TOOL).good();
    let is_counted = match error.trim() {
        "0" => false,
        error if error == libc::ENOMEM.to_string() => true,
        error => panic!("io_uring_setup fails with error {error}"),
    };
    let mut little = start("0");
    if is_counted {
        assert!(!little.became_ready(), "{}", little.log());
        let expected = "no memory for io_uring (see ulimit -l)";
        assert!(little.log().contains(expected), "{}", little.log());
    } else {
        little.wait_ready();
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.read(0, 4096), Ok(vec![0; 4096]));
        drop(guest);
        little.stop();
    }
    let mut enough = start("hard");
    enough.wait_ready();
    enough.stop();
}

/// By default SIGXFSZ ends a process that writes beyond the limit (`ulimit -f`).
#[test]
fn a_write_beyond_the_limit_of_a_files_size_fails_alone() {
    let folder = Folder::new();
    let (image, socket) = (folder.join("disk.qcow2"), folder.join("s"));
    blockyard(["image", "create", "-q", image.to_str().unwrap(), "64M"]).good();
    let mut limited = Command::new("prlimit");
    limited.args(["--fsize=4194304:4194304", BLOCKYARD, "serve"]);
    let mut daemon = Daemon::start(limited.arg(&image).arg("--vhost-user").arg(&socket));
    daemon.wait_ready();
    let mut guest = Guest::connect(&socket);
    let data = pattern(1, 256 << 10);
    let answers: Vec<_> = (0..32).map(|at| guest.write(at << 9, &data)).collect();
    assert_eq!((answers[0], answers[31]), (status::OK, status::IOERR), "{answers:?}");
    assert!(guest.read(0, 256 << 10).unwrap() == data);
    guest.leave();
    daemon.wait_log("File too large");
    assert!(daemon.running());
    daemon.kill();
}
