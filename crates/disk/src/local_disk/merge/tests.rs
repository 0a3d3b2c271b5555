//! Batches on a simulated disk: which requests are merged, and that each is answered as it would be
//! by itself.

use super::*;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::{Alignment, Raw, Storage};
use blockyard_ring::{GuestMemory, Region};
use blockyard_storage::sim::{Fault, OpKind as SimOp, Phase, Sim, SimConfig, SimDisk, SimImage};
use proptest::prelude::*;

use crate::{Backend, Disk, DiskOptions, Failure, OpKind, Source, Status};

const MIB: u64 = 1 << 20;
const WRITE: Op = Op::Write { fua: false };
const DURABLE: Op = Op::Write { fua: true };
const OK: Status = Ok(());
const IO: Status = Err(Failure::Io);

/// Stores the answer of one request.
struct Note(Rc<RefCell<Vec<Option<Status>>>>, usize);

impl Token for Note {
    fn answer(self, status: Status, _: Segments) {
        assert!(self.0.borrow_mut()[self.1].replace(status).is_none(), "answered twice");
    }

    fn may_wait(&self) -> bool {
        true
    }
}

/// A request: operation, and offset and length on the disk in bytes.
type Ask = (Op, u64, u64);

/// A guest's memory, a disk, and a queue that passes batches from one to the other.
struct Stage {
    sim: SimDisk,
    served: LocalDisk,
    memory: Rc<GuestMemory>,
    merges: bool,
}

impl Stage {
    fn new(len: u64) -> Self {
        Self::with(len, len, Alignment { memory_align: 1, offset_align: 1 }, options())
    }

    /// Creates a stage whose disk has `capacity` bytes, in a file of `len` bytes.
    fn with(len: u64, capacity: u64, shape: Alignment, options: DiskOptions) -> Self {
        let sim = SimDisk::new(SimImage::zeroed(len), SimConfig::new(1));
        let disk = Arc::new(Disk::new(options, Source::Null { size: capacity }));
        let served = LocalDisk::new(disk, Backend::Raw(Raw::on(sim.clone(), shape)), None);
        let memory = Rc::new(
            GuestMemory::default().with(Region::memfd("guest", 0, 0, 4 * MIB).unwrap().0).unwrap(),
        );
        Stage { sim, served, memory, merges: true }
    }

    /// Returns `bytes` bytes of guest memory from `addr` on, in `pieces` pieces that are not
    /// adjacent.
    fn segments(&self, addr: u64, bytes: u64, pieces: u64) -> Segments {
        let mut segments = Segments::default();
        segments.reset(&self.memory);
        for piece in 0..pieces {
            segments.push_guest(addr + piece * (bytes / pieces + 1), bytes / pieces).unwrap();
        }
        segments
    }

    /// Serves a batch as a queue does, except that it waits for each operation before the next.
    async fn batch(&self, batch: Vec<(Ask, Segments)>) -> Vec<Status> {
        let answers = Rc::new(RefCell::new(vec![None; batch.len()]));
        let token = |index| Note(answers.clone(), index);
        let request = |(index, ((op, offset, len), segments))| {
            Request::new(op, offset, len, segments, Instant::now(), token(index))
        };
        let mut requests: Vec<_> = batch.into_iter().enumerate().map(request).collect();
        let (mut batch, mut run) = (requests.drain(..), Run::default());
        while let many @ 1.. = self.served.neighbours(batch.as_slice()) {
            if many > 1 && self.merges {
                run.fill(batch.by_ref().take(many));
                self.served.serve_run(&mut run).await;
                run.finished().for_each(Finished::answer);
            } else {
                self.served.serve(batch.next().unwrap()).await.answer();
            }
        }
        answers.take().into_iter().map(|answer| answer.expect("answered")).collect()
    }

    /// Serves a batch whose data are adjacent in memory, from address 0 on.
    async fn ask(&self, asks: &[Ask]) -> Vec<Status> {
        let mut addr = 0;
        let place = |&ask: &Ask| {
            let segments = self.segments(addr, ask.2, 1);
            addr += ask.2;
            (ask, segments)
        };
        self.batch(asks.iter().map(place).collect()).await
    }

    /// Returns the operations that the disk has begun since the last call: kind, offset and length.
    fn operations(&self, seen: &mut usize) -> Vec<(SimOp, u64, u64)> {
        let trace = self.sim.trace();
        let new = trace[*seen..]
            .iter()
            .filter(|t| t.phase == Phase::Started)
            .map(|t| (t.kind, t.offset, t.len))
            .collect();
        *seen = trace.len();
        new
    }

    /// Returns the numbers of requests, merged requests, errors and bytes.
    fn counted(&self, kind: OpKind) -> (u64, u64, u64, u64) {
        let sums = self.served.statistics().summary(kind).unwrap();
        (sums.requests, sums.merged, sums.errors, sums.bytes)
    }
}

fn options() -> DiskOptions {
    DiskOptions {
        name: "test".into(),
        serial: String::new(),
        read_only: false,
        cache: blockyard_image::CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    }
}

fn run<T: 'static>(work: impl Future<Output = T> + 'static) -> T {
    Sim::new(1).block_on(work).unwrap()
}

#[test]
fn adjacent_requests_are_one_operation_and_each_is_answered_and_counted() {
    let stage = Stage::new(MIB);
    run(async move {
        let mut seen = 0;
        let text: Vec<u8> = (0..4096u32).map(|i| (i / 16) as u8).collect();
        stage.segments(0, 4096, 1).copy_in(0, &text);
        assert_eq!(
            stage.ask(&[(WRITE, 512, 512), (WRITE, 1024, 3072), (WRITE, 4096, 512)]).await,
            [OK; 3]
        );
        assert_eq!(stage.operations(&mut seen), [(SimOp::Write, 512, 4096)]);
        assert_eq!(stage.counted(OpKind::Write), (3, 2, 0, 4096));
        assert_eq!(stage.sim.contents()[512..4608], text);
        // Reads back into memory that is neither contiguous nor in the order of the disk.
        let places = [
            ((Op::Read, 512, 1024), 9000, 4),
            ((Op::Read, 1536, 2048), 5000, 1),
            ((Op::Read, 3584, 1024), 0, 2),
        ];
        let batch = places.map(|(ask, addr, pieces)| (ask, stage.segments(addr, ask.2, pieces)));
        assert_eq!(stage.batch(batch.into()).await, [OK; 3]);
        assert_eq!(stage.operations(&mut seen), [(SimOp::Read, 512, 4096)]);
        for ((_, offset, len), addr, pieces) in places {
            let mut bytes = vec![0; len as usize];
            stage.segments(addr, len, pieces).copy_out(0, &mut bytes);
            assert_eq!(bytes, text[offset as usize - 512..][..len as usize]);
        }
        assert_eq!(stage.counted(OpKind::Read), (3, 2, 0, 4096));
    });
}

#[test]
fn a_run_is_volatile_if_its_requests_are() {
    for (op, volatile) in [(WRITE, true), (Op::Write { fua: true }, false), (Op::Read, false)] {
        let request = |offset| {
            let answers = Rc::new(RefCell::new(vec![None]));
            let segments = Segments::buffer(512);
            Request::new(op, offset, 512, segments, Instant::now(), Note(answers, 0))
        };
        let mut run = Run::default();
        assert!(!run.is_volatile());
        run.fill([request(0), request(512)].into_iter());
        assert_eq!(run.is_volatile(), volatile, "{op:?}");
        run.parts.drain(..).for_each(|request| request.finish(OK).answer());
    }
}

#[test]
fn other_requests_stay_separate_and_in_order() {
    let stage = Stage::new(MIB);
    run(async move {
        let mut seen = 0;
        let asks = [
            (Op::Read, 0, 512),
            // A request of another kind, then requests of another durability.
            (WRITE, 512, 512),
            (DURABLE, 1024, 512),
            (DURABLE, 1536, 512),
            // An earlier offset, the same request again, and a gap.
            (DURABLE, 512, 512),
            (DURABLE, 512, 512),
            (DURABLE, 1536, 512),
            // Adjacent only to the request before the previous one.
            (DURABLE, 1024, 512),
            (Op::Discard, 8192, 512),
            (Op::Discard, 8704, 512),
            (Op::Flush, 0, 0),
            (Op::Flush, 0, 0),
        ];
        assert_eq!(stage.ask(&asks).await, [OK; 12]);
        let operations = stage.operations(&mut seen);
        let places: Vec<_> = operations.iter().map(|o| (o.1, o.2)).collect();
        let expected =
            [(0, 512), (512, 512), (1024, 1024), (512, 512), (512, 512), (1536, 512), (1024, 512)];
        assert_eq!(places[..7], expected, "{operations:?}");
        assert_eq!(operations.len(), 7 + 4, "{operations:?}");
        // A request of no bytes is adjacent to any other.
        assert_eq!(
            stage.ask(&[(Op::Read, 0, 512), (Op::Read, 512, 0), (Op::Read, 512, 512)]).await,
            [OK; 3]
        );
        assert_eq!(stage.operations(&mut seen), [(SimOp::Read, 0, 1024)]);
        assert_eq!(stage.ask(&[]).await, []);
    });
}

#[test]
fn a_run_is_bounded_in_bytes_and_pieces() {
    let stage = Stage::new(8 * MIB);
    run(async move {
        let mut seen = 0;
        let asks: Vec<_> = (0..9).map(|i| (Op::Read, i * 256 * 1024, 256 << 10)).collect();
        let asks =
            [&asks[..], &[(Op::Read, 9 * 256 * 1024, MIB)], &[(Op::Read, 13 * 256 * 1024, 512)]]
                .concat();
        assert_eq!(stage.ask(&asks).await, [OK; 11]);
        let places: Vec<_> = stage.operations(&mut seen).iter().map(|o| (o.1, o.2)).collect();
        let expected =
            [(0, MIB), (MIB, MIB), (2 * MIB, 256 << 10), (9 << 18, MIB), (13 << 18, 512)];
        assert_eq!(places, expected);
        // 512 pieces fit into a run, 513 do not. A request of 1024 pieces is served by itself.
        let of = |pieces: &[u64]| -> Vec<_> {
            let place = |(i, &pieces)| {
                ((Op::Read, i as u64 * 3072, 3072), stage.segments(i as u64 * 4096, 3072, pieces))
            };
            pieces.iter().enumerate().map(place).collect()
        };
        for (pieces, runs) in [
            ([vec![2; 255], vec![2]].concat(), vec![256 * 3072]),
            ([vec![2; 255], vec![3]].concat(), vec![255 * 3072, 3072]),
            (vec![1, 1024, 1, 1], vec![3072, 3072, 2 * 3072]),
        ] {
            assert!(stage.batch(of(&pieces)).await.iter().all(|s| s.is_ok()));
            let lengths: Vec<_> = stage.operations(&mut seen).iter().map(|o| o.2).collect();
            assert_eq!(lengths, runs);
        }
    });
}

#[test]
fn one_bad_sector_fails_one_request() {
    for (kind, op) in [(SimOp::Read, Op::Read), (SimOp::Write, WRITE), (SimOp::Write, DURABLE)] {
        let stage = Stage::new(MIB);
        run(async move {
            let mut seen = 0;
            stage.sim.fail(Fault::new(kind, 5).within(4096 + 512..4096 + 1024).always());
            let asks = [(op, 0, 4096), (op, 4096, 4096), (op, 8192, 4096)];
            assert_eq!(stage.ask(&asks).await, [OK, IO, OK], "{op:?}");
            let operations = stage.operations(&mut seen);
            assert_eq!(operations[0], (kind, 0, 3 * 4096));
            assert_eq!(operations[1..], asks.map(|(_, offset, len)| (kind, offset, len)));
            assert_eq!(stage.counted(OpKind::of(op)), (3, 0, 1, 8192), "{op:?}");
            assert!(stage.served.disk().poisoned().is_none());
        });
    }
    // After a merged operation has failed, the answers are those of the separate requests.
    let stage = Stage::new(MIB);
    stage.sim.fail(Fault::new(SimOp::Write, 5));
    stage.sim.fail(Fault::new(SimOp::Write, 28).within(512..1024));
    run(async move {
        let asks = [(WRITE, 0, 512), (WRITE, 512, 512), (WRITE, 1024, 512)];
        assert_eq!(stage.ask(&asks).await, [OK, Err(Failure::NoSpace), OK]);
    });
}

#[test]
fn a_failed_run_of_durable_writes_poisons_the_disk_as_a_single_write_does() {
    let stage = Stage::new(MIB);
    run(async move {
        assert_eq!(stage.ask(&[(WRITE, 0, 512)]).await, [OK]);
        stage.sim.fail(Fault::new(SimOp::Write, 5).within(1024..1536));
        assert_eq!(
            stage.ask(&[(DURABLE, 512, 512), (DURABLE, 1024, 512)]).await,
            [Err(Failure::Poisoned); 2]
        );
        assert_eq!(stage.ask(&[(Op::Read, 512, 512), (Op::Read, 1024, 512)]).await, [OK; 2]);
    });
}

#[test]
fn a_run_in_flight_on_a_poisoned_disk_is_not_acknowledged() {
    for (op, answer) in [(WRITE, Err(Failure::Poisoned)), (Op::Read, OK)] {
        let stage = Stage::new(MIB);
        run(async move {
            let asks = [(op, 0, 512), (op, 512, 512)];
            let mut answers = Box::pin(stage.ask(&asks));
            let begun = poll_fn(|cx| Poll::Ready(answers.as_mut().poll(cx).is_pending())).await;
            assert!(begun);
            stage.served.disk().poison("a flush", &std::io::Error::from_raw_os_error(5));
            assert_eq!(answers.await, [answer; 2]);
        });
    }
}

#[test]
fn a_bad_request_does_not_fail_adjacent_ones() {
    let stage = Stage::new(MIB);
    run(async move {
        let last = MIB - 512;
        let out = Err(Failure::OutOfRange);
        assert_eq!(
            stage
                .ask(&[(Op::Read, last - 512, 512), (Op::Read, last, 512), (Op::Read, MIB, 512)])
                .await,
            [OK, OK, out]
        );
        assert_eq!(stage.ask(&[(WRITE, last, 512), (WRITE, MIB, 512)]).await, [OK, out]);
        // The end of the request wraps around 64 bits to offset 0.
        assert_eq!(
            stage.ask(&[(Op::Read, u64::MAX - 511, 512), (Op::Read, 0, 512)]).await,
            [out, OK]
        );
        assert_eq!(stage.counted(OpKind::Read).1, 0);
        let elsewhere = Stage::new(MIB);
        let batch = vec![
            ((WRITE, 0, 512), stage.segments(0, 512, 1)),
            ((WRITE, 512, 512), elsewhere.segments(0, 512, 1)),
        ];
        assert_eq!(stage.batch(batch).await, [OK; 2], "in memory of two guests");
        assert_eq!(stage.counted(OpKind::Write), (4, 0, 1, 3 * 512));
    });
    let shape = Alignment { memory_align: 1, offset_align: 1 };
    let stage = Stage::with(MIB, MIB, shape, DiskOptions { read_only: true, ..options() });
    run(async move {
        assert_eq!(
            stage.ask(&[(WRITE, 0, 512), (WRITE, 512, 512)]).await,
            [Err(Failure::ReadOnly); 2]
        );
        assert_eq!(stage.ask(&[(Op::Read, 0, 512), (Op::Read, 512, 512)]).await, [OK; 2]);
    });
}

#[test]
fn filters_apply_to_each_request() {
    let shape = Alignment { memory_align: 1, offset_align: 1 };
    for (filter, answer) in [("error:read=1,range=512-1024", IO), ("error:flush=1", OK)] {
        let filters = vec![filter.parse().unwrap()];
        let stage = Stage::with(MIB, MIB, shape, DiskOptions { filters, ..options() });
        run(async move {
            let asks = [
                (Op::Read, 0, 512),
                (Op::Read, 512, 512),
                (Op::Read, 1024, 512),
                (Op::Read, 1536, 512),
            ];
            assert_eq!(stage.ask(&asks).await, [OK, answer, OK, OK]);
            let expected = if answer.is_ok() { 4 } else { 3 };
            assert_eq!(stage.operations(&mut 0).len(), expected, "{filter}");
        });
    }
}

/// A file ends within the last sector, or before it. The bytes after the end of the file read as
/// zeroes, whether requests are merged or not.
#[test]
fn the_end_of_a_file_reads_as_zeroes() {
    for offset_align in [1, 512, 4096] {
        let shape = Alignment { memory_align: offset_align, offset_align };
        let stage = Stage::with(9000, 32 << 10, shape, options());
        run(async move {
            let text = vec![7; 9000];
            stage.segments(0, 9000, 1).copy_in(0, &text);
            let file = stage.segments(0, 9000, 1);
            assert_eq!(stage.sim.write(file, 0, false).await.1.unwrap(), 9000);
            let mut seen = stage.sim.trace().len();
            stage.segments(0, 32 << 10, 1).copy_in(0, &[0xee; 32 << 10]);
            let asks: Vec<_> = (0..8).map(|i| (Op::Read, i * 4096, 4096)).collect();
            assert_eq!(stage.ask(&asks).await, [OK; 8]);
            assert_eq!(stage.operations(&mut seen), [(SimOp::Read, 0, 32 << 10)], "{shape:?}");
            let mut bytes = vec![0; 32 << 10];
            stage.segments(0, 32 << 10, 1).copy_out(0, &mut bytes);
            assert_eq!(bytes[..9000], text);
            assert!(bytes[9000..].iter().all(|&b| b == 0), "{shape:?}");
        });
    }
}

const SECTORS: usize = 48;

/// Batches of requests that are mostly adjacent, and optionally a bad sector. With a bad sector no
/// write is durable: a failed run of durable writes may poison the disk for all of them, where the
/// first would have succeeded by itself.
fn batches() -> impl Strategy<Value = (Vec<Vec<Ask>>, Option<u64>)> {
    let bad = prop::option::of(0..SECTORS as u64);
    bad.prop_flat_map(|bad| (some_batches(if bad.is_some() { WRITE } else { DURABLE }), Just(bad)))
}

fn some_batches(durable: Op) -> impl Strategy<Value = Vec<Vec<Ask>>> {
    let op = prop_oneof![
        4 => Just(Op::Read), 4 => Just(WRITE), 1 => Just(durable), 1 => Just(Op::Flush)
    ];
    let jump = prop_oneof![3 => Just(None), 1 => (0..SECTORS as u64).prop_map(Some)];
    let one = (prop::option::weighted(0.3, op), jump, 0..6u64);
    let batch = prop::collection::vec(one, 1..24).prop_map(|steps| {
        let (mut op, mut at) = (Op::Read, 0);
        let step = |(next, jump, sectors): (Option<Op>, Option<u64>, u64)| {
            op = next.unwrap_or(op);
            at = jump.unwrap_or(at);
            let ask = if op == Op::Flush { (op, 0, 0) } else { (op, at * 512, sectors * 512) };
            // Some requests end past the end of the disk.
            at = (at + sectors) % (SECTORS as u64 + 4);
            ask
        };
        steps.into_iter().map(step).collect()
    });
    prop::collection::vec(batch, 1..6)
}

/// Serves the batches. Returns every status, every byte read, the contents of the disk, and the
/// number of merged requests. Bytes of failed requests count as 0xff.
fn outcome(
    batches: &[Vec<Ask>],
    bad: Option<u64>,
    shape: Alignment,
    merges: bool,
) -> (Vec<Status>, Vec<u8>, Vec<u8>, u64) {
    let capacity = (SECTORS * 512) as u64;
    let stage = Stage { merges, ..Stage::with(capacity - 700, capacity, shape, options()) };
    for (bad, kind) in bad.into_iter().flat_map(|bad| [(bad, SimOp::Read), (bad, SimOp::Write)]) {
        stage.sim.fail(Fault::new(kind, 5).within(bad * 512..bad * 512 + 1).always());
    }
    let batches = batches.to_vec();
    run(async move {
        let (mut all, mut read, mut unknown) = (Vec::new(), Vec::new(), vec![false; SECTORS]);
        for (number, asks) in batches.iter().enumerate() {
            // Each request has memory of its own, filled with a pattern that identifies it.
            let place = |(index, &ask): (usize, &Ask)| {
                let segments = stage.segments(
                    index as u64 * 8192,
                    ask.2,
                    if ask.2 > 0 { 1 + index as u64 % 2 } else { 1 },
                );
                let fill: Vec<u8> = (0..ask.2)
                    .map(|i| (number * 31 + index * 7 + i as usize / 512) as u8 & 0x7f)
                    .collect();
                segments.copy_in(0, &fill);
                (ask, segments)
            };
            let batch: Vec<_> = asks.iter().enumerate().map(place).collect();
            let copies: Vec<_> = batch.iter().map(|(_, s)| s.slice(0, s.len())).collect();
            let statuses = stage.batch(batch).await;
            for ((&(op, offset, len), status), segments) in asks.iter().zip(&statuses).zip(copies) {
                let sectors = (offset / 512) as usize..((offset + len) / 512) as usize;
                match op {
                    Op::Write { .. } if *status != Err(Failure::OutOfRange) => {
                        unknown[sectors].fill(status.is_err());
                    }
                    Op::Read if status.is_ok() => {
                        let mut bytes = vec![0; len as usize];
                        segments.copy_out(0, &mut bytes);
                        for (bytes, sector) in bytes.chunks_mut(512).zip(sectors) {
                            if unknown[sector] {
                                bytes.fill(0xff);
                            }
                        }
                        read.extend(bytes);
                    }
                    _ => {}
                }
            }
            all.extend(statuses);
        }
        let mut contents = stage.sim.contents();
        contents.resize(SECTORS * 512, 0);
        for (sector, _) in unknown.iter().enumerate().filter(|(_, u)| **u) {
            contents[sector * 512..][..512].fill(0xff);
        }
        let merged = OpKind::ALL
            .into_iter()
            .filter_map(|k| stage.served.statistics().summary(k))
            .map(|s| s.merged)
            .sum();
        (all, read, contents, merged)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 512, ..ProptestConfig::default()
    })]

    /// Merging changes no answer and no byte.
    #[test]
    fn merging_changes_no_answer_and_no_byte(
        (batches, bad) in batches(),
        align in prop::sample::select(vec![1, 512, 4096]),
    ) {
        let shape = Alignment { memory_align: align, offset_align: align };
        let merged = outcome(&batches, bad, shape, true);
        let apart = outcome(&batches, bad, shape, false);
        prop_assert_eq!(merged.0, apart.0);
        prop_assert!(merged.1 == apart.1, "read other bytes");
        prop_assert!(merged.2 == apart.2, "left other bytes on the disk");
        prop_assert_eq!(apart.3, 0);
    }
}
