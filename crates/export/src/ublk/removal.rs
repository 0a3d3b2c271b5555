//! Stops and removes devices.
//!
//! What must hold: a device that is in use is stopped only by force, or if it would end with its
//! server anyway.

use std::io;
use std::time::Duration;

use blockyard_ring::ublk::Control;
use blockyard_ring::ublk::abi::{self, DeviceInfo};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::{UblkError, UblkOptions, takeover, users};

/// How long the removal by another process may take. It waits for udev, and for the server.
const OTHERS: Duration = Duration::from_secs(30);

/// Removes a device, even if another process serves it. `force`: remove the device even if it is in
/// use. Calls `watch` before the device is stopped, with the process that serves it, if there is
/// one. Returns what `watch` returned.
pub fn remove<T>(
    id: u32,
    force: bool,
    watch: impl FnOnce(Option<Pid>) -> T,
) -> Result<T, UblkError> {
    let error = |what| move |source| UblkError::Device { id, what, source };
    let mut control = Control::open().map_err(UblkError::Control)?;
    // If several processes remove a device at once, the first one succeeds, and the others find no
    // device.
    let _lock = takeover::lock_within(id, OTHERS);
    let device = control.info(id).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::NODEV | Errno::NOENT) => UblkError::Missing { id },
        _ => error("cannot read its state")(e),
    })?;
    if takeover::is_removed(&device) {
        return Err(UblkError::Missing { id });
    }
    let server = Pid::from_raw(device.server.max(0))
        .filter(|pid| test_kill_process(*pid) != Err(Errno::SRCH));
    let server = watch(server);
    let stopped = if force { control.stop(&device) } else { stop_unused(&mut control, &device) };
    match stopped.map_err(|e| (Errno::from_io_error(&e), e)) {
        // The device was never started, or another process has stopped it. In both cases no block
        // device exists.
        Ok(()) | Err((Some(Errno::NODEV | Errno::NXIO | Errno::NOENT), _)) => {}
        Err((Some(Errno::BUSY), _)) => return Err(in_use(&mut control, id)),
        Err((Some(Errno::ACCESS), _)) if !force => return Err(UblkError::Unseen { id }),
        Err((_, e)) => return Err(error("cannot stop it")(e)),
    }
    if is_left(&mut control, &device) {
        delete(&mut control, &device).map_err(error("cannot remove it"))?;
    }
    Ok(server)
}

/// Removes the device that a dead server of a disk left, if it is not in use. Returns its number,
/// or `None` if there is no such device.
pub fn remove_left(options: &UblkOptions) -> Result<Option<u32>, UblkError> {
    let mut control = Control::open().map_err(UblkError::Control)?;
    let (left, _lock) = takeover::find(&mut control, options)?;
    let Some(device) = left else { return Ok(None) };
    let id = device.id;
    stop_unused(&mut control, &device).map_err(|source| match Errno::from_io_error(&source) {
        Some(Errno::BUSY) => in_use(&mut control, id),
        _ => UblkError::Device { id, what: "cannot stop it", source },
    })?;
    let deleted = delete(&mut control, &device);
    deleted.map_err(|source| UblkError::Device { id, what: "cannot remove it", source })?;
    Ok(Some(id))
}

/// Removes a device if the path of its image now belongs to another file. Fails if the device is in
/// use, because its users may have cached data of the old file.
pub(super) fn replace(control: &mut Control, device: &DeviceInfo) -> Result<(), UblkError> {
    let id = device.id;
    let error = |source| UblkError::Device {
        id,
        what: "cannot remove it (another file has the path of its image)",
        source,
    };
    stop_unused(control, device).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::BUSY) => UblkError::OtherFile { id, by: by(id) },
        _ => error(e),
    })?;
    delete(control, device).map_err(error)
}

fn in_use(control: &mut Control, id: u32) -> UblkError {
    match users::find(id) {
        None if is_waiting(control, id) => UblkError::Waiting { id },
        user => {
            UblkError::InUse { id, by: user.map_or_else(String::new, |user| format!(" by {user}")) }
        }
    }
}

/// Returns ` by USER`, where USER has the device open, or an empty string if USER is not known.
pub(super) fn by(id: u32) -> String {
    users::find(id).map_or_else(String::new, |user| format!(" by {user}"))
}

/// Removes a stopped device. If the device is still open, it disappears when it is closed. This
/// function does not wait for that.
pub(super) fn delete(control: &mut Control, device: &DeviceInfo) -> io::Result<()> {
    match control.delete(device) {
        // NODEV: another process has removed the device first.
        Err(e) if Errno::from_io_error(&e) != Some(Errno::NODEV) => Err(e),
        _ => Ok(()),
    }
}

/// Returns whether the stopped device still exists. The device that has this number now may be a
/// different one, which must not be removed.
pub(super) fn is_left(control: &mut Control, device: &DeviceInfo) -> bool {
    control.info(device.id).is_ok_and(|info| info.note == device.note && info.state == abi::S_DEAD)
}

/// Returns whether the device has no server and has requests that wait for one. If its server was
/// killed while the kernel read the partitions, each check of its use would block until it has a
/// server again.
fn is_waiting(control: &mut Control, id: u32) -> bool {
    control.info(id).is_ok_and(|info| info.state == abi::S_QUIESCED)
        && users::requests_in_flight(id)
}

/// Stops a device if it is not in use. Returns `ResourceBusy` if it is in use, and
/// `PermissionDenied` if this process cannot check that. Waits up to a second for udev, which may
/// have the device open for a moment.
pub(super) fn stop_unused(control: &mut Control, device: &DeviceInfo) -> io::Result<()> {
    let mut stop = || {
        if is_waiting(control, device.id) {
            return Err(Errno::BUSY.into());
        }
        if device.flags & abi::F_SAFE_STOP_DEV != 0 {
            let stopped = control.try_stop(device);
            // EINVAL: some drivers cannot check the use for a user without privileges.
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
