//! The kernel's NBD client, `/dev/nbdN`: turns a connected socket into a block device.
//!
//! What must hold: negotiation on the socket is complete, with simple replies. The device exists as
//! long as [`NbdDevice::serve`] runs.

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

/// The requests of `ioctl` that this module makes.
pub(crate) const REQUESTS: [u64; 7] =
    [SET_SOCK, SET_BLKSIZE, DO_IT, CLEAR_SOCK, SET_SIZE_BLOCKS, DISCONNECT, SET_FLAGS];

/// Logical block size in bytes.
pub const BLOCK: u64 = 512;

/// An open `/dev/nbdN`.
pub struct NbdDevice {
    file: OwnedFd,
    path: PathBuf,
}

impl NbdDevice {
    /// Opens a device by its path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())?;
        Ok(NbdDevice { file, path: path.into() })
    }

    /// Attaches `socket` to the first free device, with the export's size in bytes and its flags.
    /// `None`: all devices are in use.
    pub fn attach(socket: impl AsFd, size: u64, flags: u16) -> io::Result<Option<Self>> {
        for number in 0..4096 {
            let path = PathBuf::from(format!("/dev/nbd{number}"));
            let device = match NbdDevice::open(&path) {
                Ok(device) => device,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(e) => return Err(e),
            };
            // A device that is configured by netlink, or is being configured, has this file.
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

    /// Returns the path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether [`NbdDevice::serve`], in another thread, already forwards requests. The
    /// driver first publishes the pid, and then the size of the device.
    pub fn is_up(path: &Path, size: u64) -> bool {
        let attributes = Path::new("/sys/block").join(path.file_name().unwrap_or_default());
        let sectors = std::fs::read_to_string(attributes.join("size"))
            .ok()
            .and_then(|text| text.trim().parse().ok());
        attributes.join("pid").exists() && sectors == Some(size / BLOCK)
    }

    /// Forwards requests to the socket, and replies back, until the device is disconnected or the
    /// server is gone.
    pub fn serve(&self) -> io::Result<()> {
        let ended = self.call(DO_IT, 0);
        self.call(CLEAR_SOCK, 0)?;
        ended
    }

    /// Syncs the device: all data written to it is then durable on its server.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.file)?)
    }

    /// Disconnects the device, whichever process serves it. Data that was not synced is lost.
    pub fn disconnect(&self) -> io::Result<()> {
        self.call(DISCONNECT, 0)
    }

    /// Disconnects the device at once, also if its server does not answer. Requests in flight fail.
    pub fn abort(&self) -> io::Result<()> {
        self.call(CLEAR_SOCK, 0)
    }

    fn call(&self, request: u64, value: u64) -> io::Result<()> {
        // SAFETY: these requests take a number, not a pointer.
        let rc =
            unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, value as libc::c_ulong) };
        if rc >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
