//! Jobs: snapshot, commit and stream. Each runs on a thread of its own beside the other commands
//! for its disk.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_disk::{Disk, SnapshotOptions, Work, WorkError};

use crate::error::YardError;

/// Jobs that may run at a time, of all disks together.
const MOST_RUNNING: usize = 16;

/// Jobs that have ended and are listed still.
const MOST_ENDED: usize = 64;

#[derive(Clone, Debug)]
pub enum JobKind {
    /// Puts an overlay on the image: the image stays as it is from then on.
    Snapshot(SnapshotOptions),
    /// Copies what the topmost image has into the one below it, and empties the topmost one.
    Commit,
    /// Copies what the images below have into the topmost one, which then stands alone.
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
    state: Mutex<JobState>,
    ended: Condvar,
}

impl Job {
    /// Tells the job from all others of this yard.
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

    /// Returns bytes done and bytes in all. The second grows while the job finds what it has to do.
    pub fn progress(&self) -> (u64, u64) {
        let progress = self.0.work.progress();
        (progress.done(), progress.total())
    }

    /// Ends a commit or a stream soon. Its state is [`JobState::Failed`] then, except if it was
    /// done already. A snapshot goes on, because it takes no longer than an answer.
    pub fn cancel(&self) {
        self.0.work.cancel();
    }

    pub fn state(&self) -> JobState {
        self.0.state().clone()
    }

    /// Waits for the end of the job.
    pub fn wait(&self) -> Result<(), Arc<WorkError>> {
        let mut state = self.0.state();
        loop {
            match &*state {
                JobState::Running => {
                    state = self.0.ended.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
                JobState::Done => return Ok(()),
                JobState::Failed(why) => return Err(why.clone()),
            }
        }
    }

    fn is_running(&self) -> bool {
        matches!(*self.0.state(), JobState::Running)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, disk: &Arc<Disk>) {
        let result = match &self.kind {
            JobKind::Snapshot(options) => disk.snapshot(options),
            JobKind::Commit => disk.commit(&self.work),
            JobKind::Stream => disk.stream(&self.work),
        };
        *self.state() = match result {
            Ok(()) => JobState::Done,
            Err(e) => JobState::Failed(Arc::new(e)),
        };
        self.ended.notify_all();
    }
}

/// All jobs that run, and the last ones that have ended.
#[derive(Default)]
pub(crate) struct Jobs {
    all: Mutex<Vec<Job>>,
    numbers: AtomicU64,
}

impl Jobs {
    fn all(&self) -> MutexGuard<'_, Vec<Job>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the jobs in the order of their starts.
    pub fn list(&self) -> Vec<Job> {
        self.all().clone()
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
        if running >= MOST_RUNNING {
            return Err(YardError::TooManyJobs { disk: name.into(), running });
        }
        let shared = Arc::new(Shared {
            number: self.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            disk: name.into(),
            works_on: Arc::downgrade(disk),
            kind,
            work: Work::default(),
            state: Mutex::new(JobState::Running),
            ended: Condvar::new(),
        });
        let (job, disk) = (Job(shared.clone()), disk.clone());
        let thread = std::thread::Builder::new().name("yard job".into());
        let started = thread.spawn(move || shared.run(&disk));
        started.map_err(|source| YardError::Thread { disk: name.into(), source })?;
        let mut ended = all.len() - running;
        all.retain(|job| {
            let goes = ended >= MOST_ENDED && !job.is_running();
            ended -= usize::from(goes);
            !goes
        });
        all.push(job.clone());
        Ok(job)
    }
}
