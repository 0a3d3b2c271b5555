//! Why a driver gives up: what it did, the kind of the failure, and its cause.

use std::error::Error as StdError;
use std::fmt;

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller wants what no ring, or this machine, can do.
    Usage,
    /// A system call or a socket has failed.
    System,
    /// The back end does not offer what the caller needs.
    NotOffered,
    /// The back end has refused a message.
    Refused,
    /// The back end has broken the protocol.
    Protocol,
    /// The back end has not answered in time.
    Late,
}

/// An error of a driver.
pub struct Error {
    kind: ErrorKind,
    /// What the driver did, or what is wrong. Empty: the source says it.
    what: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Error { kind, what: what.into(), source: None }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Changes the kind, because the caller knows the cause.
    pub(crate) fn of_kind(self, kind: ErrorKind) -> Self {
        Error { kind, ..self }
    }
}

impl fmt::Debug for Error {
    /// A test that unwraps the error shows all of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind)?;
        let mut source = self.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) if self.what.is_empty() => source.fmt(f),
            _ => f.write_str(&self.what),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.source.as_deref()?;
        // Its text is the text of this error.
        if self.what.is_empty() { source.source() } else { Some(source) }
    }
}

/// Errors that a driver meets, with their kinds.
macro_rules! sources {
    ($($source:ty => $kind:ident),* $(,)?) => {
        $(impl From<$source> for Error {
            fn from(source: $source) -> Self {
                let kind = ErrorKind::$kind;
                Error { kind, what: String::new(), source: Some(Box::new(source)) }
            }
        })*
    };
}
sources! {
    std::io::Error => System,
    rustix::io::Errno => System,
    blockyard_ring::MemoryError => System,
    blockyard_ring::xen::StoreError => System,
    vhost::Error => Protocol,
    vhost::vhost_user::Error => Protocol,
    std::array::TryFromSliceError => Protocol,
    std::num::ParseIntError => Protocol,
}

/// Adds to an error what the driver did.
pub(crate) trait Context<T> {
    fn context(self, what: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl Into<String>) -> Result<T> {
        self.map_err(|error| {
            let error = error.into();
            let kind = error.kind;
            // Without a text of its own the error is only its source.
            let source: Box<dyn StdError + Send + Sync> = match error {
                Error { what, source: Some(source), .. } if what.is_empty() => source,
                other => Box::new(other),
            };
            Error { kind, what: what.into(), source: Some(source) }
        })
    }
}

/// Returns from the function with an error of this kind, unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $kind:ident, $($what:tt)*) => {
        if !$condition {
            let kind = $crate::error::ErrorKind::$kind;
            return Err($crate::error::Error::new(kind, format!($($what)*)));
        }
    };
}
pub(crate) use ensure;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_sees_the_kind_the_context_and_the_source() {
        let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let error: Error = refused().into();
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::System, refused().to_string()));
        let error = Err::<(), _>(refused()).context("connecting").context("starting").unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::System, "starting".into()));
        let inner = error.source().unwrap();
        assert_eq!(inner.to_string(), "connecting");
        let cause = inner.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(cause.kind(), std::io::ErrorKind::ConnectionRefused);
        assert_eq!(format!("{error:?}"), format!("System: starting: connecting: {}", refused()));
    }

    #[test]
    fn what_is_wrong_has_no_source() {
        let check = |size: u32| -> Result<()> {
            ensure!(size > 0, Usage, "a ring of {size} entries");
            Ok(())
        };
        let error = check(0).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (ErrorKind::Usage, "a ring of 0 entries".into())
        );
        assert!(error.source().is_none() && check(1).is_ok());
    }
}
