//! Image locks: one writer, or any number of readers. A killed daemon holds no lock.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use blockyard_driver::{Data, request};
use blockyard_ring::host::{self, Lock};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, run, until};
use crate::guest::{Guest, pattern};

fn serve(image: &Path, socket: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(image).arg("--vhost-user").arg(socket).args(more);
    command
}

/// Returns the only line of a refused start.
#[track_caller]
fn refused(command: &mut Command) -> String {
    let done = run(command, SOON);
    assert_eq!((done.status.code(), done.err.lines().count()), (Some(1), 1), "{}", done.err);
    done.err
}

#[test]
fn a_refused_writer_reports_the_process_that_holds_the_image() {
    let folder = Folder::new();
    let (image, socket, second) =
        (folder.image("disk", 1 << 20), folder.join("s"), folder.join("t"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let holder = format!("is in use by blockyard (pid {}):", daemon.pid());
    // This test has the image open too, but holds no lock.
    let _reader = std::fs::File::open(&image).unwrap();
    // The server logs that it waits for a lock, so the only line also says that it has not waited.
    for more in [&[][..], &["--read-only"], &["--cache", "unsafe"]] {
        let error = refused(&mut serve(&image, &second, more));
        assert!(
            error.contains(image.to_str().unwrap()) && error.contains(&holder),
            "{holder} {error}"
        );
    }
    let link = folder.join("link");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    assert!(refused(&mut serve(&link, &second, &[])).contains(&holder));
    assert!(!second.exists());
    assert_eq!(
        Guest::connect(&socket).write(0, &pattern(1, 512)),
        0,
        "the holder is not disturbed"
    );
    daemon.stop();
    Daemon::serve(&image, &second, &[]).stop();
}

#[test]
fn many_readers_share_an_image() {
    let folder = Folder::new();
    let (image, sockets) = (folder.image("disk", 1 << 20), [folder.join("a"), folder.join("b")]);
    let daemons = sockets.each_ref().map(|s| Daemon::serve(&image, s, &["--read-only"]));
    for socket in &sockets {
        assert_eq!(Guest::connect(socket).read(0, 512).unwrap(), [0; 512]);
    }
    let error = refused(&mut serve(&image, &folder.join("c"), &[]));
    for daemon in &daemons {
        assert!(
            error.contains(&format!("blockyard (pid {})", daemon.pid())),
            "both are named: {error}"
        );
    }
    for daemon in daemons {
        daemon.stop();
    }
}

#[test]
fn one_configuration_may_have_an_image_twice_only_if_both_are_read_only() {
    let folder = Folder::new();
    let (image, file) = (folder.image("disk", 1 << 20), folder.join("disks.toml"));
    let disk = |name: &str| {
        let (image, socket) = (image.display(), folder.join(name));
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost-user = \"{}\"\n",
            socket.display()
        )
    };
    std::fs::write(&file, disk("a") + &disk("b")).unwrap();
    let mut daemon = Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&file));
    assert_eq!(daemon.ended(SOON).code(), Some(2));
    daemon.wait_log("disk \"b\": disk \"a\" has the same image");
}

#[test]
fn a_start_waits_for_the_lock_of_a_killed_server() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let mut daemon = Daemon::serve(&image, &socket, &[]);
    for round in 0..8 {
        // The daemon is killed under load: the kernel must cancel its requests before it releases
        // the lock.
        let mut guest = Guest::connect(&socket);
        for slot in 0..32 {
            guest.queue().submit(
                slot,
                request::OUT,
                u64::from(slot) * 512,
                Data::ToDevice(256 << 10),
            );
        }
        guest.queue().publish().unwrap();
        until("it is under load", SOON, || guest.queue().reap().unwrap().is_some());
        daemon.kill();
        daemon = Daemon::start(&mut serve(&image, &socket, &[]));
        assert!(daemon.became_ready(), "round {round}: {}", daemon.log());
    }
    daemon.stop();
}

#[test]
fn a_start_waits_for_a_lock_whose_holder_is_unknown() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    // A descriptor in a socket's buffer belongs to no process. A killed process leaves a lock in
    // the same state.
    let limbo = || {
        let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
        assert!(host::lock(&file, Lock::Exclusive).unwrap());
        let pair = std::os::unix::net::UnixStream::pair().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [std::io::IoSlice::new(b"x")];
        rustix::net::sendmsg(&pair.0, &bytes, &mut control, SendFlags::empty()).unwrap();
        pair
    };
    let held = limbo();
    let mut daemon = Daemon::start(&mut serve(&image, &socket, &[]));
    daemon.wait_log("waiting up to 30 s for its lock, which another process");
    assert!(daemon.running(), "it waits: {}", daemon.log());
    drop(held);
    daemon.wait_ready();
    daemon.stop();
}
