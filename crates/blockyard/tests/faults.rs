//! Targets that lie, hang, panic or fail: their own disk gets errors, another one goes on.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard::{
    Access, CacheMode, Device, Discard, Disk, ErrorKind, Extent, Files, Fill, Handle, Lent, Limits,
    Map, OwnFile, Place, Question, Shape, Target, Yard,
};

mod common;

use common::{Guest, LIMIT, Scratch};

const SIZE: u64 = 4 << 20;
const SHAPE: Shape = Shape { size: SIZE, granule: 4096 };
/// virtio-blk's status of a failed request.
const IOERR: u8 = 1;

/// What a map answers for a question behind its first megabyte. Before it answers truthfully.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Outside,
    Short,
    Empty,
    Overlap,
    NoFile,
    Panic,
    Error,
    ReadOnlyFile,
}

struct Liar(Lie);

impl Map for Liar {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let at = |file, offset, len| Extent { len, place: Place::At { file, offset } };
        let truth = vec![at(0, asked.offset, asked.len)];
        if asked.offset < 1 << 20 {
            return Ok(truth);
        }
        match self.0 {
            Lie::Outside => Ok(vec![at(0, SIZE, asked.len)]),
            Lie::Short => Ok(vec![at(0, asked.offset, 512)]),
            Lie::Empty => Ok(Vec::new()),
            Lie::Overlap => Ok(vec![at(0, 0, 4096), at(0, 0, 4096)]),
            Lie::NoFile => Ok(vec![at(7, 0, asked.len)]),
            Lie::Panic => panic!("the target's own fault"),
            Lie::Error => Err(io::Error::other("no idea")),
            Lie::ReadOnlyFile => Ok(vec![at(1, 0, asked.len)]),
        }
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

fn honest(path: &str) -> Target {
    let target = Target::map("honest", SHAPE, async |_, _| Ok(Liar(Lie::Error)));
    target.data(path, Access::Write)
}

#[test]
fn a_map_that_lies_hurts_only_its_own_disk() {
    let scratch = Scratch::new("lies");
    let blank = vec![0; SIZE as usize];
    let (good, other) = (scratch.file("good", &blank), scratch.file("other", &blank));
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("good", honest(&good)).vhost_user(scratch.path("good.sock"))).unwrap();
    let mut neighbour = Guest::connect(&scratch.path("good.sock"));
    let lies = [
        Lie::Outside,
        Lie::Short,
        Lie::Empty,
        Lie::Overlap,
        Lie::NoFile,
        Lie::Panic,
        Lie::Error,
        Lie::ReadOnlyFile,
    ];
    for lie in lies {
        let path = scratch.file("lies", &blank);
        let target = Target::map("liar", SHAPE, async move |_, _| Ok(Liar(lie)));
        let target = target.data(path, Access::Write).data(other.clone(), Access::Read);
        let socket = scratch.path("liar.sock");
        yard.serve(Disk::target("liar", target).vhost_user(&socket)).unwrap();
        let mut guest = Guest::connect(&socket);
        guest.write(0, &[1; 4096]);
        assert_eq!(guest.try_write(2 << 20, &[2; 8192]), IOERR, "{lie:?}");
        if !matches!(lie, Lie::Overlap | Lie::ReadOnlyFile) {
            assert_eq!(guest.try_read(2 << 20, 4096), Err(IOERR), "{lie:?}");
        }
        // What is known needs no question, so it works even after a panic.
        assert_eq!(guest.read(0, 4096), [1; 4096], "{lie:?}");
        neighbour.write(8192, &[lie as u8; 512]);
        neighbour.flush();
        assert_eq!(neighbour.read(8192, 512), [lie as u8; 512]);
        drop(guest);
        let counted = yard.remove("liar").unwrap().statistics;
        assert!(counted.write.errors >= 1, "{lie:?}: {counted:?}");
    }
    assert_eq!(yard.statistics("good").unwrap().write.errors, 0);
}

/// Answers when the test lets it, from a thread that it blocks meanwhile.
struct Silent(Mutex<Receiver<()>>);

impl Map for Silent {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let _ = self.0.lock().unwrap().recv();
        Ok(vec![Extent { len: asked.len, place: Place::Zero }])
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

/// Time for which a target may be silent.
const SILENCE: Duration = Duration::from_secs(1);

#[test]
fn a_map_that_is_silent_is_not_waited_for() {
    let scratch = Scratch::new("silent");
    let good = scratch.file("good", &vec![0; SIZE as usize]);
    let yard = Yard::start(1).unwrap();
    let (release, held) = sync_channel(0);
    let limits = Limits { answer: SILENCE, ..Limits::default() };
    let target = Target::map("silent", SHAPE, async |_, _| Ok(Silent(Mutex::new(held))));
    let disk = Disk::target("silent", target.limits(limits));
    yard.serve(disk.vhost_user(scratch.path("silent.sock"))).unwrap();
    // A host that stops for some seconds must not look like a silent target.
    let patient = Limits { answer: Duration::MAX, ..Limits::default() };
    let neighbour = Disk::target("good", honest(&good).limits(patient));
    yard.serve(neighbour.vhost_user(scratch.path("good.sock"))).unwrap();
    let connect = |name| Guest::connect(&scratch.path(name));
    let (mut guest, mut neighbour) = (connect("silent.sock"), connect("good.sock"));
    assert_eq!(guest.try_read(0, 4096), Err(IOERR));
    neighbour.write(0, &[5; 4096]);
    assert_eq!(neighbour.read(0, 4096), [5; 4096]);
    // The target answers again: the late answer is not used, a later one is.
    drop(release);
    let begun = Instant::now();
    while guest.try_read(4096, 4096) != Ok(vec![0; 4096]) {
        assert!(begun.elapsed() < LIMIT, "no answer of the target is used");
    }
    drop(guest);
    assert!(yard.remove("silent").unwrap().is_flushed);
}

/// Has no answer to a change at offset 0.
struct Late;

impl Late {
    async fn answer(&self, offset: u64) -> io::Result<()> {
        if offset == 0 { std::future::pending().await } else { Ok(()) }
    }
}

impl Device for Late {
    async fn read(&self, _: u64, _: Lent) -> io::Result<()> {
        Ok(())
    }

    async fn write(&self, offset: u64, _: Lent) -> io::Result<()> {
        self.answer(offset).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Map for Late {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
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

/// The target may still make the change, after a later one.
#[test]
fn a_guest_cannot_write_after_a_change_without_an_answer() {
    let scratch = Scratch::new("late");
    let file = scratch.file("file", &vec![0; SIZE as usize]);
    let device = Target::device("device", SHAPE, async |_, _| Ok(Late));
    let map = Target::map("map", SHAPE, async |_, _| Ok(Late)).data(file, Access::Write);
    let limits = Limits { answer: SILENCE, ..Limits::default() };
    let yard = Yard::start(1).unwrap();
    let late: [fn(&mut Guest) -> u8; 2] =
        [|guest| guest.try_write(0, &[1; 4096]), |guest| guest.try_discard(0, 4096)];
    for (target, late) in [device, map].into_iter().zip(late) {
        let disk = Disk::target("late", target.limits(limits));
        yard.serve(disk.vhost_user(scratch.path("socket"))).unwrap();
        let mut guest = Guest::connect(&scratch.path("socket"));
        assert_eq!(late(&mut guest), IOERR);
        assert_eq!(guest.try_write(4096, &[2; 4096]), IOERR);
        assert_eq!(guest.try_flush(), IOERR);
        drop(guest);
        assert!(!yard.remove("late").unwrap().is_flushed);
    }
}

#[test]
fn a_target_may_have_no_limit() {
    let scratch = Scratch::new("no-limit");
    let file = scratch.file("file", &vec![0; SIZE as usize]);
    let yard = Yard::start(1).unwrap();
    let limits = Limits { start: Duration::MAX, answer: Duration::MAX };
    let disk = Disk::target("a", honest(&file).limits(limits));
    yard.serve(disk.vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    guest.write(0, &[5; 4096]);
    assert_eq!(guest.read(0, 4096), [5; 4096]);
    drop(guest);
    assert!(yard.remove("a").unwrap().is_flushed);
}

/// Fails at its start, in three ways.
#[test]
fn a_target_that_cannot_start_is_an_error() {
    let scratch = Scratch::new("start");
    let yard = Yard::start(1).unwrap();
    let path = scratch.file("file", &[0; 8192]);
    let failing = Target::map("failing", SHAPE, async |_, _| {
        Err::<Liar, _>(io::Error::other("the table is damaged"))
    });
    let error = yard.serve(Disk::target("a", failing)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Open);
    assert_eq!(error.to_string(), "target failing: it cannot start: the table is damaged");
    let panicking =
        Target::map("panicking", SHAPE, async |_, _| -> io::Result<Liar> { panic!("no") });
    let error = yard.serve(Disk::target("a", panicking)).unwrap_err();
    assert_eq!(error.to_string(), "target panicking: it cannot start: the target has panicked");
    let odd = Shape { size: SIZE, granule: 3000 };
    let error =
        yard.serve(Disk::target("a", Target::map("odd", odd, async |_, _| Ok(Liar(Lie::Empty)))));
    assert!(error.unwrap_err().to_string().contains("granule of 3000 bytes"));
    for (size, what) in [
        (0, "its size is 0 bytes"),
        (SIZE + 512, "its size of 4194816 bytes is no multiple of its granule of 4096 bytes"),
        (1 << 63, "is more than 4611686018427387904 bytes"),
    ] {
        let shape = Shape { size, granule: 4096 };
        let target = Target::map("odd", shape, async |_, _| Ok(Liar(Lie::Empty)));
        let error = yard.serve(Disk::target("a", target)).unwrap_err().to_string();
        assert!(error.ends_with(what), "{error}");
    }
    let missing = honest("/nonexistent/file");
    let error = yard.serve(Disk::target("a", missing)).unwrap_err().to_string();
    assert_eq!(error, "target honest: image /nonexistent/file: there is no such file");
    // The name and the file are free again.
    yard.serve(Disk::target("a", honest(&path))).unwrap();
    let twice = yard.serve(Disk::target("b", honest(&path))).unwrap_err().to_string();
    assert!(twice.contains("is in use by"), "{twice}");
}

#[test]
fn a_name_that_is_taken_starts_no_target() {
    let scratch = Scratch::new("taken");
    let path = scratch.file("file", &vec![0; SIZE as usize]);
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("a", honest(&path))).unwrap();
    let (sender, started) = sync_channel(1);
    let second = Target::map("second", SHAPE, async move |_, _| {
        let _ = sender.send(());
        Ok(Liar(Lie::Error))
    });
    let error = yard.serve(Disk::target("a", second)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameTaken);
    let has_started = started.recv_timeout(LIMIT);
    assert_eq!(has_started, Err(RecvTimeoutError::Disconnected), "the target has started");
    yard.remove("a").unwrap();
    let unknown = yard.remove("a").unwrap_err().to_string();
    assert_eq!(unknown, "no disk is called \"a\": `Yard::disks` returns the names");
}

/// The machine of the tests is no Xen domain.
#[test]
fn an_export_that_cannot_start_is_an_error_and_leaves_nothing() {
    let scratch = Scratch::new("xen");
    let yard = Yard::start(1).unwrap();
    let path = scratch.file("file", &vec![0; SIZE as usize]);
    for (device, what) in [("xvda", "must be a Xen domain"), ("sda", "is not a device name")] {
        let error = yard.serve(Disk::target("a", honest(&path)).xen(3, device)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Export);
        assert!(error.to_string().contains(what), "{error}");
    }
    // The name and the file are free again.
    yard.serve(Disk::target("a", honest(&path))).unwrap();
}

/// Memory, with a count of its calls.
struct Memory {
    bytes: Rc<std::cell::RefCell<Vec<u8>>>,
    flushes: Cell<u32>,
    told: SyncSender<u32>,
}

impl Device for Memory {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        if offset == 1 << 20 {
            panic!("the target's own fault");
        }
        let at = offset as usize;
        data.copy_from(0, &self.bytes.borrow()[at..at + data.len()])
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        data.copy_to(0, &mut self.bytes.borrow_mut()[offset as usize..][..data.len()])
    }

    async fn flush(&self) -> io::Result<()> {
        self.flushes.set(self.flushes.get() + 1);
        let _ = self.told.try_send(self.flushes.get());
        Ok(())
    }
}

#[test]
fn a_device_serves_its_own_data_and_its_panic_ends_only_itself() {
    let scratch = Scratch::new("device");
    let good = scratch.file("good", &vec![0; SIZE as usize]);
    let yard = Yard::start(2).unwrap();
    let (told, flushes) = sync_channel(16);
    let target = Target::device("memory", SHAPE, async move |_, _| {
        let bytes = Rc::new(std::cell::RefCell::new(vec![0; SIZE as usize]));
        Ok(Memory { bytes, flushes: Cell::new(0), told })
    });
    yard.serve(Disk::target("memory", target).vhost_user(scratch.path("m.sock"))).unwrap();
    yard.serve(Disk::target("good", honest(&good)).vhost_user(scratch.path("good.sock"))).unwrap();
    let (mut guest, mut neighbour) =
        (Guest::connect(&scratch.path("m.sock")), Guest::connect(&scratch.path("good.sock")));
    guest.write(512 * 3, &[9; 4096]);
    assert_eq!(guest.read(512 * 3, 4096), [9; 4096]);
    assert_eq!(guest.read(0, 512), [0; 512]);
    guest.flush();
    assert_eq!(flushes.recv_timeout(LIMIT).unwrap(), 1);
    assert_eq!(guest.try_read(1 << 20, 512), Err(IOERR));
    assert_eq!(guest.try_read(0, 512), Err(IOERR), "its state is unknown");
    assert_eq!(guest.try_flush(), IOERR);
    neighbour.write(0, &[5; 4096]);
    neighbour.flush();
    drop(guest);
    assert!(!yard.remove("memory").unwrap().is_flushed);
    assert!(yard.remove("good").unwrap().is_flushed);
}

/// An error of the target's own type. It notes the threads that format or drop it.
#[derive(Debug)]
struct OwnError(Arc<Mutex<Vec<String>>>);

impl OwnError {
    fn note(&self) {
        let name = std::thread::current().name().unwrap_or_default().to_string();
        self.0.lock().unwrap().push(name);
    }
}

impl std::fmt::Display for OwnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.note();
        f.write_str("no idea")
    }
}

impl Drop for OwnError {
    fn drop(&mut self) {
        self.note();
    }
}

impl std::error::Error for OwnError {}

struct Failing(Arc<Mutex<Vec<String>>>);

impl Failing {
    fn fail(&self) -> io::Result<()> {
        Err(io::Error::other(OwnError(self.0.clone())))
    }
}

impl Device for Failing {
    async fn read(&self, _offset: u64, _data: Lent) -> io::Result<()> {
        self.fail()
    }

    async fn write(&self, _offset: u64, _data: Lent) -> io::Result<()> {
        self.fail()
    }

    async fn flush(&self) -> io::Result<()> {
        self.fail()
    }
}

#[test]
fn an_error_of_a_target_runs_its_code_on_the_thread_of_the_target() {
    let scratch = Scratch::new("own-error");
    let threads = Arc::new(Mutex::new(Vec::new()));
    let noted = threads.clone();
    let target = Target::device("failing", SHAPE, async move |_, _| Ok(Failing(noted)));
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("a", target).vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    assert_eq!(guest.try_read(0, 4096), Err(IOERR));
    assert_eq!(guest.try_write(0, &[1; 4096]), IOERR);
    assert_eq!(guest.try_flush(), IOERR);
    drop(guest);
    yard.remove("a").unwrap();
    let threads = threads.lock().unwrap();
    // Each of the three errors is formatted and dropped.
    assert!(threads.len() >= 6 && threads.iter().all(|name| name == "target"), "{threads:?}");
}

/// A disk in one file that moves to another one while it is used, and grows.
struct Moving {
    file: Arc<Mutex<usize>>,
}

impl Map for Moving {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let file = *self.file.lock().unwrap();
        let place = match (asked.write, file) {
            (true, 1) => Place::At { file, offset: asked.offset },
            (true, _) => Place::New { file: 0, offset: asked.offset, fill: Fill::Zero },
            (false, _) => Place::At { file, offset: asked.offset },
        };
        Ok(vec![Extent { len: asked.len, place }])
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_invalidation_and_a_new_size_take_effect() {
    let scratch = Scratch::new("moving");
    let one = scratch.file("one", &vec![1; SIZE as usize]);
    let two = scratch.file("two", &vec![2; SIZE as usize * 2]);
    let yard = Yard::start(2).unwrap();
    let file = Arc::new(Mutex::new(0));
    let (sender, receiver) = sync_channel::<Handle>(1);
    let map = Moving { file: file.clone() };
    let target = Target::map("moving", SHAPE, async move |_, handle| {
        let _ = sender.send(handle);
        Ok(map)
    });
    let target = target.data(one, Access::Write).data(two, Access::Write);
    yard.serve(Disk::target("moving", target).vhost_user(scratch.path("m.sock"))).unwrap();
    let handle = receiver.recv_timeout(LIMIT).unwrap();
    let mut guest = Guest::connect(&scratch.path("m.sock"));
    assert_eq!(guest.read(0, 4096), [1; 4096]);
    *file.lock().unwrap() = 1;
    assert_eq!(guest.read(0, 4096), [1; 4096], "the answer is known");
    let before = handle.figures();
    assert_eq!((before.hits, before.misses), (1, 1));
    blockyard::testing::wait(handle.invalidate(100..SIZE - 100));
    assert_eq!(guest.read(0, 4096), [2; 4096]);
    assert!(!handle.set_size(SIZE + 1) && handle.set_size(SIZE * 2));
    let resized = yard.resize("moving").unwrap().unwrap();
    assert_eq!((resized.old, resized.new), (SIZE, SIZE * 2));
    assert_eq!(guest.read(SIZE as usize + 8192, 4096), [2; 4096]);
    assert_eq!(yard.resize("moving").unwrap(), None);
}

/// Blocks lie in two files in turn.
struct Striped;

impl Map for Striped {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let blocks = asked.offset / BLOCK..(asked.offset + asked.len) / BLOCK;
        let place = |block: u64| Place::At { file: block as usize % 2, offset: block * BLOCK };
        Ok(blocks.map(|block| Extent { len: BLOCK, place: place(block) }).collect())
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

const BLOCK: u64 = 4096;

#[test]
fn a_request_in_many_places_that_are_known_is_a_hit() {
    let scratch = Scratch::new("striped");
    let [one, two] = [1, 2].map(|byte| scratch.file(&byte.to_string(), &vec![byte; SIZE as usize]));
    let yard = Yard::start(1).unwrap();
    let (sender, receiver) = sync_channel::<Handle>(1);
    let target = Target::map("striped", SHAPE, async move |_, handle| {
        let _ = sender.send(handle);
        Ok(Striped)
    });
    let target = target.data(one, Access::Write).data(two, Access::Write);
    yard.serve(Disk::target("striped", target).vhost_user(scratch.path("s.sock"))).unwrap();
    let handle = receiver.recv_timeout(LIMIT).unwrap();
    let mut guest = Guest::connect(&scratch.path("s.sock"));
    let expected = [[1; BLOCK as usize], [2; BLOCK as usize]].as_flattened().repeat(8);
    for hits in 0..2 {
        assert!(guest.read(0, 16 * BLOCK as usize) == expected);
        assert_eq!((handle.figures().hits, handle.figures().misses), (hits, 1));
    }
    guest.write(0, &expected);
    let before = handle.figures();
    guest.write(0, &expected);
    let after = handle.figures();
    assert_eq!((after.hits, after.misses), (before.hits + 1, before.misses));
}

/// Counts the flushes that run at the same time.
struct Flushes {
    file: OwnFile,
    running: Cell<u64>,
    most: Arc<AtomicU64>,
}

impl Device for Flushes {
    async fn read(&self, _: u64, _: Lent) -> io::Result<()> {
        Ok(())
    }

    async fn write(&self, _: u64, _: Lent) -> io::Result<()> {
        Ok(())
    }

    async fn flush(&self) -> io::Result<()> {
        self.running.set(self.running.get() + 1);
        self.most.fetch_max(self.running.get(), Ordering::SeqCst);
        // Meanwhile other requests come.
        for _ in 0..20 {
            self.file.sync().await?;
        }
        self.running.set(self.running.get() - 1);
        Ok(())
    }
}

/// Each of these writes is durable, so each has a flush. Of two flushes at a time the kernel
/// reports lost data to one only.
#[test]
fn a_device_has_one_flush_at_a_time() {
    let scratch = Scratch::new("flushes");
    let most = Arc::new(AtomicU64::new(0));
    let counted = most.clone();
    let target = Target::device("flushes", SHAPE, async move |mut files: Files, _| {
        Ok(Flushes { file: files.own.remove(0), running: Cell::new(0), most: counted })
    });
    let target = target.file(scratch.file("file", &[]), Access::Write);
    let disk = Disk::target("flushes", target).cache(CacheMode::Writethrough);
    let yard = Yard::start(1).unwrap();
    yard.serve(disk.vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    // They are no neighbours, which would be one request.
    guest.write_at_once(&[0, 2, 4, 6, 8, 10, 12, 14].map(|block| block * 4096));
    drop(guest);
    assert_eq!(most.load(Ordering::SeqCst), 1);
}
