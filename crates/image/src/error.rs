//! Error of an image, for all formats. It names the structure and its offset, so that a person or
//! another tool can examine the bytes.

use std::error::Error;
use std::fmt;
use std::io;

/// Kinds of errors that callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The bytes violate the format.
    Invalid,
    /// Valid, but not supported by this program (encryption, an unknown feature).
    Unsupported,
    /// The request is impossible (a size too large, a missing snapshot).
    Refused,
    /// The host failed to read or write.
    Io,
}

/// Displayed as `qcow2 L1 table entry 7 at offset 196664: what is wrong`.
#[derive(Debug)]
pub struct ImageError {
    pub kind: ErrorKind,
    /// Name of the structure, with the format: "qcow2 header", "cow bitmap".
    pub structure: String,
    /// Offset of the structure in its file, in bytes.
    pub offset: Option<u64>,
    pub what: String,
    /// The cause. `what` contains its text.
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl ImageError {
    /// Creates an error of this kind about a structure. `offset`: the structure's offset in its
    /// file, in bytes.
    pub fn new(
        kind: ErrorKind,
        structure: impl Into<String>,
        offset: impl Into<Option<u64>>,
        what: impl Into<String>,
    ) -> Self {
        ImageError {
            kind,
            structure: structure.into(),
            offset: offset.into(),
            what: what.into(),
            source: None,
        }
    }

    /// Creates an error: the bytes violate the format.
    pub fn invalid(
        structure: impl Into<String>,
        offset: impl Into<Option<u64>>,
        what: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Invalid, structure, offset, what)
    }

    /// Creates an error: this program does not support what the structure asks for.
    pub fn unsupported(structure: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, structure, None, what)
    }

    /// Creates an error: the request is impossible.
    pub fn refused(structure: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, structure, None, what)
    }

    /// Creates an error of the host. `operation`: what was tried, such as "reading".
    pub fn io(
        structure: impl Into<String>,
        offset: impl Into<Option<u64>>,
        operation: &str,
        source: io::Error,
    ) -> Self {
        // An `ImageError` inside an `io::Error` is not wrapped again.
        match source.downcast::<ImageError>() {
            Ok(inner) => inner,
            Err(source) => {
                let what = format!("{operation}: {source}");
                ImageError {
                    source: Some(source.into()),
                    ..Self::new(ErrorKind::Io, structure, offset, what)
                }
            }
        }
    }

    /// Returns the same error with this cause. `what` contains the text of the cause.
    pub fn with_source(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        ImageError { source: Some(source.into()), ..self }
    }

    /// Returns the cause if it is an error of the host.
    pub fn io_source(&self) -> Option<&io::Error> {
        self.source.as_ref()?.downcast_ref()
    }
}

/// Returns whether the host refused the operation because its file system, or the server's quota,
/// is full. A file that would be too large is no such case: free space does not help.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.structure)?;
        if let Some(offset) = self.offset {
            write!(f, " at offset {offset}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// No source: the text contains it, and errors are printed as one line with all their sources.
impl Error for ImageError {}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> Self {
        let kind = match (error.io_source(), error.kind) {
            (Some(source), _) => source.kind(),
            (None, ErrorKind::Unsupported) => io::ErrorKind::Unsupported,
            (None, ErrorKind::Refused) => io::ErrorKind::InvalidInput,
            (None, _) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    }
}
