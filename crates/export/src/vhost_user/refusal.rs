//! Refusals of messages, for the front end and for the log.

use std::error::Error as Cause;
use std::fmt::{self, Display};
use std::io;

use vhost::vhost_user::Error;

/// What a session cannot use, because the front end has made it unusable: memory that cannot be
/// mapped, or a ring that cannot start. Another server could not use it either.
#[derive(Debug, thiserror::Error)]
#[error("what it shares cannot be used: {0}")]
pub struct Unusable(String);

/// Returns an error that makes the `vhost` crate send a refusal to the front end. For its own
/// errors, the crate sends no answer.
pub fn no() -> Error {
    Error::ReqHandlerError(io::ErrorKind::InvalidInput.into())
}

/// As [`no`], for what the front end has made unusable.
pub fn unusable(what: impl Display) -> Error {
    Error::ReqHandlerError(io::Error::other(Unusable(what.to_string())))
}

/// Returns what the front end has made unusable, if that is the reason of an error.
pub fn as_unusable(error: &Error) -> Option<&Unusable> {
    match error {
        Error::ReqHandlerError(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// Displays an error and its causes on one line.
pub struct Causes<'a>(pub &'a dyn Cause);

impl Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self.0, f)?;
        match self.0.source() {
            Some(cause) => write!(f, ": {}", Causes(cause)),
            None => Ok(()),
        }
    }
}
