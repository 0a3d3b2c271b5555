//! The jobs of a yard. A pool of threads runs them, concurrently with other commands for their
//! disks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_disk::Disk;
use blockyard_ring::pool::{Pool, Refused};

use crate::exports::Exports;
use crate::interface::error::YardError;
use crate::interface::job::{Job, JobKind};
use crate::interface::observer::{Event, Observer};

/// Maximum number of jobs that run at a time, for all disks together.
const MAX_RUNNING: usize = 16;

/// How long an idle thread waits for the next job.
const LINGER: Duration = Duration::from_millis(250);

/// Maximum number of ended jobs that are still listed.
const MAX_ENDED: usize = 64;

/// All jobs that run, and the last ones that have ended.
pub(crate) struct Jobs {
    all: Mutex<Vec<Job>>,
    numbers: AtomicU64,
    /// Has a thread for each job that may run. A job must not wait for another one.
    pool: Pool,
    observer: Option<Arc<dyn Observer>>,
    all_disks: AllDisks,
}

/// Returns all disks of the yard that were opened, also those that are being closed. None: the yard
/// does not answer in time.
pub(crate) type AllDisks = Arc<dyn Fn() -> Option<Vec<Arc<Disk>>> + Send + Sync>;

impl Jobs {
    pub fn new(observer: Option<Arc<dyn Observer>>, all_disks: AllDisks) -> Self {
        let (all, numbers) = Default::default();
        let pool = Pool::new("yard job", MAX_RUNNING, LINGER);
        Jobs { all, numbers, pool, observer, all_disks }
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
        for job in self.list().into_iter().filter(|job| job.is_of(disk)) {
            let _ = job.wait();
        }
    }

    pub fn start(
        &self,
        name: &str,
        (disk, exports): (&Arc<Disk>, &Exports),
        kind: JobKind,
    ) -> Result<Job, YardError> {
        let mut all = self.all();
        let running = all.iter().filter(|job| job.is_running()).count();
        if running >= MAX_RUNNING {
            return Err(YardError::TooManyJobs { disk: name.into(), running });
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let job = Job::new(number, name, disk, kind);
        let (running_job, observer) = (job.clone(), self.observer.clone());
        let (disk, exports, others) = (disk.clone(), exports.clone(), self.all_disks.clone());
        let task = move |(): &()| run(&running_job, (&disk, &exports), others, observer.as_deref());
        let started = self.pool.run_now(Box::new(task));
        started.map_err(|Refused { error: source, .. }| YardError::Thread {
            disk: name.into(),
            source,
        })?;
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

fn run(
    job: &Job,
    (disk, exports): (&Arc<Disk>, &Exports),
    all_disks: AllDisks,
    observer: Option<&dyn Observer>,
) {
    let report = |event: fn(Job) -> Event| {
        observer.into_iter().for_each(|observer| observer.event(event(job.clone())));
    };
    report(Event::JobBegun);
    job.run(disk, move || all_disks());
    exports.keep_images();
    // No lock is held: the observer reads the job's state.
    report(Event::JobEnded);
    // The observer knows that the job has ended.
    job.end();
}

#[cfg(test)]
mod tests;
