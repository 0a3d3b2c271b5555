//! A running server: the yard, which owns the disks, and the configuration that it serves.
//!
//! Signals (`serve.rs`), reloads, hand-overs and the API use it. In: commands on disks. Out: each
//! takes effect in the yard and in the book of configurations, or in neither.

use std::sync::{Mutex, Weak};
use std::time::{Instant, SystemTime};

use blockyard_control::events::What;
use blockyard_disk::SourceError;
use blockyard_program::ending::Failure;
use blockyard_yard::{
    Change, DiskInfo, DiskSettings, DiskState, Job, JobState, Pending, Yard, YardError,
};
use toml::Table;

use crate::book::{Book, Entry, HeldDisk};
use crate::changes::{Known, changes};
use crate::disks::{advise, log_end, settings};
use crate::events::Events;
use crate::exports::{self, Common};
use crate::handover::HandOvers;
use crate::options::disk::DiskArgs;
use crate::options::serve::ServeOptions;
use crate::{figures, sandbox};

/// Reasons why a disk cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    #[error("{0}")]
    Conflict(String),
    #[error("{0:#}")]
    Open(anyhow::Error),
    #[error(transparent)]
    Yard(YardError),
}

impl AddError {
    /// Returns whether another process has locked the image.
    pub fn is_locked(&self) -> bool {
        let AddError::Open(e) = self else { return false };
        e.downcast_ref::<SourceError>().is_some_and(SourceError::is_locked)
    }
}

/// A disk that is being opened.
pub struct Adding<'a> {
    held: HeldDisk<'a>,
    pending: Pending<()>,
    args: DiskArgs,
}

impl Adding<'_> {
    /// Waits until the disk is served.
    pub fn wait(self) -> Result<(), AddError> {
        self.pending.wait().map_err(|e| match e {
            YardError::Open(e) => AddError::Open(advise(e, &self.args)),
            e => AddError::Yard(e),
        })?;
        self.held.keep();
        Ok(())
    }
}

/// A running server: the yard, and the configuration that it serves.
pub struct Server {
    pub yard: Yard,
    pub events: Events,
    pub common: Common,
    pub options: ServeOptions,
    pub since: SystemTime,
    /// The same moment, on the clock that never goes back.
    pub started: Instant,
    /// Configuration of each disk that is served, without the disks of toolstacks.
    pub book: Book,
    /// The configuration file that is in effect.
    pub known: Mutex<Known>,
    /// Held during a reload: one at a time.
    pub reloading: Mutex<()>,
    pub hand_overs: HandOvers,
    /// For threads that outlive a call.
    pub itself: Weak<Server>,
}

impl Server {
    /// Opens a disk and starts its exports. `keys`: the keys that were given. `by_api`: no
    /// configuration file has the disk.
    pub fn add(&self, args: DiskArgs, keys: Table, by_api: bool) -> Result<(), AddError> {
        self.begin_add(args, keys, by_api)?.wait()
    }

    /// Like `add`, but returns before the disk is open.
    pub fn begin_add(
        &self,
        args: DiskArgs,
        keys: Table,
        by_api: bool,
    ) -> Result<Adding<'_>, AddError> {
        sandbox::check(&args).map_err(AddError::Open)?;
        let held = self.book.reserve(args.clone(), keys, by_api).map_err(AddError::Conflict)?;
        let carried = match self.common.handed.take_carried(&args.name()) {
            Ok(carried) => carried,
            Err(e) => {
                held.remove();
                return Err(AddError::Open(e));
            }
        };
        let settings = settings(&args, exports::ways(&args, &self.common));
        let pending = self.yard.begin_add(DiskSettings { carried, ..settings });
        Ok(Adding { held, pending, args })
    }

    /// Removes a disk, and logs its final statistics. Returns whether its image was flushed.
    pub fn remove(&self, held: HeldDisk<'_>) -> Result<bool, YardError> {
        let ended = self.yard.remove(&held.args().name());
        held.remove();
        ended.map(|ended| {
            log_end(&ended);
            ended.is_flushed
        })
    }

    /// Applies keys that need no reconnection: weight, limits, reservations,
    /// `tls-allow` and `on-enospc`.
    pub fn change(
        &self,
        held: &HeldDisk<'_>,
        args: DiskArgs,
        keys: Table,
    ) -> Result<(), YardError> {
        let Entry { args: served, keys: old, .. } = held.entry();
        let (knobs, clients, disk) = (args.knobs(), args.tls_allow.clone(), args.name());
        let change = Change {
            clients: (served.tls_allow != clients).then_some(clients),
            knobs: (served.knobs() != knobs).then_some(knobs),
            on_enospc: (served.on_enospc != args.on_enospc).then_some(args.on_enospc),
        };
        self.yard.change(&disk, change)?;
        let changed = changes(&old, &keys);
        if !changed.is_empty() {
            self.events.publish(What::DiskChanged { disk, keys: changed });
        }
        held.set(args, keys);
        Ok(())
    }

    /// Returns the disks that are open. Commands to other disks would wait until these are opened
    /// or closed, and would delay the next signal.
    pub fn served(&self) -> impl Iterator<Item = DiskInfo> {
        let answers = |disk: &DiskInfo| matches!(disk.state, DiskState::Serving | DiskState::Busy);
        self.yard.list().into_iter().filter(answers)
    }

    /// Returns whether a job works on a disk.
    pub fn has_job(&self, disk: &str) -> bool {
        let is_running = |job: Job| job.disk() == disk && matches!(job.state(), JobState::Running);
        self.yard.jobs().into_iter().any(is_running)
    }

    /// Logs the statistics of the open disks.
    pub fn log_statistics(&self) {
        for disk in self.served() {
            // The disk may have been removed since the list was made.
            let Ok(report) = self.yard.report(&disk.name) else { continue };
            if !report.clients.is_empty() {
                let clients = figures::describe_clients(&report.clients);
                tracing::info!(disk = report.name, "clients: {clients}");
            }
            figures::log(&report.name, &report.statistics, &report.share);
            figures::log_policies(&report.name, &report.policies);
        }
    }

    /// Closes all disks. Returns an error if an image could not be flushed.
    pub fn close(&self) -> Result<(), Failure> {
        let ended = self.yard.close();
        for disk in &ended {
            figures::log(&disk.name, &disk.statistics, &disk.share);
            figures::log_policies(&disk.name, &disk.policies);
        }
        if ended.iter().all(|disk| disk.is_flushed) {
            return Ok(());
        }
        Err(anyhow::anyhow!("an image could not be flushed, writes may be lost: see the log")
            .into())
    }
}
