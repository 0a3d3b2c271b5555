//! Errors of commands: the disk, the operation, and why it failed.

use std::io;
use std::path::PathBuf;

use blockyard_disk::{Difference, SourceError, WorkError};
use blockyard_export::LongestHold;

use super::obstacle::Obstacle;
use super::settings::WayError;

/// Error of a command of the yard.
#[derive(Debug, thiserror::Error)]
pub enum YardError {
    #[error("no disk is called \"{disk}\": `blockyard ctl list` shows the disks")]
    NotFound { disk: String },
    #[error("a disk is called \"{disk}\" already: choose another name")]
    NameTaken { disk: String },
    /// The caller could not determine the disk's settings.
    #[error(transparent)]
    Settings(WayError),
    #[error(transparent)]
    Open(SourceError),
    #[error("image {}: finding its device", image.display())]
    Device { image: PathBuf, source: io::Error },
    /// Clients of another server rely on what its disk was.
    #[error("disk \"{disk}\": {why}, and its clients would stay connected: restart the server")]
    Differs { disk: String, why: Difference },
    #[error("disk \"{disk}\": starting its export")]
    Export { disk: String, source: WayError },
    #[error(transparent)]
    Work(#[from] WorkError),
    #[error("disk \"{disk}\": finding the image's size")]
    Size { disk: String, source: io::Error },
    #[error(
        "disk \"{disk}\": the image could not be flushed now, and no write is lost: the server keeps \
         what is missing, and the next flush tries again. {remedy}"
    )]
    NotFlushed { disk: String, remedy: &'static str },
    #[error("disk \"{disk}\": the image could not be flushed, writes may be lost: the log has why")]
    Flush { disk: String },
    #[error(
        "disk \"{disk}\": {running} jobs run already, and no more may: wait until one ends, \
         or cancel one"
    )]
    TooManyJobs { disk: String, running: usize },
    #[error(
        "another command works on disk \"{disk}\": try again when it has ended; if it does not \
         end, the disk's storage does not answer"
    )]
    Busy { disk: String },
    #[error("disk \"{disk}\": cannot start a thread")]
    Thread { disk: String, source: io::Error },
    #[error("disk \"{disk}\" cannot be handed over: {why}")]
    Stays { disk: String, why: Obstacle },
    #[error(
        "disk \"{disk}\": {what} is refused, because its requests may wait for at most {} s: {}",
        .longest.time.as_secs(),
        .longest.why
    )]
    Holds { disk: String, what: &'static str, longest: LongestHold },
    #[error("the server is ending, and accepts no more commands")]
    Closing,
}

impl YardError {
    /// Returns whether another process has locked the image.
    pub fn is_locked(&self) -> bool {
        matches!(self, YardError::Open(e) if e.is_locked())
    }

    /// Returns whether the host has no space for what the image needs to be opened.
    pub fn is_full(&self) -> bool {
        matches!(self, YardError::Open(e) if e.is_full())
    }
}
