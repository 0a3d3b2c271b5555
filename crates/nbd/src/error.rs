//! Errors of NBD connections and NBD URIs.

use std::error::Error;
use std::fmt;

/// The kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdErrorKind {
    /// The text is not an NBD URI.
    Name,
    /// Certificates, keys, or the TLS session.
    Tls,
    /// The peer closed the connection.
    Closed,
    /// The peer does not answer in time.
    Silent,
    /// The peer refuses the option or the export.
    Refused,
    /// The peer sends bytes that the protocol does not allow.
    Protocol,
    /// The export exists, but does not fit this side's needs.
    Unsuitable,
    /// The export can be read only.
    ReadOnly,
    /// The host failed to connect, read or write.
    Io,
}

/// An error of a connection or URI. It is displayed as `context: what is wrong`.
#[derive(Debug)]
pub struct NbdError {
    pub kind: NbdErrorKind,
    /// The object of the error: a URI, a certificate file, an export. Empty: the connection.
    pub context: String,
    pub what: String,
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl NbdError {
    pub fn new(kind: NbdErrorKind, what: impl Into<String>) -> Self {
        NbdError { kind, context: String::new(), what: what.into(), source: None }
    }

    pub fn protocol(what: impl Into<String>) -> Self {
        Self::new(NbdErrorKind::Protocol, what)
    }

    /// Creates an error with `source` as its cause.
    pub fn of(kind: NbdErrorKind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let source = source.into();
        NbdError { source: Some(source), ..Self::new(kind, "") }
    }

    /// Returns the same error with this context.
    pub fn about(self, context: impl Into<String>) -> Self {
        NbdError { context: context.into(), ..self }
    }
}

impl fmt::Display for NbdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.context.is_empty() {
            write!(f, "{}: ", self.context)?;
        }
        match &self.source {
            Some(source) if self.what.is_empty() => write!(f, "{source}"),
            _ => f.write_str(&self.what),
        }
    }
}

/// The error has no `source`, because its text includes the source's: logs print an error as one
/// line.
impl Error for NbdError {}
