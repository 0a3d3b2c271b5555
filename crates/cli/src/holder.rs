//! `serve --keep-sessions`: the holder's process, and what a server does with it.
//!
//! ```text
//!   blockyard serve --keep-sessions ...   the holder; it runs `blockyard_ring::holder`
//!     \-- blockyard serve --held ...      the server; its standard input is the holder's socket
//! ```

use std::ffi::OsString;
use std::os::fd::OwnedFd;

use anyhow::Context;
use blockyard_export::keeper;
use blockyard_export::vhost_user::Before;

use crate::handover::{HandOvers, HandedExports, Takeover, inherited_connection, own_binary};

/// Name of the holder's connection in a hand-over.
const HOLDER: &str = "holder";

/// Runs the holder until its server exits. Returns the server's status.
pub fn run() -> anyhow::Result<u8> {
    let arguments = std::env::args_os()
        .skip(1)
        .map(|word| if word == "--keep-sessions" { OsString::from("--held") } else { word });
    let arguments: Vec<_> = arguments.collect();
    if let Err(e) = blockyard_ring::host::raise_descriptor_limit() {
        tracing::warn!("raising the limit of open descriptors (ulimit -n): {e}");
    }
    blockyard_ring::holder::run(&own_binary()?, &arguments).context("the holder of the sessions")
}

/// Connects a server to its holder. Call this before the process enters its sandbox.
pub fn connect(takeover: Option<&mut Takeover>) -> anyhow::Result<()> {
    let socket: OwnedFd = match takeover {
        None => inherited_connection().context("--held: standard input is no socket")?,
        Some(takeover) => {
            let parcel = takeover.socket(HOLDER).context("the running server has no holder")?;
            parcel.fds.into_iter().next().context("the holder's connection is missing")?
        }
    };
    keeper::use_holder(socket).context("connecting to the holder")
}

/// Takes the exports that a dead server has left at the holder. Returns their number.
pub fn take_all(handed: &HandedExports) -> anyhow::Result<usize> {
    let all = keeper::left_behind().context("reading from the holder")?;
    let count = all.len();
    for (key, parcel) in all {
        if let Some((kind, disk)) = key.split_once(':') {
            handed.put(disk, kind, parcel, Before::Died);
        }
    }
    Ok(count)
}

/// Makes the holder watch this process.
pub fn announce() {
    match own_binary() {
        Ok(program) => keeper::announce(&program),
        Err(e) => tracing::error!("the holder watches another process: {e:#}"),
    }
}

/// Passes the holder's connection on to the next server.
pub fn offer(hand_overs: &HandOvers) {
    if keeper::is_on() {
        hand_overs.offer(HOLDER, || {
            let socket =
                keeper::connection().unwrap_or(Err(std::io::ErrorKind::NotConnected.into()))?;
            Ok(blockyard_ring::parcel::Parcel { bytes: Vec::new(), fds: vec![socket] })
        });
    }
}
