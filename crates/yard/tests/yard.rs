//! Tests of the yard as a library: commands take effect as a whole, in order for each disk, and
//! delay no other disk.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_disk::{BackupOptions, Disk, LocalDisk, SnapshotOptions, WorkError};
use blockyard_export::{Client, Export, Reactors};
use blockyard_image::tools::{NewOverlay, OverlayBase};
use blockyard_image::{CacheMode, ChainOptions, Format};
use blockyard_sched::Knobs;
use blockyard_yard::{
    Activation, Change, DiskSettings, DiskState, Job, JobKind, JobState, Obstacle, Pending,
    Resized, Shares, Way, WayError, Yard, YardError,
};

/// Longest wait for an event. The event itself ends the wait.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits for `work`, and fails if it does not end in time.
#[track_caller]
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, ended) = sync_channel(1);
    std::thread::spawn(move || sender.send(work()));
    ended.recv_timeout(LIMIT).expect("a command or a job does not end")
}

/// Waits for the end of a command.
#[track_caller]
fn result<T>(pending: Pending<T>) -> Result<T, YardError> {
    pending.wait_at_most(LIMIT).ok().expect("a command does not end")
}

/// Waits for the end of a job.
#[track_caller]
fn end_of(job: &Job) -> Result<(), Arc<WorkError>> {
    let job = job.clone();
    in_time(move || job.wait())
}

/// The calls that an export gets, in order.
type Events = Arc<Mutex<Vec<String>>>;

/// An export without clients, which records the calls that it gets.
struct Note {
    name: String,
    events: Events,
}

impl Note {
    fn note(&self, event: &str) {
        self.events.lock().unwrap().push(format!("{} {event}", self.name));
    }
}

impl Export for Note {
    fn resize(&mut self) {
        self.note("resize");
    }

    fn stop(&mut self, _deadline: Instant) {
        self.note("stop");
    }

    fn allow(&mut self, names: Option<&[String]>) {
        self.note(&format!("allow {}", names.unwrap_or_default().join(",")));
    }

    fn clients(&self) -> Vec<Client> {
        vec![Client::described(format!("client of {}", self.name))]
    }

    /// A device ignores this.
    fn disconnect(&mut self, description: Option<&str>) -> Vec<Client> {
        self.note("disconnect");
        let is_meant = |client: &Client| description.is_none_or(|d| d == client.description);
        let clients = self.clients().into_iter().filter(is_meant);
        clients.filter(|_| self.name != "device").collect()
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        self.note("gone");
    }
}

/// Starts a [`Note`], or fails.
struct NoteWay {
    name: &'static str,
    events: Events,
    fails: bool,
    /// Channel for which the start of the export waits.
    held: Option<Mutex<Receiver<()>>>,
}

impl Way for NoteWay {
    fn describe(&self) -> String {
        self.name.into()
    }

    fn start(&self, _: &Arc<Disk>, _: &Arc<Reactors>) -> Result<Box<dyn Export>, WayError> {
        if let Some(held) = &self.held {
            let _ = held.lock().unwrap().recv_timeout(LIMIT);
        }
        if self.fails {
            return Err(WayError::caller("the address is taken"));
        }
        let note = Note { name: self.name.into(), events: self.events.clone() };
        note.note("start");
        Ok(Box::new(note))
    }
}

/// Opens the disk on a reactor, as the first request of a client does.
#[derive(Default)]
struct OpeningWay {
    disk: Mutex<Option<Arc<Disk>>>,
    /// The export opens the disk on a reactor. One that a client has not used yet does not.
    opens: bool,
}

impl Way for OpeningWay {
    fn describe(&self) -> String {
        "opening".into()
    }

    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn Export>, WayError> {
        *self.disk.lock().unwrap() = Some(disk.clone());
        if self.opens {
            let opened = disk.clone();
            let opened = reactors.next().ask(move |handle, reply| {
                reply.send(LocalDisk::local(handle, &opened).is_ok());
            });
            assert_eq!(opened, Some(true));
        }
        Ok(Box::new(Note { name: "opening".into(), events: Events::default() }))
    }
}

/// The yard has at most 64 threads that open disks.
const MORE_THAN_THREADS: usize = 65;

struct Stage {
    yard: Yard,
    events: Events,
    folder: PathBuf,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.yard.close();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Stage {
    fn new(test: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("blockyard-yard-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let reactors = Arc::new(Reactors::start(2, &[]).unwrap());
        let yard = Yard::start(reactors, Shares::new(true, Vec::new(), BTreeMap::new())).unwrap();
        Stage { yard, events: Events::default(), folder }
    }

    fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.folder.join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    fn way(&self, name: &'static str) -> NoteWay {
        NoteWay { name, events: self.events.clone(), fails: false, held: None }
    }

    /// Returns an export whose start waits until the sender is dropped.
    fn held_way(&self, name: &'static str) -> (NoteWay, SyncSender<()>) {
        let (sender, receiver) = sync_channel(0);
        (NoteWay { held: Some(Mutex::new(receiver)), ..self.way(name) }, sender)
    }

    /// Serves a disk and starts to open more others than may be opened at a time. They wait until
    /// the result is dropped. Then adds a disk with the name of the first one again.
    fn with_slow_images(&self) -> Vec<SyncSender<()>> {
        self.yard.add(disk("served", "ram:1M", vec![self.way("served")])).unwrap();
        let mut held = Vec::new();
        for number in 0..MORE_THAN_THREADS {
            let (way, hold) = self.held_way("slow");
            held.push(hold);
            let name = number.to_string();
            let settings = disk(&name, "ram:1M", vec![way]);
            self.yard.add_then(name, || Ok(settings), |_| ());
        }
        let settings = disk("served", "ram:1M", vec![self.way("second")]);
        self.yard.add_then("served".into(), || Ok(settings), |_| ());
        held
    }

    fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }

    fn states(&self) -> Vec<(String, DiskState)> {
        self.yard.list().into_iter().map(|disk| (disk.name, disk.state)).collect()
    }
}

fn disk(name: &str, image: impl Into<PathBuf>, ways: Vec<NoteWay>) -> DiskSettings {
    DiskSettings {
        on_enospc: Default::default(),
        name: name.into(),
        serial: "a serial number of more than twenty bytes".into(),
        image: ChainOptions::new(image),
        activation: Activation::Start,
        filters: Vec::new(),
        device: None,
        group: None,
        knobs: Knobs::default(),
        carried: None,
        ways: ways.into_iter().map(|way| Arc::new(way) as Arc<dyn Way>).collect(),
    }
}

/// The next server would take requests of such an export before it may ask the program.
#[test]
fn a_program_stays_if_an_export_does_not_wait_for_the_owner() {
    let stage = Stage::new("program");
    let program = stage.folder.join("program");
    let text = "#!/bin/sh\nprintf '%s\\n' 'blockyard-map 1' 'size 4096' 'granule 512' ready\ncat";
    // Another process writes the file: a process that a second thread starts meanwhile would
    // inherit a descriptor of this one, and the kernel starts no program that is open for writing.
    let mut install = std::process::Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(&program).stdin(std::process::Stdio::piped());
    let mut install = install.spawn().unwrap();
    install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(install.wait().unwrap().success());
    let image = format!("exec:{}", program.display());
    stage.yard.add(disk("a", &image, vec![stage.way("first")])).unwrap();
    assert_eq!(stage.yard.program("a").unwrap().image, image);
    let handed = result(stage.yard.begin_hand_over("a")).map(|handed| handed.ended.is_flushed);
    let Err(YardError::Stays { why: Obstacle::ProgramWithDevice, .. }) = handed else {
        panic!("{handed:?}");
    };
    stage.yard.add(disk("b", "ram:1M", Vec::new())).unwrap();
    assert!(stage.yard.program("b").is_none());
}

#[test]
fn disks_come_change_and_go() {
    let stage = Stage::new("come");
    let (yard, image) = (&stage.yard, stage.image("a.raw", 1 << 20));
    yard.add(disk("b", "ram:1M", vec![stage.way("first"), stage.way("second")])).unwrap();
    yard.add(disk("a", &image, vec![stage.way("third")])).unwrap();
    let list = yard.list();
    assert_eq!(
        list.iter().map(|disk| &*disk.name).collect::<Vec<_>>(),
        ["b", "a"],
        "in the order of their arrival"
    );
    assert_eq!(
        (list[0].state, list[0].capacity, &*list[0].ways.join(" ")),
        (DiskState::Serving, 1 << 20, "first second")
    );
    assert_eq!(list[1].image.as_deref(), Some(&*image));
    let row = yard.info("a").unwrap();
    assert_eq!((&*row.name, row.image.as_deref()), ("a", Some(&*image)));
    assert!(yard.info("c").is_none());
    let taken = yard.add(disk("a", "ram:1M", Vec::new()));
    assert!(matches!(&taken, Err(YardError::NameTaken { disk }) if disk == "a"), "{taken:?}");

    assert_eq!(yard.report("a").unwrap().clients[0].description, "client of third");
    assert_eq!(yard.refresh("a").unwrap(), None);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(yard.refresh("a").unwrap(), Some(Resized { old: 1 << 20, new: 2 << 20 }));
    let knobs = Knobs { weight: 7, ..Knobs::default() };
    yard.change(
        "b",
        Change { knobs: Some(knobs), clients: Some(Some(vec!["x".into()])), on_enospc: None },
    )
    .unwrap();
    assert_eq!(yard.report("b").unwrap().share.figures().weight, 7.0);

    assert!(yard.remove("a").unwrap().is_flushed);
    let missing = yard.remove("a").map(|ended| ended.name);
    assert!(matches!(&missing, Err(YardError::NotFound { disk }) if disk == "a"), "{missing:?}");
    assert_eq!(stage.states(), [("b".into(), DiskState::Serving)]);
    assert_eq!(
        yard.close().iter().map(|ended| (&*ended.name, ended.is_flushed)).collect::<Vec<_>>(),
        [("b", true)]
    );
    assert!(matches!(yard.add(disk("c", "ram:1M", Vec::new())), Err(YardError::Closing)));
    let expected = [
        "first start",
        "second start",
        "third start",
        "third resize",
        "first allow x",
        "second allow x",
        "third stop",
        "third gone",
        "first stop",
        "second stop",
        "first gone",
        "second gone",
    ];
    assert_eq!(stage.events(), expected);
}

/// A flush of the operator takes effect, although the disk ignores the flushes of guests, and
/// although no reactor has it open: an earlier server may have written to it.
#[test]
fn a_flush_of_a_disk_that_ignores_flushes_syncs_it() {
    let stage = Stage::new("flush");
    for (name, opens) in [("a", true), ("b", false)] {
        let way = Arc::new(OpeningWay { opens, ..OpeningWay::default() });
        let mut settings = disk(name, stage.image(&format!("{name}.raw"), 1 << 20), Vec::new());
        settings.image.cache = CacheMode::Unsafe;
        settings.ways = vec![way.clone()];
        stage.yard.add(settings).unwrap();
        let served = way.disk.lock().unwrap().take().unwrap();
        assert_eq!(served.flushes().syncs, 0);
        result(stage.yard.begin_flush(name).unwrap()).unwrap();
        assert_eq!(served.flushes().syncs, 1, "{name}");
    }
}

#[test]
fn a_disk_that_cannot_be_added_leaves_nothing() {
    let stage = Stage::new("fails");
    let (yard, image) = (&stage.yard, stage.image("disk.raw", 1 << 20));
    let failing = NoteWay { fails: true, ..stage.way("second") };
    let error = yard.add(disk("a", &image, vec![stage.way("first"), failing])).unwrap_err();
    assert_eq!(error.to_string(), "disk \"a\": starting its export");
    assert_eq!(error.source().unwrap().to_string(), "the address is taken");
    assert_eq!(stage.events(), ["first start", "first gone"]);
    assert!(yard.list().is_empty());
    let missing = yard.add(disk("a", stage.folder.join("missing.raw"), Vec::new())).unwrap_err();
    assert!(missing.to_string().contains("missing.raw"), "{missing}");
    let settings = || Err(WayError::caller("the toolstack names no image"));
    let (sender, receiver) = sync_channel(1);
    yard.add_then("a".into(), settings, move |result| {
        sender.send(result.unwrap_err().to_string()).unwrap()
    });
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), "the toolstack names no image");
    // The image is not locked: it can be opened again.
    yard.add(disk("a", &image, vec![stage.way("third")])).unwrap();
}

/// The API waits for the clients that leave. It would wait for a device in vain.
#[test]
fn only_clients_of_connections_leave() {
    let stage = Stage::new("clients");
    let yard = &stage.yard;
    yard.add(disk("a", "ram:1M", vec![stage.way("device"), stage.way("socket")])).unwrap();
    assert_eq!(yard.report("a").unwrap().clients.len(), 2);
    let client = |name: &str| Client::described(format!("client of {name}"));
    assert_eq!(yard.disconnect("a", None).unwrap(), [client("socket")]);
    assert_eq!(yard.disconnect("a", Some("client of socket")).unwrap(), [client("socket")]);
    assert_eq!(yard.disconnect("a", Some("client of device")).unwrap(), []);
}

#[test]
fn commands_for_a_disk_wait_for_one_another_and_for_no_other_disk() {
    let stage = Stage::new("order");
    let yard = &stage.yard;
    // Open as many disks as may be opened at a time.
    let (mut held, names) = (Vec::new(), ["1", "2", "3", "4", "5", "6", "7", "8"]);
    let (sender, receiver) = sync_channel(16);
    for name in names {
        let (way, hold) = stage.held_way(name);
        held.push(hold);
        let (settings, sender) = (disk(name, "ram:1M", vec![way]), sender.clone());
        yard.add_then(
            name.into(),
            || Ok(settings),
            move |result| {
                result.unwrap();
                sender.send(format!("added {name}")).unwrap();
            },
        );
    }
    let after = sender.clone();
    yard.remove_then("1".into(), move |result| {
        after.send(format!("removed {}", result.unwrap().name)).unwrap()
    });
    let (settings, after) = (disk("1", "ram:2M", vec![stage.way("1")]), sender.clone());
    yard.add_then(
        "1".into(),
        || Ok(settings),
        move |result| {
            result.unwrap();
            after.send("added 1 again".into()).unwrap();
        },
    );
    // The yard answers although all threads that open disks are busy.
    assert_eq!(stage.states(), names.map(|name| (name.to_string(), DiskState::Opening)));
    assert!(matches!(yard.report("other"), Err(YardError::NotFound { .. })));
    assert!(receiver.try_recv().is_err());
    drop(held.remove(0));
    let events: Vec<_> = (0..3).map(|_| receiver.recv_timeout(LIMIT).unwrap()).collect();
    assert_eq!(events, ["added 1", "removed 1", "added 1 again"]);
    // A waiting command finds the latest disk of that name.
    yard.report("1").unwrap();
    assert_eq!(yard.list()[0].capacity, 2 << 20);
    // The end does not wait for disks that are being opened.
    let ended = yard.close();
    assert_eq!(ended.iter().map(|disk| &*disk.name).collect::<Vec<_>>(), ["1"]);
    drop(held);
}

#[test]
fn jobs_end_before_their_disk() {
    let stage = Stage::new("jobs");
    let (yard, image) = (&stage.yard, stage.image("disk.raw", 1 << 20));
    yard.add(disk("a", &image, vec![stage.way("a")])).unwrap();
    yard.add(disk("none", "ram:1M", Vec::new())).unwrap();
    let overlay = stage.folder.join("overlay.qcow2");
    let options = SnapshotOptions { unrecorded: true, ..SnapshotOptions::new(&overlay) };
    let snapshot = yard.start_job("a", JobKind::Snapshot(options.into())).unwrap();
    end_of(&snapshot).unwrap();
    assert!(yard.list()[0].images.contains("overlay.qcow2"), "{:?}", yard.list());
    let commit = yard.start_job("a", JobKind::Commit).unwrap();
    end_of(&commit).unwrap();
    let copy = stage.folder.join("copy.qcow2");
    let options = BackupOptions::new(&copy, Format::Qcow2);
    let backup = yard.start_job("a", JobKind::Backup(options)).unwrap();
    assert_eq!(backup.kind().to_string(), format!("backup into {}", copy.display()));
    end_of(&backup).unwrap();
    assert_eq!(backup.progress(), (1 << 20, 1 << 20));
    assert!(copy.exists());
    let refused = yard.start_job("none", JobKind::Stream).unwrap();
    let why = end_of(&refused).unwrap_err().to_string();
    assert!(why.contains("no image"), "{why}");
    let stream = yard.start_job("a", JobKind::Stream).unwrap();
    assert!(yard.remove("a").unwrap().is_flushed);
    assert!(!matches!(stream.state(), JobState::Running), "a disk went before its job");
    let numbers: Vec<_> =
        yard.jobs().iter().map(|job| (job.number(), job.disk().to_string())).collect();
    let names = ["a", "a", "a", "none", "a"].map(String::from);
    assert_eq!(numbers, (1..).zip(names).collect::<Vec<_>>());
    assert!(matches!(yard.start_job("a", JobKind::Commit), Err(YardError::NotFound { .. })));
}

/// An inactive disk has no image open, so no lock shows that it needs the image.
#[test]
fn a_commit_does_not_change_the_images_of_an_inactive_disk() {
    let stage = Stage::new("inactive");
    let (yard, image) = (&stage.yard, stage.image("base.raw", 1 << 20));
    yard.add(disk("a", &image, Vec::new())).unwrap();
    let options = SnapshotOptions::new(stage.folder.join("a.qcow2"));
    let options = SnapshotOptions { unrecorded: true, ..options };
    end_of(&yard.start_job("a", JobKind::Snapshot(options.into())).unwrap()).unwrap();
    let base = OverlayBase {
        path: stage.folder.join("link"),
        format: Format::Raw,
        size: 1 << 20,
        nbd: Default::default(),
    };
    std::fs::hard_link(&image, &base.path).unwrap();
    let fork = stage.folder.join("fork.qcow2");
    let mut overlay = NewOverlay::create(&fork, &base, &[]).unwrap();
    overlay.publish().unwrap();
    overlay.keep();
    let way = Arc::new(OpeningWay::default());
    let settings = DiskSettings {
        activation: Activation::Rings,
        ways: vec![way.clone()],
        ..disk("fork", &fork, Vec::new())
    };
    yard.add(settings).unwrap();
    let commit = || end_of(&yard.start_job("a", JobKind::Commit).unwrap());
    let check_refused = || {
        assert!(yard.info("fork").unwrap().is_inactive);
        let why = commit().unwrap_err().to_string();
        assert!(why.contains("disk \"fork\" needs image") && why.contains("base.raw"), "{why}");
    };
    check_refused();
    // A guest has used the disk, and is off.
    let fork = way.disk.lock().unwrap().take().unwrap();
    fork.activate(|| true).unwrap();
    fork.deactivate().unwrap();
    check_refused();
    drop(fork);
    yard.remove("fork").unwrap();
    commit().unwrap();
}

#[test]
fn the_end_closes_a_disk_whose_name_is_added_again_while_images_open_slowly() {
    let stage = Stage::new("taken");
    let yard = &stage.yard;
    let held = stage.with_slow_images();
    let ended = yard.close();
    assert_eq!(
        ended.iter().map(|disk| &*disk.name).collect::<Vec<_>>(),
        ["served"],
        "it was not flushed and closed"
    );
    drop(held);
}

/// The refresh waits behind the second disk of its name. The server makes the report of SIGUSR1 on
/// its main thread, which also waits for SIGTERM.
#[test]
fn commands_for_a_served_disk_do_not_wait_for_images_that_open_slowly() {
    let stage = Stage::new("slow");
    let yard = &stage.yard;
    let held = stage.with_slow_images();
    let (sender, receiver) = sync_channel(1);
    let asked = yard.clone();
    std::thread::spawn(move || {
        let size = asked.refresh("served").unwrap();
        sender.send((size, asked.report("served").unwrap().clients))
    });
    let answered = receiver.recv_timeout(LIMIT);
    drop(held);
    assert_eq!(answered, Ok((None, vec![Client::described("client of served".into())])));
}

/// A hand-over must not find a disk between its opening and its service.
#[test]
fn a_disk_that_is_opened_during_a_hold_begins_afterwards_or_never() {
    let stage = Stage::new("openings");
    let yard = &stage.yard;
    let held = yard.hold_openings(Duration::ZERO).unwrap();
    let first = yard.begin_add(disk("a", "ram:1M", vec![stage.way("a")]));
    // A command for the disk waits behind its addition.
    let refreshed = yard.begin_refresh("a");
    assert_eq!(stage.states(), [("a".into(), DiskState::Opening)]);
    assert!(stage.events().is_empty(), "{:?}", stage.events());
    drop(held);
    result(first).unwrap();
    assert_eq!(result(refreshed).unwrap(), None);
    let held = yard.hold_openings(LIMIT).unwrap();
    let second = yard.begin_add(disk("b", "ram:1M", vec![stage.way("b")]));
    held.for_good();
    assert!(matches!(result(second), Err(YardError::Closing)));
    assert_eq!(stage.states(), [("a".into(), DiskState::Serving)]);
}
