//! A block device of the kernel's NBD client, `/dev/nbdN`, for kernels without ublk.
//!
//! The server of an attached disk listens on a socket. This file connects to that socket, chooses
//! the export by NBD_OPT_EXPORT_NAME (the kernel supports only simple replies) and passes the
//! connection to the kernel. What must hold: the device ends with the server, and the server with
//! the device.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use blockyard_nbd::negotiate::greet;
use blockyard_nbd::wire::{self, opt};
use blockyard_ring::nbd_device::NbdDevice;

/// How long the driver may take to start a device.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes a device of the export `name` at `socket`, and returns its path. Calls `ended` when the
/// device is removed.
pub fn start(
    socket: &Path,
    name: &str,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<PathBuf> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("connecting to {}", socket.display()))?;
    let (size, flags) = choose(&mut stream, name).context("choosing the export")?;
    let device = NbdDevice::attach(&stream, size, flags)
        .context("setting up a device of the kernel's NBD driver")?;
    let device =
        device.context("every /dev/nbdN is in use (modprobe nbd nbds_max=64 makes more)")?;
    let path = device.path().to_path_buf();
    let gone = Arc::new(AtomicBool::new(false));
    let has_gone = gone.clone();
    let serve = move || {
        if let Err(e) = device.serve() {
            tracing::warn!("{}: {e}", device.path().display());
        }
        drop(stream);
        has_gone.store(true, Ordering::SeqCst);
        ended();
    };
    std::thread::Builder::new()
        .name("nbd device".into())
        .spawn(serve)
        .context("starting its thread")?;
    // Return only when the device works: the caller may use it at once.
    let deadline = Instant::now() + START_TIMEOUT;
    while !NbdDevice::is_up(&path, size) {
        if gone.load(Ordering::SeqCst) || Instant::now() > deadline {
            bail!("{} is set up but does not answer (see the kernel log)", path.display());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(path)
}

/// Does the handshake for the export `name`. The server is of this program: it sends no zeroes
/// after its answer. Returns its size in bytes and its transmission flags.
fn choose(stream: &mut UnixStream, name: &str) -> anyhow::Result<(u64, u16)> {
    greet(stream)?;
    let mut request = wire::OPTION.to_be_bytes().to_vec();
    request.extend(opt::EXPORT_NAME.to_be_bytes());
    request.extend((name.len() as u32).to_be_bytes());
    request.extend(name.as_bytes());
    stream.write_all(&request)?;
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    Ok((wire::u64_at(&answer, 0), u16::from_be_bytes([answer[8], answer[9]])))
}
