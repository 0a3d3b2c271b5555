//! Costs of an idle disk, and resources that disconnected front ends leave behind.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockyard_driver::{Connection, Data, Plan, request, status};

use crate::common::{Daemon, Folder, SOON, until};
use crate::guest::{Guest, pattern};

#[test]
fn idle_costs_nothing() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    // A guest with enough load that the server tries busy-polling.
    for round in 0..2000 {
        assert_eq!(guest.write(round % 1000 * 8, &pattern(round, 4096)), status::OK);
    }
    assert_eq!(guest.flush(), status::OK);
    let threads = daemon.falls_asleep();
    assert!(threads.len() >= 3, "{threads:?}");
    let (resident, anonymous) = (daemon.kilobytes("VmRSS"), daemon.kilobytes("RssAnon"));
    println!("resident: {resident} kB, of which anonymous {anonymous} kB; threads: {threads:?}");
    // The rest is the text of the program, which all servers share.
    assert!(anonymous < 3 << 10, "{anonymous} kB of its own, {resident} kB resident");
    assert_eq!(guest.write(0, &pattern(1, 4096)), status::OK, "and it wakes up");
    assert_eq!((guest.flush(), guest.read(0, 4096).unwrap()), (status::OK, pattern(1, 4096)));
    daemon.stop();
}

/// One connection of a front end. `number` selects its behaviour.
fn visit(socket: &Path, number: u64) {
    match number % 6 {
        // A proper connection and disconnection.
        0 => {
            let mut guest = Guest::connect(socket);
            let bytes = pattern(number, 16384);
            assert_eq!(guest.write(number % 100 * 32, &bytes), status::OK);
            assert_eq!(guest.read(number % 100 * 32, 16384).unwrap(), bytes);
            guest.leave();
        }
        // The front end disconnects under load, with and without reading the answers.
        1 => {
            let mut guest = Guest::connect(socket);
            for slot in 0..32 {
                let (kind, data) = match slot % 3 {
                    0 => (request::OUT, Data::ToDevice(65536)),
                    1 => (request::IN, Data::FromDevice(65536)),
                    _ => (request::FLUSH, Data::None),
                };
                guest.queue().submit(slot, kind, u64::from(slot) * 128, data);
            }
            guest.queue().publish().unwrap();
            if number % 4 == 1 {
                guest.queue().sleep(Some(Duration::from_millis(5))).unwrap();
            }
        }
        // The front end disconnects in the middle of the handshake.
        2 => {
            let mut connection = Connection::open(socket).unwrap();
            let plan = Plan::default();
            connection.negotiate(plan.wanted, 0, plan.protocol).unwrap();
            let inflight = connection.inflight(1, 128).unwrap().unwrap();
            if number % 4 == 2 {
                connection.set_inflight(&inflight).unwrap();
            }
        }
        // The front end does everything except starting the ring.
        3 => {
            let plan = Plan::default();
            let mut link =
                blockyard_driver::Link::open::<blockyard_driver::SplitRing>(socket, &plan).unwrap();
            let queues = link.queues::<blockyard_driver::SplitRing>().unwrap();
            let setup = queues[0].setup();
            link.connection.set_memory(&link.memory).unwrap();
            link.connection.set_ring(&setup, 0, &link.memory).unwrap();
        }
        // The front end sends no message, or an incomplete one.
        4 => {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.write_all(&[0; 11][..number as usize % 12]).unwrap();
        }
        // The front end sends random bytes with descriptors. The daemon may disconnect before it
        // has read all.
        _ => {
            let connection = Connection::open(socket).unwrap();
            let mut bytes = pattern(number, 256);
            if number % 4 == 1 {
                // A known message with a wrong length.
                bytes[..12].copy_from_slice(&[
                    number as u8 % 45,
                    0,
                    0,
                    0,
                    1,
                    0,
                    0,
                    0,
                    0xff,
                    0xff,
                    0,
                    0,
                ]);
            }
            let file = std::fs::File::open("/dev/null").unwrap();
            let _ = connection.send_bytes(&bytes, &[file.as_fd(), file.as_fd()]);
        }
    }
}

#[test]
fn disconnected_front_ends_leave_no_resources_behind() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 64 << 20), folder.join("s"));
    let mut daemon = Daemon::serve(&image, &socket, &["--reactors", "2"]);
    // The daemon may inherit memfds from this process: the `vhost` crate, which the tests' clients
    // use, may receive descriptors without FD_CLOEXEC. They are not counted as leaks.
    let shared =
        |daemon: &Daemon| daemon.descriptors().iter().filter(|d| d.contains("memfd")).count();
    let inherited = shared(&daemon);
    let idle = kinds(&daemon.descriptors());
    let settle = |daemon: &Daemon| {
        let mut guest = Guest::connect(&socket);
        let bytes = pattern(1, 4096);
        assert_eq!(guest.write(0, &bytes), status::OK);
        assert_eq!(guest.read(0, 4096).unwrap(), bytes);
        guest.leave();
        until("the guest's memory is released", SOON, || shared(daemon) == inherited);
        until(&format!("no descriptors but {idle:?}"), SOON, || {
            kinds(&daemon.descriptors()) == idle
        });
    };
    (0..60).for_each(|number| visit(&socket, number));
    settle(&daemon);
    let (resident, mappings) = (daemon.kilobytes("VmRSS"), mappings(&daemon));
    (60..360).for_each(|number| visit(&socket, number));
    settle(&daemon);
    assert!(daemon.running());
    // The server unmaps memory after it has closed the descriptor.
    until("no mapping stays", SOON, || self::mappings(&daemon) <= mappings);
    let grown = daemon.kilobytes("VmRSS").saturating_sub(resident);
    println!("resident: {resident} kB, {grown} kB more after 300 visits");
    assert!(grown < 1 << 10, "{grown} kB more than {resident}");
    let log = daemon.stop();
    assert!(!log.contains("panicked"), "{log}");
    assert!(log.lines().count() < 200, "{} lines", log.lines().count());
}

/// Returns the links without inode numbers.
fn kinds(links: &[String]) -> Vec<String> {
    links.iter().map(|l| l.split(['[', ':']).next().unwrap().to_string()).collect()
}

fn mappings(daemon: &Daemon) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
    maps.lines().filter(|l| l.contains("memfd")).count()
}
