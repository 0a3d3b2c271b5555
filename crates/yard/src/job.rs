//! Jobs: snapshot, commit and stream. Each job runs on a thread of its own, concurrently with other
//! commands for its disk.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_disk::{Disk, SnapshotOptions, Why, Work, WorkError};
use blockyard_ring::threads;

use crate::error::YardError;
use crate::observer::{Event, Observer};

/// Maximum number of jobs that run at a time, for all disks together.
const MAX_RUNNING: usize = 16;

/// Maximum number of ended jobs that are still listed.
const MAX_ENDED: usize = 64;

/// What a job does.
#[derive(Clone, Debug)]
pub enum JobKind {
    /// Puts an overlay on the image. The image no longer changes from then on.
    Snapshot(SnapshotOptions),
    /// Copies the topmost image's data into its backing image, and empties the topmost one.
    Commit,
    /// Copies the data of all backing images into the topmost one, which then needs none.
    Stream,
}

impl fmt::Display for JobKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobKind::Snapshot(options) => write!(f, "snapshot into {}", options.overlay.display()),
            JobKind::Commit => write!(f, "commit"),
            JobKind::Stream => write!(f, "stream"),
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
    observer: Option<Arc<dyn Observer>>,
}

struct Progress {
    state: JobState,
    /// The observer knows that the job has ended.
    is_over: bool,
}

impl Job {
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

    /// Cancels a commit or a stream. Its state becomes [`JobState::Failed`], unless it is done
    /// already. A snapshot is not cancelled, because it is short.
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

    fn is_running(&self) -> bool {
        matches!(self.0.progress().state, JobState::Running)
    }
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(self: &Arc<Self>, event: impl Fn(Job) -> Event) {
        self.observer.iter().for_each(|observer| observer.event(event(Job(self.clone()))));
    }

    fn run(self: &Arc<Self>, disk: &Arc<Disk>) {
        self.report(Event::JobBegun);
        let result = match &self.kind {
            JobKind::Snapshot(options) => disk.snapshot(options),
            JobKind::Commit => disk.commit(&self.work),
            JobKind::Stream => disk.stream(&self.work),
        };
        self.progress().state = match result {
            Ok(()) => JobState::Done,
            Err(e) => {
                let (disk, job, kind) = (&self.disk, self.number, self.kind.to_string());
                match &*e.why {
                    why @ (Why::Cancelled | Why::Ended) => {
                        tracing::info!(disk, job, "{kind} ended: {why}");
                    }
                    why => tracing::warn!(disk, job, "{kind} failed: {why}"),
                }
                JobState::Failed(Arc::new(e))
            }
        };
        // No lock is held: the observer reads the job's state.
        self.report(Event::JobEnded);
        self.progress().is_over = true;
        self.over.notify_all();
    }
}

/// All jobs that run, and the last ones that have ended.
#[derive(Default)]
pub(crate) struct Jobs {
    all: Mutex<Vec<Job>>,
    numbers: AtomicU64,
    observer: Option<Arc<dyn Observer>>,
}

impl Jobs {
    pub fn new(observer: Option<Arc<dyn Observer>>) -> Self {
        Jobs { observer, ..Jobs::default() }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Job>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the jobs in the order of their starts.
    pub fn list(&self) -> Vec<Job> {
        self.all().clone()
    }

    /// Returns whether a job of this disk runs.
    pub fn are_running(&self, disk: &str) -> bool {
        self.all().iter().any(|job| job.disk() == disk && job.is_running())
    }

    /// Cancels the jobs of a disk that is about to be closed, and waits until they have ended.
    pub fn end(&self, disk: &Arc<Disk>) {
        disk.end_work();
        let is_its = |job: &Job| Weak::ptr_eq(&job.0.works_on, &Arc::downgrade(disk));
        for job in self.list().into_iter().filter(is_its) {
            let _ = job.wait();
        }
    }

    pub fn start(&self, name: &str, disk: &Arc<Disk>, kind: JobKind) -> Result<Job, YardError> {
        let mut all = self.all();
        let running = all.iter().filter(|job| job.is_running()).count();
        if running >= MAX_RUNNING {
            return Err(YardError::TooManyJobs { disk: name.into(), running });
        }
        let shared = Arc::new(Shared {
            number: self.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            disk: name.into(),
            works_on: Arc::downgrade(disk),
            kind,
            work: Work::default(),
            progress: Mutex::new(Progress { state: JobState::Running, is_over: false }),
            over: Condvar::new(),
            observer: self.observer.clone(),
        });
        let (job, disk) = (Job(shared.clone()), disk.clone());
        let thread = std::thread::Builder::new().name("yard job".into());
        // A caller of the API may not do all that a job needs.
        let started = threads::spawn(thread, move || shared.run(&disk));
        started.map_err(|source| YardError::Thread { disk: name.into(), source })?;
        let mut ended = all.len() - running;
        all.retain(|job| {
            let remove = ended >= MAX_ENDED && !job.is_running();
            ended -= usize::from(remove);
            !remove
        });
        all.push(job.clone());
        Ok(job)
    }
}
