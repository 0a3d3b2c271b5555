//! Why a device cannot be made, taken over or removed.

use std::io;

use blockyard_ring::ublk::QueueError;
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
    #[error("/dev/ublkb{id}: {what}")]
    Device { id: u32, what: &'static str, source: io::Error },
    #[error("/dev/ublkb{id}, queue {queue}")]
    Queue { id: u32, queue: u16, source: QueueError },
}

fn explain_control(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => {
            "the kernel's ublk driver is not loaded (modprobe ublk_drv; Linux 6.1 or later)".into()
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            format!(
                "{error}: only root may open it, or users that a udev rule permits (docs/ublk.md)"
            )
        }
        _ => error.to_string(),
    }
}
