//! Image formats and their names. A format is told, or known by the file's name; never guessed from
//! what a guest wrote.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use blockyard_storage::scheme_of;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Raw,
    Qcow2,
    /// User Mode Linux's copy-on-write file.
    Cow,
}

impl Format {
    pub const NAMES: [(&str, Format); 3] =
        [("raw", Format::Raw), ("qcow2", Format::Qcow2), ("cow", Format::Cow)];

    /// What the file's name says; None: nothing that is known here (which does not make it raw).
    pub fn of_name(path: &Path) -> Option<Self> {
        // What a scheme opens is a disk, whatever it is called, unless somebody says otherwise.
        if scheme_of(path).is_some() {
            return Some(Format::Raw);
        }
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "qcow2" | "qcow" => Some(Format::Qcow2),
            "cow" => Some(Format::Cow),
            "raw" | "img" => Some(Format::Raw),
            _ => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            Self::NAMES.iter().find(|(_, format)| format == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// A name that is not among [`Format::NAMES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("format \"{0}\" is not known: it is one of raw, qcow2, cow")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(s: &str) -> Result<Self, UnknownFormat> {
        let known = Self::NAMES.iter().find(|(name, _)| *name == s);
        known.map(|(_, format)| *format).ok_or_else(|| UnknownFormat(s.into()))
    }
}
