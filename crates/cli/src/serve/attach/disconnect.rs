//! `detach` of a device of the kernel's NBD client.
//!
//! What must hold: without `--force`, a device in use stays, and all writes are in the image before
//! the disconnect. With `--force`, a server that does not answer cannot keep the device.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use blockyard_export::ublk;
use blockyard_program::output;
use blockyard_ring::host;
use blockyard_ring::nbd_device::NbdDevice;
use rustix::io::Errno;
use rustix::process::Pid;

use super::closing::{Server, serves_one_device};

/// How long the driver may wait for the server of a device that is removed by force.
const FORCE_TIMEOUT: Duration = Duration::from_secs(10);

/// Disconnects a device. Returns the process that served it.
pub fn disconnect(path: &Path, id: u32, force: bool) -> anyhow::Result<Server> {
    let name = path.display();
    let Some(pid) = process_of(id) else { bail!("{name} is not connected") };
    if !serves_one_device(pid) {
        bail!("{name} is not served by this program");
    }
    if !force {
        check_unused(path, pid)?;
    }
    let server = Server::watch(Some(pid));
    if force {
        // The server may not answer.
        if !matches!(in_time(path, |device| device.sync()), Some(Ok(()))) {
            output::note(format_args!(
                "blockyard: {name}: writes that its server has not taken within {} s are lost",
                FORCE_TIMEOUT.as_secs()
            ));
        }
        match in_time(path, |device| device.abort()) {
            Some(aborted) => aborted.with_context(|| format!("disconnecting {name}"))?,
            None => bail!(
                "{name} stays: its server, process {}, does not answer: end it first",
                pid.as_raw_nonzero()
            ),
        }
        return Ok(server);
    }
    let device = NbdDevice::open(path).with_context(|| format!("device {name}"))?;
    // A disconnect makes the kernel drop data that it has not written back.
    device
        .sync()
        .with_context(|| format!("{name}: its writes cannot be synced (--force drops them)"))?;
    device.disconnect().with_context(|| format!("disconnecting {name}"))?;
    Ok(server)
}

/// Returns an error if the device is in use. Waits up to a second for udev, which may have the
/// device open for a moment.
fn check_unused(path: &Path, server: Pid) -> anyhow::Result<()> {
    let name = path.display();
    let mut by = String::new();
    for _ in 0..20 {
        match host::claim(path).map_err(|e| (Errno::from_io_error(&e), e)) {
            Ok(()) => match ublk::user_of(path, server) {
                None => return Ok(()),
                Some(user) => by = format!(" by {user}"),
            },
            Err((Some(Errno::BUSY), _)) => by.clear(),
            Err((Some(Errno::ACCESS | Errno::PERM), _)) => bail!(
                "cannot check whether {name} is in use, because this process may not open it: run \
                 as root, or remove it with --force"
            ),
            Err((_, e)) => {
                return Err(anyhow!(e).context(format!("checking whether {name} is in use")));
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("{name} is in use{by}: unmount it first")
}

/// Calls the driver. Returns `None` if the driver waits too long for the device's server. (Then the
/// call goes on.)
fn in_time(
    path: &Path,
    call: fn(&NbdDevice) -> std::io::Result<()>,
) -> Option<std::io::Result<()>> {
    let (send, done) = mpsc::channel();
    let path = path.to_path_buf();
    std::thread::spawn(move || send.send(NbdDevice::open(&path).and_then(|device| call(&device))));
    done.recv_timeout(FORCE_TIMEOUT).ok()
}

/// Returns the process that serves /dev/nbdN. sysfs has the ID of one of its threads.
fn process_of(id: u32) -> Option<Pid> {
    let thread = std::fs::read_to_string(format!("/sys/block/nbd{id}/pid")).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", thread.trim())).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    Pid::from_raw(process.trim().parse().ok()?)
}
