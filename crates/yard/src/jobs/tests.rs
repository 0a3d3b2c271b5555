//! Jobs of disks in memory. Each of them fails, because such a disk has no image to work on.

use blockyard_disk::DiskOptions;
use blockyard_disk::Source;
use blockyard_image::ChainOptions;

use super::*;
use crate::fixture::{Calls, FakeObserver, FakeWay, until};
use crate::interface::job::JobState;
use crate::interface::settings::Way;

fn disk(name: &str) -> Arc<Disk> {
    let options = DiskOptions {
        name: name.into(),
        serial: String::new(),
        read_only: false,
        cache: Default::default(),
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()))
}

fn jobs(observer: &Arc<FakeObserver>) -> Jobs {
    Jobs::new(Some(observer.clone()), Arc::new(|| Some(Vec::new())))
}

#[test]
fn a_bounded_number_of_jobs_runs_at_a_time() {
    let (observer, exports) = (FakeObserver::holding(), Exports::default());
    let (jobs, one, other) = (jobs(&observer), disk("one"), disk("other"));
    let start = |name, disk| jobs.start(name, (disk, &exports), JobKind::Stream);
    let running: Vec<_> = (0..MAX_RUNNING).map(|_| start("one", &one).unwrap()).collect();
    // Each has its own thread: a job must not wait for another one.
    until("all jobs begin", || observer.events().len() == MAX_RUNNING);
    assert!(jobs.are_running("one") && !jobs.are_running("other"));
    for (name, disk) in [("one", &one), ("other", &other)] {
        let Err(YardError::TooManyJobs { disk, running }) = start(name, disk).map(|_| ()) else {
            panic!("a job too many runs");
        };
        assert_eq!((&*disk, running), (name, MAX_RUNNING));
    }
    assert_eq!(jobs.list().len(), MAX_RUNNING, "a refused job is not listed");
    observer.release();
    running.iter().for_each(|job| drop(job.wait()));
    start("other", &other).unwrap().wait().unwrap_err();
}

#[test]
fn the_list_keeps_the_last_jobs_that_have_ended() {
    let (observer, exports) = (FakeObserver::new(), Exports::default());
    let (jobs, disk) = (jobs(&observer), disk("a"));
    let start = || jobs.start("a", (&disk, &exports), JobKind::Stream).unwrap();
    for number in 1..=MAX_ENDED as u64 + 10 {
        let job = start();
        assert_eq!(job.number(), number);
        job.wait().unwrap_err();
    }
    let numbers: Vec<_> = jobs.list().iter().map(Job::number).collect();
    assert_eq!(numbers, (11..=MAX_ENDED as u64 + 10).collect::<Vec<_>>());
}

#[test]
fn the_observer_knows_the_end_of_a_job_before_its_callers_do() {
    let (observer, log) = (FakeObserver::new(), Calls::default());
    let (jobs, disk) = (jobs(&observer), disk("a"));
    let reactors = Arc::new(blockyard_export::Reactors::start(1, &[]).unwrap());
    let export = FakeWay::new("export", &log).start(&disk, &reactors).unwrap();
    let exports = Exports::new(vec![export]);
    let job = jobs.start("a", (&disk, &exports), JobKind::Commit).unwrap();
    let why = job.wait().unwrap_err();
    assert_eq!(observer.events(), ["begun 1", "ended 1 false"]);
    // The next server must know which images the disk has now.
    assert_eq!(*log.lock().unwrap(), ["export start", "export keep images"]);
    assert!(matches!(job.state(), JobState::Failed(state) if Arc::ptr_eq(&state, &why)));
    assert_eq!((job.disk(), job.kind().to_string().as_str()), ("a", "commit"));
    assert_eq!(job.progress().0, 0);
}

/// A disk that is closed waits for its own jobs, and for no other ones.
#[test]
fn the_end_of_a_disk_waits_for_its_jobs() {
    let (observer, exports) = (FakeObserver::holding(), Exports::default());
    let (jobs, one, other) = (Arc::new(jobs(&observer)), disk("one"), disk("other"));
    let job = jobs.start("one", (&one, &exports), JobKind::Stream).unwrap();
    assert!(job.is_of(&one) && !job.is_of(&other));
    jobs.end(&other);
    let (ending, disk) = (jobs.clone(), one.clone());
    let end = std::thread::spawn(move || ending.end(&disk));
    assert!(job.is_running(), "the disk has not ended");
    assert!(!end.is_finished(), "a disk went before its job");
    observer.release();
    end.join().unwrap();
    assert!(!job.is_running());
    // Work on a disk that has ended is refused.
    let late = jobs.start("one", (&one, &exports), JobKind::Stream).unwrap();
    let why = late.wait().unwrap_err();
    assert!(matches!(*why.why, blockyard_disk::Why::Ended), "{why}");
}
