//! Reports to systemd's watchdog (sd_notify(3), `WatchdogSec=`) that the server works.
//!
//! In: `WATCHDOG_USEC` and `NOTIFY_SOCKET`. Out: a report twice in that time, while all reactors
//! make progress. If one stalls for the whole time, systemd ends the server and starts it again.
//! The watchdog's thread may not make sockets, so this one is connected before.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use blockyard_export::Alive;

/// Shortest time between two reports.
const SHORTEST: Duration = Duration::from_millis(50);

/// Returns what the watchdog reports, or `None` if no supervisor asks for it.
pub fn alive() -> Option<Alive> {
    let period = (sd_notify::watchdog_enabled()? / 2).max(SHORTEST);
    let socket = match connect() {
        Ok(socket) => socket?,
        Err(e) => {
            tracing::warn!("cannot report to the supervisor's watchdog: {e}");
            return None;
        }
    };
    let report = move || {
        if let Err(e) = socket.send(b"WATCHDOG=1") {
            tracing::debug!("reporting to the supervisor's watchdog: {e}");
        }
    };
    Some(Alive { period, report: Box::new(report) })
}

fn connect() -> std::io::Result<Option<UnixDatagram>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // A supervisor that does not read must not stop the watchdog.
    socket.set_nonblocking(true)?;
    Ok(Some(socket))
}
