//! Forks: a second, writable disk that begins with the present content of another one.
//!
//! ```text
//!   check all ─► new disk in the book ─► its image, an overlay without a name
//!     ─► snapshot of the old disk ─► name of that image ─► the new disk opens
//! ```
//!
//! In: the old disk, its overlay, and the keys of the new disk. Out: the new disk, served.
//!
//! What must hold: a failure before the end of the snapshot leaves everything as it was. A failure
//! after it leaves no image of the new disk, and says what to do. No other command has the old disk
//! until the new disk has its images open, because a commit would change the base of both. After a
//! death of the server the old disk starts as before or as after a snapshot. The new image is
//! missing, or it is complete and on the snapshot.

use std::collections::HashSet;
use std::iter::once;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use blockyard_control::types::{Disk, Fork, Snapshot};
use blockyard_control::{Answer, Kind, Object, Problem, invalid};
use blockyard_disk::Source;
use blockyard_image::tools::{NewOverlay, OverlayBase};
use blockyard_image::{ChainError, Format};
use blockyard_program::output::shell;
use blockyard_ring::pool::Pool;

use super::adding::{NewDisk, not_added};
use super::places;
use super::snapshots::SnapshotEnd;
use crate::disks::book::HeldDisk;
use crate::exports::bound::{self, Address};
use crate::exports::{self, Listens};
use crate::options::disk::DiskArgs;
use crate::process::{inherited, looks};
use crate::server::error::AddError;
use crate::server::{NotOpened, Reserved, STORAGE_TIME, Server, reopening, words};

/// Shortest wait for the new disk, after a snapshot that took nearly all the time.
const LEAST: Duration = Duration::from_secs(2);

/// Number of threads that close images of forks that failed. Their file systems may never answer.
const CLOSERS: usize = 4;
static CLOSING: LazyLock<Pool> =
    LazyLock::new(|| Pool::new("fork close", CLOSERS, Duration::from_millis(250)));

/// The image of a new disk. Dropping it removes the image, and waits for that for a limited time:
/// its file system may not answer.
struct NewImage {
    path: PathBuf,
    overlay: Option<NewOverlay>,
}

impl NewImage {
    fn publish(&mut self) -> Result<(), ChainError> {
        self.overlay.as_mut().map_or(Ok(()), NewOverlay::publish)
    }

    fn keep(mut self) {
        self.overlay.take().into_iter().for_each(NewOverlay::keep);
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        let Some(overlay) = self.overlay.take() else { return };
        let (sender, removed) = sync_channel(1);
        let remove = move |(): &()| {
            drop(overlay);
            let _ = sender.send(());
        };
        match CLOSING.run(Box::new(remove)) {
            Ok(()) if removed.recv_timeout(looks::LIMIT).is_err() => tracing::error!(
                "image {}: its file system has not answered for {} s, so it may stay",
                self.path.display(),
                looks::LIMIT.as_secs()
            ),
            Ok(()) => {}
            // No thread can start, so this one removes it.
            Err(refused) => (refused.task)(&()),
        }
    }
}

/// The present topmost image of the old disk. The snapshot makes it the base of both disks.
struct Base {
    image: OverlayBase,
    /// Folders in which the old disk's backing files may lie. Empty: the folder of its image.
    folders: Vec<PathBuf>,
}

/// A fork that was checked. All its steps together have [`STORAGE_TIME`].
struct Forking<'a> {
    server: &'a Server,
    until: Instant,
    /// Name of the old disk.
    disk: &'a str,
    base: Base,
    snapshot: Snapshot,
    new: NewDisk,
}

impl Server {
    pub(super) fn fork_disk(&self, disk: &str, fork: Fork) -> Answer<Disk> {
        let _no_upgrade = self.exclude_upgrades()?;
        let Fork { overlay, unrecorded, persist, disk: keys } = fork;
        places::check_free("overlay", &overlay)?;
        let snapshot = Snapshot { overlay, unrecorded, persist };
        self.snapshot_options(disk, &snapshot)?;
        // A reload that runs has read the old file. A later one finds the disk held.
        let only = persist.then(|| self.exclude_reloads()).transpose()?;
        let held = self.hold(disk)?;
        drop(only);
        let base = self.base_of(disk, &held)?;
        let new = self.new_disk(&base, keys, &snapshot).map_err(of_new)?;
        let reserved = self.reserve_disk(new.args.clone(), new.table.clone(), true);
        let reserved = reserved.map_err(|e| not_added(e, persist))?;
        let image = new_image(&base, &new)?;
        let until = Instant::now() + STORAGE_TIME;
        let forking = Forking { server: self, until, disk, base, snapshot, new };
        let lent = match self.start_awaited(held, &forking.snapshot)?.wait(STORAGE_TIME) {
            SnapshotEnd::Taken(lent) => lent,
            SnapshotEnd::Failed(why) => return Err(forking.not_begun(words::work(why))),
            SnapshotEnd::GoesOn(job) => return Err(forking.goes_on(job)),
        };
        let opened = forking.open(reserved, image);
        drop(lent);
        self.keep_new(opened?, forking.new)
    }

    /// Returns the image on which the new disk begins. Returns an error if the disk cannot be
    /// forked.
    fn base_of(&self, disk: &str, held: &HeldDisk<'_>) -> Answer<Base> {
        let (info, args) = (self.info(disk)?, held.args());
        let refuse = |why: &str| {
            let what = format!("disk \"{disk}\" cannot be forked: {why}");
            Err(Problem::new(Kind::Conflict, what))
        };
        if info.is_read_only {
            return refuse(
                "it is read-only, so its image does not change: put an overlay on the image \
                 (blockyard image create -b), and add a disk with the overlay",
            );
        }
        if info.is_drained {
            return refuse("it is drained: resume it first");
        }
        if self.has_job(disk) {
            return refuse(reopening::JOB);
        }
        let is_overlaid = reopening::has_overlay(&info);
        let Some(path) = info.top.or(info.image) else {
            return refuse("it is not open yet: try again");
        };
        let has_program = |(scheme, name): (&dyn blockyard_storage::Scheme, &str)| {
            scheme.program(name).is_some() || blockyard_image::scheme_of(&path).is_none()
        };
        if Source::scheme_of(&path).is_some_and(has_program) {
            return refuse("it has no image on which another image can be put");
        }
        let format = match is_overlaid {
            true => Format::Qcow2,
            false => args.format().unwrap_or(Format::Raw),
        };
        let nbd = args.chain().nbd;
        let image = OverlayBase { path, format, size: info.capacity, nbd };
        Ok(Base { image, folders: args.backing_folders })
    }

    /// Checks the new disk, as far as that is possible before its image exists.
    fn new_disk(&self, base: &Base, mut keys: Object, snapshot: &Snapshot) -> Answer<NewDisk> {
        let (args, _) = words::disk(keys.clone())?;
        let image = args.image.to_string_lossy().into_owned();
        places::check_free("image", &image)?;
        if is_same_path(&args.image, snapshot.overlay.as_ref()) {
            let what = format!("{image}: it is the overlay of the old disk: choose another path");
            return Err(invalid("image", &what));
        }
        match (args.format, Format::of_name(&args.image)) {
            (Some(Format::Qcow2), _) | (None, Some(Format::Qcow2)) => {}
            (None, None) => drop(keys.insert("format".into(), Format::Qcow2.to_string().into())),
            (Some(other), _) => {
                let what = format!("the new image is qcow2, not {other}: leave the key out");
                return Err(invalid("format", &what));
            }
            (None, Some(other)) => {
                let what = format!(
                    "the new image is qcow2, and the name {image} means {other}: choose another \
                     name, or set format=qcow2"
                );
                return Err(invalid("image", &what));
            }
        }
        let mut folders = folders_for(base, &args)?;
        folders.retain(|folder| !args.backing_folders.contains(folder));
        if !folders.is_empty() {
            let all = args.backing_folders.iter().chain(&folders);
            let all: Vec<_> = all.map(|folder| folder.to_string_lossy()).collect();
            keys.insert("backing-folders".into(), all.into());
        }
        let (args, table) = words::disk(keys)?;
        let new = self.check_new(args, table, snapshot.persist)?;
        self.check_exports(&new.args)?;
        Ok(new)
    }

    /// Returns an error if an export of the new disk could not start now.
    fn check_exports(&self, args: &DiskArgs) -> Answer<()> {
        let disk = args.name();
        if self.common.handed.disks().contains(&disk) {
            let what = format!(
                "clients of an earlier disk \"{disk}\" wait for that one: choose another name"
            );
            return Err(Problem::new(Kind::Conflict, what).in_field("name"));
        }
        if let Some(list) = &args.on_reactors
            && let Err(e) = self.yard.reactors().only(&list.0)
        {
            return Err(invalid("on-reactors", &e.to_string()));
        }
        let failed = |e: anyhow::Error| {
            Problem::new(Kind::Failed, format!("disk \"{disk}\" could not be exported: {e:#}"))
        };
        for listens in exports::listens(args) {
            if let Listens::Inherited { name, .. } = listens {
                inherited::check(&name).map_err(failed)?;
            }
        }
        let served = self.book.all();
        let present = bound::addresses(served.iter().map(|entry| &entry.args));
        // Disks can share an address of NBD. Another one must be free.
        let shared: HashSet<Address> = &present & &bound::addresses(once(args));
        bound::probe(args, &shared).map_err(failed)
    }
}

impl Forking<'_> {
    /// Gives the image of the new disk its name, and opens the disk. No other command has the disk
    /// before the caller keeps it.
    fn open<'a>(&self, reserved: Reserved<'a>, image: NewImage) -> Answer<HeldDisk<'a>> {
        let not_finished = |problem| self.not_finished(problem, None);
        // A program may have changed the size of the old image between check and snapshot.
        let size = self.server.info(self.disk).map_err(not_finished)?.capacity;
        if size != self.base.image.size {
            let why = format!(
                "disk \"{}\" has changed its size meanwhile, from {} to {size} bytes",
                self.disk, self.base.image.size
            );
            return Err(not_finished(Problem::new(Kind::Conflict, why)));
        }
        let image = self.publish(image).map_err(not_finished)?;
        let left = self.until.saturating_duration_since(Instant::now()).max(LEAST);
        let opened = match reserved.found_image() {
            Ok(()) => reserved.open().wait_or_return(left, || false),
            Err(e) => Err(NotOpened { error: Box::new(e), held: None }),
        };
        match opened {
            Ok(held) => {
                image.keep();
                Ok(held)
            }
            Err(NotOpened { error, .. }) if error.goes_on() => {
                image.keep();
                Err(self.still_opens(not_added(*error, self.snapshot.persist)))
            }
            Err(NotOpened { error, held }) => {
                // Another disk or program has taken the image since it has its name.
                let is_taken = error.is_locked() || matches!(*error, AddError::Conflict(_));
                // The image goes before another command can have the disk's name.
                let image = Some(image).filter(|_| is_taken);
                drop(held);
                Err(self.not_finished(not_added(*error, false), image))
            }
        }
    }

    /// Gives the image its name. If its file system does not answer, the thread that waits for it
    /// removes it.
    fn publish(&self, mut image: NewImage) -> Answer<NewImage> {
        let published = looks::look(&self.new.args.image, looks::LIMIT, move || {
            let published = image.publish();
            published.map(|()| image)
        });
        let published = published.map_err(|e| Problem::new(Kind::Busy, format!("image {e}")))?;
        published.map_err(failed)
    }

    fn not_begun(&self, problem: Problem) -> Problem {
        let new = self.new.args.name();
        let detail =
            format!("{}; disk \"{new}\" is not added, and nothing has changed", problem.detail);
        Problem { detail, ..problem }
    }

    fn goes_on(&self, job: u64) -> Problem {
        let Forking { disk, new, snapshot, .. } = self;
        let what = format!(
            "the snapshot of disk \"{disk}\" has not ended after {} s and goes on: the disk's \
             storage may not answer; disk \"{}\" is not added, and its image is not created. If \
             `blockyard ctl wait {job}` succeeds, disk \"{disk}\" goes on in {}. {}",
            STORAGE_TIME.as_secs(),
            new.args.name(),
            snapshot.overlay,
            self.remedy()
        );
        Problem::new(Kind::Busy, what)
    }

    /// The snapshot was taken, and the new disk is not added. `taken`: its image, if another disk
    /// or program has it.
    fn not_finished(&self, problem: Problem, taken: Option<NewImage>) -> Problem {
        let Forking { disk, new, snapshot, .. } = self;
        let image = match taken.map(NewImage::keep) {
            None => "it has no image",
            Some(()) => "its image stays, because something else has it",
        };
        let what = format!(
            "disk \"{}\" is not added, and {image}: {}. The snapshot was taken: disk \"{disk}\" \
             goes on in {}. {}",
            new.args.name(),
            problem.detail,
            snapshot.overlay,
            self.remedy()
        );
        Problem::new(Kind::Failed, what)
    }

    /// The snapshot was taken, and the new disk is served later.
    fn still_opens(&self, problem: Problem) -> Problem {
        let detail = format!(
            "{}. The snapshot was taken: disk \"{disk}\" goes on in {}. Do not commit it before \
             disk \"{}\" is served",
            problem.detail,
            self.snapshot.overlay,
            self.new.args.name(),
            disk = self.disk
        );
        Problem { detail, ..problem }
    }

    /// Returns what a caller can do after the snapshot.
    fn remedy(&self) -> String {
        let OverlayBase { path, format, .. } = &self.base.image;
        let path = match blockyard_image::scheme_of(path) {
            Some(_) => path.clone(),
            None => std::path::absolute(path).unwrap_or_else(|_| path.clone()),
        };
        let quoted = |path: &Path| shell(&path.to_string_lossy()).into_owned();
        format!(
            "To go on by hand: `blockyard image create -b {} -F {format} {}`, then `blockyard ctl \
             add` with the keys of the new disk. To undo the snapshot: `blockyard ctl commit {}`",
            quoted(&path),
            quoted(&self.new.args.image),
            shell(self.disk)
        )
    }
}

/// Creates the image of the new disk. It has no name yet.
fn new_image(base: &Base, new: &NewDisk) -> Answer<NewImage> {
    let (path, below) = (new.args.image.clone(), base.image.clone());
    let folders = new.args.backing_folders.clone();
    let paths = vec![path.clone(), below.path.clone()];
    let made = looks::look_at(paths, looks::LIMIT, move |_| {
        let overlay = Some(NewOverlay::create(&path, &below, &folders)?);
        Ok(NewImage { path, overlay })
    });
    made.map_err(|e| Problem::new(Kind::Busy, format!("image {e}")))?.map_err(failed)
}

/// Returns the folders in which the new disk's backing files lie. Empty: the folder of its image.
fn folders_for(base: &Base, new: &DiskArgs) -> Answer<Vec<PathBuf>> {
    if !base.folders.is_empty() || blockyard_image::scheme_of(&base.image.path).is_some() {
        return Ok(base.folders.clone());
    }
    // Given folders replace that of the image.
    let has_others = !new.backing_folders.is_empty();
    let (below, folder) = (base.image.path.clone(), places::folder(&new.image).to_path_buf());
    let paths = vec![below.clone(), folder.clone()];
    let seen = looks::look_at(paths, looks::LIMIT, move |position| {
        let below = std::fs::canonicalize(below).ok()?;
        position.is_at(1);
        let folder = std::fs::canonicalize(folder).ok()?;
        let own = below.parent()?.to_path_buf();
        (has_others || !below.starts_with(folder)).then_some(own)
    });
    let far = seen.map_err(|e| Problem::new(Kind::Busy, format!("image {e}")))?;
    Ok(far.into_iter().collect())
}

/// Returns whether two paths are the same, as texts.
fn is_same_path(a: &Path, b: &Path) -> bool {
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
    whole(a) == whole(b)
}

fn failed(error: ChainError) -> Problem {
    Problem::new(Kind::Failed, format!("{:#}", anyhow::Error::from(error)))
}

/// Names the field of the body that has the keys of the new disk.
fn of_new(problem: Problem) -> Problem {
    match problem.field.clone() {
        Some(field) => problem.in_field(format!("disk.{field}")),
        None => problem,
    }
}
