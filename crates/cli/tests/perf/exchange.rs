//! For how long snapshots, commits and streams hold the requests of a guest.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use blockyard_bench::client::LoadOptions;
use blockyard_bench::client::workload::Pattern;
use blockyard_disk::Work;

use crate::common::{SOON, Server, until};
use crate::disks::good;
use crate::figures::Figures;

/// A folder in memory, which the drop removes. The images are in memory, because a flush of a disk
/// can take longer than all else that holds requests.
struct MemoryFolder(PathBuf);

impl MemoryFolder {
    fn new() -> Self {
        let folder = PathBuf::from(format!("/dev/shm/by-perf-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        MemoryFolder(folder)
    }
}

impl Drop for MemoryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The client writes as fast as it can, so a commit quiesces the disk repeatedly, for 50 ms each.
#[test]
fn exchanges_of_images_hold_requests_briefly() {
    let mut figures = Figures::default();
    let folder = MemoryFolder::new();
    let file = |name: &str| folder.0.join(name);
    let (base, socket) = (file("base.img"), file("disk.sock"));
    std::fs::File::create_new(&base).unwrap().set_len(64 << 20).unwrap();
    let server = Server::start(&base, &socket, &[]);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        queues: 2,
        depth: 16,
        flush_every: 64,
        runtime: 120.0,
        ..LoadOptions::for_socket(socket)
    };
    let until_written = || {
        let before = server.writes();
        until("a write is answered", SOON, || server.writes() > before);
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| good(&load));
        for round in 0..4 {
            until_written();
            server.snapshot(file(&format!("{round}-a.qcow2"))).unwrap();
            until_written();
            server.disk.commit(&Work::default()).unwrap();
            until_written();
            server.snapshot(file(&format!("{round}-b.qcow2"))).unwrap();
            until_written();
            server.disk.stream(&Work::default()).unwrap();
        }
        load.over.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    let longest = server.disk.longest_held_back().as_secs_f64() * 1e3;
    figures.row("ms for which an exchange of images held requests, at most", longest, 0.0..75.0);
    server.end();
    figures.judge();
}
