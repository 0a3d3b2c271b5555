//! Why a storage that a scheme names cannot be opened, or its name is wrong: one error for all
//! schemes.

use std::error::Error;
use std::fmt;

use blockyard_nbd::{NbdError, error};

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The name is not of its scheme's form.
    Name,
    /// It is there, and can be opened for reading.
    ReadOnly,
    /// It cannot be reached.
    Unreachable,
    /// It is not what was asked for, or refuses to be used.
    Refused,
}

/// Displayed as its source.
#[derive(Debug)]
pub struct StorageError {
    pub kind: ErrorKind,
    pub source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

/// Without a source: the text is the source's already.
impl Error for StorageError {}

impl From<NbdError> for StorageError {
    fn from(error: NbdError) -> Self {
        let kind = match error.kind {
            error::Kind::Name => ErrorKind::Name,
            error::Kind::ReadOnly => ErrorKind::ReadOnly,
            error::Kind::Closed | error::Kind::Silent | error::Kind::Io => ErrorKind::Unreachable,
            error::Kind::Tls
            | error::Kind::Refused
            | error::Kind::Protocol
            | error::Kind::Unsuitable => ErrorKind::Refused,
        };
        StorageError { kind, source: error.into() }
    }
}
