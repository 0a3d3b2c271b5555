//! Hand-overs with front ends that make their sessions unusable, and new servers that lack
//! something. The former lose their session alone. The latter leave the old server serving.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;

use blockyard_driver::status;
use rustix::fs::{CWD, FileType, MemfdFlags, Mode, SealFlags};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{BLOCKYARD, Daemon, Lines, SOON, TOOL, end_of, tool_command, until};
use crate::guest::Guest;
use crate::handover::{Case, ctl, end_server, is_running, script};

/// Guest address of memory that no request uses, so that the old server does not touch it.
const EXTRA: u64 = 1 << 41;

/// Starts a server with the disks "bad" and "good". Returns their sockets.
fn serve(case: &Case, options: &[&str]) -> (Daemon, [PathBuf; 2]) {
    let mut config = String::new();
    let sockets = ["bad", "good"].map(|name| {
        let image = case.folder.join(format!("{name}.img"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let socket = case.folder.join(format!("{name}.s"));
        config += &format!(
            "[[disk]]\nname = \"{name}\"\nimage = {image:?}\nvhost-user = {socket:?}\n\
             cache = \"writeback\"\n"
        );
        socket
    });
    let path = case.folder.join("config.toml");
    std::fs::write(&path, config).unwrap();
    let mut daemon = Daemon::start(case.configured(&path).args(options));
    daemon.wait_ready();
    (daemon, sockets)
}

/// Adds a region of memory, and returns its descriptor.
fn share(guest: &mut Guest, len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("extra", flags).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: EXTRA,
        memory_size: len,
        userspace_addr: 0x7e00_0000_0000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    guest.session.link.connection.frontend().add_mem_region(&region).unwrap();
    file
}

fn works(guest: &mut Guest, fill: u8) {
    assert_eq!(guest.write(8, &[fill; 4096]), status::OK);
    assert_eq!(guest.read(8, 4096).unwrap(), [fill; 4096]);
}

/// Replaces the server of `pid`. Returns the new one.
fn upgrade(case: &Case, pid: i32) -> i32 {
    let shown = ctl(case, &["upgrade", "--json"]).good();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    until("the old server has ended", SOON, || !is_running(pid));
    shown["pid"].as_u64().unwrap() as i32
}

#[test]
fn a_front_end_that_cannot_be_mapped_again_loses_its_session_alone() {
    for fault in ["truncated", "sealed"] {
        let case = Case::new();
        let (daemon, [bad, good]) = serve(&case, &[]);
        let mut other = Guest::connect(&good);
        let mut guest = Guest::connect(&bad);
        works(&mut other, 1);
        works(&mut guest, 2);
        let extra = share(&mut guest, 1 << 20);
        match fault {
            "truncated" => rustix::fs::ftruncate(&extra, 4096).unwrap(),
            _ => rustix::fs::fcntl_add_seals(&extra, SealFlags::FUTURE_WRITE).unwrap(),
        }
        works(&mut guest, 3);
        let second = upgrade(&case, daemon.pid() as i32);
        match guest.session.link.connection.socket().read(&mut [0]) {
            Ok(0) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{fault}: not disconnected: {other:?}"),
        }
        works(&mut other, 4);
        // The disk is still there, also for the next server.
        let mut guest = Guest::connect(&bad);
        assert_eq!(guest.read(8, 4096).unwrap(), [3; 4096], "{fault}");
        let third = upgrade(&case, second);
        works(&mut guest, 5);
        works(&mut other, 6);
        drop((guest, other));
        end_server(third);
    }
}

/// A guest that stays connected would have another disk.
#[test]
fn an_upgrade_never_changes_what_a_connected_guest_has() {
    let case = Case::new();
    let (daemon, [bad, _]) = serve(&case, &[]);
    let mut guest = Guest::connect(&bad);
    works(&mut guest, 1);
    let [config, image] = ["config.toml", "bad.img"].map(|name| case.folder.join(name));
    let good = std::fs::read_to_string(&config).unwrap();
    let other = case.folder.image("other.img", 1 << 20);
    let refused = |why: &str| {
        let done = ctl(&case, &["upgrade"]);
        assert!(done.err.contains(why), "{why}: {}", done.err);
    };
    let name = "name = \"bad\"\n";
    for (text, why) in [
        (good.replace("bad.img", "other.img"), "its image is another file now"),
        (good.replace(image.to_str().unwrap(), "null:1M"), "its image is another file now"),
        (good.replace(name, &format!("{name}read-only = true\n")), "it is read-only now"),
        (good.replace(name, &format!("{name}nonsense = 1\n")), "unknown key `nonsense`"),
    ] {
        std::fs::write(&config, text).unwrap();
        refused(why);
        works(&mut guest, 2);
    }
    std::fs::write(&config, good).unwrap();
    let away = case.folder.join("away.img");
    std::fs::rename(&image, &away).unwrap();
    refused("it cannot be opened again");
    works(&mut guest, 3);
    std::fs::rename(&other, &image).unwrap();
    refused("another file is there now");
    works(&mut guest, 4);
    std::fs::rename(&away, &image).unwrap();
    let last = upgrade(&case, daemon.pid() as i32);
    works(&mut guest, 5);
    drop(guest);
    end_server(last);
}

/// The new server would not know what such a call has changed.
#[test]
fn a_call_that_changes_disks_is_refused_during_an_upgrade() {
    let case = Case::new();
    let (daemon, [_, good]) = serve(&case, &["--sandbox", "off"]);
    let mut guest = Guest::connect(&good);
    let pid = case.folder.join("pid");
    let hung = script(
        &case,
        "hung",
        &format!("echo $$ >{pid:?}.tmp; mv {pid:?}.tmp {pid:?}; exec sleep 999"),
    );
    let (image, socket) = (case.folder.image("new.img", 1 << 20), case.folder.join("new.s"));
    let add = || {
        let (image, socket) = (image.to_str().unwrap(), socket.to_str().unwrap());
        ctl(&case, &["add", &format!("image={image}"), &format!("vhost-user={socket}")])
    };
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| ctl(&case, &["upgrade", "--binary", hung.to_str().unwrap()]));
        until("the new server has started", SOON, || pid.exists());
        for refused in [add(), ctl(&case, &["remove", "good", "--force"]), ctl(&case, &["reload"])]
        {
            assert!(refused.err.contains("upgrade runs: try again"), "{}", refused.err);
        }
        end_server(std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap());
        let done = upgrade.join().unwrap();
        assert!(done.err.contains("not upgraded"), "{}", done.err);
    });
    add().good();
    works(&mut guest, 1);
    guest.leave();
    daemon.stop();
}

/// It ends before it says anything, as a program does that lacks a library.
#[test]
fn a_new_server_that_ends_at_once_is_named_with_its_status() {
    let case = Case::new();
    // In a sandbox the server would not start this program.
    let (daemon, [_, good]) = serve(&case, &["--sandbox", "off"]);
    let silent = script(&case, "silent", "exit 7");
    for _ in 0..2 {
        let done = ctl(&case, &["upgrade", "--binary", silent.to_str().unwrap()]);
        let why = "not upgraded: the new server has ended by itself (exit status: 7)";
        assert!(done.err.contains(why), "{}", done.err);
    }
    works(&mut Guest::connect(&good), 1);
    daemon.stop();
}

#[test]
fn a_new_server_without_room_for_a_front_ends_memory_leaves_the_old_one_serving() {
    let case = Case::new();
    // In a sandbox the server would not start this program.
    let (daemon, [bad, good]) = serve(&case, &["--sandbox", "off"]);
    let (mut other, mut guest) = (Guest::connect(&good), Guest::connect(&bad));
    let _extra = share(&mut guest, 1 << 40);
    // 256 GiB of address space.
    let poor = script(&case, "poor", &format!("ulimit -v 268435456; exec {BLOCKYARD} \"$@\""));
    let done = ctl(&case, &["upgrade", "--binary", poor.to_str().unwrap()]);
    assert!(!done.status.success(), "{}", done.out);
    assert!(done.err.contains("not upgraded"), "{}", done.err);
    daemon.wait_log("may map at most");
    works(&mut guest, 1);
    works(&mut other, 2);
    let second = upgrade(&case, daemon.pid() as i32);
    works(&mut guest, 3);
    works(&mut other, 4);
    drop((guest, other));
    end_server(second);
}

/// Another process may lock the image between the old server and the new one, such as a check.
#[test]
fn a_disk_waits_for_a_process_that_has_locked_its_image() {
    let case = Case::new();
    let mut daemon = Daemon::start(case.command().args(["--sandbox", "off"]));
    daemon.wait_ready();
    let mut guest = Guest::connect(&case.socket);
    works(&mut guest, 1);
    let [given, end] = ["given", "end"].map(|name| case.folder.join(name));
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(CWD, &end, FileType::Fifo, mode, 0).unwrap();
    let half = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/half_server.py");
    let body = format!(
        "python3 -IS {half} disk.qcow2 given\ntouch {}\nread < {}\nexit 1",
        given.display(),
        end.display()
    );
    let program = script(&case, "half", &body);
    std::thread::scope(|scope| {
        let upgrade =
            scope.spawn(|| ctl(&case, &["upgrade", "--binary", program.to_str().unwrap()]));
        until("the new server has the disk", SOON, || given.exists());
        let mut reader = tool_command("qemu-io");
        reader.arg("-r").arg(&case.top).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut reader = reader.spawn().unwrap();
        let mut commands = reader.stdin.take().unwrap();
        commands.write_all(b"read 0 512\n").unwrap();
        let mut shown = Lines::of(reader.stdout.take().unwrap());
        assert!(shown.any(|line| line.contains("read 512/512 bytes")));
        std::fs::write(&end, "\n").unwrap();
        daemon.wait_log("before it is served again: ");
        let done = upgrade.join().unwrap();
        assert!(done.err.contains("not upgraded"), "{}", done.err);
        let write = scope.spawn(|| guest.write(16, &[2; 4096]));
        drop(commands);
        assert!(end_of(&mut reader, TOOL).success());
        daemon.wait_log("served again");
        assert_eq!(write.join().unwrap(), status::OK);
    });
    let log = daemon.log();
    assert_eq!(log.matches("before it is served again: ").count(), 1, "{log}");
    assert!(log.contains("is in use by "), "{log}");
    assert_eq!(guest.read(16, 4096).unwrap(), [2; 4096]);
    works(&mut guest, 3);
    drop(guest);
    daemon.stop();
    case.is_clean();
}
