//! Pinned guest memory: it is pinned as long as its front end is connected.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{Plan, status};
use blockyard_ring::Region;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, until};
use crate::guest::{Guest, bytes_of, pattern};

fn pinned(daemon: &Daemon) -> u64 {
    daemon.kilobytes("VmPin")
}

#[track_caller]
fn nothing_pinned(daemon: &Daemon) {
    until("the guest's memory is released", SOON, || pinned(daemon) == 0);
}

fn memory_of(guest: &Guest) -> u64 {
    guest.session.link.memory.range().1 >> 10
}

fn works(guest: &mut Guest, image: &Path, seed: u64) {
    let bytes = pattern(seed, 256 << 10);
    assert_eq!((guest.write(8, &bytes), guest.flush()), (status::OK, status::OK));
    assert!(
        bytes_of(image, 4096, bytes.len()) == bytes && guest.read(8, bytes.len()).unwrap() == bytes
    );
}

#[test]
fn memory_is_pinned_while_its_front_end_is_connected() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    for (reactors, cache) in [(1, "none"), (2, "writeback")] {
        let (count, more) =
            (reactors.to_string(), ["--queues", "4", "--pin-memory", "--cache", cache]);
        let daemon = Daemon::serve(&image, &socket, &[&more[..], &["--reactors", &count]].concat());
        assert_eq!(pinned(&daemon), 0);
        for (round, packed) in (1..).zip([false, true]) {
            let load = LoadOptions {
                rw: Pattern::Randrw,
                queues: 4,
                depth: 16,
                runtime: 120.0,
                flush_every: 50,
                verify: true,
                packed,
                ..LoadOptions::for_socket(socket.clone())
            };
            let report = std::thread::scope(|scope| {
                let client = scope.spawn(|| measure(&load).unwrap());
                daemon.until_served_more_than(round * 2000, "write", "");
                // Each reactor pins at least the data of all requests.
                until("each reactor has pinned the memory", SOON, || {
                    pinned(&daemon) >= 4 * 16 * 4 * reactors
                });
                load.over.store(true, Ordering::Relaxed);
                client.join().unwrap()
            });
            assert_eq!((report.errors, report.first_error), (0, None));
            assert!(report.verified_blocks > 1000, "{} blocks: no load", report.verified_blocks);
            nothing_pinned(&daemon);
        }
        let mut guest = Guest::connect(&socket);
        works(&mut guest, &image, reactors);
        assert_eq!(pinned(&daemon), memory_of(&guest), "one queue, one reactor");
        // A front end that dies cannot send a message.
        drop(guest);
        nothing_pinned(&daemon);
        let log = daemon.stop();
        assert!(log.contains("guest memory is registered with io_uring: "), "{log}");
        assert!(!log.contains("not registered with io_uring"), "{log}");
    }
}

#[test]
fn regions_are_pinned_and_unpinned_under_load() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &["--pin-memory"]);
    let mut guest = Guest::connect(&socket);
    let own = memory_of(&guest);
    works(&mut guest, &image, 1);
    for round in 0..10 {
        let (region, fd) = Region::memfd("extra", 0, 0, 4 << 20).unwrap();
        let info = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0x9_0000_0000,
            memory_size: region.size(),
            userspace_addr: 0x9_0000_0000,
            mmap_offset: 0,
            mmap_handle: fd.as_raw_fd(),
        };
        guest.session.link.connection.frontend().add_mem_region(&info).unwrap();
        works(&mut guest, &image, round * 2);
        until("the new region is pinned", SOON, || pinned(&daemon) == own + (4 << 10));
        guest.session.link.connection.frontend().remove_mem_region(&info).unwrap();
        works(&mut guest, &image, round * 2 + 1);
        until("the region is released", SOON, || pinned(&daemon) == own);
    }
    // A stopped queue keeps the memory pinned, because its front end is still connected.
    guest.session.link.connection.stop_ring(0).unwrap();
    assert_eq!(pinned(&daemon), own);
    guest.leave();
    nothing_pinned(&daemon);
    daemon.stop();
}

/// The server has no CAP_IPC_LOCK, and may lock less memory than the guest has.
#[test]
fn a_server_that_may_not_pin_memory_still_serves() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    // setpriv drops the capability from the bounding set, which only root can do. Other users do
    // not have the capability.
    let mut command = Command::new("prlimit");
    command.arg("--memlock=1048576");
    if rustix::process::geteuid().is_root() {
        command.args(["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-all"]);
    }
    command
        .arg(BLOCKYARD)
        .arg("serve")
        .arg(&image)
        .arg("--vhost-user")
        .arg(&socket)
        .arg("--pin-memory");
    let mut daemon = Daemon::start(&mut command);
    daemon.wait_ready();
    let mut guest = Guest::with(&socket, &Plan { data_len: 1 << 20, ..Plan::default() });
    works(&mut guest, &image, 1);
    assert!(memory_of(&guest) > 1 << 10);
    assert_eq!(pinned(&daemon), 0);
    guest.leave();
    let log = daemon.stop();
    let lines = log.lines().filter(|l| l.contains("not registered with io_uring")).count();
    assert!(lines == 1 && log.contains("cannot pin its pages: Cannot allocate memory"), "{log}");
}
