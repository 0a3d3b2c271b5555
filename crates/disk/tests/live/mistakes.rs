//! Impossible, cancelled and failing commands: the disk stays as it was, and the error says why.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use blockyard_disk::{Disk, Failure, Op, SnapshotOptions, StartRecord, Why, Work, WorkError};
use blockyard_image::journal::MemoryStore;
use blockyard_image::{ChainOptions, ImageFile, OpenOptions};

use crate::load::{HANGS, Load, Reactor, WRITE, ask, close, result};
use crate::peer::{Scratch, judge, qemu_img, random};

const SIZE: usize = 8 << 20;
/// Size in bytes of an image that takes a while to copy.
const LARGE: usize = 128 << 20;

type Run = fn(&Arc<Disk>, &Work) -> Result<(), WorkError>;

fn snapshot(disk: &Arc<Disk>, overlay: PathBuf) -> Result<(), WorkError> {
    disk.snapshot(&SnapshotOptions::new(overlay))
}

/// A raw image with an overlay, in use and under load.
struct Fixture {
    scratch: Scratch,
    disk: Arc<Disk>,
    reactors: [Reactor; 2],
    load: Load,
}

impl Fixture {
    fn new(name: &str) -> Self {
        Fixture::with(name, SIZE, false)
    }

    /// Creates the images and starts the load. `full`: the overlay holds all data that a guest
    /// sees.
    fn with(name: &str, size: usize, full: bool) -> Self {
        let scratch = Scratch::new(name);
        let mut known = random(size, 1);
        std::fs::write(scratch.path("base.raw"), &known).unwrap();
        let top = scratch.name("top.qcow2");
        qemu_img(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &top]);
        if full {
            known = random(size, 2);
            std::fs::write(scratch.path("other.raw"), &known).unwrap();
            qemu_img(&[
                "convert",
                "-n",
                "-f",
                "raw",
                "-O",
                "qcow2",
                &scratch.name("other.raw"),
                &top,
            ]);
        }
        let (disk, reactors) = (scratch.disk("top.qcow2"), [Reactor::start(), Reactor::start()]);
        let load = Load::start(&reactors, &disk, 1, &known);
        load.go_on(200);
        Fixture { scratch, disk, reactors, load }
    }

    /// Checks that the load has met no error, and that the chain is as before.
    fn end(self) {
        let Fixture { scratch, disk, reactors, load } = self;
        load.go_on(200);
        let known = load.end();
        let chain = disk.source().chain().unwrap().describe();
        assert_eq!(chain.matches(" over ").count(), 1, "{chain}");
        close(&disk, &reactors);
        drop(disk);
        judge(&scratch, "top.qcow2", &known);
    }

    fn open(&self, name: &str, read_only: bool) -> Result<ImageFile, String> {
        let options = OpenOptions::new(self.scratch.path(name), read_only, Default::default());
        ImageFile::open(&options).map_err(|e| e.to_string())
    }
}

#[test]
fn a_snapshot_that_fails_leaves_no_overlay_and_the_disk_as_it_was() {
    let fixture = Fixture::new("overlay");
    let (scratch, disk) = (&fixture.scratch, &fixture.disk);
    std::fs::write(scratch.path("there.qcow2"), b"other data").unwrap();
    std::fs::create_dir(scratch.path("other")).unwrap();
    let cases = [
        ("there.qcow2", "the file exists already"),
        ("nowhere/new.qcow2", "outside the allowed folders"),
        ("other/new.qcow2", "outside the allowed folders: put the overlay beside it"),
        ("base.raw", "the file exists already"),
    ];
    for (overlay, what) in cases {
        let error = snapshot(disk, scratch.path(overlay)).unwrap_err().to_string();
        assert!(
            error.starts_with("disk \"live\": snapshot: image ") && error.contains(overlay),
            "{error}"
        );
        assert!(error.contains(what), "{error}");
    }
    assert_eq!(std::fs::read(scratch.path("there.qcow2")).unwrap(), b"other data");
    assert!(!scratch.path("other/new.qcow2").exists());
    // The snapshot fails after it has created the file, but before the file holds an image.
    let shape = blockyard_image::qcow2::CreateOptions {
        cluster_size: 100,
        ..blockyard_image::qcow2::CreateOptions::new(0)
    };
    let overlay = scratch.path("odd.qcow2");
    let error = disk
        .snapshot(&SnapshotOptions { shape: Some(shape), ..SnapshotOptions::new(overlay) })
        .unwrap_err()
        .to_string();
    assert!(error.contains("cluster size"), "{error}");
    assert!(!scratch.path("odd.qcow2").exists());
    fixture.end();
}

/// Notes the calls, and whether the overlay is a complete image then. Fails if it shall.
#[derive(Debug)]
struct Record {
    overlay: PathBuf,
    fails: bool,
    calls: Mutex<Vec<(&'static str, bool)>>,
}

impl Record {
    fn note(&self, call: &'static str) {
        let is_complete = std::fs::read(&self.overlay).is_ok_and(|bytes| bytes.starts_with(b"QFI"));
        self.calls.lock().unwrap().push((call, is_complete));
    }
}

impl StartRecord for Record {
    fn name_overlay(&self) -> io::Result<()> {
        self.note("overlay");
        if self.fails { Err(io::Error::other("no space")) } else { Ok(()) }
    }

    fn name_old_image(&self) -> io::Result<()> {
        self.note("old image");
        if self.fails { Ok(()) } else { Err(io::Error::other("on purpose")) }
    }

    fn ended(&self, is_taken: bool) {
        self.note(if is_taken { "taken" } else { "not taken" });
    }
}

#[test]
fn a_start_record_never_names_an_overlay_that_is_not_there() {
    let fixture = Fixture::new("record");
    let (scratch, disk) = (&fixture.scratch, &fixture.disk);
    let overlay = scratch.path("new.qcow2");
    let take = |fails: bool| {
        let calls = Mutex::default();
        let record = Arc::new(Record { overlay: overlay.clone(), fails, calls });
        let start_record = Some(record.clone() as Arc<dyn StartRecord>);
        let options = SnapshotOptions { start_record, ..SnapshotOptions::new(&overlay) };
        let taken = disk.snapshot(&options);
        (taken, std::mem::take(&mut *record.calls.lock().unwrap()))
    };
    let (failed, calls) = take(true);
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("cannot keep it for the next start: no space"), "{error}");
    assert_eq!(calls, [("overlay", true), ("old image", true), ("not taken", false)]);
    assert!(!overlay.exists());
    fixture.load.go_on(100);
    let (taken, calls) = take(false);
    taken.unwrap();
    assert_eq!(calls, [("overlay", true), ("taken", true)]);
    let Fixture { scratch, disk, reactors, load } = fixture;
    load.go_on(100);
    let known = load.end();
    close(&disk, &reactors);
    drop(disk);
    judge(&scratch, "new.qcow2", &known);
}

/// The journal of the old image ended when the snapshot closed the image.
#[test]
fn a_disk_has_a_journal_again_after_a_snapshot_that_fails() {
    let scratch = Scratch::new("journal");
    let (top, overlay) = (scratch.name("top.qcow2"), scratch.path("new.qcow2"));
    qemu_img(&["create", "-f", "qcow2", &top, "8M"]);
    let store = MemoryStore::default();
    let disk = scratch.disk_with_journal("top.qcow2", &store);
    let reactors = [Reactor::start(), Reactor::start()];
    // Each write allocates a cluster.
    let write = |at: u64| {
        let bytes = vec![at as u8; 512];
        let written =
            reactors[0].on(&disk, move |d| async move { ask(&d, WRITE, at << 20, bytes).await });
        assert_eq!(written.0, Ok(()));
    };
    write(1);
    assert_eq!(store.len(), 1);
    let record = Record { overlay: overlay.clone(), fails: true, calls: Mutex::default() };
    let start_record = Some(Arc::new(record) as Arc<dyn StartRecord>);
    let options = SnapshotOptions { start_record, ..SnapshotOptions::new(&overlay) };
    disk.snapshot(&options).unwrap_err();
    assert_eq!((store.len(), overlay.exists()), (0, false));
    write(2);
    assert_eq!(store.len(), 1, "the changed metadata are in a journal");
    for at in [1, 2] {
        let read = reactors[1]
            .on(&disk, move |d| async move { ask(&d, Op::Read, at << 20, vec![0; 512]).await });
        assert_eq!(read, (Ok(()), vec![at as u8; 512]));
    }
    close(&disk, &reactors);
    assert!(store.is_empty());
}

#[test]
fn a_backing_image_that_another_process_reads_refuses_a_commit() {
    let fixture = Fixture::new("reader");
    let reader = fixture.open("base.raw", true).unwrap();
    let error = fixture.disk.commit(&Work::default()).unwrap_err().to_string();
    assert!(error.contains("base.raw is in use by"), "{error}");
    // The image still has a shared lock: others may read it, but not write to it.
    drop(reader);
    fixture.open("base.raw", true).unwrap();
    assert!(fixture.open("base.raw", false).is_err());
    fixture.load.go_on(100);
    fixture.disk.commit(&Work::default()).unwrap();
    fixture.open("base.raw", true).unwrap();
    assert!(fixture.open("base.raw", false).is_err());
    fixture.end();
}

#[test]
fn a_backing_image_that_is_too_small_refuses_a_commit() {
    let fixture = Fixture::new("small");
    let (scratch, reactors) = (&fixture.scratch, [Reactor::start()]);
    std::fs::write(scratch.path("small.raw"), vec![1; SIZE / 2]).unwrap();
    let size = SIZE.to_string();
    qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-b",
        "small.raw",
        "-F",
        "raw",
        &scratch.name("larger.qcow2"),
        &size,
    ]);
    let disk = scratch.disk("larger.qcow2");
    let error = disk.commit(&Work::default()).unwrap_err().to_string();
    assert!(error.contains("use stream; or end the disk"), "{error}");
    let (status, bytes) =
        reactors[0].on(&disk, async |served| ask(&served, Op::Read, 0, vec![0; 512]).await);
    assert_eq!((status, bytes[0]), (Ok(()), 1));
    close(&disk, &reactors);
    fixture.end();
}

/// A commit writes into compressed clusters of the backing image, and fails. The reactors cannot
/// open the backing image again, so they read the compressed clusters that no entry of the file
/// names any more. The next commit must not release these clusters while reactors read them.
#[test]
fn a_commit_after_one_that_could_not_end_releases_nothing_that_is_read() {
    const CLUSTER: usize = 64 << 10;
    const PACKED: usize = 1 << 20;
    let scratch = Scratch::new("stale");
    let mut known = random(LARGE, 3);
    // The first MiB is compressible, and the base has nothing else.
    known[..PACKED].iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 7);
    let mut base = known[..PACKED].to_vec();
    base.resize(LARGE, 0);
    std::fs::write(scratch.path("source"), base).unwrap();
    let names = ["source", "base.qcow2", "top.qcow2"].map(|name| scratch.name(name));
    let [source, base, top] = names.each_ref().map(String::as_str);
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", source, base]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, top]);
    let (disk, reactor) = (scratch.disk("top.qcow2"), Reactor::start());
    let write = |at: usize, bytes: &[u8]| {
        let bytes = bytes.to_vec();
        let written =
            reactor.on(&disk, move |d| async move { ask(&d, WRITE, at as u64, bytes).await });
        assert_eq!(written.0, Ok(()));
    };
    for at in (0..PACKED).step_by(CLUSTER) {
        known[at..at + 4096].fill(9);
        write(at, &known[at..at + 4096]);
    }
    for at in (PACKED..LARGE).step_by(PACKED) {
        write(at, &known[at..at + PACKED]);
    }
    let read = |at: usize| {
        reactor.on(&disk, move |d| async move { ask(&d, Op::Read, at as u64, vec![0; 4096]).await })
    };
    let (work, thread) = begin(&disk, Disk::commit);
    // Now the reactor has the old entries of the backing image.
    assert_eq!(read(PACKED - 4096), (Ok(()), known[PACKED - 4096..PACKED].to_vec()));
    let header = std::fs::OpenOptions::new().write(true).open(base).unwrap();
    header.write_all_at(b"none", 0).unwrap();
    let begun = Instant::now();
    while work.progress().done() < 16 * PACKED as u64 {
        assert!(begun.elapsed() < HANGS, "the commit makes no progress");
        std::thread::yield_now();
    }
    work.cancel();
    assert!(matches!(*result(thread).unwrap_err().why, Why::Cancelled));
    header.write_all_at(b"QFI\xfb", 0).unwrap();
    // The disk is larger than its backing image now, so the next commit ends when it has opened
    // the backing image.
    disk.grow((LARGE + PACKED) as u64).unwrap();
    let error = disk.commit(&Work::default()).unwrap_err().to_string();
    assert!(error.contains("use stream; or end the disk"), "{error}");
    for at in (0..PACKED).step_by(CLUSTER).map(|at| at + CLUSTER / 2) {
        assert_eq!(read(at), (Ok(()), known[at..at + 4096].to_vec()), "at {at}");
    }
    close(&disk, std::slice::from_ref(&reactor));
    drop(disk);
    known.resize(LARGE + PACKED, 0);
    judge(&scratch, "top.qcow2", &known);
}

/// Starts a commit or a stream, and waits until some of it is done.
fn begin(disk: &Arc<Disk>, run: Run) -> (Work, JoinHandle<Result<(), WorkError>>) {
    let (work, disk) = (Work::default(), disk.clone());
    let doing = work.clone();
    let thread = std::thread::spawn(move || run(&disk, &doing));
    let begun = Instant::now();
    while work.progress().done() == 0 {
        assert!(begun.elapsed() < HANGS, "the work makes no progress");
        assert!(!thread.is_finished(), "it ended before anything was done");
        std::thread::yield_now();
    }
    (work, thread)
}

#[test]
fn a_cancelled_commit_or_stream_leaves_the_disk_as_it_was() {
    let works: [(Run, bool); 2] = [(Disk::commit, true), (Disk::stream, false)];
    for (run, full) in works {
        let fixture = Fixture::with("cancel", LARGE, full);
        let (work, thread) = begin(&fixture.disk, run);
        // No other work may begin while this one runs.
        let other = snapshot(&fixture.disk, fixture.scratch.path("other.qcow2")).unwrap_err();
        assert!(matches!(*other.why, Why::Busy), "{other}");
        work.cancel();
        let error = result(thread).unwrap_err();
        assert!(matches!(*error.why, Why::Cancelled), "{error}");
        assert!(work.progress().done() < work.progress().total());
        fixture.load.go_on(200);
        // The work is cancelled before it begins.
        assert!(matches!(*run(&fixture.disk, &work).unwrap_err().why, Why::Cancelled));
        fixture.open("base.raw", true).unwrap();
        assert!(fixture.open("base.raw", false).is_err());
        fixture.end();
    }
}

#[test]
fn closing_a_disk_cancels_its_commit_or_stream_first() {
    let works: [(Run, bool); 2] = [(Disk::commit, true), (Disk::stream, false)];
    for (run, full) in works {
        let Fixture { scratch, disk, reactors, load } = Fixture::with("ended", LARGE, full);
        let known = load.end();
        let (work, thread) = begin(&disk, run);
        close(&disk, &reactors);
        let error = result(thread).unwrap_err();
        assert!(matches!(*error.why, Why::Ended), "{error}");
        assert!(matches!(*run(&disk, &work).unwrap_err().why, Why::Ended));
        drop(disk);
        judge(&scratch, "top.qcow2", &known);
    }
}

#[test]
fn a_disk_without_image_or_a_read_only_disk_refuses_snapshots() {
    let (scratch, work) = (Scratch::new("refused"), Work::default());
    std::fs::write(scratch.path("base.raw"), vec![0; SIZE]).unwrap();
    let raw = scratch.disk("base.raw");
    let error = raw.commit(&work).unwrap_err().to_string();
    assert!(error.contains("no backing file"), "{error}");
    let error = raw.stream(&work).unwrap_err().to_string();
    assert!(error.contains("no backing file"), "{error}");
    drop(raw);
    let reading = scratch.disk_with("base.raw", |options| options.read_only = true);
    let error = snapshot(&reading, scratch.path("new.qcow2")).unwrap_err().to_string();
    assert_eq!(error, "disk \"live\": snapshot: the disk is read-only");
    let chain = ChainOptions::new("null:1M");
    let null = blockyard_disk::Source::open(&chain).unwrap();
    let null = Arc::new(Disk::new(reading.options().clone(), null));
    assert!(snapshot(&null, scratch.path("new.qcow2")).is_err());
    assert!(!scratch.path("new.qcow2").exists());
}

#[test]
fn a_disk_whose_flush_fails_takes_no_snapshot() {
    let scratch = Scratch::new("poisoned");
    std::fs::write(scratch.path("base.raw"), vec![0; SIZE]).unwrap();
    let filter = "error:flush=1".parse().unwrap();
    let (disk, reactors) = (
        scratch.disk_with("base.raw", |options| options.filters = vec![filter]),
        [Reactor::start()],
    );
    let (status, _) =
        reactors[0].on(&disk, async |served| ask(&served, WRITE, 0, vec![1; 512]).await);
    assert_eq!(status, Ok(()));
    let error = snapshot(&disk, scratch.path("new.qcow2")).unwrap_err().to_string();
    assert!(error.contains("flush"), "{error}");
    assert!(!scratch.path("new.qcow2").exists(), "the overlay of a failed snapshot remains");
    let (status, _) =
        reactors[0].on(&disk, async |served| ask(&served, Op::Flush, 0, Vec::new()).await);
    assert_eq!(status, Err(Failure::Io), "the filter's error does not poison the disk");
    let (status, _) =
        reactors[0].on(&disk, async |served| ask(&served, WRITE, 0, vec![2; 512]).await);
    assert_eq!(status, Ok(()));
}
