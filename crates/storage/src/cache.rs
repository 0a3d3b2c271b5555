//! Cache modes, with QEMU's names and meanings (qemu(1), `-drive cache=`).

use std::fmt;
use std::str::FromStr;

/// |              | host page cache | guest sees write-back | flush reaches the disk |
/// |--------------|-----------------|-----------------------|------------------------|
/// | none         | no (O_DIRECT)   | yes                   | yes                    |
/// | writeback    | yes             | yes                   | yes                    |
/// | writethrough | yes             | no: every write is durable | not needed        |
/// | directsync   | no (O_DIRECT)   | no: every write is durable | not needed        |
/// | unsafe       | yes             | yes                   | **never**              |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheMode {
    #[default]
    None,
    Writeback,
    Writethrough,
    Directsync,
    Unsafe,
}

impl CacheMode {
    /// All modes with their names.
    pub const NAMES: [(&str, CacheMode); 5] = [
        ("none", CacheMode::None),
        ("writeback", CacheMode::Writeback),
        ("writethrough", CacheMode::Writethrough),
        ("directsync", CacheMode::Directsync),
        ("unsafe", CacheMode::Unsafe),
    ];

    /// Returns whether the mode bypasses the host's page cache.
    pub fn direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::Directsync)
    }

    /// Returns whether a guest initially sees a volatile write cache. The guest may switch it if
    /// its protocol allows that.
    pub fn write_back(self) -> bool {
        !matches!(self, CacheMode::Writethrough | CacheMode::Directsync)
    }

    /// Returns whether flushes succeed without any effect.
    pub fn ignores_flush(self) -> bool {
        self == CacheMode::Unsafe
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, mode)| mode == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// Error for a name that is not among [`CacheMode::NAMES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cache mode \"{0}\" is not known: use one of none, \
     writeback, writethrough, directsync, unsafe"
)]
pub struct UnknownCacheMode(pub String);

impl FromStr for CacheMode {
    type Err = UnknownCacheMode;

    fn from_str(s: &str) -> Result<Self, UnknownCacheMode> {
        let known = Self::NAMES.iter().find(|(name, _)| *name == s);
        known.map(|(_, mode)| *mode).ok_or_else(|| UnknownCacheMode(s.into()))
    }
}
