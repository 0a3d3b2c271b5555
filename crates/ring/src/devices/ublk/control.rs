//! The control device, `/dev/ublk-control`: creates, changes and removes devices.
//!
//! In: a device's number, and a command. Out: the driver's result. Calls block, some until every
//! queue of the device has a server, or until nothing is in flight: never call them on a reactor's
//! thread.
//!
//! What must hold: the memory of a command stays alive until the kernel has completed it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use super::abi::{self, ControlCommand, DeviceInfo, Params, Plain};

const PATH: &str = "/dev/ublk-control";

/// The sysfs folder that lists the devices.
pub const CLASS: &str = "/sys/class/ublk-char";

/// Longest waits after a removal was requested: until the removed device is closed, and until it is
/// removed.
const CLOSED: Duration = Duration::from_secs(1);
const REMOVED: Duration = Duration::from_secs(5);
/// Time between two checks whether a wait for a removal must end.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the result to use instead of the driver's if the wait must end, else `None`.
type Enough<'a> = &'a dyn Fn() -> Option<io::Result<()>>;

/// A connection to the driver; see the module documentation.
pub struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: OwnedFd,
    /// Number of the last command that was submitted.
    last: u64,
}

/// Returns the path of a device's character device, through which it is served.
pub fn character_device(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// Returns the path of a device's block device.
pub fn block_device(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

fn open() -> io::Result<OwnedFd> {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(PATH, flags, rustix::fs::Mode::empty())?)
}

/// A lock on a device number while this process creates, takes over or removes the device. Other
/// Blockyard processes wait for the lock. It is an OFD lock on one byte of the control device,
/// which ends with this value, and with the process.
pub struct NumberLock {
    _file: OwnedFd,
}

impl NumberLock {
    /// Locks the number of a device. `None`: another process has locked it.
    pub fn try_new(id: u32) -> io::Result<Option<Self>> {
        let file = open()?;
        let locked = crate::files::host::set_lock(file.as_fd(), libc::F_WRLCK, id.into(), 1)?;
        Ok(locked.then_some(NumberLock { _file: file }))
    }
}

impl Control {
    /// Opens the control device.
    pub fn open() -> io::Result<Self> {
        let file = open()?;
        let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(4)?;
        Ok(Control { ring, file, last: 0 })
    }

    /// Returns the driver's features: `abi::F_...`. Drivers before Linux 6.5 do not know the
    /// command (`EOPNOTSUPP`), and most of them look for its device first (`ENODEV`).
    pub fn features(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.command(abi::GET_FEATURES, u32::MAX, 0, &mut bytes, None, None)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Creates a device as in `want` (number `u32::MAX`: any). Returns its actual description.
    pub fn add(&mut self, want: &DeviceInfo) -> io::Result<DeviceInfo> {
        let mut bytes = want.bytes().to_vec();
        self.command(abi::ADD_DEV, want.id, 0, &mut bytes, None, None)?;
        Ok(DeviceInfo::parse(&bytes))
    }

    /// Returns the description of a device.
    pub fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let mut bytes = DeviceInfo::default().bytes().to_vec();
        self.command(abi::GET_DEV_INFO2, id, 0, &mut bytes, Some(character_device(id)), None)?;
        Ok(DeviceInfo::parse(&bytes))
    }

    /// Returns the parameters of a device.
    pub fn params(&mut self, device: &DeviceInfo) -> io::Result<Params> {
        let params = Params { len: size_of::<Params>() as u32, ..Params::default() };
        let mut bytes = params.bytes().to_vec();
        self.command(abi::GET_PARAMS, device.id, 0, &mut bytes, path(device), None)?;
        Ok(Params::parse(&bytes))
    }

    /// Sets the parameters of a device, before it is started.
    pub fn set_params(&mut self, device: &DeviceInfo, params: &Params) -> io::Result<()> {
        let params = Params { len: size_of::<Params>() as u32, ..*params };
        let mut bytes = params.bytes().to_vec();
        self.command(abi::SET_PARAMS, device.id, 0, &mut bytes, path(device), None).map(|_| ())
    }

    /// Makes the block device appear, served by this process. Every queue must fetch already, or
    /// begin soon.
    pub fn start(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::START_DEV, device, u64::from(std::process::id()))
    }

    /// Stops the device. Even if it is open, it serves no more requests.
    pub fn stop(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::STOP_DEV, device, 0)
    }

    /// As [`Control::stop`], but `ResourceBusy` if the device is open. (Some drivers return EINVAL
    /// for an unprivileged device.)
    pub fn try_stop(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::TRY_STOP_DEV, device, 0)
    }

    /// Removes the device. Its number is free when no process has it open any more. This call does
    /// not wait for that, except for a second at most before Linux 6.7 and for unprivileged
    /// devices. `TimedOut`: the driver has not removed the device in time, and may do so later.
    pub fn delete(&mut self, device: &DeviceInfo) -> io::Result<()> {
        match self.plain(abi::DEL_DEV_ASYNC, device, 0) {
            // The driver returns EINVAL for an unprivileged device.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {}
            done => return done,
        }
        let (start, listed) =
            (Instant::now(), Path::new(CLASS).join(format!("ublkc{}", device.id)));
        // If sysfs does not list devices at all, only the elapsed time decides.
        let was_listed = listed.exists() || !Path::new(CLASS).exists();
        let enough = || removal_result(start.elapsed(), was_listed && !listed.exists());
        self.command(abi::DEL_DEV, device.id, 0, &mut [], path(device), Some(&enough)).map(|_| ())
    }

    /// Begins to take over a device after its server has died.
    pub fn start_recovery(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::START_USER_RECOVERY, device, 0)
    }

    /// Ends the takeover: this process serves the device now.
    pub fn end_recovery(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::END_USER_RECOVERY, device, u64::from(std::process::id()))
    }

    /// Detaches from the device as if its server had died, after its requests are complete, within
    /// `milliseconds`.
    pub fn quiesce(&mut self, device: &DeviceInfo, milliseconds: u64) -> io::Result<()> {
        self.plain(abi::QUIESCE_DEV, device, milliseconds)
    }

    /// Changes the size of a running device, in sectors of 512 bytes.
    pub fn update_size(&mut self, device: &DeviceInfo, sectors: u64) -> io::Result<()> {
        self.plain(abi::UPDATE_SIZE, device, sectors)
    }

    fn plain(&mut self, op: u32, device: &DeviceInfo, data: u64) -> io::Result<()> {
        self.command(op, device.id, data, &mut [], path(device), None).map(|_| ())
    }

    /// Runs a command. `bytes` go to the driver and come back. `path`: the device's path, which the
    /// driver expects before `bytes`. `enough`: decides when to stop waiting, and the result then.
    fn command(
        &mut self,
        op: u32,
        id: u32,
        data: u64,
        bytes: &mut [u8],
        path: Option<PathBuf>,
        enough: Option<Enough<'_>>,
    ) -> io::Result<i32> {
        let mut path = path.map(|p| p.into_os_string().into_encoded_bytes()).unwrap_or_default();
        if !path.is_empty() {
            path.push(0);
        }
        let path_len = path.len();
        let mut memory = path;
        memory.extend_from_slice(bytes);
        let command = ControlCommand {
            id,
            queue: u16::MAX,
            len: memory.len() as u16,
            addr: if memory.is_empty() { 0 } else { memory.as_mut_ptr() as u64 },
            data,
            path_len: path_len as u16,
            ..ControlCommand::default()
        };
        let mut cmd = [0; 80];
        cmd[..size_of::<ControlCommand>()].copy_from_slice(command.bytes());
        self.last += 1;
        let sqe = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), op)
            .cmd(cmd)
            .build()
            .user_data(self.last);
        // SAFETY: `memory`, to which the entry points, stays alive until the completion, or for
        // ever (below). The queue is empty, because each command is awaited.
        unsafe { self.ring.submission().push(&sqe) }.map_err(io::Error::other)?;
        let result = match self.wait(enough) {
            Ok(result) => result,
            Err(instead) => {
                // The kernel may still write to `memory`, so it is leaked.
                std::mem::forget(memory);
                return instead.map(|()| 0);
            }
        };
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        bytes.copy_from_slice(&memory[path_len..]);
        Ok(result)
    }

    /// Returns the driver's result of the last command; as the error, the result of `enough`.
    fn wait(&mut self, enough: Option<Enough<'_>>) -> Result<i32, io::Result<()>> {
        let interval = Timespec::new().nsec(CHECK_INTERVAL.subsec_nanos());
        let args = enough.iter().fold(SubmitArgs::new(), |args, _| args.timespec(&interval));
        loop {
            match self.ring.submitter().submit_with_args(1, &args) {
                Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::ETIME)) => {
                    return Err(Err(e));
                }
                _ => {}
            }
            // Skip the completions of earlier commands that this value no longer waited for.
            if let Some(cqe) = self.ring.completion().find(|cqe| cqe.user_data() == self.last) {
                return Ok(cqe.result());
            }
            if let Some(instead) = enough.and_then(|enough| enough()) {
                return Err(instead);
            }
        }
    }
}

/// Returns the result of a removal if the wait for it must end. A device that is no longer listed
/// is removed, and only waits to be closed.
fn removal_result(waited: Duration, unlisted: bool) -> Option<io::Result<()>> {
    if unlisted {
        return (waited >= CLOSED).then_some(Ok(()));
    }
    let why = || {
        format!(
            "the driver has not removed the device for {} s, and may do so later",
            REMOVED.as_secs()
        )
    };
    (waited >= REMOVED).then(|| Err(io::Error::new(io::ErrorKind::TimedOut, why())))
}

/// Returns the path that proves ownership of an unprivileged device: its owner may open the
/// character device.
fn path(device: &DeviceInfo) -> Option<PathBuf> {
    (device.flags & abi::F_UNPRIVILEGED_DEV != 0).then(|| character_device(device.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_succeeds_only_if_the_device_is_not_listed() {
        let waited = |ms, unlisted| {
            let result = removal_result(Duration::from_millis(ms), unlisted);
            result.map(|result| result.map_err(|e| e.kind()))
        };
        assert_eq!(waited(900, true), None);
        assert_eq!(waited(1000, true), Some(Ok(())));
        assert_eq!(waited(60_000, true), Some(Ok(())));
        assert_eq!(waited(4_900, false), None);
        assert_eq!(waited(5_000, false), Some(Err(io::ErrorKind::TimedOut)));
    }
}
