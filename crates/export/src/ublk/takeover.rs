//! Devices whose server has died: which one is ours, and taking it over.
//!
//! The driver keeps 64 bits for the server with each device: they tell the disk. What must hold: no
//! device is taken over for another disk, for whoever has it mounted would find, and write to, the
//! wrong one.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_ring::ublk::abi::{self, DeviceInfo};
use blockyard_ring::ublk::{CLASS, Control, NumberLock};
use rustix::io::Errno;

use super::{PATIENCE, UblkError, UblkOptions};
use crate::fingerprint;

/// No device has this number.
const ADDING: u32 = u32::MAX;

/// What a device keeps of its disk: the upper half tells the disk, the lower half the image's file,
/// if that is known.
pub(super) fn note(options: &UblkOptions) -> u64 {
    let disk = fingerprint::of(options.identity.bytes());
    options.file.map_or(disk, |file| disk & HALF | fingerprint::of(file.to_le_bytes()) & !HALF)
}

const HALF: u64 = !0 << 32;

fn is_ours(info: &DeviceInfo, options: &UblkOptions) -> bool {
    (info.note ^ fingerprint::of(options.identity.bytes())) & HALF == 0
}

/// Whether the device was made of another file, which had the image's path then. (The lower half of
/// the disk's own hash: the device knows no file.)
pub(super) fn is_other_file(info: &DeviceInfo, options: &UblkOptions) -> bool {
    options.file.is_some()
        && info.note != note(options)
        && info.note != fingerprint::of(options.identity.bytes())
}

/// The device that a server of this disk left, and the lock on its number. No device: one is to be
/// made.
pub(super) fn find(
    control: &mut Control,
    options: &UblkOptions,
) -> Result<(Option<DeviceInfo>, Option<NumberLock>), UblkError> {
    if let Some(id) = options.id {
        let lock = lock(id);
        return match wait_left(control, id, options, lock.is_some())? {
            Some(info) if !is_ours(&info, options) => Err(UblkError::Another { id }),
            found => Ok((found, lock)),
        };
    }
    let is_left = |info: &DeviceInfo| {
        is_ours(info, options)
            && !is_removed(info)
            && (info.state == abi::S_QUIESCED || !is_alive(info))
    };
    for id in listed() {
        if !control.info(id).is_ok_and(|info| is_left(&info)) {
            continue;
        }
        // Another server of the disk may have taken it over before this one had the lock.
        let lock = lock(id);
        if control.info(id).is_ok_and(|info| is_left(&info))
            && let Some(info) = wait_left(control, id, options, lock.is_some())?
        {
            return Ok((Some(info), lock));
        }
    }
    Ok((None, None))
}

/// Locks the number of a device, so that one process at a time makes, takes over or removes it, and
/// each finds what the one before it has done. `None`: another process keeps the lock too long, or
/// there are no such locks.
///
/// A process that lets the driver choose the number can lock it only when it has the device. From
/// the one to the other it holds [`ADDING`]; so a device that was added and is not locked has no
/// process that is about to start it.
pub(super) fn lock(id: u32) -> Option<NumberLock> {
    wait_for(|| {
        let adding = NumberLock::try_new(ADDING)?;
        if adding.is_some() { NumberLock::try_new(id) } else { Ok(None) }
    })
}

/// Calls `add`, which makes a device of a number that the driver chooses, and locks that number.
pub(super) fn lock_new<E>(add: impl FnOnce() -> Result<u32, E>) -> Result<Option<NumberLock>, E> {
    let _adding = wait_for(|| NumberLock::try_new(ADDING));
    add().map(|id| wait_for(|| NumberLock::try_new(id)))
}

fn wait_for(mut lock: impl FnMut() -> io::Result<Option<NumberLock>>) -> Option<NumberLock> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match lock() {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => {
                tracing::debug!("locking the number of a device: {e}");
                return None;
            }
        }
    }
    tracing::debug!(
        "another process has the number of a device locked for {} s",
        PATIENCE.as_secs()
    );
    None
}

/// Whether a device was removed and some process still has it open: the driver keeps its number,
/// and lists it no more.
pub(super) fn is_removed(info: &DeviceInfo) -> bool {
    let class = Path::new(CLASS);
    info.state == abi::S_DEAD && class.exists() && !class.join(format!("ublkc{}", info.id)).exists()
}

/// Waits for the end of a server that was killed; None: there is no such device. `locked`: no other
/// process is making it.
fn wait_left(
    control: &mut Control,
    id: u32,
    options: &UblkOptions,
    locked: bool,
) -> Result<Option<DeviceInfo>, UblkError> {
    let error = |what, source| UblkError::Device { id, what, source };
    let start = Instant::now();
    loop {
        let info = match control.info(id) {
            Ok(info) => info,
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NODEV | Errno::NOENT)) => {
                return Ok(None);
            }
            Err(e) => return Err(error("asking what it is", e)),
        };
        match info.state {
            abi::S_QUIESCED => return Ok(Some(info)),
            // Its number is free when it is closed, for which `Ublk::add_when_free` waits.
            abi::S_DEAD if is_removed(&info) => return Ok(None),
            // Another disk's, whose server may be about to start it.
            abi::S_DEAD if !is_ours(&info, options) => return Err(UblkError::Another { id }),
            // Added, and never started, because its server died too early.
            abi::S_DEAD if !is_alive(&info) && locked => {
                let deleted = control.delete(&info);
                if start.elapsed() > PATIENCE {
                    let why = deleted.err().unwrap_or_else(|| Errno::BUSY.into());
                    return Err(error("removing what a server has left of it", why));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            abi::S_DEAD if start.elapsed() > PATIENCE => {
                return Err(error("another process is making or removing it", Errno::BUSY.into()));
            }
            _ if is_alive(&info) || start.elapsed() > PATIENCE => {
                return Err(UblkError::Served { id, server: info.server });
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Whether this kernel wants a thread for each vacant queue before a takeover begins: see
/// `blockyard_ring::ublk::fill_vacant`.
pub(super) fn has_vacant_queues() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .is_ok_and(|release| leaves_vacant(&release))
}

fn leaves_vacant(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return false };
    ((6, 7)..(6, 15)).contains(&(major, minor))
}

/// Makes the driver forget the last server. It may still be taking the requests of that server
/// apart.
pub(super) fn begin(control: &mut Control, info: &DeviceInfo) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let begun = control.start_recovery(info);
        match begun.as_ref().map_err(Errno::from_io_error) {
            Err(Some(Errno::BUSY)) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10))
            }
            // Linux before 6.7 refuses if no queue of a quiesced device has had a server since the
            // last time: that server was killed while it took the device over. There is nothing to
            // forget then.
            Err(Some(Errno::INVAL)) if is_quiesced(control, info.id) => return Ok(()),
            _ => return begun,
        }
    }
}

fn is_quiesced(control: &mut Control, id: u32) -> bool {
    control
        .info(id)
        .is_ok_and(|info| info.state == abi::S_QUIESCED && info.flags & abi::F_USER_RECOVERY != 0)
}

fn is_alive(info: &DeviceInfo) -> bool {
    let pid = rustix::process::Pid::from_raw(info.server.max(0));
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

fn listed() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(CLASS) else { return Vec::new() };
    let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.ok()?.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::QueueShape;

    fn options(identity: &str, file: Option<u64>) -> UblkOptions {
        UblkOptions {
            id: None,
            shape: QueueShape { queues: 1, size: 1 },
            identity: identity.into(),
            file,
        }
    }

    #[test]
    fn a_note_stays_the_same_for_ever() {
        assert_eq!(note(&options("", None)), 0xcbf2_9ce4_8422_2325);
        assert_eq!(note(&options("a", None)), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(note(&options("a", Some(1))), 0xaf63_dc4c_1d2a_efa4);
    }

    #[test]
    fn kernels_that_leave_vacant_queues_are_known_by_their_release() {
        for (release, leaves) in [
            ("6.1.0-42-cloud-amd64", false),
            ("6.6.114", false),
            ("6.7.0", true),
            ("6.12.107+deb13-cloud-amd64", true),
            ("6.14-rc1", true),
            ("6.15.0", false),
            ("7.3.4+deb13-cloud-amd64", false),
            ("", false),
        ] {
            assert_eq!(leaves_vacant(release), leaves, "{release}");
        }
    }

    #[test]
    fn a_note_tells_the_disk_and_the_file() {
        let device = |identity, file| DeviceInfo {
            note: note(&options(identity, file)),
            ..DeviceInfo::default()
        };
        let (first, second) = (options("/srv/a.img", Some(1)), options("/srv/a.img", Some(2)));
        let of_first = device("/srv/a.img", Some(1));
        assert!(is_ours(&of_first, &first) && !is_other_file(&of_first, &first));
        assert!(is_ours(&of_first, &second) && is_other_file(&of_first, &second));
        assert!(!is_ours(&device("/srv/b.img", Some(1)), &first));
        // Where either side knows no file.
        assert!(!is_other_file(&device("/srv/a.img", None), &first));
        assert!(!is_other_file(&of_first, &options("/srv/a.img", None)));
    }
}
