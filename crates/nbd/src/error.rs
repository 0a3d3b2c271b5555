//! What went wrong with an NBD peer, or with what names it.

use std::error::Error;
use std::fmt;

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The text is no NBD URI.
    Name,
    /// Certificates, keys, or the TLS session.
    Tls,
    /// The peer closed the connection.
    Closed,
    /// The peer does not answer in time.
    Silent,
    /// The peer refuses what was asked for.
    Refused,
    /// The peer's bytes are not what the protocol allows.
    Protocol,
    /// The export exists, but is not what this side needs.
    Unsuitable,
    /// The export can be read only.
    ReadOnly,
    /// The host failed to connect, read or write.
    Io,
}

/// Displayed as `context: what is wrong`.
#[derive(Debug)]
pub struct NbdError {
    pub kind: Kind,
    /// What it is about: a URI, a file of certificates, an export; empty: the connection.
    pub context: String,
    pub what: String,
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl NbdError {
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        NbdError { kind, context: String::new(), what: what.into(), source: None }
    }

    pub fn protocol(what: impl Into<String>) -> Self {
        Self::new(Kind::Protocol, what)
    }

    /// `source` is what is wrong.
    pub fn of(kind: Kind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let source = source.into();
        NbdError { source: Some(source), ..Self::new(kind, "") }
    }

    /// The same, about this.
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

/// Without a source: the text has it already, and errors are told as one line of all of them.
impl Error for NbdError {}
