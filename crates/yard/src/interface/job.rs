//! A job: a snapshot, commit, stream or backup of a disk. Its handle shows its state and progress.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_disk::{BackupOptions, Disk, SnapshotOptions, Why, Work, WorkError};

/// What a job does.
#[derive(Clone, Debug)]
pub enum JobKind {
    /// Puts an overlay on the image. The image no longer changes from then on.
    Snapshot(Box<SnapshotOptions>),
    /// Copies the topmost image's data into its backing image, and empties the topmost one.
    Commit,
    /// Copies the data of all backing images into the topmost one, which then needs none.
    Stream,
    /// Copies the disk, as it is when the job begins, into a new image.
    Backup(BackupOptions),
}

impl fmt::Display for JobKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobKind::Snapshot(options) => write!(f, "snapshot into {}", options.overlay.display()),
            JobKind::Commit => write!(f, "commit"),
            JobKind::Stream => write!(f, "stream"),
            JobKind::Backup(options) => write!(f, "backup into {}", options.target.display()),
        }
    }
}

/// The state of a job.
#[derive(Clone, Debug)]
pub enum JobState {
    Running,
    Done,
    /// The disk is as it was before the job.
    Failed(Arc<WorkError>),
}

/// A job on a disk. Clones are the same job.
#[derive(Clone)]
pub struct Job(Arc<Shared>);

struct Shared {
    number: u64,
    disk: String,
    works_on: Weak<Disk>,
    kind: JobKind,
    work: Work,
    progress: Mutex<Progress>,
    over: Condvar,
}

struct Progress {
    state: JobState,
    /// The observer knows that the job has ended.
    is_over: bool,
}

impl Job {
    /// Returns a job that has not begun.
    pub(crate) fn new(number: u64, name: &str, disk: &Arc<Disk>, kind: JobKind) -> Self {
        Job(Arc::new(Shared {
            number,
            disk: name.into(),
            works_on: Arc::downgrade(disk),
            kind,
            work: Work::default(),
            progress: Mutex::new(Progress { state: JobState::Running, is_over: false }),
            over: Condvar::new(),
        }))
    }

    /// Does the job on this thread. `others` returns all disks of the yard. Waiters continue after
    /// [`Job::end`].
    pub(crate) fn run(
        &self,
        disk: &Arc<Disk>,
        others: impl FnOnce() -> Option<Vec<Arc<Disk>>> + 'static,
    ) {
        let Shared { kind, work, number, .. } = &*self.0;
        let result = match kind {
            JobKind::Snapshot(options) => disk.snapshot(options),
            JobKind::Commit => disk.commit_among(work, others),
            JobKind::Stream => disk.stream(work),
            JobKind::Backup(options) => disk.backup(options, work),
        };
        self.0.progress().state = match result {
            Ok(()) => JobState::Done,
            Err(e) => {
                let (disk, job) = (self.disk(), number);
                match &*e.why {
                    why @ (Why::Cancelled | Why::Ended) => {
                        tracing::info!(disk, job, "{kind} ended: {why}");
                    }
                    why => tracing::warn!(disk, job, "{kind} failed: {why}"),
                }
                JobState::Failed(Arc::new(e))
            }
        };
    }

    /// Wakes the callers that wait for the end of the job.
    pub(crate) fn end(&self) {
        self.0.progress().is_over = true;
        self.0.over.notify_all();
    }

    /// Returns whether the job works on this disk.
    pub(crate) fn is_of(&self, disk: &Arc<Disk>) -> bool {
        Weak::ptr_eq(&self.0.works_on, &Arc::downgrade(disk))
    }

    /// Returns the job's number, which is unique in this yard.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Returns the name of the disk.
    pub fn disk(&self) -> &str {
        &self.0.disk
    }

    pub fn kind(&self) -> &JobKind {
        &self.0.kind
    }

    /// Returns the number of bytes done, and the total number of bytes. The total grows while the
    /// job finds more data to copy.
    pub fn progress(&self) -> (u64, u64) {
        let progress = self.0.work.progress();
        (progress.done(), progress.total())
    }

    /// Cancels a commit, stream or backup. Its state becomes [`JobState::Failed`], unless it is
    /// done already. A snapshot is not cancelled, because it is short.
    pub fn cancel(&self) {
        self.0.work.cancel();
    }

    pub fn state(&self) -> JobState {
        self.0.progress().state.clone()
    }

    /// Waits for the end of the job.
    pub fn wait(&self) -> Result<(), Arc<WorkError>> {
        let mut progress = self.0.progress();
        while !progress.is_over {
            progress = self.0.over.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        match &progress.state {
            JobState::Failed(why) => Err(why.clone()),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.0.progress().state, JobState::Running)
    }
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
