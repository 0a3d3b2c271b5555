//! Stops and removes devices.
//!
//! What must hold: a device that something uses is stopped only by force, or if it ends with its
//! server anyway.

use std::io;
use std::time::Duration;

use blockyard_ring::ublk::Control;
use blockyard_ring::ublk::abi::{self, DeviceInfo};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::{UblkError, takeover, users};

/// Removes a device, whichever process serves it. Returns that process, if there is one. `force`:
/// also if the device is in use.
pub fn remove(id: u32, force: bool) -> Result<Option<Pid>, UblkError> {
    let error = |what| move |source| UblkError::Device { id, what, source };
    let mut control = Control::open().map_err(UblkError::Control)?;
    // Of several that remove it at once, one does, and the others find nothing.
    let _lock = takeover::lock(id);
    let device = control.info(id).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::NODEV | Errno::NOENT) => UblkError::Missing { id },
        _ => error("asking what it is")(e),
    })?;
    if takeover::is_removed(&device) {
        return Err(UblkError::Missing { id });
    }
    let server = Pid::from_raw(device.server.max(0))
        .filter(|pid| test_kill_process(*pid) != Err(Errno::SRCH));
    let stopped = if force { control.stop(&device) } else { stop_unused(&mut control, &device) };
    match stopped.map_err(|e| (Errno::from_io_error(&e), e)) {
        // Never started, or stopped by another: there is no block device.
        Ok(()) | Err((Some(Errno::NODEV | Errno::NXIO | Errno::NOENT), _)) => {}
        Err((Some(Errno::BUSY), _)) => return Err(UblkError::InUse { id, by: by(id) }),
        Err((Some(Errno::ACCESS), _)) if !force => return Err(UblkError::Unseen { id }),
        Err((_, e)) => return Err(error("stopping it")(e)),
    }
    if is_left(&mut control, &device) {
        delete(&mut control, &device).map_err(error("removing it"))?;
    }
    Ok(server)
}

/// Removes a device whose image's path belongs to another file now, if nothing uses it. If
/// something does, it may have cached what the first file has.
pub(super) fn replace(control: &mut Control, device: &DeviceInfo) -> Result<(), UblkError> {
    let id = device.id;
    let error = |source| UblkError::Device {
        id,
        what: "removing it, because another file has the path of its image",
        source,
    };
    stop_unused(control, device).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::BUSY) => UblkError::OtherFile { id, by: by(id) },
        _ => error(e),
    })?;
    delete(control, device).map_err(error)
}

/// Names what has a device open, for a message; empty if that is not known.
pub(super) fn by(id: u32) -> String {
    users::find(id).map_or_else(String::new, |user| format!(" by {user}"))
}

/// Removes a device that was stopped. One that is still open goes when it is closed, which is not
/// waited for.
pub(super) fn delete(control: &mut Control, device: &DeviceInfo) -> io::Result<()> {
    match control.delete(device) {
        // Another process was faster.
        Err(e) if Errno::from_io_error(&e) != Some(Errno::NODEV) => Err(e),
        _ => Ok(()),
    }
}

/// Whether a device that was stopped is still there, and not another of the same number: the driver
/// removes any.
pub(super) fn is_left(control: &mut Control, device: &DeviceInfo) -> bool {
    control.info(device.id).is_ok_and(|info| info.note == device.note && info.state == abi::S_DEAD)
}

/// Stops a device if nothing uses it. `ResourceBusy`: something does. `PermissionDenied`: this
/// process cannot see that. Waits a second for udev, which may have it open for a moment.
pub(super) fn stop_unused(control: &mut Control, device: &DeviceInfo) -> io::Result<()> {
    let mut stop = || {
        if device.flags & abi::F_SAFE_STOP_DEV != 0 {
            let stopped = control.try_stop(device);
            // (EINVAL: some drivers do not know whether a user may.)
            if !matches!(&stopped, Err(e) if Errno::from_io_error(e) == Some(Errno::INVAL)) {
                return stopped;
            }
        }
        users::check_unused(device.id).and_then(|()| control.stop(device))
    };
    for _ in 0..20 {
        match stop() {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::BUSY) => {
                std::thread::sleep(Duration::from_millis(50))
            }
            done => return done,
        }
    }
    stop()
}
