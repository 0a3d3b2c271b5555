//! What an old server excludes while it hands its disks over.
//!
//! In: a server. Out: locks for the time of a hand-over. What must hold: one hand-over runs at a
//! time. No call, reload or late addition changes the set of disks meanwhile, because the new
//! server has read the configuration. A wait for such work has a limit.

use std::sync::{MutexGuard, RwLockWriteGuard};

use blockyard_disk::SnapshotOptions;
use blockyard_yard::{HeldOpenings, Job, JobKind, JobState};

use crate::server::Server;
use crate::server::hand_overs::{CALLS_TIME, NotNow};

/// What excludes another hand-over, reloads, and calls that change disks or the configuration. It
/// begins before the new server reads the configuration. The last field is dropped last.
pub struct Alone<'a> {
    /// Disks that are being opened. Only storage that hangs does that beside the other locks.
    pub(super) openings: Option<HeldOpenings>,
    _changes: RwLockWriteGuard<'a, ()>,
    _reloading: MutexGuard<'a, ()>,
    _only: MutexGuard<'a, ()>,
}

impl<'a> Alone<'a> {
    pub fn of(server: &'a Server) -> Result<Self, NotNow> {
        let only = server.hand_overs.try_alone();
        let _only = only.ok_or_else(|| NotNow("another hand-over runs".into()))?;
        let not_ended = |what: &str| {
            let waits = server.waits.describe();
            NotNow(format!("{what} has not ended{waits}: try again later"))
        };
        // Calls that wait for storage which hangs end their wait.
        let hurry = server.waits.hurry();
        let reloading = server.exclude_reloads_within(CALLS_TIME);
        let _reloading =
            reloading.ok_or_else(|| not_ended("a reload, or a call that keeps a change,"))?;
        let changes = server.hand_overs.exclude_changes();
        let _changes =
            changes.ok_or_else(|| not_ended("a call that adds, changes or removes a disk"))?;
        drop(hurry);
        if let Some(job) = server.yard.jobs().iter().find(|job| will_change_configuration(job)) {
            return Err(NotNow(format!(
                "a snapshot of disk \"{}\" that is kept has not ended: try again later",
                job.disk()
            )));
        }
        let openings = server.yard.hold_openings(CALLS_TIME);
        let what = "the exports of a disk have not started: try again later";
        let openings = Some(openings.ok_or_else(|| NotNow(what.into()))?);
        Ok(Alone { openings, _changes, _reloading, _only })
    }
}

/// Returns whether the end of a job changes a file of the configuration.
fn will_change_configuration(job: &Job) -> bool {
    let is_kept = |options: &SnapshotOptions| options.start_record.is_some();
    let is_running = matches!(job.state(), JobState::Running);
    is_running && matches!(job.kind(), JobKind::Snapshot(options) if is_kept(options))
}
