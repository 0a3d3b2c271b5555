//! Devices whose server has died: which one is ours, and taking it over.
//!
//! The driver keeps 64 bits for the server with each device: they tell the disk. What must hold: no device is taken over for
//! another disk, for whoever has it mounted would find, and write to, the wrong one.

use std::io;
use std::time::{Duration, Instant};

use blockyard_ring::ublk::abi::{self, DeviceInfo};
use blockyard_ring::ublk::{CLASS, Control};
use rustix::io::Errno;

use super::{PATIENCE, UblkError, UblkOptions};

/// A disk's identity, as a device keeps it. (FNV-1a: it must be the same in every build of this program.)
pub(super) fn note(identity: &str) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    identity.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The device that a server of this disk left. None: one is to be made.
pub(super) fn find(control: &mut Control, options: &UblkOptions) -> Result<Option<DeviceInfo>, UblkError> {
    let ours = note(&options.identity);
    let Some(id) = options.id else {
        let of_ours = listed().into_iter().filter_map(|id| control.info(id).ok()).filter(|info| info.note == ours);
        let id = of_ours.filter(|info| info.state == abi::S_QUIESCED || !is_alive(info)).map(|info| info.id).next();
        return match id {
            Some(id) => wait_left(control, id, ours),
            None => Ok(None),
        };
    };
    match wait_left(control, id, ours)? {
        Some(info) if info.note != ours => Err(UblkError::Another { id }),
        found => Ok(found),
    }
}

/// Waits for the end of a server that was killed; None: there is no such device.
fn wait_left(control: &mut Control, id: u32, ours: u64) -> Result<Option<DeviceInfo>, UblkError> {
    let error = |what, source| UblkError::Device { id, what, source };
    let start = Instant::now();
    loop {
        let info = match control.info(id) {
            Ok(info) => info,
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NODEV | Errno::NOENT)) => return Ok(None),
            Err(e) => return Err(error("asking what it is", e)),
        };
        match info.state {
            abi::S_QUIESCED => return Ok(Some(info)),
            // Somebody else's, who may be about to start it.
            abi::S_DEAD if info.note != ours => return Err(UblkError::Another { id }),
            // Added, and never started, for its server died too early; or removed, and still open.
            abi::S_DEAD if !is_alive(&info) => {
                let deleted = control.delete(&info);
                if start.elapsed() > PATIENCE {
                    let why = deleted.err().unwrap_or_else(|| Errno::BUSY.into());
                    return Err(error("removing what a server has left of it", why));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            _ if is_alive(&info) || start.elapsed() > PATIENCE => {
                return Err(UblkError::Served { id, server: info.server });
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// The kernel may still be taking the last server's requests apart.
pub(super) fn begin(control: &mut Control, info: &DeviceInfo) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match control.start_recovery(info) {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::BUSY) && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
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

    #[test]
    fn a_note_stays_the_same_for_ever() {
        assert_eq!(note(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(note("a"), 0xaf63_dc4c_8601_ec8c);
        assert_ne!(note("/srv/a.img"), note("/srv/b.img"));
    }
}
