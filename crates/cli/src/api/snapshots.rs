//! Snapshots, and the configuration that names their overlays.
//!
//! In: a snapshot to take, with `persist` or without. Out: a job. What must hold: at each death of
//! the server the configuration names an image that a start can open: the old image before the
//! snapshot, the overlay after it ([`StartRecord`]). With `persist`, and for a fork, no other
//! command changes the disk or its file before the job has ended.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_control::types::Snapshot;
use blockyard_control::{Answer, Kind, Problem, invalid};
use blockyard_disk::{SnapshotOptions, StartRecord, WorkError};
use blockyard_image::Format;
use blockyard_yard::{Job, JobKind};
use toml::{Table, Value};

use super::persist::{Persistence, Prepared};
use super::places;
use crate::disks::book::HeldDisk;
use crate::options::disk::DiskArgs;
use crate::process::journals;
use crate::server::{Server, words};

/// Key of a disk of which each start abandons the overlay.
const ABANDON: &str = "abandon-overlay";

/// A change of a prepared file, and where its result goes.
type Step = (fn(&Prepared) -> io::Result<()>, SyncSender<io::Result<()>>);

/// A thread that changes a file of the configuration: the sandbox lets neither the thread of a job
/// nor those of a [`blockyard_ring::pool::Pool`] write there. A disk has at most one, because its
/// job holds the disk. Drop removes what is left of the preparation.
#[derive(Debug)]
struct FileWriter {
    steps: Option<Sender<Step>>,
    thread: Option<JoinHandle<()>>,
}

impl FileWriter {
    /// Starts the thread. It has the rights of the caller, which is a call of the API.
    fn start(prepared: Prepared) -> io::Result<Self> {
        let (steps, wanted) = channel::<Step>();
        let body = move || {
            for (step, done) in wanted {
                let _ = done.send(step(&prepared));
            }
        };
        let thread = std::thread::Builder::new().name("kept overlay".into()).spawn(body)?;
        Ok(FileWriter { steps: Some(steps), thread: Some(thread) })
    }

    fn run(&self, step: fn(&Prepared) -> io::Result<()>) -> io::Result<()> {
        let (done, answer) = sync_channel(1);
        let sent = self.steps.as_ref().is_some_and(|steps| steps.send((step, done)).is_ok());
        let answer = if sent { answer.recv().ok() } else { None };
        answer.unwrap_or_else(|| Err(io::Error::other("the thread of the file has ended")))
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        drop(self.steps.take());
        // The next call may prepare the same file.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The file of a disk that a snapshot changes. The job holds the disk until it has ended.
#[derive(Debug)]
struct KeptOverlay {
    server: Weak<Server>,
    disk: String,
    overlay: PathBuf,
    /// None after the end of the job.
    file: Mutex<Option<FileWriter>>,
}

impl KeptOverlay {
    fn file(&self) -> MutexGuard<'_, Option<FileWriter>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StartRecord for KeptOverlay {
    fn name_overlay(&self) -> io::Result<()> {
        self.file().as_ref().map_or(Ok(()), |file| file.run(Prepared::apply))
    }

    fn name_old_image(&self) -> io::Result<()> {
        self.file().as_ref().map_or(Ok(()), |file| file.run(Prepared::take_back))
    }

    fn ended(&self, is_taken: bool) {
        let Some(server) = self.server.upgrade() else { return drop(self.file().take()) };
        let held = server.book.lent(self.disk.clone());
        self.note_end(&server, &held, is_taken);
    }
}

impl KeptOverlay {
    /// Enters the overlay into the book, after a snapshot that was taken.
    fn note_end(&self, server: &Server, held: &HeldDisk<'_>, is_taken: bool) {
        drop(self.file().take());
        if is_taken {
            // A reload finds nothing to change.
            let entry = held.entry();
            let args = DiskArgs {
                name: Some(self.disk.clone()),
                image: self.overlay.clone(),
                format: Some(Format::Qcow2),
                abandon_overlay: false,
                ..entry.args
            };
            held.set_image(args.clone(), self.named(entry.keys));
            server.yard.adopt_overlay(&self.disk, self.overlay.clone());
            server.book.adopt(&[args]);
        }
    }

    /// Returns the keys of the disk with the overlay as its image.
    fn named(&self, mut keys: Table) -> Table {
        // The key was about the old image. It would let a start abandon a later overlay.
        keys.remove(ABANDON);
        let text = |text: &str| Value::String(text.into());
        // Without the key, the name would be that of the image.
        keys.insert("name".into(), text(&self.disk));
        keys.insert("image".into(), text(&self.overlay.to_string_lossy()));
        keys.insert("format".into(), text(&Format::Qcow2.to_string()));
        keys
    }
}

/// A disk that a command holds on several threads, one after the other. Drop lets other commands
/// have it.
#[derive(Debug)]
pub struct LentDisk {
    server: Weak<Server>,
    /// None: another value has the disk.
    disk: Option<String>,
}

impl LentDisk {
    fn of(server: &Server, held: HeldDisk<'_>) -> Self {
        LentDisk { server: server.itself.clone(), disk: Some(held.lend()) }
    }

    fn take<'a>(mut self, server: &'a Server) -> Option<HeldDisk<'a>> {
        Some(server.book.lent(self.disk.take()?))
    }
}

impl Drop for LentDisk {
    fn drop(&mut self) {
        if let (Some(disk), Some(server)) = (self.disk.take(), self.server.upgrade()) {
            drop(server.book.lent(disk));
        }
    }
}

/// The start record of a snapshot for which a caller waits. The caller has the disk after it.
#[derive(Debug)]
struct AwaitedRecord {
    /// None: the configuration does not name the overlay.
    kept: Option<KeptOverlay>,
    /// None after the end of the job.
    lent: Mutex<Option<LentDisk>>,
    ended: SyncSender<LentDisk>,
}

impl StartRecord for AwaitedRecord {
    fn name_overlay(&self) -> io::Result<()> {
        self.kept.as_ref().map_or(Ok(()), StartRecord::name_overlay)
    }

    fn name_old_image(&self) -> io::Result<()> {
        self.kept.as_ref().map_or(Ok(()), StartRecord::name_old_image)
    }

    fn ended(&self, is_taken: bool) {
        let lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(lent) = lent else { return };
        let lent = match (&self.kept, lent.server.upgrade()) {
            (Some(kept), Some(server)) => lent.take(&server).map(|held| {
                kept.note_end(&server, &held, is_taken);
                LentDisk::of(&server, held)
            }),
            _ => Some(lent),
        };
        // A caller that waits no more has dropped the receiver, so this drops the disk.
        let _ = lent.map(|lent| self.ended.send(lent));
    }
}

/// A snapshot for which a caller waits.
pub struct AwaitedSnapshot {
    job: Job,
    ended: Receiver<LentDisk>,
}

/// How the wait for a snapshot has ended.
pub enum SnapshotEnd {
    /// The disk has the overlay. No other command has the disk before this is dropped.
    Taken(LentDisk),
    Failed(Arc<WorkError>),
    /// The job with this number still runs.
    GoesOn(u64),
}

impl AwaitedSnapshot {
    /// Waits for the end of the snapshot, at most `limit`.
    pub fn wait(self, limit: Duration) -> SnapshotEnd {
        let AwaitedSnapshot { job, ended } = self;
        match ended.recv_timeout(limit) {
            // The state of the job follows at once.
            Ok(lent) => match job.wait() {
                Ok(()) => SnapshotEnd::Taken(lent),
                Err(why) => SnapshotEnd::Failed(why),
            },
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                SnapshotEnd::GoesOn(job.number())
            }
        }
    }
}

impl Server {
    /// Returns the options of a snapshot. Returns an error if its overlay cannot be there.
    pub(super) fn snapshot_options(
        &self,
        name: &str,
        snapshot: &Snapshot,
    ) -> Answer<SnapshotOptions> {
        check_overlay(&snapshot.overlay, snapshot.persist)?;
        let Snapshot { overlay, unrecorded, .. } = snapshot;
        let (unrecorded, options) = (*unrecorded, SnapshotOptions::new(overlay));
        // A disk of a toolstack is not in the book.
        let Some(DiskArgs { abandon_overlay, crash_safety, backing_folders: folders, .. }) =
            self.book.find(name).map(|entry| entry.args)
        else {
            let crash_safety = journals::safety(Default::default());
            return Ok(SnapshotOptions { unrecorded, crash_safety, ..options });
        };
        if abandon_overlay && !snapshot.persist {
            let what = format!(
                "disk \"{name}\" has {ABANDON} (--{ABANDON}): the next start would abandon the new \
                 overlay, and all data in it would be lost: use persist=true (--persist), which \
                 takes the key out of the configuration, or start the disk without it first"
            );
            return Err(Problem::new(Kind::Conflict, what));
        }
        let crash_safety = journals::safety(crash_safety);
        Ok(SnapshotOptions { unrecorded, crash_safety, folders, ..options })
    }

    /// Starts a snapshot that also names the overlay in the configuration.
    pub(super) fn start_kept(&self, name: &str, snapshot: &Snapshot) -> Answer<Job> {
        let options = self.snapshot_options(name, snapshot)?;
        let Some(store) = self.persistence(name, true)? else {
            return self.start_job(name, options);
        };
        // A reload that runs has read the old file, and would put the old image into the book. The
        // job excludes no later reload: that one finds the disk held, or compares it again.
        let _only = self.exclude_reloads()?;
        let held = self.hold(name)?;
        let (kept, options) = self.prepare_overlay(&store, &held, options)?;
        let options = SnapshotOptions { start_record: Some(Arc::new(kept)), ..options };
        let lent = held.lend();
        let started = self.start_job(name, options);
        if started.is_err() {
            drop(self.book.lent(lent));
        }
        started
    }

    /// Starts a snapshot for which the caller waits. No other command has the disk until the caller
    /// drops what it gets at the end. If it waits no more, until the job has ended.
    pub(super) fn start_awaited(
        &self,
        held: HeldDisk<'_>,
        snapshot: &Snapshot,
    ) -> Answer<AwaitedSnapshot> {
        let name = held.args().name();
        let options = self.snapshot_options(&name, snapshot)?;
        // A reload that runs finds the disk held, too.
        let store = self.persistence(&name, snapshot.persist)?;
        let (kept, options) = match &store {
            Some(store) => {
                let (kept, options) = self.prepare_overlay(store, &held, options)?;
                (Some(kept), options)
            }
            None => (None, options),
        };
        let (sender, ended) = sync_channel(1);
        let lent = Mutex::new(Some(LentDisk::of(self, held)));
        // If no job starts, the drop of this record lets other commands have the disk.
        let record = AwaitedRecord { kept, lent, ended: sender };
        let options = SnapshotOptions { start_record: Some(Arc::new(record)), ..options };
        Ok(AwaitedSnapshot { job: self.start_job(&name, options)?, ended })
    }

    fn start_job(&self, name: &str, options: SnapshotOptions) -> Answer<Job> {
        self.yard.start_job(name, JobKind::Snapshot(options.into())).map_err(words::problem)
    }

    /// Prepares to name the overlay of a held disk in the configuration.
    fn prepare_overlay(
        &self,
        store: &Persistence,
        held: &HeldDisk<'_>,
        options: SnapshotOptions,
    ) -> Answer<(KeptOverlay, SnapshotOptions)> {
        let failed = |e| Problem::new(Kind::Conflict, format!("{e:#}"));
        let name = held.args().name();
        // The next server may have another working folder.
        let overlay = std::path::absolute(&options.overlay).map_err(|e| failed(e.into()))?;
        if overlay.to_str().is_none() {
            let what = "persist: the configuration cannot have a path that is not UTF-8";
            return Err(Problem::new(Kind::Invalid, what).in_field("overlay"));
        }
        let kept = KeptOverlay {
            server: self.itself.clone(),
            disk: name.clone(),
            overlay: overlay.clone(),
            file: Mutex::new(None),
        };
        let keys = store.keys(&name).map_err(failed)?.unwrap_or_else(|| held.entry().keys);
        let keys = kept.named(keys);
        store.check(&name, &keys).map_err(failed)?;
        let prepared = store.prepare(&name, &keys);
        let prepared = prepared.map_err(|e| Problem::new(Kind::Failed, format!("{e:#}")))?;
        let failed = |e| Problem::new(Kind::Failed, format!("persist: no thread can start: {e}"));
        *kept.file() = Some(FileWriter::start(prepared).map_err(failed)?);
        Ok((kept, SnapshotOptions { overlay, ..options }))
    }
}

/// Returns an error if the next server would open an overlay in another format than qcow2, or if it
/// lies in the configuration.
/// `persist`: the configuration will name the format.
fn check_overlay(overlay: &str, persist: bool) -> Answer<()> {
    places::check_reserved("overlay", overlay)?;
    let what = match Format::of_name(overlay.as_ref()) {
        Some(Format::Qcow2) => return Ok(()),
        None if persist => return Ok(()),
        None => format!(
            "{overlay}: without a format, the next start would take it for a raw image: call it \
             {overlay}.qcow2, or use persist=true (--persist)"
        ),
        Some(other) => format!("an overlay is qcow2, and the name {overlay} means {other}"),
    };
    Err(invalid("overlay", &what))
}
