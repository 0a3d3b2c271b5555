//! The model's arithmetic: with made-up times, and by the requests of whole disks on a simulated
//! clock, where all time that passes is time of the model.

use std::cell::Cell;
use std::rc::Rc;

use blockyard_image::{Alignment, CacheMode};
use blockyard_ring::Executor;
use blockyard_storage::sim::{SimConfig, SimDisk, SimImage};

use super::*;
use crate::backend::{Backend, Source};
use crate::disk::{Disk, DiskOptions};
use crate::local_disk::LocalDisk;
use crate::request::{Op, Request, Status, Token};

fn model(text: &str) -> Arc<Model> {
    Model::open(text).unwrap_or_else(|e| panic!("{text}: {e}")).1
}

/// Keeps `depth` requests in flight until `total` are done. Returns the seconds that this takes.
fn closed_loop(model: &Model, depth: usize, total: usize, kind: OpKind, bytes: u64) -> f64 {
    let start = Instant::now();
    let mut in_flight: BinaryHeap<_> =
        (0..depth).map(|_| Reverse(model.book(start, kind, bytes))).collect();
    let mut end = start;
    for _ in depth..total {
        let Reverse(done) = in_flight.pop().unwrap();
        in_flight.push(Reverse(model.book(done, kind, bytes)));
    }
    while let Some(Reverse(done)) = in_flight.pop() {
        end = done;
    }
    (end - start).as_secs_f64()
}

#[track_caller]
fn near(found: f64, truth: f64, tolerance: f64) {
    assert!((found / truth - 1.0).abs() < tolerance, "{found}, and the truth is {truth}");
}

#[test]
fn a_saturated_device_does_n_requests_in_the_time_of_one() {
    let text = "1G,parallel=8,read=100us,write=400us,bandwidth=1G";
    // A read takes 100 us, and the time for 4 KiB x 8 at 1 GiB a second.
    let read = 100e-6 + 4096.0 * 8.0 / (1u64 << 30) as f64;
    near(closed_loop(&model(text), 64, 80_000, OpKind::Read, 4096), 10_000.0 * read, 1e-3);
    // The bandwidth determines the time of large requests.
    near(closed_loop(&model(text), 64, 8_000, OpKind::Write, 16 << 20), 125.0 + 0.4, 1e-3);
}

#[test]
fn a_request_on_an_idle_device_takes_the_configured_time() {
    let model = model("1G,parallel=4,read=100us,write=400us,flush=2ms,discard=50us,bandwidth=400M");
    let mut now = Instant::now();
    let us = Duration::from_micros;
    for (kind, bytes, time) in [
        (OpKind::Read, 0, us(100)),
        (OpKind::Write, 100 << 20, us(1_000_400)),
        (OpKind::Flush, 0, us(2000)),
        (OpKind::Discard, 0, us(50)),
        (OpKind::WriteZeroes, 0, us(0)),
    ] {
        assert_eq!(model.book(now, kind, bytes) - now, time, "{kind:?}");
        now += Duration::from_secs(10);
    }
    // Requests run concurrently while a server is free, and wait in the queue while none is.
    let ends: Vec<_> =
        (0..6).map(|_| (model.book(now, OpKind::Read, 0) - now).as_micros()).collect();
    assert_eq!(ends, [100, 100, 100, 100, 200, 200]);
}

#[test]
fn exponential_times_have_the_right_mean_and_variance() {
    let text = "1G,parallel=1,read=100us,spread=exponential";
    let times = |text| {
        let (model, mut now) = (model(text), Instant::now());
        let mut times = Vec::new();
        for _ in 0..100_000 {
            let done = model.book(now, OpKind::Read, 4096);
            times.push((done - now).as_secs_f64());
            now = done;
        }
        times
    };
    let found = times(text);
    let mean = found.iter().sum::<f64>() / found.len() as f64;
    near(mean, 100e-6, 0.02);
    near(found.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / found.len() as f64, 1e-8, 0.05);
    assert!(found == times(text), "the same each time");
    assert!(found != times(&format!("{text},seed=3")), "another seed, other times");
}

#[test]
fn disks_of_one_device_share_its_servers() {
    let text = "parallel=2,read=1ms";
    let (one, two) =
        (model(&format!("1G,{text},device=shared")), model(&format!("2G,{text},device=shared")));
    assert!(Arc::ptr_eq(&one, &two) && one.name() == Some("shared"));
    let other = model(&format!("1G,{text},device=other"));
    assert!(!Arc::ptr_eq(&one, &other) && !Arc::ptr_eq(&model("1G"), &model("1G")));
    assert!(
        Model::open("1G,parallel=3,read=1ms,device=shared")
            .unwrap_err()
            .to_string()
            .contains("\"shared\"")
    );
    // A device without disks is dropped, and its name may be used for another.
    drop((one, two));
    model("1G,parallel=3,read=1ms,device=shared");
}

#[test]
fn malformed_models_are_refused() {
    for (bad, part) in [
        ("", "a size is"),
        ("511", "at least 512"),
        ("1x", "a size is"),
        ("1G,fast", "\"fast\" has no value"),
        ("1G,read", "\"read\" has no value"),
        ("1G,reed=1ms", "\"reed=1ms\" is not known"),
        ("1G,read=5", "read \"5\": a time is"),
        ("1G,flush=1m", "flush \"1m\": a time is"),
        ("1G,parallel=0", "parallel is a number from 1"),
        ("1G,parallel=70000", "to 65536, not \"70000\""),
        ("1G,bandwidth=0", "bandwidth \"0\""),
        ("1G,spread=even", "spread is exponential"),
        ("1G,seed=1", "without spread"),
        ("1G,spread=exponential,seed=x", "seed \"x\""),
        ("1G,device=", "is not known"),
        ("1G,read=1e19s", "a time is"),
        ("file=a.qcow2", "a.qcow2 means qcow2"),
    ] {
        let error = Model::open(bad).unwrap_err();
        assert!(error.to_string().contains(part), "{bad}: {error}");
    }
    assert_eq!(Model::open("1000").unwrap().0, Below::Nothing { size: 512 }, "whole sectors");
    assert_eq!(Model::open("file=a.img,read=1ms").unwrap().0, Below::File("a.img".into()));
}

/// A device with 32 servers, and its service times of a read of 512 bytes and of a write of 1 MiB:
/// the time of the kind, and the transfer at a 32nd of 64 MiB/s.
const PARALLEL: &str = "1G,parallel=32,read=4ms,write=8ms,bandwidth=64M";
const READ: Duration = Duration::from_nanos(4_000_000 + 244_140);
const WRITE: Duration = Duration::from_millis(8 + 500);

fn simulate(work: impl AsyncFn(Handle) + 'static) {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap();
}

/// Keeps `depth` requests of `bytes` bytes in flight until `count` are done. Returns a counter of
/// the requests that are done, and the time of the last one.
fn keep_busy(
    handle: &Handle,
    disk: &Rc<Delay>,
    write: bool,
    bytes: usize,
    (depth, count): (u32, u32),
) -> Rc<Cell<(u32, Instant)>> {
    let begun = handle.read_clock();
    let (left, done) = (Rc::new(Cell::new(count)), Rc::new(Cell::new((0, begun))));
    for _ in 0..depth {
        let (handle_of_task, disk) = (handle.clone(), disk.clone());
        let (left, done) = (left.clone(), done.clone());
        handle.spawn(async move {
            while left.get() > 0 {
                left.set(left.get() - 1);
                let segments = Segments::buffer(bytes);
                let (_, result) = match write {
                    true => disk.write(segments, 0, false).await,
                    false => disk.read(segments, 0).await,
                };
                result.unwrap();
                done.set((done.get().0 + 1, handle_of_task.read_clock()));
            }
        });
    }
    done
}

/// Waits until `count` requests are done. Returns the time that they took.
async fn all(handle: &Handle, done: &Cell<(u32, Instant)>, count: u32, begun: Instant) -> Duration {
    while done.get().0 < count {
        handle.sleep(Duration::from_millis(1)).await;
    }
    done.get().1 - begun
}

#[test]
fn disks_have_the_rates_and_the_latencies_of_their_device() {
    simulate(async |handle| {
        let disk = |text: &str| Rc::new(Delay::new(&handle, &model(text), None));
        for (write, bytes, depth, count, time) in [
            (false, 512, 256, 3200, 100 * READ),
            (true, 1 << 20, 64, 64, 2 * WRITE),
            // A read takes the same time alone and together with 31 others.
            (false, 512, 1, 10, 10 * READ),
            (false, 512, 32, 320, 10 * READ),
        ] {
            let begun = handle.read_clock();
            let done = keep_busy(&handle, &disk(PARALLEL), write, bytes, (depth, count));
            assert_eq!(all(&handle, &done, count, begun).await, time, "depth {depth}: {count}");
        }
        // Two disks of one device have its rate together, and half of it each. A third disk has
        // a device of its own.
        let shared = format!("{PARALLEL},device=simulated");
        let disks = [disk(&shared), disk(&shared), disk(PARALLEL)];
        let begun = handle.read_clock();
        let busy = disks.each_ref().map(|d| keep_busy(&handle, d, false, 512, (256, 3200)));
        let mut times = Vec::new();
        for done in &busy {
            times.push(all(&handle, done, 3200, begun).await);
        }
        assert_eq!(times.iter().max(), Some(&(200 * READ)));
        assert!(times[..2].iter().all(|time| *time >= 192 * READ), "unequal: {times:?}");
        assert_eq!(times[2], 100 * READ);
    });
}

fn on_simulated_disk(size: u64) -> (SimDisk, Raw) {
    let device = SimDisk::new(SimImage::zeroed(size), SimConfig::new(1));
    let alignment = Alignment { memory_align: 1, offset_align: 1 };
    (device.clone(), Raw::on(device, alignment))
}

#[test]
fn a_model_before_an_image_takes_its_time_and_stores() {
    simulate(async |handle| {
        let text = "file=disk.img,parallel=8,read=20ms,write=40ms,flush=20ms";
        let (_device, raw) = on_simulated_disk(1 << 20);
        let disk = Delay::new(&handle, &model(text), Some(raw));
        let begun = handle.read_clock();
        let (_, written) = disk.write(Segments::from_bytes(&[7; 4096]), 8192, false).await;
        written.unwrap();
        assert_eq!(handle.read_clock() - begun, Duration::from_millis(40));
        disk.other(OpKind::Flush, async |raw| raw.flush().await).await.unwrap();
        assert_eq!(handle.read_clock() - begun, Duration::from_millis(60));
        let (read, result) = disk.read(Segments::buffer(4096), 8192).await;
        result.unwrap();
        assert_eq!(handle.read_clock() - begun, Duration::from_millis(80));
        let mut bytes = [0; 4096];
        read.copy_out(0, &mut bytes);
        assert_eq!(bytes, [7; 4096]);
        // 240 reads and 160 writes occupy eight servers for 1.4 s.
        let (disk, begun) = (Rc::new(disk), handle.read_clock());
        let reads = keep_busy(&handle, &disk, false, 4096, (16, 240));
        let writes = keep_busy(&handle, &disk, true, 4096, (16, 160));
        let last = all(&handle, &reads, 240, begun).await;
        let last = last.max(all(&handle, &writes, 160, begun).await);
        let busy = (240 * Duration::from_millis(20) + 160 * Duration::from_millis(40)) / 8;
        assert!(last >= busy && last <= busy + Duration::from_millis(40), "{last:?}");
    });
}

/// A token that takes its answer.
struct Answered(Rc<Cell<Option<Status>>>);

impl Token for Answered {
    fn answer(self, status: Status, _: Segments) {
        self.0.set(Some(status));
    }

    fn may_wait(&self) -> bool {
        true
    }
}

/// The filter `delay:` on a whole disk: each request takes the delay of its kind, and a write with
/// a flush after it takes both delays.
#[test]
fn requests_of_a_disk_with_a_delay_take_it() {
    simulate(async |handle| {
        let options = DiskOptions {
            name: "slow".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: vec!["delay:read=20ms,write=30ms,flush=25ms".parse().unwrap()],
            on_enospc: Default::default(),
        };
        let size = 1 << 20;
        let (_device, raw) = on_simulated_disk(size);
        let disk = Arc::new(Disk::new(options, Source::Null { size }));
        let served = LocalDisk::new(disk, Backend::Raw(raw), Some(handle.clone()));
        let begun = handle.read_clock();
        let mut at = Vec::new();
        for op in [Op::Read, Op::Write { fua: false }, Op::Write { fua: false }, Op::Flush] {
            let len = if op == Op::Flush { 0 } else { 4096 };
            let answered = Rc::new(Cell::new(None));
            let token = Answered(answered.clone());
            let (segments, now) = (Segments::buffer(len as usize), handle.read_clock());
            served.serve(Request::new(op, 0, len, segments, now, token)).await.answer();
            assert_eq!(answered.take(), Some(Ok(())), "{op:?}");
            at.push((handle.read_clock() - begun).as_millis());
        }
        assert_eq!(at, [20, 50, 80, 105]);
    });
}
