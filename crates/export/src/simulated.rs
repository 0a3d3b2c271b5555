//! A disk on a simulated file and the simulated clock, for tests of queues.
//!
//! Queues open the disk as on any reactor. So its throttle and its quiesce gate are the real ones,
//! and all time that passes is time that requests wait.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{Executor, Handle};
use blockyard_sched::{Knobs, Limit, Limits, Share};
use blockyard_storage::sim::{Journal, Phase, SimConfig, SimDisk, SimFiles, SimImage};

pub const SIZE: u64 = 256 << 10;
/// Size of a limit's bucket without a burst, as time.
pub const BUCKET: Duration = Duration::from_millis(10);
/// The throttle may wake a request later by this time, so that one timer wakes several.
pub const COALESCE: Duration = Duration::from_micros(300);

/// A simulated disk with its reactor; see the module documentation.
pub struct Stage {
    pub handle: Handle,
    pub disk: Arc<Disk>,
    pub device: SimDisk,
    begun: Instant,
    _files: (SimFiles, Folder),
}

/// A folder with the name of the file. It is removed with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Stage {
    /// Returns a disk of zeroes. With `iops`, it has this limit.
    pub fn new(handle: &Handle, seed: u64, iops: Option<u64>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-stage-{}-{number}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&folder.0).unwrap();
        let path = folder.0.join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let files = SimFiles::new(SimConfig::new(seed), SimDisk::into);
        files.add(&path, SimImage::zeroed(SIZE), None);
        let device = files.disk(&path).expect("it was added");
        let cache = CacheMode::Writeback;
        let journal = Some(Journal::simulated(&files));
        let chain = ChainOptions { journal, cache, ..ChainOptions::new(&path) };
        let options = DiskOptions {
            name: "simulated".into(),
            serial: String::new(),
            read_only: false,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let limit = |rate| Limit { rate, max: None, length: Duration::from_secs(1) };
        let limits = Limits { iops: iops.map(limit), ..Limits::default() };
        let share = Arc::new(Share::new(None, None, &Knobs { limits, ..Knobs::default() }));
        let disk = Arc::new(Disk::sharing(options, Source::open(&chain).unwrap(), share));
        let begun = handle.read_clock();
        Stage { handle: handle.clone(), disk, device, begun, _files: (files, folder) }
    }

    /// Returns the simulated time since the disk was made.
    pub fn time(&self) -> Duration {
        self.handle.read_clock() - self.begun
    }

    /// Runs all tasks that need no time.
    pub async fn settle(&self) {
        let now = self.handle.read_clock();
        for _ in 0..1000 {
            self.handle.yield_now().await;
        }
        assert_eq!(self.handle.read_clock(), now, "time has passed");
    }

    /// Lets `time` pass.
    pub async fn pass(&self, time: Duration) {
        self.handle.sleep(time).await;
        self.settle().await;
    }

    /// Returns how many operations of the device have begun, and how many have ended.
    pub fn operations(&self) -> (usize, usize) {
        let trace = self.device.trace();
        let begun = trace.iter().filter(|line| line.phase == Phase::Started).count();
        (begun, trace.len() - begun)
    }
}

/// Runs `work` with each seed below `seeds`, on a clock that begins anew. A failure shows the seed.
pub fn simulate(seeds: u64, work: impl AsyncFn(Handle, u64) + Copy + 'static) {
    for seed in 0..seeds {
        println!("seed {seed}");
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        executor.block_on(async move { work(handle, seed).await }).unwrap();
    }
}

/// Checks the times of operations that came at once, against a limit of one in `each`. The bucket
/// is full at the beginning. `step`: how often the caller looked.
#[track_caller]
pub fn took(times: &[Duration], each: Duration, step: Duration) {
    for (number, time) in (0..).zip(times) {
        let exact = (each * number).saturating_sub(BUCKET.saturating_sub(each));
        let least = exact.saturating_sub(BUCKET / 2);
        assert!(
            (least..=exact + COALESCE + step).contains(time),
            "operation {number} took {time:?}, and its limit says {exact:?}: {times:?}"
        );
    }
}
