//! Backups of a disk in use: the copy is the disk at one moment, and the guest goes on.
//!
//! Each sector holds one number only, which names the request that has written it. A clock counts
//! the begins and ends of all requests. So a copy shows at which ticks of the clock the disk may
//! have been like it.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use blockyard_disk::{
    BackupOptions, Disk, DiskOptions, LocalDisk, Op, SnapshotOptions, Source, Why, Work, WorkError,
};
use blockyard_image::tools::{self, NewImage};
use blockyard_image::{CacheMode, Chain, ChainOptions, Format, OpenedFiles};
use blockyard_storage::sim::Rng;

use crate::load::{HANGS, Load, Reactor, SECTOR, WRITE, ask, close, result};
use crate::peer::{Scratch, judge, qemu_img, random};

/// Not a multiple of a part, nor of a cluster.
const SIZE: u64 = (16 << 20) + 33 * SECTOR;
/// Size in bytes of an image that takes a while to copy.
const LARGE: usize = 128 << 20;
const WRITERS: u64 = 8;
/// Sectors of a stripe. Some stripes lie in two parts of the copy.
const STRIPE: u64 = 24;
const TARGETS: [(&str, Format); 2] = [("copy.raw", Format::Raw), ("copy.qcow2", Format::Qcow2)];

/// What a request has left in a sector.
#[derive(Clone, Copy)]
struct Change {
    begun: u64,
    ended: u64,
    number: u64,
}

type History = HashMap<u64, Vec<Change>>;

/// The number in a sector that no request has changed.
fn initial(sector: u64) -> u64 {
    u64::MAX - sector
}

fn filled(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(SECTOR as usize / 8)
}

fn number_in(sector: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(sector[..8].try_into().unwrap());
    (sector == filled(number)).then_some(number)
}

/// Changes its own sectors, and notes what it has done.
struct Writer {
    number: u64,
    writers: u64,
    served: Rc<LocalDisk>,
    clock: Arc<AtomicU64>,
    rng: Rng,
    history: History,
}

impl Writer {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    async fn step(&mut self) {
        let sectors = SIZE / SECTOR;
        let stripes = sectors.div_ceil(STRIPE);
        let mine = (stripes - self.number).div_ceil(self.writers);
        let stripe = (self.rng.below(mine) * self.writers + self.number) * STRIPE;
        let first = stripe + self.rng.below(STRIPE.min(sectors - stripe));
        let most = (stripe + STRIPE).min(sectors) - first;
        let count = self.rng.between(1, most);
        let (at, len) = (first * SECTOR, (count * SECTOR) as usize);
        let begun = self.tick();
        let (op, bytes) = match self.rng.below(8) {
            0 => {
                let (unmap, fua) = (self.rng.one_in(2), self.rng.one_in(4));
                (Op::WriteZeroes { unmap, fua, fast: false }, vec![0; len])
            }
            1 => (Op::Discard, vec![0; len]),
            _ => (WRITE, filled(begun).repeat(count as usize)),
        };
        let (status, _) = ask(&self.served, op, at, bytes.clone()).await;
        assert_eq!(status, Ok(()), "{op:?} at {at}");
        let ended = self.tick();
        // A discard may leave the old data.
        let now = match op {
            Op::Discard => ask(&self.served, Op::Read, at, bytes).await.1,
            _ => bytes,
        };
        for (sector, bytes) in (first..).zip(now.chunks(SECTOR as usize)) {
            let number = number_in(bytes).expect("a whole sector");
            self.history.entry(sector).or_default().push(Change { begun, ended, number });
        }
    }
}

/// Writers on several reactors.
struct Writers {
    clock: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    count: u64,
    ended: mpsc::Receiver<History>,
}

impl Writers {
    fn start(reactors: &[Reactor], disk: &Arc<Disk>, seed: u64) -> Self {
        let (sender, ended) = mpsc::channel();
        // 0 is the number of zeroes.
        let (clock, stop) = (Arc::new(AtomicU64::new(1)), Arc::<AtomicBool>::default());
        let writers = WRITERS * reactors.len() as u64;
        for number in 0..writers {
            let (disk, sender, stop) = (disk.clone(), sender.clone(), stop.clone());
            let (clock, rng) = (clock.clone(), Rng::new(seed << 8 | number));
            reactors[(number / WRITERS) as usize].remote.run(move |handle| {
                let served = LocalDisk::local(handle, &disk).unwrap();
                let history = History::new();
                let mut writer = Writer { number, writers, served, clock, rng, history };
                handle.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        writer.step().await;
                    }
                    let _ = sender.send(writer.history);
                });
            });
        }
        Writers { clock, stop, count: writers, ended }
    }

    fn now(&self) -> u64 {
        self.clock.load(Ordering::SeqCst)
    }

    /// Waits until the writers have begun and ended some requests more.
    fn go_on(&self, ticks: u64) {
        let (until, begun) = (self.now() + ticks, Instant::now());
        while self.now() < until {
            assert!(begun.elapsed() < HANGS, "the writers make no progress");
            std::thread::yield_now();
        }
    }

    fn end(self) -> History {
        self.stop.store(true, Ordering::SeqCst);
        let next = |_| self.ended.recv_timeout(HANGS).expect("a writer has failed or hangs");
        let histories = (0..self.count).map(next);
        histories.flatten().collect()
    }
}

/// Returns the ticks of the clock, within `ticks`, at which the disk may have had these contents.
fn moments(
    contents: &[u8],
    history: &History,
    ticks: std::ops::RangeInclusive<u64>,
) -> Result<Vec<u64>, String> {
    let (mut from, mut until) = ticks.into_inner();
    let mut ambiguous = Vec::new();
    for (sector, bytes) in (0..).zip(contents.chunks(SECTOR as usize)) {
        let number = number_in(bytes).ok_or_else(|| format!("sector {sector} is torn"))?;
        let first = Change { begun: 0, ended: 0, number: initial(sector) };
        let later = history.get(&sector).map_or(&[][..], Vec::as_slice);
        let all: Vec<_> = std::iter::once(&first).chain(later).collect();
        let spans = all.iter().enumerate().filter(|(_, change)| change.number == number);
        let spans: Vec<_> = spans
            .map(|(at, change)| (change.begun + 1, all.get(at + 1).map_or(u64::MAX, |c| c.ended)))
            .collect();
        match spans[..] {
            [] => return Err(format!("sector {sector} holds {number}, which was never in it")),
            [(begin, end)] => (from, until) = (from.max(begin), until.min(end)),
            _ => ambiguous.push(spans),
        }
    }
    let fits = |tick: &u64| {
        let holds =
            |spans: &Vec<(u64, u64)>| spans.iter().any(|(begin, end)| begin <= tick && tick <= end);
        ambiguous.iter().all(holds)
    };
    Ok((from..=until).filter(fits).collect())
}

fn read_all(reactor: &Reactor, disk: &Arc<Disk>) -> Vec<u8> {
    reactor.on(disk, async |served| {
        let mut all = Vec::new();
        while (all.len() as u64) < SIZE {
            let len = (SIZE - all.len() as u64).min(1 << 20) as usize;
            let (status, bytes) = ask(&served, Op::Read, all.len() as u64, vec![0xee; len]).await;
            assert_eq!(status, Ok(()));
            all.extend(bytes);
        }
        all
    })
}

/// Makes an image with the initial numbers. Returns its name.
fn make(scratch: &Scratch, source: &'static str) -> &'static str {
    let bytes: Vec<u8> = (0..SIZE / SECTOR).flat_map(|sector| filled(initial(sector))).collect();
    let base = scratch.path("base.raw");
    std::fs::write(&base, bytes).unwrap();
    let (from, image) = (scratch.name("base.raw"), scratch.name(source));
    match source {
        "base.raw" => {}
        "alone.qcow2" => {
            let small = "cluster_size=4k";
            qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", small, &from, &image]);
        }
        "top.qcow2" => {
            qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &image]);
        }
        _ => {
            File::create(&image).unwrap();
            let stat = std::fs::metadata(&base).unwrap();
            let (size, mtime) = (stat.len(), stat.mtime());
            let new = NewImage::Cow { backing: from, size, mtime, version: 3, alignment: 4096 };
            tools::create(Path::new(&image), &OpenedFiles::default(), new).unwrap();
        }
    }
    source
}

/// Returns the contents of a backup, which QEMU finds consistent.
fn contents_of(scratch: &Scratch, target: &str, format: Format) -> Vec<u8> {
    if format == Format::Raw {
        return std::fs::read(scratch.path(target)).unwrap();
    }
    let (name, plain) = (scratch.name(target), scratch.name("plain.raw"));
    qemu_img(&["check", "-f", "qcow2", &name]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &name, &plain]);
    std::fs::read(plain).unwrap()
}

fn backup(disk: &Arc<Disk>, target: impl AsRef<Path>, format: Format) -> Result<(), WorkError> {
    disk.backup(&BackupOptions::new(target.as_ref(), format), &Work::default())
}

/// Starts a backup, and waits until some of it is done.
fn begin(
    disk: &Arc<Disk>,
    options: BackupOptions,
    is_begun: impl Fn(&Work) -> bool,
) -> (Work, JoinHandle<Result<(), WorkError>>) {
    let (work, disk) = (Work::default(), disk.clone());
    let doing = work.clone();
    let thread = std::thread::spawn(move || disk.backup(&options, &doing));
    let begun = Instant::now();
    while !is_begun(&work) {
        assert!(begun.elapsed() < HANGS, "the backup does not begin");
        assert!(!thread.is_finished() || is_begun(&work), "it ended before it began");
        std::thread::yield_now();
    }
    (work, thread)
}

/// Returns the names of the files in the folder.
fn files(scratch: &Scratch) -> Vec<String> {
    let entries = std::fs::read_dir(scratch.path("")).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_backup_under_load_is_the_disk_at_one_moment_and_the_disk_has_all_writes() {
    let mut requests_during_copies = 0;
    for (seed, source) in (0..).zip(["base.raw", "alone.qcow2", "top.qcow2", "disk.cow"]) {
        for (target, format) in TARGETS {
            let (scratch, reactors) =
                (Scratch::new("backup"), [Reactor::start(), Reactor::start()]);
            let disk = scratch.disk(make(&scratch, source));
            let writers = Writers::start(&reactors, &disk, seed);
            writers.go_on(500);
            let (before, path) = (writers.now(), scratch.path(target));
            let options = BackupOptions::new(path, format);
            let (work, job) = begin(&disk, options, |work| work.progress().total() > 0);
            // Now the reactors have the map, so the moment is past.
            let after = writers.now();
            result(job).unwrap();
            requests_during_copies += writers.now() - after;
            assert_eq!((work.progress().done(), work.progress().total()), (SIZE, SIZE));
            writers.go_on(500);
            let history = writers.end();
            let copy = contents_of(&scratch, target, format);
            assert_eq!(copy.len() as u64, SIZE);
            let found = moments(&copy, &history, before..=after);
            let found = found.unwrap_or_else(|e| panic!("{target} of {source}: {e}"));
            assert!(!found.is_empty(), "{target} of {source} is not the disk at one moment");
            let disk_now = read_all(&reactors[0], &disk);
            let end = u64::MAX - 1;
            let found = moments(&disk_now, &history, end..=end).unwrap();
            assert_eq!(found, [end], "{source} lacks a write");
            close(&disk, &reactors);
        }
    }
    assert!(requests_during_copies > 0, "nothing has tested the copies");
}

#[test]
fn a_sparse_disk_has_a_sparse_backup() {
    const LEN: u64 = (1 << 30) + 512;
    let scratch = Scratch::new("sparse");
    let base = File::create(scratch.path("base.raw")).unwrap();
    base.set_len(LEN).unwrap();
    for (at, len) in [(0, 4096), ((512 << 20) + 5000, 3), (LEN - 512, 512)] {
        base.write_all_at(&vec![7; len], at).unwrap();
    }
    let disk = scratch.disk("base.raw");
    for (target, format) in TARGETS {
        let (work, path) = (Work::default(), scratch.path(target));
        disk.backup(&BackupOptions::new(&path, format), &work).unwrap();
        assert_eq!((work.progress().done(), work.progress().total()), (LEN, LEN));
        let stat = std::fs::metadata(&path).unwrap();
        assert!(stat.blocks() * 512 < 2 << 20, "{target} has {} blocks", stat.blocks());
        assert!(format != Format::Raw || stat.len() == LEN);
    }
    // QEMU cannot open an image that a disk holds.
    drop(disk);
    for (target, format) in TARGETS {
        let (name, format) = (scratch.name(target), format.to_string());
        qemu_img(&["compare", "-f", &format, "-F", "raw", &name, &scratch.name("base.raw")]);
    }
}

#[test]
fn a_backup_has_the_size_of_its_disk_and_the_mode_of_its_image() {
    for size in [0, 512, (64 << 10) + 1024] {
        let scratch = Scratch::new("sizes");
        let base = scratch.path("base.raw");
        std::fs::write(&base, random(size, 1)).unwrap();
        std::fs::set_permissions(&base, Permissions::from_mode(0o640)).unwrap();
        let disk = scratch.disk("base.raw");
        for (target, format) in TARGETS {
            let path = scratch.path(target);
            backup(&disk, &path, format).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
            // Nothing holds its lock any more.
            let options = ChainOptions { format: Some(format), ..ChainOptions::new(&path) };
            assert_eq!(Chain::open(&options).unwrap().size(), size as u64);
        }
        assert!(std::fs::read(scratch.path("copy.raw")).unwrap() == std::fs::read(base).unwrap());
    }
}

/// Such a disk would copy all data of its backing image into the topmost one.
#[test]
fn a_backup_of_a_disk_with_copy_on_read_changes_no_image() {
    let scratch = Scratch::new("copy-on-read");
    make(&scratch, "top.qcow2");
    let top = scratch.path("top.qcow2");
    let chain = ChainOptions { copy_on_read: true, ..ChainOptions::new(&top) };
    let options = DiskOptions {
        name: "live".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::open(&chain).unwrap()));
    let reactors = [Reactor::start()];
    backup(&disk, scratch.path("copy.raw"), Format::Raw).unwrap();
    close(&disk, &reactors);
    drop(disk);
    judge(&scratch, "copy.raw", &std::fs::read(scratch.path("base.raw")).unwrap());
    let map = qemu_img(&["map", "--output=json", &scratch.name("top.qcow2")]);
    assert!(!map.contains("\"depth\": 0, \"present\": true, \"zero\": false"), "{map}");
}

#[test]
fn a_read_only_disk_has_backups() {
    let scratch = Scratch::new("reading");
    let base = scratch.path("base.raw");
    std::fs::write(&base, random(3 << 20, 1)).unwrap();
    let disk = scratch.disk_with("base.raw", |options| options.read_only = true);
    backup(&disk, scratch.path("copy.raw"), Format::Raw).unwrap();
    assert!(std::fs::read(scratch.path("copy.raw")).unwrap() == std::fs::read(base).unwrap());
}

#[test]
fn a_backup_that_is_refused_leaves_all_files_as_they_were() {
    let scratch = Scratch::new("refused");
    std::fs::write(scratch.path("base.raw"), random(1 << 20, 1)).unwrap();
    std::fs::write(scratch.path("there.raw"), b"other data").unwrap();
    symlink("nothing", scratch.path("link.raw")).unwrap();
    let disk = scratch.disk("base.raw");
    let before = files(&scratch);
    let cases = [
        ("there.raw", Format::Raw, "the file exists already"),
        ("link.raw", Format::Qcow2, "the file exists already"),
        ("base.raw", Format::Raw, "the file exists already"),
        ("nowhere/new.raw", Format::Raw, "No such file or directory"),
        ("new.cow", Format::Cow, "its format must be raw or qcow2"),
    ];
    for (target, format, what) in cases {
        let error = backup(&disk, scratch.path(target), format).unwrap_err().to_string();
        assert!(error.starts_with("disk \"live\": backup: image "), "{error}");
        assert!(error.contains(target) && error.contains(what), "{error}");
    }
    let null = Source::open(&ChainOptions::new("null:1M")).unwrap();
    let null = Arc::new(Disk::new(disk.options().clone(), null));
    let error = backup(&null, scratch.path("new.raw"), Format::Raw).unwrap_err().to_string();
    assert!(error.contains("the disk has no image"), "{error}");
    drop(disk);
    let filter = "error:flush=1".parse().unwrap();
    let disk = scratch.disk_with("base.raw", |options| options.filters = vec![filter]);
    let error = backup(&disk, scratch.path("new.raw"), Format::Raw).unwrap_err().to_string();
    assert!(error.contains("a flush failed"), "{error}");
    assert_eq!(files(&scratch), before);
    assert_eq!(std::fs::read(scratch.path("there.raw")).unwrap(), b"other data");
}

/// A disk that takes a while to copy, under load.
struct Large {
    scratch: Scratch,
    disk: Arc<Disk>,
    reactors: [Reactor; 2],
    load: Load,
}

impl Large {
    fn new(name: &str) -> Self {
        let (scratch, known) = (Scratch::new(name), random(LARGE, 1));
        std::fs::write(scratch.path("base.raw"), &known).unwrap();
        let (disk, reactors) = (scratch.disk("base.raw"), [Reactor::start(), Reactor::start()]);
        let load = Load::start(&reactors, &disk, 1, &known);
        load.go_on(200);
        Large { scratch, disk, reactors, load }
    }
}

/// Starts a backup of a large disk into new.qcow2, and waits until some of it is done.
fn begin_large(scratch: &Scratch, disk: &Arc<Disk>) -> (Work, JoinHandle<Result<(), WorkError>>) {
    let options = BackupOptions::new(scratch.path("new.qcow2"), Format::Qcow2);
    begin(disk, options, |work| work.progress().done() > 0)
}

#[test]
fn a_cancelled_backup_leaves_no_file_and_the_disk_as_it_was() {
    let Large { scratch, disk, reactors, load } = Large::new("cancelled");
    let (work, job) = begin_large(&scratch, &disk);
    // No other work may begin while this one runs.
    let others = [
        backup(&disk, scratch.path("other.raw"), Format::Raw),
        disk.snapshot(&SnapshotOptions::new(scratch.path("other.qcow2"))),
    ];
    for other in others {
        let error = other.unwrap_err();
        assert!(matches!(*error.why, Why::Busy), "{error}");
    }
    work.cancel();
    let error = result(job).unwrap_err();
    assert!(matches!(*error.why, Why::Cancelled), "{error}");
    assert_eq!(files(&scratch), ["base.raw"]);
    // The work is cancelled before it begins.
    let options = BackupOptions::new(scratch.path("new.qcow2"), Format::Qcow2);
    let error = disk.backup(&options, &work).unwrap_err();
    assert!(matches!(*error.why, Why::Cancelled), "{error}");
    load.go_on(200);
    let known = load.end();
    close(&disk, &reactors);
    drop(disk);
    assert_eq!(files(&scratch), ["base.raw"]);
    judge(&scratch, "base.raw", &known);
}

#[test]
fn closing_a_disk_ends_its_backup_first() {
    let Large { scratch, disk, reactors, load } = Large::new("closed");
    let known = load.end();
    let (_, job) = begin_large(&scratch, &disk);
    close(&disk, &reactors);
    let error = result(job).unwrap_err();
    assert!(matches!(*error.why, Why::Ended), "{error}");
    let error = backup(&disk, scratch.path("new.raw"), Format::Raw).unwrap_err();
    assert!(matches!(*error.why, Why::Ended), "{error}");
    drop(disk);
    assert_eq!(files(&scratch), ["base.raw"]);
    judge(&scratch, "base.raw", &known);
}
