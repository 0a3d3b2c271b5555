//! Error for a storage that cannot be opened, or whose name is malformed: one type for all schemes.

use std::error::Error;
use std::fmt;

use blockyard_nbd::{NbdError, error};

/// Kinds of errors that callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The name is malformed.
    Name,
    /// The storage can be opened for reading only.
    ReadOnly,
    /// The storage cannot be reached.
    Unreachable,
    /// The storage is unsuitable, or refuses the connection.
    Refused,
}

/// An error of a storage. Its text is that of its source.
#[derive(Debug)]
pub struct StorageError {
    pub kind: ErrorKind,
    pub source: Box<dyn Error + Send + Sync>,
}

impl StorageError {
    pub fn new(kind: ErrorKind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        StorageError { kind, source: source.into() }
    }
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

/// Has no `source()`, because its own text is that of the source.
impl Error for StorageError {}

impl From<NbdError> for StorageError {
    fn from(error: NbdError) -> Self {
        let kind = match error.kind {
            error::NbdErrorKind::Name => ErrorKind::Name,
            error::NbdErrorKind::ReadOnly => ErrorKind::ReadOnly,
            error::NbdErrorKind::Closed | error::NbdErrorKind::Silent | error::NbdErrorKind::Io => {
                ErrorKind::Unreachable
            }
            error::NbdErrorKind::Tls
            | error::NbdErrorKind::Refused
            | error::NbdErrorKind::Protocol
            | error::NbdErrorKind::Unsuitable => ErrorKind::Refused,
        };
        StorageError { kind, source: error.into() }
    }
}
