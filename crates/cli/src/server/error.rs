//! Why a disk is not added or removed, for logs and for answers of the API.

use std::time::Duration;

use blockyard_disk::SourceError;
use blockyard_program::output::shell;
use blockyard_yard::YardError;

use super::late::describe;
use crate::claims::UnseenError;
use crate::disks::advise;
use crate::options::disk::DiskArgs;

/// Reasons why a disk cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    #[error("{0}")]
    Conflict(String),
    #[error(transparent)]
    Unseen(UnseenError),
    #[error("{0:#}")]
    Open(anyhow::Error),
    /// The list of disks that are not open has no place for causes, so this names all of them.
    #[error("{}", describe(.0))]
    Yard(YardError),
    /// The disk is served when its storage answers.
    #[error(
        "disk \"{disk}\" is still opening after {} s, and goes on: its storage may not answer; \
         `ctl show {}` shows the state opening until it ends",
        .limit.as_secs(),
        shell(disk)
    )]
    GoesOn { disk: String, limit: Duration },
    /// The disk is served when another program has unlocked its image.
    #[error(
        "disk \"{disk}\" waits for the lock of its image, and is served then: {why}; `ctl show {}` \
         shows the state opening until it is served",
        shell(disk)
    )]
    Waits { disk: String, why: String },
    /// The disk is served when the file systems of its files answer.
    #[error("{why}; disk \"{disk}\" waits, because its clients do")]
    WaitsForFiles { disk: String, why: String },
    /// The disk is served when the host has space for it.
    #[error("disk \"{disk}\": {why}")]
    Full { disk: String, why: String },
    #[error("disk \"{disk}\" is not open yet, and a signal ends the server")]
    Stopped { disk: String },
}

impl AddError {
    pub(super) fn of(e: YardError, args: &DiskArgs) -> Self {
        match e {
            YardError::Open(e) => AddError::Open(advise(e, args)),
            e => AddError::Yard(e),
        }
    }

    /// Returns whether the disk may still be served, without another command.
    pub fn goes_on(&self) -> bool {
        matches!(
            self,
            AddError::GoesOn { .. }
                | AddError::Waits { .. }
                | AddError::WaitsForFiles { .. }
                | AddError::Full { .. }
        )
    }

    /// Returns whether another process has locked the image.
    pub fn is_locked(&self) -> bool {
        let AddError::Open(e) = self else { return false };
        e.downcast_ref::<SourceError>().is_some_and(SourceError::is_locked)
    }
}

/// Reasons why a disk is not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Yard(YardError),
    /// The disk is removed when its storage answers.
    #[error(
        "disk \"{disk}\" is still closing after {} s, and goes on: its storage may not answer; \
         `ctl show {}` shows the state closing until it ends",
        .limit.as_secs(),
        shell(disk)
    )]
    GoesOn { disk: String, limit: Duration },
}
