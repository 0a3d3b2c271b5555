//! The kernel's own NBD client, `/dev/nbdN`: a connected socket and an export's shape become a
//! block device.
//!
//! What must hold: the socket is past negotiation, with simple replies; whoever is in
//! [`NbdDevice::serve`] keeps the device, and when that ends there is none any more.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

const SET_SOCK: u64 = 0xab00;
const SET_BLKSIZE: u64 = 0xab01;
const DO_IT: u64 = 0xab03;
const CLEAR_SOCK: u64 = 0xab04;
const SET_SIZE_BLOCKS: u64 = 0xab07;
const DISCONNECT: u64 = 0xab08;
const SET_FLAGS: u64 = 0xab0a;

/// The block that requests are multiples of, in bytes.
pub const BLOCK: u64 = 512;

pub struct NbdDevice {
    file: OwnedFd,
    path: PathBuf,
}

impl NbdDevice {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())?;
        Ok(NbdDevice { file, path: path.into() })
    }

    /// The first device that nobody has, with `socket` and the export's size in bytes and flags.
    /// None: all are taken.
    pub fn attach(socket: impl AsFd, size: u64, flags: u16) -> io::Result<Option<Self>> {
        for number in 0..4096 {
            let path = PathBuf::from(format!("/dev/nbd{number}"));
            let device = match NbdDevice::open(&path) {
                Ok(device) => device,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(e) => return Err(e),
            };
            // A device that is set up by netlink, or is being set up, tells so.
            if Path::new(&format!("/sys/block/nbd{number}/pid")).exists() {
                continue;
            }
            match device.call(SET_SOCK, socket.as_fd().as_raw_fd() as u64) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EINVAL)) => continue,
                done => done?,
            };
            device.call(SET_BLKSIZE, BLOCK)?;
            device.call(SET_SIZE_BLOCKS, size / BLOCK)?;
            device.call(SET_FLAGS, flags.into())?;
            return Ok(Some(device));
        }
        Ok(None)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether [`NbdDevice::serve`], in another thread, has come as far as that requests are
    /// carried: the driver then tells who serves, and only after that how long the device is.
    pub fn is_up(path: &Path, size: u64) -> bool {
        let attributes = Path::new("/sys/block").join(path.file_name().unwrap_or_default());
        let sectors = std::fs::read_to_string(attributes.join("size"))
            .ok()
            .and_then(|text| text.trim().parse().ok());
        attributes.join("pid").exists() && sectors == Some(size / BLOCK)
    }

    /// Carries requests to the socket and back until the device is disconnected or the server is
    /// gone.
    pub fn serve(&self) -> io::Result<()> {
        let ended = self.call(DO_IT, 0);
        self.call(CLEAR_SOCK, 0)?;
        ended
    }

    /// What programs have written to the device is with its server, and durable there.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.file)?)
    }

    /// Ends it, wherever it is served. What was not synced before is lost.
    pub fn disconnect(&self) -> io::Result<()> {
        self.call(DISCONNECT, 0)
    }

    fn call(&self, request: u64, value: u64) -> io::Result<()> {
        // SAFETY: these requests take a number, and no pointer.
        let rc =
            unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, value as libc::c_ulong) };
        if rc >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
