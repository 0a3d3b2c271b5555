//! A back end with a disk in memory, and a domain with the test driver as its front end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_driver::xen::{Entry, Front, FrontRing, PAGE, Terms, segment};
use blockyard_export::Reactors;
use blockyard_export::xen::{Xen, XenData, XenError, XenOptions};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::xen::{Host, Machine};

use crate::lines;

pub const LIMIT: Duration = Duration::from_secs(60);
/// Number of the device `xvda`.
pub const XVDA: u32 = 51712;

/// Returns the deadline of a call that begins now.
pub fn soon() -> Instant {
    Instant::now() + LIMIT
}

/// Waits until `happens` returns true.
#[track_caller]
pub fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happens() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}

/// A back end: machine, reactor and disk.
pub struct Setup {
    pub machine: Arc<Machine>,
    pub reactors: Arc<Reactors>,
    pub disk: Arc<Disk>,
    pub ended: Arc<AtomicBool>,
}

impl Setup {
    pub fn new(read_only: bool) -> Self {
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        Setup { machine: Machine::new(), reactors, disk: disk(read_only), ended: Arc::default() }
    }

    /// Returns a setup with another disk on the same machine and reactor.
    pub fn beside(&self) -> Self {
        let (machine, reactors) = (self.machine.clone(), self.reactors.clone());
        Setup { machine, reactors, disk: disk(false), ended: Arc::default() }
    }

    pub fn start(&self) -> Xen {
        self.start_with(XenData::Map)
    }

    pub fn start_with(&self, data: XenData) -> Xen {
        self.start_for(7, data)
    }

    pub fn start_for(&self, domain: u16, data: XenData) -> Xen {
        self.start_of(&self.disk, XenOptions { domain, data, ..options() }).unwrap()
    }

    pub fn start_of(&self, disk: &Arc<Disk>, options: XenOptions) -> Result<Xen, XenError> {
        // A connection of the domain creates its first nodes.
        let _domain = self.machine.store(options.domain).unwrap();
        let host = Host::Machine(self.machine.clone());
        let ended = self.ended.clone();
        let ended = move || ended.store(true, Ordering::SeqCst);
        Xen::start(disk.clone(), &options, &host, self.reactors.clone(), ended)
    }

    /// Returns the warnings about the setup's disk.
    pub fn lines(&self) -> Vec<String> {
        lines::of(self.disk.name())
    }

    /// Waits for the first warning.
    pub fn wait_for_line(&self) {
        until("there is a warning in the log", || !self.lines().is_empty());
    }
}

pub fn options() -> XenOptions {
    XenOptions {
        domain: 7,
        device: "xvda".parse().unwrap(),
        queues: 4,
        data: XenData::Map,
        records: None,
    }
}

/// Returns a disk of 16 MiB with a unique name.
pub fn disk(read_only: bool) -> Arc<Disk> {
    make_disk(read_only, &[])
}

/// Returns a disk with filters that make it slow, or make requests fail.
pub fn disk_with(filters: &[&str]) -> Arc<Disk> {
    make_disk(false, filters)
}

fn make_disk(read_only: bool, filters: &[&str]) -> Arc<Disk> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    lines::keep();
    let options = DiskOptions {
        name: format!("disk-{}", NEXT.fetch_add(1, Ordering::Relaxed)),
        serial: String::new(),
        read_only,
        cache: CacheMode::None,
        filters: filters.iter().map(|filter| filter.parse().unwrap()).collect(),
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:16M")).unwrap()))
}

/// A domain with 512 pages, all granted. Pages 0 to 63 are for rings, the other pages for data.
pub struct Guest {
    pub front: Front,
    pub rings: Vec<FrontRing>,
    pub references: Vec<u32>,
}

impl Guest {
    pub fn new(setup: &Setup) -> Self {
        Self::of(&setup.machine, 7, XVDA)
    }

    pub fn of(machine: &Machine, domain: u16, device: u32) -> Self {
        let domain = machine.add(domain, 512).unwrap();
        let references = (0..512).map(|page| domain.grant(page, false)).collect();
        let front = Front::new(machine, domain, device, LIMIT).unwrap();
        Guest { front, rings: Vec::new(), references }
    }

    pub fn connect(&mut self, terms: Terms) {
        self.rings = self.front.connect(&terms, &self.references).unwrap();
    }

    /// Offers rings in the pages from `first` on, in any state of the back end.
    pub fn offer_again(&mut self, terms: Terms, first: usize) {
        let (rings, keys) = self.front.rings(&terms, first, &self.references).unwrap();
        self.rings = rings;
        self.front.offer(&keys).unwrap();
    }

    pub fn set(&mut self, key: &str, value: impl std::fmt::Display) {
        self.front.set(key, value).unwrap();
    }

    pub fn back(&mut self, key: &str) -> Option<String> {
        self.front.back(key).unwrap()
    }

    pub fn wait_for_state(&mut self, state: u8) {
        self.front.wait_for_state(state).unwrap();
    }

    /// Returns the number of the domain's pages that back ends have mapped.
    pub fn mapped(&self) -> u32 {
        self.front.domain.mapped()
    }

    /// Writes an entry into a ring, and publishes it.
    pub fn put(&mut self, queue: usize, id: u64, sector: u64, head: [u8; 4], rest: &[u8]) {
        self.rings[queue].send(&Entry { head, id, sector, rest });
    }

    /// Submits a read or a write of whole pages.
    pub fn ask(&mut self, queue: usize, id: u64, operation: u8, sector: u64, pages: &[usize]) {
        let rest = self.segments(pages);
        self.put(queue, id, sector, [operation, pages.len() as u8, 0, 0], &rest);
    }

    pub fn segments(&self, pages: &[usize]) -> Vec<u8> {
        pages.iter().flat_map(|page| segment(self.references[*page], 0, 7)).collect()
    }

    /// Waits for the next response. Returns its id and its status.
    pub fn answer(&mut self, queue: usize) -> (u64, i16) {
        let answer = self.rings[queue].wait(LIMIT).unwrap();
        (answer.id, answer.status)
    }

    /// Waits for the next responses. Returns them sorted by id.
    pub fn answers(&mut self, queue: usize, count: usize) -> Vec<(u64, i16)> {
        let mut answers: Vec<_> = (0..count).map(|_| self.answer(queue)).collect();
        answers.sort();
        answers
    }

    pub fn done(&mut self, id: u64, operation: u8, sector: u64, pages: &[usize]) -> i16 {
        self.ask(0, id, operation, sector, pages);
        let (answered, status) = self.answer(0);
        assert_eq!(answered, id);
        status
    }

    /// Fills a page with a byte.
    pub fn fill(&self, page: usize, number: u8) {
        self.front.memory.write(page * PAGE, &[number; PAGE]);
    }

    pub fn holds(&self, page: usize, number: u8) -> bool {
        let mut bytes = [0; PAGE];
        self.front.memory.read(page * PAGE, &mut bytes);
        bytes == [number; PAGE]
    }

    /// Waits until the back end has taken all requests of a queue.
    pub fn wait_until_taken(&self, queue: usize) {
        let deadline = Instant::now() + LIMIT;
        while !self.rings[queue].is_drained() {
            assert!(Instant::now() < deadline, "the back end takes no requests");
            std::thread::yield_now();
        }
    }
}
