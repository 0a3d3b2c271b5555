//! A connection on the simulated disk and clock, and its client at the other end of a socket pair.

use blockyard_disk::Backend;
use blockyard_image::{Alignment, Raw};
use blockyard_ring::Executor;
use blockyard_sched::{Knobs, Limit, Limits, Share};
use blockyard_storage::sim::SimDisk;

use super::super::block_status::Contexts;
use super::super::connection::Connection;
use super::*;

pub struct Connected {
    pub connection: Rc<Connection>,
    /// The client's socket. It does not block.
    pub client: UnixStream,
}

/// Returns a disk like `sim`. With `iops`, it waits for this limit.
fn limited_disk(size: u64, iops: Option<u64>) -> Arc<Disk> {
    let (name, serial, filters) = (NAME.to_string(), String::new(), Vec::new());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters,
        on_enospc: Default::default(),
    };
    let limit = |rate| Limit { rate, max: None, length: Duration::from_secs(1) };
    let limits = Limits { iops: iops.map(limit), ..Limits::default() };
    let share = Arc::new(Share::new(None, None, &Knobs { limits, ..Knobs::default() }));
    let source = Source::open(&ChainOptions::new(format!("ram:{size}"))).unwrap();
    Arc::new(Disk::sharing(options, source, share))
}

/// Returns an open connection to the disk `sim` of `size` bytes.
pub fn connect(
    handle: &Handle,
    headers: Headers,
    sim: &SimDisk,
    (size, iops): (u64, Option<u64>),
) -> Connected {
    let disk = limited_disk(size, iops);
    let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
    let served = LocalDisk::new(disk.clone(), Backend::Raw(raw), Some(handle.clone()));
    let exported = Exported::new(disk, NAME, "", None).polled(PollMode::Off);
    connect_to(handle, headers, Arc::new(exported), Rc::new(served))
}

/// Returns an open connection to `exported`, which this reactor serves with `served`.
pub fn connect_to(
    handle: &Handle,
    headers: Headers,
    exported: Arc<Exported>,
    served: Rc<LocalDisk>,
) -> Connected {
    let (client, theirs) = UnixStream::pair().unwrap();
    client.set_nonblocking(true).unwrap();
    let stream = Stream::new(handle, theirs).unwrap();
    stream.chose(&exported.disk);
    let mut contexts = Contexts::default();
    if headers != Headers::Simple {
        contexts.choose(b"base:allocation", false);
    }
    let terms = Terms { exported, headers, contexts, place: Cell::default() };
    let connection = Connection::on(handle, Rc::new(stream), terms, served);
    Connected { connection, client }
}

/// Runs `work` on the simulated clock. `work` must always have a time to wait for.
pub fn simulated<T: 'static>(work: impl AsyncFnOnce(Handle) -> T + 'static) -> T {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap()
}

/// Lets simulated time pass until `happens` returns true.
pub async fn until(handle: &Handle, what: &str, mut happens: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happens() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        handle.sleep(Duration::from_micros(50)).await;
    }
}
