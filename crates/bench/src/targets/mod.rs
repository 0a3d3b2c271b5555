//! Targets of single operations: a file, a block device, or a server.
//!
//! ```text
//!   file   files and block devices      vhost  a vhost-user-blk server
//!   nbd    an NBD server                guard  checks for data that would be lost
//! ```
//! In: a name. Out: a [`Target`]. What must hold: nothing is written before [`guard::check`],
//! except by option; an operation that moves fewer bytes than requested is an error.

mod file;
pub mod guard;
pub mod nbd;
mod vhost;

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use blockyard_nbd::uri::{self, Uri};

/// Size of a sector in bytes.
const SECTOR: u64 = 512;

/// A target of operations. Offsets and lengths are multiples of [`Target::block`], inside
/// [`Target::size`].
pub trait Target {
    /// Returns the size in bytes.
    fn size(&self) -> u64;
    /// Returns the alignment of offsets and lengths in bytes.
    fn block(&self) -> u64;
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()>;
    /// Writes at an offset. `durable`: the data are on stable storage when it returns.
    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()>;
}

/// Options to open a target.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub writes: bool,
    /// Whether each write is durable when it returns.
    pub durable: bool,
    /// Whether files and devices are opened with O_DIRECT.
    pub direct: bool,
    /// Size of the largest operation in bytes.
    pub largest: u64,
}

/// The address of a target as text.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetAddress {
    File(PathBuf),
    /// A vhost-user-blk server's socket.
    Vhost(PathBuf),
    Nbd(Uri),
}

impl TargetAddress {
    /// `nbd://HOST[:PORT][/EXPORT]`, `nbd+unix:///[EXPORT]?socket=PATH`, `vhost-user:SOCKET`, or a
    /// path. A socket counts as that of a vhost-user-blk server.
    pub fn parse(text: &str) -> Result<Self> {
        if uri::is_uri(text) || text.starts_with("nbd:") {
            return nbd::parse(text).map(TargetAddress::Nbd);
        }
        if let Some(path) = text.strip_prefix("vhost-user:") {
            return Ok(TargetAddress::Vhost(path.into()));
        }
        let is_socket = std::fs::metadata(text).is_ok_and(|m| m.file_type().is_socket());
        Ok(if is_socket {
            TargetAddress::Vhost(text.into())
        } else {
            TargetAddress::File(text.into())
        })
    }

    pub fn open(&self, access: Access) -> Result<Box<dyn Target>> {
        match self {
            TargetAddress::File(path) => {
                let file = file::File::open(path, access)
                    .with_context(|| format!("opening {}", path.display()))?;
                Ok(Box::new(file))
            }
            TargetAddress::Vhost(path) => {
                let vhost = vhost::Vhost::open(path, access);
                Ok(Box::new(
                    vhost.with_context(|| {
                        format!("the vhost-user-blk server at {}", path.display())
                    })?,
                ))
            }
            TargetAddress::Nbd(address) => {
                let nbd = nbd::Nbd::open(address, access);
                Ok(Box::new(nbd.with_context(|| format!("the NBD server at {address}"))?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_they_are_of() {
        assert_eq!(
            TargetAddress::parse("disk.img").unwrap(),
            TargetAddress::File("disk.img".into())
        );
        assert_eq!(
            TargetAddress::parse("vhost-user:/a:b").unwrap(),
            TargetAddress::Vhost("/a:b".into())
        );
        assert!(matches!(
            TargetAddress::parse("nbd://[::1]:10809/x").unwrap(),
            TargetAddress::Nbd(_)
        ));
        assert!(TargetAddress::parse("nbd+unix:///x").is_err(), "no socket");
    }
}
