//! Why a device cannot be made, taken over or removed.

use std::io;

use blockyard_ring::ublk::{Control, QueueError};
use rustix::io::Errno;

/// Reasons why a device cannot be made, taken over or removed.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    #[error("/dev/ublk-control: {}", explain_control(.0))]
    Control(io::Error),
    #[error(
        "/dev/ublkb{id} is served by process {server}: stop that first, or give another number"
    )]
    Served { id: u32, server: i32 },
    #[error(
        "/dev/ublkb{id} belongs to another disk, and the server of that disk has ended: \
         serve that one, or remove it (blockyard detach /dev/ublkb{id})"
    )]
    Another { id: u32 },
    #[error("there is no device /dev/ublkb{id}")]
    Missing { id: u32 },
    #[error("/dev/ublkb{id} is in use{by}: unmount it first")]
    InUse { id: u32, by: String },
    #[error("/dev/ublkb{id} waits for a server: attach its image again, or remove it with --force")]
    Waiting { id: u32 },
    #[error(
        "/dev/ublkb{id} is in use{by}, and another file has the path of its image now: \
         put the first one back, or unmount the device and remove it \
         (blockyard detach /dev/ublkb{id})"
    )]
    OtherFile { id: u32, by: String },
    #[error("/dev/ublkb{id} was removed and is still open{by}: close that, or give another number")]
    StillOpen { id: u32, by: String },
    #[error(
        "cannot check whether /dev/ublkb{id} is in use, because this process may not open it: \
         run as root, or remove it with --force"
    )]
    Unseen { id: u32 },
    #[error(
        "a ublk device of a user without privileges cannot have on-enospc = \"pause\", because the \
         kernel kills its server if a request takes 30 s: use \"error\""
    )]
    Pauses,
    #[error("/dev/ublkb{id}: {what}")]
    Device { id: u32, what: &'static str, source: io::Error },
    #[error("/dev/ublkb{id}, queue {queue}")]
    Queue { id: u32, queue: u16, source: QueueError },
}

fn explain_control(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => {
            "the kernel's ublk driver is not loaded (modprobe ublk_drv; Linux 6.5 or later)".into()
        }
        Some(_) if is_of_old_driver(error) => {
            "the kernel's ublk driver is too old: Linux 6.5 or later is needed".into()
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            format!(
                "{error}: only root may open it, or users that a udev rule permits (docs/ublk.md)"
            )
        }
        _ => error.to_string(),
    }
}

/// Returns whether the driver does not know the query of its features, which is new in Linux 6.5.
/// Older drivers look for the device of the query first.
fn is_of_old_driver(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NODEV | Errno::OPNOTSUPP))
}

/// Returns whether the kernel has a ublk driver that is too old for this program.
pub fn is_too_old() -> bool {
    Control::open().and_then(|mut control| control.features()).is_err_and(|e| is_of_old_driver(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_says_which_kernel_is_needed() {
        let message = |errno: Errno| UblkError::Control(errno.into()).to_string();
        let missing = message(Errno::NOENT);
        assert!(
            missing.contains("not loaded (modprobe ublk_drv; Linux 6.5 or later)"),
            "{missing}"
        );
        for errno in [Errno::NODEV, Errno::OPNOTSUPP] {
            let old = message(errno);
            assert!(old.contains("too old: Linux 6.5 or later is needed"), "{old}");
        }
        let refused = message(Errno::ACCESS);
        assert!(!refused.contains("Linux"), "{refused}");
    }
}
