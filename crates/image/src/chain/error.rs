//! Error of opening a chain.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use blockyard_ring::text::clean;
use blockyard_storage::OpenError;

use crate::error::ImageError;

/// What a file is to the image that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Backing,
    Data,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Backing => "backing file",
            Role::Data => "data file",
        })
    }
}

/// Returns a text that an image contains, without control characters. They could change lines that
/// a terminal has shown, or look like another line of a log.
fn shown(text: &str) -> String {
    clean(text)
}

/// The cause of an error, for callers that need more than its text.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Error of opening a chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("image {}: {error}", path.display())]
    Image { path: PathBuf, error: ImageError },
    #[error(
        "image {}: its name does not give its format: pass --format raw, qcow2 or cow",
        path.display()
    )]
    Format { path: PathBuf },
    /// The image that the caller names cannot be opened by this name. `what` contains the text of
    /// `cause`.
    #[error("image {}: {what}", path.display())]
    Name { path: PathBuf, what: String, cause: Option<Cause> },
    /// `what` contains the text of `cause`.
    #[error("image {}: its {role} {}: {}", path.display(), shown(name), shown(what))]
    Named { path: PathBuf, role: Role, name: String, what: String, cause: Option<Cause> },
    /// The file exists, but lies outside the folders in which images may name files.
    #[error(
        "image {}: its {role} {}: {} lies outside {allowed}: pass --backing-folder to allow its \
         folder",
        path.display(),
        shown(name),
        shown(&real.display().to_string())
    )]
    Outside { path: PathBuf, role: Role, name: String, real: PathBuf, allowed: String },
    #[error("starting io_uring")]
    Executor(#[source] std::io::Error),
}
