//! An export of a disk in memory, and a front end with a log of changed memory.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use blockyard_disk::{Disk, DiskOptions, Filter, Source};
use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::ring::{Ring, RingOptions};
use blockyard_driver::{Connection, Data, Memory, Queue, feature, request, status};
use blockyard_export::vhost_user::{QueueShape, SecondClient, Tuning, VhostUser};
use blockyard_export::{Listener, PollMode, Reactors};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::SharedWords;
use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{FrontendReq as R, VhostUserProtocolFeatures as P};

pub const LOG_ALL: u64 = 1 << 26;
pub const PAGE: u64 = 4096;
pub const SLOTS: u16 = 16;
/// Bytes of data of a slot.
pub const ROOM: u32 = 64 << 10;
/// Number of entries of the ring: the used elements of a split ring fill a page.
pub const ENTRIES: u16 = 512;
/// Guest address at which the used ring is logged. No memory is there. Flags and index of a split
/// ring are in one page, the elements in the next one, and the event index in a third one.
pub const USED_LOG: u64 = 0x7654_4000 - 4;
pub const LIMIT: Duration = Duration::from_secs(60);
/// Sectors that cannot be read.
pub const BAD: std::ops::Range<u64> = 3072..4096;
pub const SECTORS: u64 = 4096;

pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn memfd(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

pub fn options(filters: Vec<Filter>) -> DiskOptions {
    let (name, serial) = ("disk".into(), "serial of the disk".into());
    DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters,
        on_enospc: Default::default(),
    }
}

/// Connects and negotiates.
pub fn connect<T: Ring>(socket: &Path) -> Connection {
    let mut connection = Connection::open(socket).unwrap();
    connection.socket().set_read_timeout(Some(LIMIT)).unwrap();
    let protocol = PROTOCOL | P::LOG_SHMFD | P::DEVICE_STATE;
    connection.negotiate(feature::GUEST | T::FEATURES, LOG_ALL, protocol).unwrap();
    connection
}

pub struct Front<T> {
    pub connection: Connection,
    pub memory: Memory,
    pub queue: Queue<T>,
    pub disk: Arc<Disk>,
    pub socket: PathBuf,
    /// Dropped after the connection.
    _export: VhostUser,
}

impl<T: Ring> Front<T> {
    /// Connects to an export of a disk in memory, and sends the guest's memory. The ring does not
    /// run yet.
    pub fn connect(event_idx: bool) -> Self {
        let disk = Source::open(&ChainOptions::new("ram:2M")).unwrap();
        let filter = "error:read=1,range=1572864-2097152".parse::<Filter>().unwrap();
        Self::serving(Disk::new(options(vec![filter]), disk), event_idx)
    }

    /// As `connect`, to an export of `disk`.
    pub fn serving(disk: Disk, event_idx: bool) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let socket = std::env::temp_dir()
            .join(format!("blockyard-migration-{}-{number}", std::process::id()));
        let disk = Arc::new(disk);
        let tuning = Tuning {
            poll: PollMode::Off,
            in_band: false,
            pin_memory: false,
            any_memory_file: false,
            second_client: SecondClient::Wait,
        };
        let (listener, shape) =
            (Listener::bind(&socket).unwrap(), QueueShape { queues: 1, size: ENTRIES });
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let export = VhostUser::start(disk.clone(), listener, shape, tuning, reactors).unwrap();

        let mut connection = connect::<T>(&socket);
        let options = RingOptions { size: ENTRIES, slots: SLOTS, event_idx, indirect: false };
        let len = Queue::<T>::memory_needed(options, ROOM);
        let mut memory = Memory::new(len).unwrap();
        connection.set_memory(&memory).unwrap();
        let queue = Queue::new(&mut memory, 0, options, ROOM).unwrap();
        let mut front = Front { connection, memory, queue, disk, socket, _export: export };
        front.features(false, event_idx);
        front
    }

    pub fn start(&mut self) {
        let base = self.queue.ring.fresh_base();
        self.connection.set_ring(&self.queue.setup(), base, &self.memory).unwrap();
        self.connection.enable(0, true).unwrap();
    }

    /// Sends SET_FEATURES, with or without VHOST_F_LOG_ALL.
    pub fn features(&mut self, log_all: bool, event_idx: bool) {
        let without = LOG_ALL | if event_idx { 0 } else { feature::EVENT_IDX };
        let features = self.connection.features & !without | if log_all { LOG_ALL } else { 0 };
        assert_eq!(self.ask(R::SET_FEATURES, &words(&[features]), &[]), Some(words(&[0])));
    }

    /// Sends SET_VRING_ADDR, with or without VHOST_VRING_F_LOG.
    pub fn log_used(&mut self, logs: bool, at: u64) -> Option<Vec<u8>> {
        let addresses = self.queue.ring.addresses();
        let [desc, used, avail] = [addresses.desc, addresses.used, addresses.avail]
            .map(|addr| self.memory.user_address(addr));
        let flags = if logs { 1 << 32 } else { 0 };
        self.ask(R::SET_VRING_ADDR, &words(&[flags, desc, used, avail, at]), &[])
    }

    /// Sends SET_LOG_BASE. Returns the reply, or `None` if the session has ended.
    pub fn log_base(&mut self, len: u64, offset: u64, file: &OwnedFd) -> Option<Vec<u8>> {
        self.ask(R::SET_LOG_BASE, &words(&[len, offset]), &[file])
    }

    /// Uses a new log. Returns it.
    pub fn new_log(&mut self) -> Log {
        let log = Log::covering(&self.memory);
        let reply = self.log_base(log.len, Log::OFFSET, &log.file);
        assert_eq!(reply, Some(words(&[log.len, Log::OFFSET])));
        log
    }

    pub fn ask(&self, request: R, body: &[u8], fds: &[&OwnedFd]) -> Option<Vec<u8>> {
        self.ask_number(request as u32, body, fds)
    }

    pub fn ask_number(&self, request: u32, body: &[u8], fds: &[&OwnedFd]) -> Option<Vec<u8>> {
        let mut bytes: Vec<u8> =
            [request, 1 | 8, body.len() as u32].iter().flat_map(|w| w.to_ne_bytes()).collect();
        bytes.extend(body);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.connection.send_bytes(&bytes, &fds).unwrap();
        let mut head = [0; 12];
        let mut socket = self.connection.socket();
        socket.read_exact(&mut head).ok()?;
        assert_eq!(head[..4], request.to_ne_bytes());
        let mut body = vec![0; usize::from(head[8])];
        socket.read_exact(&mut body).unwrap();
        Some(body)
    }

    /// Fills the disk with bytes that are not zero. Returns the number of requests.
    pub fn fill(&mut self) -> u64 {
        let sectors = u64::from(ROOM) / 512;
        for sector in (0..SECTORS).step_by(sectors as usize) {
            let mut bytes: Vec<u8> =
                (0..ROOM).map(|at| (at / 64 + sector as u32) as u8 | 1).collect();
            let data = Data::ToDevice(ROOM);
            let done = self.queue.call(request::OUT, sector, data, &mut bytes, LIMIT).unwrap();
            assert_eq!(done, status::OK);
        }
        SECTORS / sectors
    }

    /// Returns a copy of the guest's memory.
    pub fn snapshot(&self) -> Vec<u8> {
        let (start, len) = self.memory.range();
        let mut bytes = vec![0; len as usize];
        self.memory.slice(start, len, 1).unwrap().read(0, &mut bytes);
        bytes
    }

    /// Waits until a number of requests has completed. Returns their statuses by slot.
    pub fn wait(&mut self, count: usize) -> Vec<(u16, u8)> {
        let start = std::time::Instant::now();
        let mut done = Vec::new();
        while done.len() < count {
            assert!(start.elapsed() < LIMIT, "requests have not completed: {done:?}");
            match self.queue.reap().unwrap() {
                Some(one) => done.push(one),
                None => std::thread::yield_now(),
            }
        }
        done
    }
}

/// A log of changed memory.
pub struct Log {
    pub file: OwnedFd,
    pub len: u64,
}

impl Log {
    pub const OFFSET: u64 = 512;

    /// Returns a log that is just large enough.
    pub fn covering(memory: &Memory) -> Self {
        let (start, len) = memory.range();
        let len = ((start + len) / PAGE).div_ceil(8);
        Log { file: memfd(Self::OFFSET + len), len }
    }

    /// Returns the numbers of the marked pages, and clears their marks.
    pub fn take(&self) -> Vec<u64> {
        let len = (Self::OFFSET + self.len).div_ceil(8) as usize;
        let words = SharedWords::of_file(&self.file, len).unwrap();
        // By an atomic exchange: the server sets bits meanwhile.
        let words = words[Self::OFFSET as usize / 8..].iter();
        let bytes: Vec<u8> =
            words.flat_map(|word| word.swap(0, Ordering::SeqCst).to_ne_bytes()).collect();
        let is_marked = |page: &u64| bytes[*page as usize / 8] >> (page % 8) & 1 == 1;
        (0..self.len * 8).filter(is_marked).collect()
    }
}

impl<T: Ring> Front<T> {
    /// Returns the guest address of a slot's data.
    pub fn data_address(&self, slot: u16) -> u64 {
        self.queue.addresses(slot).0
    }

    /// Returns the guest address of a slot's status byte.
    pub fn status_address(&self, slot: u16) -> u64 {
        self.queue.addresses(slot).1
    }
}
