//! A guest with one queue: requests one at a time, and helpers for custom ones.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use blockyard_driver::{Data, Plan, Queue, Session, SplitRing, feature, request, status};

/// Maximum time for an answer. If it takes longer, the daemon hangs.
pub const ANSWER: Duration = Duration::from_secs(60);

pub struct Guest {
    pub session: Session<SplitRing>,
}

impl Guest {
    /// Connects a modern guest: all features, requests of up to 256 KiB.
    #[track_caller]
    pub fn connect(socket: &Path) -> Self {
        Self::with(socket, &Plan::default())
    }

    /// Connects a guest without the features in `without`.
    #[track_caller]
    pub fn without(socket: &Path, without: u64) -> Self {
        Self::with(socket, &Plan { wanted: feature::GUEST & !without, ..Plan::default() })
    }

    #[track_caller]
    pub fn with(socket: &Path, plan: &Plan) -> Self {
        // The memory for custom requests grows with the size of the ring.
        let plan = Plan { data_len: plan.data_len.max(256 << 10), queue_size: 1024, ..*plan };
        match Session::start(socket, &plan) {
            Ok(session) => Guest { session },
            Err(e) => panic!("connecting to {}: {e:#}", socket.display()),
        }
    }

    pub fn queue(&mut self) -> &mut Queue<SplitRing> {
        &mut self.session.queues[0]
    }

    pub fn capacity(&self) -> u64 {
        self.session.link.config.capacity_sectors * 512
    }

    pub fn has(&self, feature: u64) -> bool {
        self.session.link.connection.features & feature != 0
    }

    /// Submits a request and returns its status byte.
    #[track_caller]
    pub fn ask(&mut self, request: u32, sector: u64, data: Data, bytes: &mut [u8]) -> u8 {
        match self.queue().call(request, sector, data, bytes, ANSWER) {
            Ok(status) => status,
            Err(e) => panic!("request {request} at sector {sector}: {e:#}"),
        }
    }

    #[track_caller]
    pub fn read(&mut self, sector: u64, len: usize) -> Result<Vec<u8>, u8> {
        let mut bytes = vec![0xee; len];
        match self.ask(request::IN, sector, Data::FromDevice(len as u32), &mut bytes) {
            status::OK => Ok(bytes),
            status => Err(status),
        }
    }

    #[track_caller]
    pub fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        self.ask(request::OUT, sector, Data::ToDevice(bytes.len() as u32), &mut bytes.to_vec())
    }

    #[track_caller]
    pub fn flush(&mut self) -> u8 {
        self.ask(request::FLUSH, 0, Data::None, &mut [])
    }

    /// Submits DISCARD or WRITE_ZEROES of ranges: first sector, number of sectors, flags.
    #[track_caller]
    pub fn ranges(&mut self, request: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in ranges {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        self.ask(request, 0, Data::ToDevice(bytes.len() as u32), &mut bytes)
    }

    /// Publishes submitted requests, and waits until the daemon has taken them from the ring. It
    /// waits for a flush in `slot` after them. Returns the requests that were answered before it:
    /// none, unless the machine is slower than the requests.
    #[track_caller]
    pub fn all_taken(&mut self, slot: u16) -> Vec<(u16, u8)> {
        let mut early = Vec::new();
        self.queue().submit(slot, request::FLUSH, 0, Data::None);
        self.queue().publish().unwrap();
        let start = Instant::now();
        loop {
            match self.queue().reap().unwrap() {
                Some((answered, status)) if answered == slot => {
                    assert_eq!(status, status::OK);
                    return early;
                }
                Some(answer) => early.push(answer),
                None => assert!(start.elapsed() < ANSWER, "the flush is not answered"),
            }
            self.queue().sleep(Some(Duration::from_millis(100))).unwrap();
        }
    }

    /// Stops the queue, as a guest does at shutdown, and disconnects.
    #[track_caller]
    pub fn leave(mut self) {
        self.session.link.stop().unwrap_or_else(|e| panic!("leaving: {e:#}"));
    }
}

/// Returns `len` bytes that differ for every offset and every `seed`. The loop is short and makes
/// words, because tests are built without optimisation and need megabytes.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let step = seed.wrapping_mul(2).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut words = vec![[0; 8]; len.div_ceil(8)];
    let mut word = 0_u64;
    for place in &mut words {
        word = word.wrapping_add(step);
        *place = (word | 0x0101_0101_0101_0101).to_le_bytes();
    }
    let mut bytes = words.into_flattened();
    bytes.truncate(len);
    bytes
}

/// Largest base image of [`base_bytes`] in bytes.
const LARGEST_BASE: usize = 32 << 20;

/// Returns `pattern(77, len)`, which base images have. A process computes it once.
pub fn base_bytes(len: usize) -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    &BYTES.get_or_init(|| pattern(77, LARGEST_BASE))[..len]
}

/// Creates a base image with [`base_bytes`].
#[track_caller]
pub fn write_base(path: &Path, len: usize) {
    std::fs::write(path, base_bytes(len)).unwrap();
}

/// Returns `len` bytes of a file from `offset`.
#[track_caller]
pub fn bytes_of(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; len];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}
