//! What is measured, one operation at a time: a file, a block device, or the far end of a protocol.
//!
//! ```text
//!   file    files and block devices, by plain system calls       vhost   a vhost-user-blk server, as its driver
//!   nbd     an NBD server, as its client                         guard   whether there is something to be lost
//! ```
//! In: a name. Out: a [`Target`]. What must hold: nothing is written before [`guard::check`] has
//! seen it, or has an option not to look; an operation that did not move all its bytes is an error.

mod file;
pub mod guard;
mod nbd;
mod vhost;

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use blockyard_nbd::uri::{self, Uri};

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// Something that holds bytes. Offsets and lengths are multiples of [`Target::block`], inside
/// [`Target::size`].
pub trait Target {
    /// Bytes.
    fn size(&self) -> u64;
    /// Bytes that offsets and lengths must be multiples of.
    fn block(&self) -> u64;
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()>;
    /// `durable`: on stable storage when it answers.
    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()>;
}

/// How a target is opened.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub writes: bool,
    /// Each write is durable when it answers.
    pub durable: bool,
    /// Past the host's page cache (files and devices).
    pub direct: bool,
    /// The largest operation, in bytes.
    pub largest: u64,
}

/// Where a target is, as people write it.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    File(PathBuf),
    /// A vhost-user-blk server's socket.
    Vhost(PathBuf),
    Nbd(Uri),
}

impl Place {
    /// `nbd://HOST[:PORT][/EXPORT]`, `nbd+unix:///[EXPORT]?socket=PATH`, `vhost-user:SOCKET`, or a
    /// path: a socket is a vhost-user-blk server's.
    pub fn parse(text: &str) -> Result<Self> {
        if uri::is_uri(text) || text.starts_with("nbd:") {
            return nbd::parse(text).map(Place::Nbd);
        }
        if let Some(path) = text.strip_prefix("vhost-user:") {
            return Ok(Place::Vhost(path.into()));
        }
        let is_socket = std::fs::metadata(text).is_ok_and(|m| m.file_type().is_socket());
        Ok(if is_socket { Place::Vhost(text.into()) } else { Place::File(text.into()) })
    }

    pub fn open(&self, access: Access) -> Result<Box<dyn Target>> {
        match self {
            Place::File(path) => {
                let file = file::File::open(path, access)
                    .with_context(|| format!("opening {}", path.display()))?;
                Ok(Box::new(file))
            }
            Place::Vhost(path) => {
                let vhost = vhost::Vhost::open(path, access);
                Ok(Box::new(
                    vhost.with_context(|| {
                        format!("the vhost-user-blk server at {}", path.display())
                    })?,
                ))
            }
            Place::Nbd(address) => {
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
        assert_eq!(Place::parse("disk.img").unwrap(), Place::File("disk.img".into()));
        assert_eq!(Place::parse("vhost-user:/a:b").unwrap(), Place::Vhost("/a:b".into()));
        assert!(matches!(Place::parse("nbd://[::1]:10809/x").unwrap(), Place::Nbd(_)));
        assert!(Place::parse("nbd+unix:///x").is_err(), "no socket");
    }
}
