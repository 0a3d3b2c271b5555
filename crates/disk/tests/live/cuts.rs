//! Power cuts of a disk under load during snapshot, commit, stream and resize, on real files with a
//! journal and real threads.
//!
//! The tests in the crate (`live/cuts`) make most power cuts, on simulated disks. This test shows
//! that files and threads do the same. For each power cut the test reconstructs the files as the
//! power cut may have left them, and checks them.
//!
//! What must hold after each power cut: the image that was named at the start, or the overlay that
//! its record names, opens for writing. Each image of the chain is consistent. The disk holds every
//! write that an acknowledged flush covered. `BLOCKYARD_CUTS=N` sets the number of power cuts. The
//! timing of threads is not repeatable: a seed determines the operations, not their timing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use blockyard_disk::{Disk, DiskOptions, LocalDisk, Op, SnapshotOptions, Source, Work};
use blockyard_image::qcow2::CreateOptions;
use blockyard_image::qcow2::check::{Repair, check};
use blockyard_image::tools::on_file;
use blockyard_image::{CacheMode, Chain, ChainOptions, Format};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::sim::{FlushToken, Journal, LeftFile, Oracle, Rng, WriteToken, pattern};

use crate::load::{HANGS, Reactor, SECTOR, ask, close};
use crate::peer::{Scratch, qemu_img};

const SIZE: u64 = 192 << 10;
/// Power cuts of an ordinary run, and of one disk.
const CUTS: u64 = 30;
const CUTS_OF_A_LIFE: u64 = 10;
const LANES: u64 = 3;

/// The meaning of a mark in the journal.
enum Event {
    Write { request: u64, at: u64, data: Vec<u8> },
    Written { request: u64, durable: bool },
    Flush { request: u64 },
    Flushed { request: u64 },
}

#[derive(Clone, Default)]
struct Record {
    journal: Journal,
    events: Arc<Mutex<BTreeMap<u64, Event>>>,
}

impl Record {
    fn mark(&self, event: Event) {
        let mark = self.journal.mark();
        self.events.lock().unwrap().insert(mark, event);
    }
}

/// A disk with a journal, and the load on it.
struct Life {
    rng: Rng,
    scratch: Scratch,
    base: &'static str,
    record: Record,
    disk: Arc<Disk>,
    reactors: [Reactor; 2],
    overlays: u64,
}

impl Life {
    fn new(seed: u64) -> Self {
        let (scratch, record) = (Scratch::new("cuts"), Record::default());
        let (base, format, options) = [
            ("base.raw", "raw", "preallocation=off"),
            ("base.qcow2", "qcow2", "cluster_size=4k"),
            ("base.qcow2", "qcow2", "cluster_size=512"),
        ][seed as usize % 3];
        qemu_img(&["create", "-f", format, "-o", options, &scratch.name(base), &SIZE.to_string()]);
        let chain = ChainOptions {
            cache: CacheMode::Writeback,
            journal: Some(record.journal.clone()),
            ..ChainOptions::new(scratch.path(base))
        };
        let (name, serial, cache) = ("cut".into(), String::new(), CacheMode::Writeback);
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Arc::new(Disk::new(options, Source::open(&chain).unwrap()));
        Life {
            rng: Rng::new(seed),
            scratch,
            base,
            record,
            disk,
            reactors: [Reactor::start(), Reactor::start()],
            overlays: 0,
        }
    }

    /// Runs the load, with some snapshots, commits, streams and resizes at the same time.
    fn run(&mut self) {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, ended) = mpsc::channel();
        for number in 0..LANES * self.reactors.len() as u64 {
            let (disk, stop, sender) = (self.disk.clone(), stop.clone(), sender.clone());
            let (record, rng) = (self.record.clone(), self.rng.fork());
            self.reactors[(number / LANES) as usize].remote.run(move |handle| {
                let (served, sleeper) = (LocalDisk::local(handle, &disk).unwrap(), handle.clone());
                let mut lane = Lane { number, requests: 0, served, record, rng };
                handle.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        lane.step().await;
                        // The journal is kept in memory, so the load is light.
                        sleeper.sleep(Duration::from_micros(500)).await;
                    }
                    let _ = sender.send(());
                });
            });
        }
        drop(sender);
        for _ in 0..5 {
            self.work();
        }
        stop.store(true, Ordering::SeqCst);
        (0..LANES * self.reactors.len() as u64)
            .for_each(|_| ended.recv_timeout(HANGS).expect("a lane has failed or hangs"));
        close(&self.disk, &self.reactors);
    }

    /// Runs a snapshot, or, if the chain allows it, a commit, a stream or a resize.
    fn work(&mut self) {
        let depth = self.disk.source().chain().map_or(1, |chain| chain.layers().len());
        match self.rng.below(4) {
            1 if depth > 1 && self.can_commit() => self.disk.commit(&Work::default()).unwrap(),
            2 if depth > 1 => self.disk.stream(&Work::default()).unwrap(),
            3 if self.disk.source().chain().is_some() => {
                // Beyond the present L1 table, or not.
                let more = SECTOR * *self.rng.pick(&[1, 777, 100_000]);
                self.disk.grow(self.disk.capacity() + more).unwrap();
                self.disk.refresh_capacity().unwrap().expect("another size");
            }
            _ => {
                self.overlays += 1;
                let overlay = self.scratch.path(&format!("{}.qcow2", self.overlays));
                let cluster_size = *self.rng.pick(&[512, 4096, 16384]);
                let shape = CreateOptions { cluster_size, ..CreateOptions::new(0) };
                self.disk
                    .snapshot(&SnapshotOptions {
                        shape: Some(shape),
                        ..SnapshotOptions::new(overlay)
                    })
                    .unwrap();
            }
        }
    }

    /// A commit needs a backing image that is as large as the disk.
    fn can_commit(&self) -> bool {
        let source = self.disk.source();
        source.chain().is_some_and(|chain| chain.layers()[1].size() >= self.disk.capacity())
    }

    /// Goes through the journal, and cuts the power at `cuts` random lines.
    fn judge(&mut self, cuts: u64) -> Result<(), String> {
        let mut replay = self.record.journal.replay(self.rng.next_u64());
        let lines = replay.len() as u64;
        let mut at: Vec<u64> = (0..cuts).map(|_| self.rng.below(lines)).collect();
        at.sort_unstable();
        let (mut at, mut guest) = (at.into_iter().peekable(), Guest::default());
        let mut events = std::mem::take(&mut *self.record.events.lock().unwrap());
        for line in 0..lines {
            while at.next_if_eq(&line).is_some() {
                let left = replay.power_cut();
                let disk = self.start(&left).map_err(|e| format!("line {line} of {lines}: {e}"))?;
                let allowed = guest.oracle.allows_after_cut(0, &disk);
                allowed.map_err(|e| format!("line {line} of {lines}: {e}"))?;
            }
            if let Some(event) = replay.step().and_then(|mark| events.remove(&mark)) {
                guest.sees(event);
            }
        }
        Ok(())
    }

    /// Opens the disk after a power cut as a start does: it begins at the base, and follows the
    /// records. Returns the contents.
    fn start(&self, left: &[LeftFile]) -> Result<Vec<u8>, String> {
        let scratch = Scratch::new("left");
        let mut top = self.scratch.path(self.base);
        while let Some(overlay) =
            left.iter().find(|file| file.path == top).and_then(|file| file.note.clone())
        {
            top = overlay;
        }
        for file in left {
            std::fs::write(scratch.path(&name(&file.path)), file.image.bytes()).unwrap();
        }
        let path = scratch.path(&name(&top));
        let options = ChainOptions { cache: CacheMode::Writeback, ..ChainOptions::new(&path) };
        let chain = Chain::open(&options).map_err(|e| e.to_string())?;
        let files: Vec<PathBuf> =
            chain.layers().iter().map(|layer| layer.file.path().into()).collect();
        let qcow2 =
            chain.layers().iter().map(|layer| layer.format == Format::Qcow2).collect::<Vec<_>>();
        let executor = Executor::new().unwrap();
        let image = chain.image(executor.handle()).unwrap();
        let read = executor
            .block_on(async move { image.read(Segments::buffer(SIZE as usize), 0).await })
            .unwrap();
        let (segments, result) = read;
        result.map_err(|e| e.to_string())?;
        drop(chain);
        for (file, _) in files.iter().zip(qcow2).filter(|(_, qcow2)| *qcow2) {
            let report =
                on_file(file, true, async |raw| check(&raw, None, Repair::No).await).unwrap();
            if report.corruptions > 0 || report.check_errors > 0 {
                return Err(format!("{} is corrupt: {:?}", file.display(), report.findings));
            }
        }
        let mut disk = vec![0; SIZE as usize];
        segments.copy_out(0, &mut disk);
        Ok(disk)
    }
}

fn name(path: &std::path::Path) -> String {
    path.file_name().unwrap().to_string_lossy().into()
}

/// The requests that the guest has seen at a line of the journal.
#[derive(Default)]
struct Guest {
    oracle: Oracle,
    writes: BTreeMap<u64, WriteToken>,
    flushes: BTreeMap<u64, FlushToken>,
}

impl Guest {
    fn sees(&mut self, event: Event) {
        match event {
            Event::Write { request, at, data } => {
                self.writes.insert(request, self.oracle.write_started(at, &data));
            }
            Event::Written { request, durable } => {
                let token = self.writes.remove(&request).expect("a write");
                self.oracle.write_answered(token, true, durable);
            }
            Event::Flush { request } => {
                self.flushes.insert(request, self.oracle.flush_started());
            }
            Event::Flushed { request } => {
                let token = self.flushes.remove(&request).expect("a flush");
                self.oracle.flush_answered(token, true);
            }
        }
    }
}

struct Lane {
    number: u64,
    requests: u64,
    served: Rc<LocalDisk>,
    record: Record,
    rng: Rng,
}

impl Lane {
    async fn step(&mut self) {
        self.requests += 1;
        let request = self.number << 32 | self.requests;
        if self.rng.one_in(5) {
            self.record.mark(Event::Flush { request });
            assert_eq!(ask(&self.served, Op::Flush, 0, Vec::new()).await.0, Ok(()));
            return self.record.mark(Event::Flushed { request });
        }
        let sectors = SIZE / SECTOR;
        let first = self.rng.below(sectors);
        let most = if self.rng.one_in(4) { 40 } else { 6 };
        let len = self.rng.between(1, most).min(sectors - first) * SECTOR;
        let (at, fua) = (first * SECTOR, self.rng.one_in(6));
        let (op, data) = match self.rng.below(8) {
            0 => (
                Op::WriteZeroes { unmap: self.rng.one_in(2), fua, fast: false },
                vec![0; len as usize],
            ),
            _ => (Op::Write { fua }, pattern(self.rng.next_u64(), at, len as usize)),
        };
        self.record.mark(Event::Write { request, at, data: data.clone() });
        assert_eq!(ask(&self.served, op, at, data).await.0, Ok(()), "{op:?}");
        self.record.mark(Event::Written { request, durable: fua });
    }
}

#[test]
fn a_power_cut_leaves_the_old_chain_or_the_new_one() {
    let cuts = std::env::var("BLOCKYARD_CUTS")
        .map_or(CUTS, |text| text.parse().expect("BLOCKYARD_CUTS is a number"));
    for seed in 0..cuts.div_ceil(CUTS_OF_A_LIFE) {
        let mut life = Life::new(seed);
        life.run();
        let lines = life.record.journal.len();
        life.judge(CUTS_OF_A_LIFE).unwrap_or_else(|e| panic!("seed {seed}, {}: {e}", life.base));
        println!("seed {seed}: {} with {} overlays, {lines} lines", life.base, life.overlays);
    }
}
