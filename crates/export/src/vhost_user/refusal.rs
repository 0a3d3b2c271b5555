//! How a message is refused: towards the front end, and in the log.

use std::error::Error as Cause;
use std::fmt::{self, Display};

use vhost::vhost_user::Error;

/// Returns our own refusal, which the front end receives. The crate's errors come without an
/// answer.
pub fn no() -> Error {
    Error::ReqHandlerError(std::io::ErrorKind::InvalidInput.into())
}

/// An error and its causes on one line.
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
