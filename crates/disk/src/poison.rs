//! Why a disk cannot be used until its image is opened again.
//!
//! In: the failure that lost writes, or the image. Out: its text for operators, and its cause for
//! programs. What must hold: the reason stays the first one, and can be kept by several.

use std::io;
use std::sync::Arc;

/// A failure that may have lost acknowledged writes. The disk accepts no more writes.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{what} failed ({error}): writes acknowledged since the last successful flush may be lost, so \
     this disk accepts no more writes until its image is opened again"
)]
pub struct Poison {
    /// What has failed.
    pub what: &'static str,
    /// How it has failed. Its text is in the text of this error.
    pub error: Arc<io::Error>,
}

impl Poison {
    /// `error`: the caller keeps it, to answer a request with it.
    pub(crate) fn new(what: &'static str, error: &io::Error) -> Self {
        let copy = match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(error.kind(), error.to_string()),
        };
        Poison { what, error: Arc::new(copy) }
    }
}

/// A work that has lost the disk's image: every request fails.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the image could not be opened again after a {work}: {why}")]
pub struct LostImage {
    /// `commit` or `resize`.
    pub work: &'static str,
    /// Why it could not be opened. The caller of the work has the error itself.
    pub why: String,
}

/// Why a disk accepts no writes, or no requests.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unusable {
    #[error(transparent)]
    Poisoned(#[from] Poison),
    #[error(transparent)]
    Lost(#[from] LostImage),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_sees_what_has_failed_and_how() {
        let space = Poison::new("a flush", &io::Error::from_raw_os_error(28));
        assert_eq!((space.what, space.error.kind()), ("a flush", io::ErrorKind::StorageFull));
        assert_eq!(space.error.raw_os_error(), Some(28));
        let late = Poison::new("a flush", &io::Error::new(io::ErrorKind::TimedOut, "no answer"));
        assert_eq!(late.error.kind(), io::ErrorKind::TimedOut);
        assert!(late.to_string().starts_with("a flush failed (no answer): writes acknowledged"));
        let lost = LostImage { work: "commit", why: "it is locked".into() };
        let text = "the image could not be opened again after a commit: it is locked";
        assert_eq!(Unusable::from(lost).to_string(), text);
        assert_eq!(Unusable::from(late.clone()).to_string(), late.to_string());
    }
}
