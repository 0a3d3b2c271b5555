//! Snapshots, and the configuration that names their overlays.
//!
//! In: a snapshot to take, with `persist` or without. Out: a job. What must hold: at each death of
//! the server the configuration names an image that a start can open: the old image before the
//! snapshot, the overlay after it ([`StartRecord`]). No other command changes the disk or its file
//! before the job has ended.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use blockyard_control::types::Snapshot;
use blockyard_control::{Answer, Kind, Problem};
use blockyard_disk::{SnapshotOptions, StartRecord};
use blockyard_image::Format;
use blockyard_ring::sandbox::is_reserved;
use blockyard_yard::{Job, JobKind};
use toml::{Table, Value};

use super::words;
use crate::journals;
use crate::options::disk::DiskArgs;
use crate::persist::Prepared;
use crate::server::Server;

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
        drop(self.file().take());
        let Some(server) = self.server.upgrade() else { return };
        let held = server.book.lent(self.disk.clone());
        if is_taken {
            // A reload finds nothing to change.
            let entry = held.entry();
            let args = DiskArgs {
                name: Some(self.disk.clone()),
                image: self.overlay.clone(),
                format: Some(Format::Qcow2),
                ..entry.args
            };
            held.set_image(args.clone(), self.named(entry.keys));
            server.yard.adopt_overlay(&self.disk, self.overlay.clone());
            server.book.adopt(&[args]);
        }
    }
}

impl KeptOverlay {
    /// Returns the keys of the disk with the overlay as its image.
    fn named(&self, mut keys: Table) -> Table {
        let text = |text: &str| Value::String(text.into());
        // Without the key, the name would be that of the image.
        keys.insert("name".into(), text(&self.disk));
        keys.insert("image".into(), text(&self.overlay.to_string_lossy()));
        keys.insert("format".into(), text(&Format::Qcow2.to_string()));
        keys
    }
}

impl Server {
    /// Starts a snapshot.
    pub(super) fn start_snapshot(&self, name: &str, snapshot: Snapshot) -> Answer<Job> {
        check_overlay(&snapshot.overlay, snapshot.persist)?;
        let Snapshot { overlay, unrecorded, persist } = snapshot;
        // A disk of a toolstack is not in the book.
        let mode = self.book.find(name).map(|entry| entry.args.crash_safety).unwrap_or_default();
        let crash_safety = journals::safety(mode);
        let options = SnapshotOptions { unrecorded, crash_safety, ..SnapshotOptions::new(overlay) };
        if persist { self.start_kept(name, options) } else { self.start_job(name, options) }
    }

    fn start_job(&self, name: &str, options: SnapshotOptions) -> Answer<Job> {
        self.yard.start_job(name, JobKind::Snapshot(options.into())).map_err(words::problem)
    }

    /// Starts a snapshot that also names the overlay in the configuration.
    fn start_kept(&self, name: &str, options: SnapshotOptions) -> Answer<Job> {
        let Some(store) = self.persistence(name, true)? else {
            return self.start_job(name, options);
        };
        let failed = |e| Problem::new(Kind::Conflict, format!("{e:#}"));
        // A reload that runs has read the old file, and would put the old image into the book. The
        // job excludes no later reload: that one finds the disk held, or compares it again.
        let _only = self.exclude_reloads()?;
        let held = self.hold(name)?;
        // The next server may have another working folder.
        let overlay = std::path::absolute(&options.overlay).map_err(|e| failed(e.into()))?;
        if overlay.to_str().is_none() {
            let what = "persist: the configuration cannot have a path that is not UTF-8";
            return Err(Problem::new(Kind::Invalid, what).in_field("overlay"));
        }
        let kept = KeptOverlay {
            server: self.itself.clone(),
            disk: name.into(),
            overlay: overlay.clone(),
            file: Mutex::new(None),
        };
        let keys = store.keys(name).map_err(failed)?.unwrap_or_else(|| held.entry().keys);
        let keys = kept.named(keys);
        store.check(name, &keys).map_err(failed)?;
        let prepared = store.prepare(name, &keys);
        let prepared = prepared.map_err(|e| Problem::new(Kind::Failed, format!("{e:#}")))?;
        let failed = |e| Problem::new(Kind::Failed, format!("persist: no thread can start: {e}"));
        *kept.file() = Some(FileWriter::start(prepared).map_err(failed)?);
        let options = SnapshotOptions { overlay, start_record: Some(Arc::new(kept)), ..options };
        let lent = held.lend();
        let started = self.start_job(name, options);
        if started.is_err() {
            drop(self.book.lent(lent));
        }
        started
    }
}

/// Returns an error if the next server would open an overlay in another format than qcow2, or if it
/// lies in the configuration.
/// `persist`: the configuration will name the format.
fn check_overlay(overlay: &str, persist: bool) -> Answer<()> {
    if is_reserved(overlay.as_ref()) {
        let what = format!(
            "overlay {overlay}: it belongs to the server's configuration or is a program of it, \
             which no disk may use: choose another place"
        );
        return Err(Problem::new(Kind::Invalid, what).in_field("overlay"));
    }
    let what = match Format::of_name(overlay.as_ref()) {
        Some(Format::Qcow2) => return Ok(()),
        None if persist => return Ok(()),
        None => format!(
            "overlay {overlay}: without a format, the next start would take it for a raw image: \
             call it {overlay}.qcow2, or use persist=true (--persist)"
        ),
        Some(other) => format!("an overlay is qcow2, and the name {overlay} means {other}"),
    };
    Err(Problem::new(Kind::Invalid, what).in_field("overlay"))
}
