//! A device of Xen from its front end's side, without a hypervisor: states, rings, pages, and what a front end may do wrong.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::Reactors;
use blockyard_export::xen::{self, Xen, XenData, XenOptions};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::Window;
use blockyard_ring::xen::abi::message;
use blockyard_ring::xen::machine::{Domain, FrontChannel};
use blockyard_ring::xen::{Host, Machine, Node, Store};
use rustix::event::{PollFd, PollFlags, Timespec};

const PAGE: usize = 4096;
const BACK: &str = "/local/domain/0/backend/blockyard/7/51712";
const FRONT: &str = "/local/domain/7/device/vbd/51712";
const READ: u8 = 0;
const WRITE: u8 = 1;
const BARRIER: u8 = 2;
const FLUSH: u8 = 3;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;

/// A back end, and what its device needs.
struct Setup {
    machine: Arc<Machine>,
    reactors: Arc<Reactors>,
    disk: Arc<Disk>,
    ended: Arc<AtomicBool>,
}

impl Setup {
    fn new(read_only: bool) -> Self {
        let options = DiskOptions {
            name: "test".into(),
            serial: String::new(),
            read_only,
            cache: CacheMode::None,
            filters: Vec::new(),
        };
        let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:16M")).unwrap()));
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        Setup { machine: Machine::new(), reactors, disk, ended: Arc::default() }
    }

    fn start(&self) -> Xen {
        self.start_with(XenData::Map)
    }

    fn start_with(&self, data: XenData) -> Xen {
        let options = XenOptions { domain: 7, device: "xvda".parse().unwrap(), queues: 4, data, records: None };
        let host = Host::Machine(self.machine.clone());
        let ended = self.ended.clone();
        let ended = move || ended.store(true, Ordering::SeqCst);
        Xen::start(self.disk.clone(), &options, &host, self.reactors.clone(), ended).unwrap()
    }
}

/// How a front end connects.
#[derive(Clone, Copy)]
struct Terms {
    queues: usize,
    order: Option<u32>,
    persistent: bool,
    /// The layout of 32-bit guests.
    short: bool,
}

const PLAIN: Terms = Terms { queues: 1, order: None, persistent: false, short: false };

struct Queue {
    ring: Vec<usize>,
    entries: u32,
    channel: FrontChannel,
    produced: u32,
    seen: u32,
}

/// Pages 0 to 63 are the rings', the others data.
struct Front {
    domain: Arc<Domain>,
    memory: Window,
    store: Store,
    queues: Vec<Queue>,
    short: bool,
    /// References of data pages.
    references: Vec<u32>,
}

impl Front {
    fn new(setup: &Setup) -> Self {
        let domain = setup.machine.add(7, 512).unwrap();
        let references = (0..512).map(|page| domain.grant(page, false)).collect();
        let mut store = setup.machine.store(7).unwrap();
        store.watch(BACK, "back").unwrap();
        Front { memory: domain.memory(), domain, store, queues: Vec::new(), short: false, references }
    }

    /// Waits until a node has this value.
    fn wait(&mut self, path: &str, value: Option<&str>) {
        let (never, _writer) = rustix::pipe::pipe().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.store.read(path).unwrap().as_deref() != value {
            let event = self.store.event(never.as_fd(), Some(deadline)).unwrap();
            assert!(event.is_some(), "{path} is not {value:?}");
        }
    }

    fn back(&mut self, key: &str) -> Option<String> {
        self.store.read(&format!("{BACK}/{key}")).unwrap()
    }

    fn set(&mut self, key: &str, value: impl std::fmt::Display) {
        self.store.write(&format!("{FRONT}/{key}"), value).unwrap();
    }

    fn wait_for_state(&mut self, state: u8) {
        self.wait(&format!("{BACK}/state"), Some(&state.to_string()));
    }

    /// Writes the keys of its rings, and says that it has them.
    fn offer(&mut self, terms: Terms) {
        self.wait_for_state(2);
        self.short = terms.short;
        self.queues.clear();
        let pages = 1 << terms.order.unwrap_or(0);
        if terms.queues > 1 {
            self.set("multi-queue-num-queues", terms.queues);
        }
        if let Some(order) = terms.order {
            self.set("ring-page-order", order);
        }
        self.set("feature-persistent", u8::from(terms.persistent));
        self.set("protocol", if terms.short { "x86_32-abi" } else { "x86_64-abi" });
        for number in 0..terms.queues {
            let folder = if terms.queues > 1 { format!("queue-{number}/") } else { String::new() };
            let ring: Vec<usize> = (0..pages).map(|page| number * pages + page).collect();
            for (at, page) in ring.iter().enumerate() {
                let key = if terms.order.is_some() { format!("ring-ref{at}") } else { "ring-ref".into() };
                self.memory.write(page * PAGE, &[0; PAGE]);
                self.set(&format!("{folder}{key}"), self.references[*page]);
            }
            // Both sides ask for an event with the first request and the first response.
            self.memory.store_u32(ring[0] * PAGE + 4, 1, Ordering::SeqCst);
            self.memory.store_u32(ring[0] * PAGE + 12, 1, Ordering::SeqCst);
            let channel = self.domain.channel().unwrap();
            self.set(&format!("{folder}event-channel"), channel.port);
            let entries = 32 * pages as u32;
            self.queues.push(Queue { ring, entries, channel, produced: 0, seen: 0 });
        }
        self.set("state", 3);
    }

    fn connect(&mut self, terms: Terms) {
        self.offer(terms);
        self.wait_for_state(4);
        self.set("state", 4);
    }

    /// Sizes and places of an entry: whole, number, sector, segments.
    fn layout(&self) -> (usize, usize, usize, usize) {
        if self.short { (108, 4, 12, 20) } else { (112, 8, 16, 24) }
    }

    /// Where byte `at` of a ring lies in the memory. Entries cross pages, so it goes byte by byte.
    fn put_byte(&self, queue: usize, at: usize, byte: u8) {
        let page = self.queues[queue].ring[at / PAGE];
        self.memory.write(page * PAGE + at % PAGE, &[byte]);
    }

    /// Puts an entry into a ring, and shows it.
    fn put(&mut self, queue: usize, id: u64, sector: u64, operation: [u8; 4], rest: &[u8]) {
        let (size, id_at, sector_at, rest_at) = self.layout();
        let mut entry = vec![0; size];
        entry[..4].copy_from_slice(&operation);
        entry[id_at..id_at + 8].copy_from_slice(&id.to_le_bytes());
        entry[sector_at..sector_at + 8].copy_from_slice(&sector.to_le_bytes());
        entry[rest_at..rest_at + rest.len()].copy_from_slice(rest);
        let produced = self.queues[queue].produced;
        let at = 64 + (produced % self.queues[queue].entries) as usize * size;
        entry.iter().enumerate().for_each(|(offset, byte)| self.put_byte(queue, at + offset, *byte));
        self.queues[queue].produced = produced.wrapping_add(1);
        let header = self.queues[queue].ring[0] * PAGE;
        self.memory.store_u32(header, produced.wrapping_add(1), Ordering::SeqCst);
        self.queues[queue].channel.notify();
    }

    /// A read or a write of whole pages.
    fn ask(&mut self, queue: usize, id: u64, operation: u8, sector: u64, pages: &[usize]) {
        let rest = self.segments(pages);
        self.put(queue, id, sector, [operation, pages.len() as u8, 0, 0], &rest);
    }

    fn segments(&self, pages: &[usize]) -> Vec<u8> {
        pages.iter().flat_map(|page| [&self.references[*page].to_le_bytes()[..], &[0, 7, 0, 0]].concat()).collect()
    }

    /// Waits for the next answer: number and status.
    fn answer(&mut self, queue: usize) -> (u64, i16) {
        let (size, ..) = self.layout();
        let (header, entries, seen) = {
            let q = &self.queues[queue];
            (q.ring[0] * PAGE, q.entries, q.seen)
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.memory.load_u32(header + 8, Ordering::SeqCst) == seen {
            let event = self.queues[queue].channel.descriptor().unwrap();
            let mut polled = [PollFd::new(&event, PollFlags::IN)];
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            assert_eq!(rustix::event::poll(&mut polled, Some(&left)), Ok(1), "no answer");
            self.queues[queue].channel.take();
        }
        self.queues[queue].seen = seen.wrapping_add(1);
        self.memory.store_u32(header + 12, seen.wrapping_add(2), Ordering::SeqCst);
        let at = 64 + (seen % entries) as usize * size;
        let mut bytes = [0; 12];
        for (offset, byte) in bytes.iter_mut().enumerate() {
            let page = self.queues[queue].ring[(at + offset) / PAGE];
            self.memory.read(page * PAGE + (at + offset) % PAGE, std::slice::from_mut(byte));
        }
        (u64::from_le_bytes(bytes[..8].try_into().unwrap()), i16::from_le_bytes([bytes[10], bytes[11]]))
    }

    fn done(&mut self, id: u64, operation: u8, sector: u64, pages: &[usize]) -> i16 {
        self.ask(0, id, operation, sector, pages);
        let (answered, status) = self.answer(0);
        assert_eq!(answered, id);
        status
    }

    /// Fills a data page with a pattern of a number.
    fn fill(&self, page: usize, number: u8) {
        self.memory.write(page * PAGE, &[number; PAGE]);
    }

    fn holds(&self, page: usize, number: u8) -> bool {
        let mut bytes = [0; PAGE];
        self.memory.read(page * PAGE, &mut bytes);
        bytes == [number; PAGE]
    }
}

#[test]
fn data_come_back_over_rings_of_all_kinds() {
    for (terms, data) in [
        (PLAIN, XenData::Map),
        (PLAIN, XenData::Auto),
        (Terms { persistent: true, ..PLAIN }, XenData::Auto),
        (Terms { persistent: true, ..PLAIN }, XenData::Copy),
        (Terms { short: true, ..PLAIN }, XenData::Map),
        (Terms { order: Some(4), persistent: true, ..PLAIN }, XenData::Map),
        (Terms { queues: 4, order: Some(1), ..PLAIN }, XenData::Copy),
    ] {
        let setup = Setup::new(false);
        let mut export = setup.start_with(data);
        let mut front = Front::new(&setup);
        front.connect(terms);
        assert_eq!(front.back("sectors").as_deref(), Some("32768"));
        // More than a ring has, on each queue.
        let queues = terms.queues;
        for round in 0..70 {
            let (queue, number) = (round % queues, round as u8 + 1);
            front.fill(100, number);
            front.fill(101, number ^ 0xff);
            front.ask(queue, round as u64, WRITE, round as u64 * 16, &[100, 101]);
            assert_eq!(front.answer(queue), (round as u64, 0));
        }
        for round in 0..70 {
            let (queue, number) = (round % queues, round as u8 + 1);
            front.ask(queue, round as u64, READ, round as u64 * 16, &[102, 103]);
            assert_eq!(front.answer(queue), (round as u64, 0));
            assert!(front.holds(102, number) && front.holds(103, number ^ 0xff), "{round}");
        }
        let rings = queues as u32 * (1 << terms.order.unwrap_or(0));
        let kept = if terms.persistent && data != XenData::Copy { 4 } else { 0 };
        assert_eq!(front.domain.mapped(), rings + kept);
        front.set("state", 6);
        front.wait_for_state(6);
        assert_eq!(front.domain.mapped(), 0);
        export.stop();
    }
}

#[test]
fn flushes_barriers_discards_and_indirect_requests() {
    operations(XenData::Map);
    operations(XenData::Copy);
}

fn operations(data: XenData) {
    let setup = Setup::new(false);
    let _export = setup.start_with(data);
    let mut front = Front::new(&setup);
    front.connect(Terms { persistent: true, ..PLAIN });
    assert_eq!(front.back("feature-max-indirect-segments").as_deref(), Some("256"));
    front.fill(100, 5);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.done(2, BARRIER, 8, &[100]), 0);
    assert_eq!(front.done(3, BARRIER, 0, &[]), 0);
    assert_eq!(front.done(4, READ, 8, &[101]), 0);
    assert!(front.holds(101, 5));
    // 256 pages by one request, whose segments a page describes.
    (200..456).for_each(|page| front.fill(page, page as u8));
    let pages: Vec<usize> = (200..456).collect();
    let described = front.segments(&pages);
    front.memory.write(110 * PAGE, &described);
    let indirect = |front: &Front| [&[0; 4][..], &front.references[110].to_le_bytes()].concat();
    let rest = indirect(&front);
    front.put(0, 5, 0, [INDIRECT, WRITE, 0, 1], &rest);
    assert_eq!(front.answer(0), (5, 0));
    assert_eq!(front.done(6, READ, 255 * 8, &[101]), 0);
    assert!(front.holds(101, 455u16 as u8));
    let discard = 16u64.to_le_bytes();
    front.put(0, 7, 0, [DISCARD, 0, 0, 0], &discard);
    assert_eq!(front.answer(0), (7, 0));
    assert_eq!(front.done(8, READ, 8, &[101]), 0);
    assert!(front.holds(101, 0));
    front.put(0, 9, 0, [DISCARD, 1, 0, 0], &discard);
    assert_eq!(front.answer(0), (9, -2), "a secure discard is refused by name");
    front.put(0, 10, 0, [77, 0, 0, 0], &[]);
    assert_eq!(front.answer(0), (10, -2));
}

#[test]
fn what_a_front_end_may_not_ask_fails_and_nothing_else() {
    for (persistent, data) in [(false, XenData::Map), (true, XenData::Map), (false, XenData::Copy)] {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Front::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        front.fill(100, 9);
        // Several in one batch: those that are good are done.
        front.references[300] = 99_999;
        front.references[301] = front.domain.grant(100_000, false);
        front.references[302] = front.domain.grant(302, true);
        front.ask(0, 1, WRITE, 0, &[100, 300]);
        front.ask(0, 2, WRITE, 8, &[100]);
        front.ask(0, 3, READ, 8, &[301]);
        front.ask(0, 4, READ, 0, &[302]);
        front.ask(0, 5, READ, u64::MAX, &[101]);
        front.ask(0, 6, READ, 32768, &[101]);
        front.ask(0, 7, READ, 32767, &[101]);
        front.put(0, 8, 0, [READ, 12, 0, 0], &[]);
        front.put(0, 9, 0, [READ, 0, 0, 0], &[]);
        let outside = [&front.references[101].to_le_bytes()[..], &[0, 8]].concat();
        front.put(0, 10, 0, [READ, 1, 0, 0], &outside);
        let lie = [&[0; 4][..], &99_999u32.to_le_bytes()].concat();
        front.put(0, 11, 0, [INDIRECT, READ, 5, 0], &lie);
        front.put(0, 12, 0, [INDIRECT, READ, 1, 1], &lie);
        let mut answers: Vec<_> = (0..12).map(|_| front.answer(0)).collect();
        answers.sort();
        let bad = |id: &u64| *id != 2;
        let expected: Vec<_> = (1..13).map(|id| (id, if bad(&id) { -1 } else { 0 })).collect();
        assert_eq!(answers, expected, "persistent: {persistent}, {data:?}");
        assert_eq!(front.done(13, READ, 8, &[101]), 0);
        assert!(front.holds(101, 9));
    }
}

#[test]
fn an_index_that_runs_away_stops_its_queue_until_the_front_end_connects_anew() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Front::new(&setup);
    front.connect(Terms { queues: 2, ..PLAIN });
    front.memory.store_u32(front.queues[0].ring[0] * PAGE, 1000, Ordering::SeqCst);
    front.queues[0].channel.notify();
    // The other queue goes on.
    front.ask(1, 1, FLUSH, 0, &[]);
    assert_eq!(front.answer(1), (1, 0));
    front.set("state", 5);
    front.wait_for_state(5);
    front.set("state", 6);
    front.wait_for_state(6);
    assert_eq!(front.domain.mapped(), 0);
    front.set("state", 1);
    front.connect(Terms { queues: 2, ..PLAIN });
    front.ask(0, 2, FLUSH, 0, &[]);
    assert_eq!(front.answer(0), (2, 0));
}

#[test]
fn nodes_that_cannot_be_close_the_device_until_the_front_end_begins_anew() {
    for (key, value, part) in [
        ("ring-ref", "lots", "ring-ref is \"lots\""),
        ("ring-ref", "4294967296", "ring-ref is"),
        ("ring-ref", "99999", "mapping its ring"),
        ("event-channel", "77", "binding its event channel 77"),
        ("ring-page-order", "5", "a number from 0 to 4 is wanted"),
        ("ring-page-order", "2", "the front end has no ring-ref1"),
        ("multi-queue-num-queues", "5", "a number from 1 to 4 is wanted"),
        ("multi-queue-num-queues", "3", "the front end has no queue-0/event-channel"),
        ("protocol", "sparc\u{1b}[2J", "protocol is \"sparc\\u{1b}[2J\""),
    ] {
        let setup = Setup::new(false);
        let _export = setup.start();
        let mut front = Front::new(&setup);
        front.wait_for_state(2);
        // `offer` says that it is there only at its end.
        front.offer_with(key, value);
        front.wait_for_state(5);
        let error = front.back("error").unwrap();
        assert!(error.contains(part), "{error}");
        assert_eq!(front.domain.mapped(), 0);
        front.store.remove(&format!("{FRONT}/{key}")).unwrap();
        front.set("state", 1);
        front.connect(PLAIN);
        assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    }
}

impl Front {
    /// Offers one plain ring, except for one key.
    fn offer_with(&mut self, key: &str, value: &str) {
        let channel = self.domain.channel().unwrap();
        let mut keys = vec![
            ("ring-ref", self.references[0].to_string()),
            ("event-channel", channel.port.to_string()),
            ("protocol", "x86_64-abi".to_string()),
        ];
        if key == "ring-page-order" {
            keys.push(("ring-ref0", self.references[0].to_string()));
            keys.remove(0);
        }
        keys.retain(|(name, _)| *name != key);
        keys.push((key, value.to_string()));
        for (key, value) in keys {
            self.set(key, value);
        }
        self.set("state", 3);
    }
}

/// The back end watches its own nodes too: a complaint must not cause the next one.
#[test]
fn a_state_that_is_no_text_causes_one_complaint() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Front::new(&setup);
    front.wait_for_state(2);
    let path = format!("{FRONT}/state");
    let garbage = [path.as_bytes(), b"\0", b"\xff"];
    front.store.ask(message::WRITE, &path, &garbage).unwrap();
    front.wait_for_state(5);
    assert!(front.back("error").unwrap().contains("no text"));
    // A further complaint would overwrite this.
    front.store.write(&format!("{BACK}/error"), "seen").unwrap();
    front.store.ask(message::WRITE, &path, &garbage).unwrap();
    front.set("state", 1);
    front.connect(PLAIN);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.back("error").as_deref(), Some("seen"));
}

#[test]
fn states_that_flap_end_where_they_began() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Front::new(&setup);
    front.connect(PLAIN);
    for state in ["4", "17", "", "5", "x", "6", "3", "6", "5", "2", "6", "1"].repeat(5) {
        front.set("state", state);
    }
    front.connect(PLAIN);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.domain.mapped(), 1);
}

#[test]
fn the_next_server_goes_on_with_the_rings_as_they_are() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Front::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 3);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    export.stop();
    assert_eq!((front.domain.mapped(), front.back("state").as_deref()), (0, Some("4")));
    // Asked while there is no server.
    front.ask(0, 2, READ, 0, &[101]);
    let _export = setup.start();
    assert_eq!(front.answer(0), (2, 0));
    assert!(front.holds(101, 3));
    assert!(!setup.ended.load(Ordering::SeqCst));
}

#[test]
fn a_device_goes_with_its_domain_or_when_it_is_detached() {
    let setup = Setup::new(true);
    let mut export = setup.start();
    let mut front = Front::new(&setup);
    front.connect(PLAIN);
    assert_eq!((front.back("info").as_deref(), front.back("feature-discard").as_deref()), (Some("4"), Some("0")));
    assert_eq!(front.done(1, WRITE, 0, &[100]), -1, "it is read-only");
    let host = Host::Machine(setup.machine.clone());
    let listed = xen::list(&host).unwrap();
    let row: Vec<_> =
        listed.iter().map(|d| (d.domain, d.device.to_string(), d.state, d.sectors, d.read_only)).collect();
    assert_eq!(row, [(7, "xvda".to_string(), "connected", Some(32768), true)]);
    // The guest uses it: it stays, and is served.
    let device = "xvda".parse().unwrap();
    assert!(!xen::detach(&host, 7, device, false, Duration::from_millis(1)).unwrap());
    front.wait_for_state(5);
    assert_eq!(front.done(2, FLUSH, 0, &[]), 0);
    front.set("state", 6);
    front.wait(&format!("{BACK}/state"), None);
    export.stop();
    assert!(setup.ended.load(Ordering::SeqCst));
    assert_eq!((front.domain.mapped(), front.store.list(FRONT).unwrap()), (0, Vec::new()));
    assert_eq!(front.store.list("/local/domain/0/backend").unwrap(), [""; 0]);
    assert!(matches!(xen::detach(&host, 7, device, false, Duration::ZERO), Err(xen::XenError::Missing { .. })));
    // A domain that is destroyed has no nodes.
    let _export = setup.start();
    front.connect(PLAIN);
    front.store.remove("/local/domain/7").unwrap();
    front.wait(&format!("{BACK}/state"), None);
    assert!(xen::list(&host).unwrap().is_empty());
}

#[test]
fn a_new_size_is_told() {
    let setup = Setup::new(false);
    let export = setup.start();
    let mut front = Front::new(&setup);
    front.connect(PLAIN);
    front.store.write(&format!("{BACK}/sectors"), "old").unwrap();
    export.config_changed();
    front.wait(&format!("{BACK}/sectors"), Some("32768"));
}
