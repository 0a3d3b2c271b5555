//! For how long snapshots, commits and streams hold the requests of a guest.

use std::sync::atomic::Ordering;

use blockyard_bench::client::LoadOptions;
use blockyard_bench::client::workload::Pattern;
use blockyard_disk::Work;

use crate::common::{Folder, SOON, Server, until};
use crate::disks::good;
use crate::figures::Figures;

#[test]
fn exchanges_of_images_hold_requests_briefly() {
    let mut figures = Figures::default();
    let folder = Folder::new();
    let (base, socket) = (folder.image("base.img", 64 << 20), folder.join("disk.sock"));
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
            server.snapshot(folder.join(format!("{round}-a.qcow2"))).unwrap();
            until_written();
            server.disk.commit(&Work::default()).unwrap();
            until_written();
            server.snapshot(folder.join(format!("{round}-b.qcow2"))).unwrap();
            until_written();
            server.disk.stream(&Work::default()).unwrap();
        }
        load.over.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    let longest = server.disk.longest_held_back().as_secs_f64() * 1e3;
    figures.row("ms for which an exchange of images held requests, at most", longest, 0.0..60.0);
    server.end();
    figures.judge();
}
