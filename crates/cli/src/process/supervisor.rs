//! Notifications to systemd (sd_notify(3)): start, end, the next server's process, and reports to
//! the watchdog (`WatchdogSec=`) that the server works.
//!
//! In: `NOTIFY_SOCKET` and `WATCHDOG_USEC`. Out: messages. The watchdog gets a report twice in its
//! time, while all reactors make progress. If one stalls for the whole time, systemd ends the
//! server and starts it again. Most threads may not make sockets, so these are connected before.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use blockyard_export::Alive;

/// Shortest time between two reports.
const SHORTEST: Duration = Duration::from_millis(50);

/// Longest wait for a supervisor that does not read.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a server that cannot serve anything waits before it ends.
const RESTART_DELAY: Duration = Duration::from_secs(1);
const RESTART_PAUSE: Duration = Duration::from_millis(20);

/// The socket of notifications, unless there is no supervisor.
static MANAGER: OnceLock<Option<UnixDatagram>> = OnceLock::new();

/// Connects to the supervisor, if there is one. Call it before the process enters its sandbox.
pub fn start() {
    let connected = || {
        let socket = connect()?;
        socket.iter().try_for_each(|socket| socket.set_write_timeout(Some(PATIENCE)))?;
        Ok::<_, std::io::Error>(socket)
    };
    let connected = connected().unwrap_or_else(|e| {
        tracing::warn!("cannot notify the supervisor (NOTIFY_SOCKET): {e}");
        None
    });
    let _ = MANAGER.set(connected);
}

/// Sends a notification, such as `READY=1`, if there is a supervisor.
pub fn notify(text: &str) {
    let Some(Some(socket)) = MANAGER.get() else { return };
    if let Err(e) = socket.send(text.as_bytes()) {
        tracing::warn!("cannot notify the supervisor ({text}): {e}");
    }
}

/// Waits before the server ends because it cannot open its disks. The units start it again after
/// 0.1 s, so that guests of a crashed server wait less. Only systemd 254 and later prolong that.
pub fn delay_restart(is_stopped: impl Fn() -> bool) {
    let Some(Some(_)) = MANAGER.get() else { return };
    tracing::info!("the server ends in 1 s: the service manager may start it again at once");
    let until = Instant::now() + RESTART_DELAY;
    while Instant::now() < until && !is_stopped() {
        std::thread::sleep(RESTART_PAUSE);
    }
}

/// Returns what the watchdog reports, or `None` if no supervisor asks for it. `continues`: the
/// server continues another one, or has a holder. Then WATCHDOG_PID names another process, which
/// the supervisor has started, and this server reports in its place.
pub fn alive(continues: bool) -> Option<Alive> {
    let time = if continues { watchdog_time() } else { sd_notify::watchdog_enabled() };
    let period = (time? / 2).max(SHORTEST);
    // A supervisor that does not read must not stop the watchdog.
    let without_wait = |socket: &UnixDatagram| socket.set_nonblocking(true);
    let socket = match connect() {
        Ok(socket) => socket.filter(|socket| without_wait(socket).is_ok())?,
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

fn watchdog_time() -> Option<Duration> {
    let time = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (time > 0).then(|| Duration::from_micros(time))
}

/// Returns a socket for notifications, or `None` if there is no supervisor. Call it before the
/// process enters its sandbox.
pub fn connect() -> std::io::Result<Option<UnixDatagram>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(Some(socket))
}
