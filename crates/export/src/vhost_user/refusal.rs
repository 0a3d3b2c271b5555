//! Refusals of messages, for the front end and for the log.

use std::error::Error as Cause;
use std::fmt::{self, Display};

use vhost::vhost_user::Error;

/// Returns an error that makes the `vhost` crate send a refusal to the front end. For its own
/// errors, the crate sends no answer.
pub fn no() -> Error {
    Error::ReqHandlerError(std::io::ErrorKind::InvalidInput.into())
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
