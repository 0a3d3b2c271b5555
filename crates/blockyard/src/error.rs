//! The error of all calls.

use std::fmt;

use blockyard_storage::targets::TargetError;
use blockyard_yard::{Obstacle, YardError};

/// Kinds of errors that callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The reactors cannot start: io_uring is missing or forbidden.
    Start,
    /// A disk has this name already.
    NameTaken,
    /// No disk has this name.
    NotFound,
    /// The target or the image cannot be opened.
    Open,
    /// An export cannot start.
    Export,
    /// The image could not be flushed: writes may be lost.
    Flush,
    /// Disks were not handed over to another process.
    HandOver,
    /// Another failure.
    Other,
}

/// Why a call failed: the kind, what failed, and the cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(
        kind: ErrorKind,
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Error { kind, what: what.into(), source: Some(source.into()) }
    }

    /// Returns the kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<TargetError> for Error {
    fn from(error: TargetError) -> Self {
        Error::new(ErrorKind::Open, error.to_string(), error)
    }
}

impl From<YardError> for Error {
    fn from(error: YardError) -> Self {
        let kind = match &error {
            YardError::NotFound { .. } => ErrorKind::NotFound,
            YardError::NameTaken { .. } => ErrorKind::NameTaken,
            YardError::Open(_) | YardError::Device { .. } => ErrorKind::Open,
            YardError::Export { .. } => ErrorKind::Export,
            YardError::Flush { .. } | YardError::NotFlushed { .. } => ErrorKind::Flush,
            _ => ErrorKind::Other,
        };
        let what = match &error {
            YardError::Export { source, .. } => format!("{error}: {source}"),
            // The commands that the server's messages advise are not there for a program.
            YardError::NotFound { disk } => {
                format!("no disk is called \"{disk}\": `Yard::disks` returns the names")
            }
            YardError::NotFlushed { disk, .. } => format!(
                "disk \"{disk}\": the image could not be flushed now, and no write is lost: the \
                 next flush tries again. The log has why. If requests wait for space on the host, \
                 free some, and call `Yard::resume`"
            ),
            YardError::Stays { disk, why: Obstacle::WaitsForSpace } => format!(
                "disk \"{disk}\" cannot be handed over: requests wait for space on the host: free \
                 some, and call `Yard::resume`"
            ),
            _ => error.to_string(),
        };
        Error::new(kind, what, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_advise_calls_of_the_library() {
        let disk = || "a".to_string();
        let remedy = "Its requests wait for space on the host: free some, then `ctl resume`";
        let (why, space) = (Obstacle::WaitsForSpace, "call `Yard::resume`");
        for (error, advice) in [
            (YardError::NotFound { disk: disk() }, "`Yard::disks` returns the names"),
            (YardError::NotFlushed { disk: disk(), remedy }, space),
            (YardError::Stays { disk: disk(), why }, space),
        ] {
            let error = Error::from(error).to_string();
            assert!(error.ends_with(advice) && !error.contains("ctl"), "{error}");
        }
    }
}
