//! Image formats and their names. A format is given, or derived from the file's name. It is never
//! probed from the contents, because a guest can write these.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use blockyard_storage::scheme_of;

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    Raw,
    Qcow2,
    /// Copy-on-write file of User Mode Linux.
    Cow,
}

impl Format {
    /// Names of the formats in options.
    pub const NAMES: [(&str, Format); 3] =
        [("raw", Format::Raw), ("qcow2", Format::Qcow2), ("cow", Format::Cow)];

    /// Returns the format by the file's name. None: the name does not give one (which does not mean
    /// raw).
    pub fn of_name(path: &Path) -> Option<Self> {
        // An image that a scheme opens (NBD) is raw, whatever its name, unless a format is given.
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

/// A name that is not in [`Format::NAMES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("format \"{0}\" is not known: use raw, qcow2 or cow")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(s: &str) -> Result<Self, UnknownFormat> {
        let known = Self::NAMES.iter().find(|(name, _)| *name == s);
        known.map(|(_, format)| *format).ok_or_else(|| UnknownFormat(s.into()))
    }
}
