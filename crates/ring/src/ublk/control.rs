//! The control device, `/dev/ublk-control`: makes, changes and removes devices.
//!
//! In: a device's number and what to do with it. Out: what the driver answers. Calls block, some
//! until every queue of the device has a server, or until nothing is in flight: not for a reactor's
//! thread. What must hold: the memory of a command stays until the kernel has answered it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use super::abi::{self, ControlCommand, DeviceInfo, Params, Plain};

const PATH: &str = "/dev/ublk-control";

/// Where the kernel lists the devices that it has.
pub const CLASS: &str = "/sys/class/ublk-char";

/// How long it is waited for that a device is closed that was removed, and for its removal.
const CLOSED: Duration = Duration::from_secs(1);
const REMOVED: Duration = Duration::from_secs(5);
/// How often it is looked, meanwhile, whether that was long enough.
const LOOK: Duration = Duration::from_millis(100);

/// Says when an answer is not waited for any more, and what is said instead.
type Enough<'a> = &'a dyn Fn() -> Option<io::Result<()>>;

/// The way to the driver. See the module's page.
pub struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: OwnedFd,
    /// The number of the last command.
    last: u64,
}

/// The character device of a device, by which it is served.
pub fn character_device(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// The block device that it is.
pub fn block_device(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

fn open() -> io::Result<OwnedFd> {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(PATH, flags, rustix::fs::Mode::empty())?)
}

/// A device number that this process makes, takes over or removes a device of. Other processes of
/// this program wait meanwhile. (An OFD lock on one byte of the control device: it ends with this
/// value, and with the process.)
pub struct NumberLock {
    _file: OwnedFd,
}

impl NumberLock {
    /// Locks the number of a device; `None` if another process has it locked.
    pub fn try_new(id: u32) -> io::Result<Option<Self>> {
        let file = open()?;
        let locked = crate::host::set_lock(file.as_fd(), libc::F_WRLCK, id.into(), 1)?;
        Ok(locked.then_some(NumberLock { _file: file }))
    }
}

impl Control {
    pub fn open() -> io::Result<Self> {
        let file = open()?;
        let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(4)?;
        Ok(Control { ring, file, last: 0 })
    }

    /// What the driver can do: `abi::F_...`.
    pub fn features(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        match self.command(abi::GET_FEATURES, u32::MAX, 0, &mut bytes, None, None) {
            Ok(_) => Ok(u64::from_ne_bytes(bytes)),
            // Before 6.5 nobody could ask.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Makes a device as `want` describes it (number `u32::MAX`: any); what it has become.
    pub fn add(&mut self, want: &DeviceInfo) -> io::Result<DeviceInfo> {
        let mut bytes = want.bytes().to_vec();
        self.command(abi::ADD_DEV, want.id, 0, &mut bytes, None, None)?;
        Ok(DeviceInfo::parse(&bytes))
    }

    pub fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let mut bytes = DeviceInfo::default().bytes().to_vec();
        self.command(abi::GET_DEV_INFO2, id, 0, &mut bytes, Some(character_device(id)), None)?;
        Ok(DeviceInfo::parse(&bytes))
    }

    pub fn params(&mut self, device: &DeviceInfo) -> io::Result<Params> {
        let params = Params { len: size_of::<Params>() as u32, ..Params::default() };
        let mut bytes = params.bytes().to_vec();
        self.command(abi::GET_PARAMS, device.id, 0, &mut bytes, path(device), None)?;
        Ok(Params::parse(&bytes))
    }

    pub fn set_params(&mut self, device: &DeviceInfo, params: &Params) -> io::Result<()> {
        let params = Params { len: size_of::<Params>() as u32, ..*params };
        let mut bytes = params.bytes().to_vec();
        self.command(abi::SET_PARAMS, device.id, 0, &mut bytes, path(device), None).map(|_| ())
    }

    /// Shows the block device, served by this process. Every queue has begun to fetch, or is about
    /// to.
    pub fn start(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::START_DEV, device, u64::from(std::process::id()))
    }

    /// Ends it: open or not, it answers nothing any more.
    pub fn stop(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::STOP_DEV, device, 0)
    }

    /// The same, unless somebody has it open: `ResourceBusy`. (EINVAL for a user's own device, by
    /// some drivers.)
    pub fn try_stop(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::TRY_STOP_DEV, device, 0)
    }

    /// Removes it; its number is free when nobody has it open any more, which is not waited for (a
    /// second at most before Linux 6.7, and of a user's own). `TimedOut`: the driver has not
    /// removed it in time, and may do it yet.
    pub fn delete(&mut self, device: &DeviceInfo) -> io::Result<()> {
        match self.plain(abi::DEL_DEV_ASYNC, device, 0) {
            // (EINVAL: for a user's own device.)
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {}
            done => return done,
        }
        let (start, listed) =
            (Instant::now(), Path::new(CLASS).join(format!("ublkc{}", device.id)));
        // (Where devices are not listed at all there is nothing to go by but the time.)
        let was_listed = listed.exists() || !Path::new(CLASS).exists();
        let enough = || has_waited(start.elapsed(), was_listed && !listed.exists());
        self.command(abi::DEL_DEV, device.id, 0, &mut [], path(device), Some(&enough)).map(|_| ())
    }

    /// Takes a device over whose server has died.
    pub fn start_recovery(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::START_USER_RECOVERY, device, 0)
    }

    /// It is served again, by this process.
    pub fn end_recovery(&mut self, device: &DeviceInfo) -> io::Result<()> {
        self.plain(abi::END_USER_RECOVERY, device, u64::from(std::process::id()))
    }

    /// Lets go of the device as if its server had died, when it has answered what it has, within
    /// `milliseconds`.
    pub fn quiesce(&mut self, device: &DeviceInfo, milliseconds: u64) -> io::Result<()> {
        self.plain(abi::QUIESCE_DEV, device, milliseconds)
    }

    pub fn update_size(&mut self, device: &DeviceInfo, sectors: u64) -> io::Result<()> {
        self.plain(abi::UPDATE_SIZE, device, sectors)
    }

    fn plain(&mut self, op: u32, device: &DeviceInfo, data: u64) -> io::Result<()> {
        self.command(op, device.id, data, &mut [], path(device), None).map(|_| ())
    }

    /// `bytes` go to the driver and come back; `path`: it asks for the device's path before them.
    /// `enough`: when its answer is not waited for any more, and what is said instead.
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
        // SAFETY: `memory`, to which the entry points, stays until the completion has come, or for
        // ever (below); the queue is empty, for each command is waited for.
        unsafe { self.ring.submission().push(&sqe) }.map_err(io::Error::other)?;
        let result = match self.wait(enough) {
            Ok(result) => result,
            Err(instead) => {
                // The kernel may still write to it.
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

    /// The answer to the last command; the error is what `enough` says instead of it.
    fn wait(&mut self, enough: Option<Enough<'_>>) -> Result<i32, io::Result<()>> {
        let look = Timespec::new().nsec(LOOK.subsec_nanos());
        let args = enough.iter().fold(SubmitArgs::new(), |args, _| args.timespec(&look));
        loop {
            match self.ring.submitter().submit_with_args(1, &args) {
                Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::ETIME)) => {
                    return Err(Err(e));
                }
                _ => {}
            }
            // (One before it may have been given up.)
            if let Some(cqe) = self.ring.completion().find(|cqe| cqe.user_data() == self.last) {
                return Ok(cqe.result());
            }
            if let Some(instead) = enough.and_then(|enough| enough()) {
                return Err(instead);
            }
        }
    }
}

/// Whether a removal that the driver has not answered is waited for any more: one that is out of
/// sight is done but for those who have it open.
fn has_waited(waited: Duration, out_of_sight: bool) -> Option<io::Result<()>> {
    if out_of_sight {
        return (waited >= CLOSED).then_some(Ok(()));
    }
    let why =
        || format!("the driver has not removed it for {} s, and may do it yet", REMOVED.as_secs());
    (waited >= REMOVED).then(|| Err(io::Error::new(io::ErrorKind::TimedOut, why())))
}

/// The owner of a device that anybody may make is known by the right to open its character device.
fn path(device: &DeviceInfo) -> Option<PathBuf> {
    (device.flags & abi::F_UNPRIVILEGED_DEV != 0).then(|| character_device(device.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_done_when_it_is_out_of_sight_and_no_time_makes_it_so() {
        let waited = |ms, out_of_sight| {
            let said = has_waited(Duration::from_millis(ms), out_of_sight);
            said.map(|said| said.map_err(|e| e.kind()))
        };
        assert_eq!(waited(900, true), None);
        assert_eq!(waited(1000, true), Some(Ok(())));
        assert_eq!(waited(60_000, true), Some(Ok(())));
        assert_eq!(waited(4_900, false), None);
        assert_eq!(waited(5_000, false), Some(Err(io::ErrorKind::TimedOut)));
    }
}
