//! A queue of blkif on a reactor, over a disk in memory: whatever the front end's ring, pages and
//! grants hold, and however they change, it answers each request at most once, stops when it is
//! told to, and leaves no page mapped. Then another front end is served.
//!
//! Input: the ring's shape; grants; requests; steps that change all of it meanwhile; the bytes of
//! the data pages.

#![no_main]

#[path = "nbd/bytes.rs"]
mod bytes;
#[path = "xen/front.rs"]
mod front;

use std::sync::{Arc, OnceLock};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::Reactors;
use blockyard_export::xen::parts::{Counts, Data, Log, QueueHandle, QueueSetup, Shared};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::Remote;
use blockyard_ring::xen::{Host, Machine};
use bytes::Bytes;
use front::Front;
use libfuzzer_sys::fuzz_target;

struct World {
    reactors: Reactors,
    shared: Arc<Shared>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let options = DiskOptions {
            name: "fuzz".into(),
            serial: "fuzz".into(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk =
            Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()));
        let shared = Shared { disk, log: Log::default(), counts: Counts::default() };
        World { reactors: Reactors::start(1, &[]).unwrap(), shared: Arc::new(shared) }
    })
}

fuzz_target!(|data: &[u8]| {
    let world = world();
    let mut bytes = Bytes(data);
    let machine = Machine::new();
    let mut front = Front::new(machine.add(1, front::PAGES).unwrap(), &mut bytes);
    let kind = match bytes.u8() % 3 {
        0 => Data::Mapped,
        1 => Data::Persistent,
        _ => Data::Copied,
    };
    let remote = world.reactors.next();
    let Some(queue) = start(&front, machine.clone(), kind, remote.clone()) else { return };
    let (requests, steps) = (bytes.u8() % 40, bytes.u8() % 64);
    (0..requests).for_each(|_| front.put(&mut bytes));
    front.publish();
    for _ in 0..steps {
        front.step(&mut bytes);
        turn(&remote);
    }
    front.fill(&bytes);
    front.channel.notify();
    turn(&remote);
    queue.stop();
    front.judge();
    // Another front end, on the same reactor and the same disk.
    let mut next = Front::good(machine.add(2, front::PAGES).unwrap());
    let queue = start(&next, machine, kind, remote).expect("a good ring is served");
    next.put_good();
    while next.answers() == 0 {
        std::thread::yield_now();
    }
    queue.stop();
    next.judge();
    assert_eq!(next.status(), 0);
});

fn start(front: &Front, machine: Arc<Machine>, data: Data, remote: Remote) -> Option<QueueHandle> {
    let host = Host::Machine(machine);
    let domain = front.domain.number();
    let grants = host.grants(domain).unwrap();
    let setup = QueueSetup {
        index: 0,
        shared: world().shared.clone(),
        ring: grants.map(front.rings(), true).unwrap(),
        abi: front.abi,
        channel: host.channel(domain, front.channel.port).unwrap(),
        grants,
        data,
        fua: false,
        record: None,
        settled: true,
    };
    QueueHandle::start(remote, setup).ok()
}

/// A turn of the reactor.
fn turn(remote: &Remote) {
    remote.ask(|_, reply| reply.send(()));
}
