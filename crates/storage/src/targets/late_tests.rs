//! What becomes of a disk after a call that its target does not answer in time. The clock of the
//! request is simulated, so it reaches the limit at once. The requests that are answered are on
//! another executor, with a real clock.

use std::future::pending;
use std::io;
use std::ops::Range;

use blockyard_ring::{Executor, Lent, Segments};

use super::super::device::Device;
use super::super::map::{Discard, Extent, Map, Place, Question};
use super::super::mapped::Mapped;
use super::super::passed::Passed;
use super::super::promise::is_late;
use super::super::shape::Shape;
use super::super::shared::{AskWorker, Core};
use super::super::worker::{Living, Make, Worker};
use super::*;
use crate::sim::{SimConfig, SimDisk, SimImage};
use crate::storage::{Capabilities, Storage};
use crate::{Geometry, SECTOR};

const GRANULE: u64 = 4096;
const SIZE: u64 = 256 * GRANULE;
/// Longest time for an answer. The requests that are answered take so long only if they hang.
const LIMIT: Duration = Duration::from_secs(60);

/// Has no answer at offset 0.
struct Silent;

impl Silent {
    async fn answer(&self, offset: u64) -> io::Result<()> {
        if offset == 0 { pending().await } else { Ok(()) }
    }
}

impl Device for Silent {
    async fn read(&self, offset: u64, _: Lent) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn write(&self, offset: u64, _: Lent) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, offset: u64, _: u64) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn write_zeroes(&self, offset: u64, _: u64) -> io::Result<()> {
        self.answer(offset).await
    }
}

impl Map for Silent {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        self.answer(asked.offset).await?;
        Ok(vec![Extent { len: asked.len, place: Place::At { file: 0, offset: asked.offset } }])
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, asked: Discard) -> io::Result<Vec<Extent>> {
        self.answer(asked.offset).await?;
        Ok(vec![Extent { len: asked.len, place: Place::Zero }])
    }
}

/// The disk of a target, for any executor.
#[derive(Clone)]
struct Disk {
    core: Arc<Core>,
    worker: Arc<Worker>,
    /// The data file of a map.
    file: SimDisk,
}

impl Disk {
    fn of(make: fn() -> Living) -> Self {
        let shape = Shape { size: SIZE, granule: GRANULE };
        let (geometry, capabilities) = (Geometry::default(), Capabilities::default());
        let core = Core::with("silent".into(), shape, SECTOR, 1, geometry, capabilities);
        let make: Make = Box::new(move |_| Box::pin(async move { Ok(make()) }));
        let worker = Arc::new(Worker::start(make, LIMIT).unwrap());
        let file = SimDisk::new(SimImage::zeroed(SIZE), SimConfig::new(1));
        Disk { core: Arc::new(core), worker, file }
    }

    fn device(self, handle: &Handle) -> Passed {
        let patience = Patience::new(handle, LIMIT);
        Passed { core: self.core, worker: self.worker, patience }
    }

    fn map(self, handle: &Handle) -> Mapped<SimDisk, AskWorker> {
        let (core, patience) = (self.core.clone(), Patience::new(handle, LIMIT));
        let ask = AskWorker { core, worker: self.worker, patience };
        Mapped::new(&self.core, vec![self.file], &[true], ask)
    }
}

/// Makes a request that is not answered, and checks that it ends at the limit.
fn is_given_up(request: impl AsyncFnOnce(Handle) -> io::Result<()> + 'static) {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    let (ended, waited) = executor
        .block_on(async move {
            let begun = handle.read_clock();
            (request(handle.clone()).await, handle.read_clock() - begun)
        })
        .unwrap();
    let error = ended.expect_err("the target has answered");
    assert!(is_late(&error), "{error}");
    assert!((LIMIT..=LIMIT + TICK).contains(&waited), "{waited:?}");
}

/// Returns the result of a request that is answered.
fn answer(request: impl AsyncFnOnce(Handle) -> io::Result<()> + 'static) -> io::Result<()> {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { request(handle).await }).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Read,
    Write,
    Discard,
    Zero,
    Flush,
}

async fn call(disk: impl Storage, call: Call, offset: u64) -> io::Result<()> {
    let data = Segments::buffer(GRANULE as usize);
    match call {
        Call::Read => disk.read(data, offset).await.1.map(drop),
        Call::Write => disk.write(data, offset, false).await.1.map(drop),
        Call::Discard => disk.discard(offset, GRANULE).await,
        Call::Zero => disk.zero(offset, GRANULE, true).await,
        Call::Flush => disk.sync().await,
    }
}

/// A kind of target, with what its disk refuses after a late change.
struct Kind<S> {
    make: fn() -> Living,
    open: fn(Disk, &Handle) -> S,
    refused: &'static [Call],
}

/// Makes requests that are answered, after a late call. `change`: the name of the late call, if it
/// ends the disk.
fn check_after<S: Storage>(kind: &Kind<S>, disk: &Disk, late: Call, change: Option<&str>) {
    let ask = |next| {
        let (disk, open) = (disk.clone(), kind.open);
        answer(async move |handle| call(open(disk, &handle), next, GRANULE).await)
    };
    ask(Call::Read).unwrap_or_else(|e| panic!("a read after {late:?}: {e}"));
    for next in kind.refused {
        let Some(change) = change else {
            ask(*next).unwrap_or_else(|e| panic!("{next:?} after {late:?}: {e}"));
            continue;
        };
        let error = ask(*next).expect_err("it may come before the late change").to_string();
        let why = format!("an earlier {change} failed: the target did not answer in time");
        assert_eq!(error, why, "{next:?} after {late:?}");
    }
}

/// Checks what becomes of a disk after each of these late calls.
fn check<S: Storage + 'static>(kind: &Kind<S>, cases: &[(Call, Option<&str>)]) {
    for (late, change) in cases.iter().copied() {
        let disk = Disk::of(kind.make);
        check_after(kind, &disk, late, None);
        let (given_up, open) = (disk.clone(), kind.open);
        is_given_up(async move |handle| call(open(given_up, &handle), late, 0).await);
        check_after(kind, &disk, late, change);
    }
}

#[test]
fn a_change_that_a_device_may_still_make_ends_the_disk() {
    let device = Kind {
        make: || Living::Device(Rc::new(Silent)),
        open: Disk::device,
        refused: &[Call::Write, Call::Discard, Call::Zero, Call::Flush],
    };
    let cases = [
        (Call::Write, Some("write")),
        (Call::Discard, Some("discard")),
        (Call::Zero, Some("write of zeroes")),
        // A read changes nothing.
        (Call::Read, None),
    ];
    check(&device, &cases);
}

#[test]
fn a_discard_that_a_map_may_still_make_ends_the_disk() {
    // A disk without further flushes accepts no further changes.
    let map =
        Kind { make: || Living::Map(Rc::new(Silent)), open: Disk::map, refused: &[Call::Flush] };
    // A question changes nothing.
    let cases = [
        (Call::Discard, Some("discard")),
        (Call::Zero, Some("discard")),
        (Call::Read, None),
        (Call::Write, None),
    ];
    check(&map, &cases);
}
