//! What is wrong with an image: one error for all formats. It names the structure and where it
//! lies, so that a person (or another tool) can look at the very bytes.

use std::fmt;
use std::io;

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The bytes are not what the format allows.
    Invalid,
    /// They are, but this program does not do that (encryption, an unknown feature).
    Unsupported,
    /// The caller asked for what cannot be (a size too large, a snapshot that is not there).
    Refused,
    /// The host failed to read or write.
    Io,
}

/// Displayed as `qcow2 L1 table entry 7 at offset 196664: what is wrong`.
#[derive(Debug)]
pub struct ImageError {
    pub kind: ErrorKind,
    /// The structure, with the format's name: "qcow2 header", "cow bitmap".
    pub structure: String,
    /// Where it lies in its file, in bytes.
    pub offset: Option<u64>,
    pub what: String,
    pub source: Option<io::Error>,
}

impl ImageError {
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

    pub fn invalid(
        structure: impl Into<String>,
        offset: impl Into<Option<u64>>,
        what: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Invalid, structure, offset, what)
    }

    pub fn unsupported(structure: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, structure, None, what)
    }

    pub fn refused(structure: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, structure, None, what)
    }

    /// `operation`: what was tried, such as "reading".
    pub fn io(
        structure: impl Into<String>,
        offset: impl Into<Option<u64>>,
        operation: &str,
        source: io::Error,
    ) -> Self {
        // One that went through `io::Error` on its way is not wrapped again.
        match source.downcast::<ImageError>() {
            Ok(inner) => inner,
            Err(source) => {
                let what = format!("{operation}: {source}");
                ImageError {
                    source: Some(source),
                    ..Self::new(ErrorKind::Io, structure, offset, what)
                }
            }
        }
    }
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

/// Without a source: the text has it already, and errors are told as one line of all of them.
impl std::error::Error for ImageError {}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> Self {
        let kind = match (&error.source, error.kind) {
            (Some(source), _) => source.kind(),
            (None, ErrorKind::Unsupported) => io::ErrorKind::Unsupported,
            (None, ErrorKind::Refused) => io::ErrorKind::InvalidInput,
            (None, _) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    }
}
