//! `serve --keep-sessions`: the holder's process, and what a server does with it.
//!
//! ```text
//!   blockyard serve --keep-sessions ...   the holder; it runs `blockyard_ring::holder`
//!     \-- blockyard serve --held ...      the server; its standard input is the holder's socket
//! ```
//! Without a holder if systemd keeps descriptors (`FileDescriptorStoreMax=`): it is the parent
//! already, and starts the server again.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context;
use blockyard_export::keeper::{self, Store};
use blockyard_export::vhost_user::Before;
use blockyard_ring::parcel::Parcel;
use rustix::net::{Shutdown, shutdown, sockopt};

use super::Takeover;
use crate::exports::HandedExports;
use crate::process::launcher::own_binary;
use crate::process::{inherited, supervisor};
use crate::server::hand_overs::HandOvers;

/// Name of the holder's connection in a hand-over.
const HOLDER: &str = "holder";

/// Why a server without its holder refuses a hand-over: the next one cannot announce itself, and
/// ends.
const LOST: &str = "this server has lost its holder, and an upgrade would end with it: restart the \
                    server";

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

/// Returns whether systemd keeps descriptors for this service.
pub fn is_stored() -> bool {
    room().is_some()
}

/// Returns how many descriptors systemd keeps for this service. systemd sets FDSTORE since version
/// 254; before, the unit does.
fn room() -> Option<usize> {
    std::env::var_os("NOTIFY_SOCKET")?;
    let most = std::env::var("FDSTORE").ok()?.parse().ok()?;
    (most > 0).then_some(most)
}

/// Keeps sessions in systemd's store. Call this before the process enters its sandbox.
pub fn use_store() -> anyhow::Result<()> {
    let room = room()
        .context("--keep-sessions with --takeover is for a service with FileDescriptorStoreMax=")?;
    let manager = supervisor::connect().context("connecting to systemd (NOTIFY_SOCKET)")?;
    let manager = manager.context("NOTIFY_SOCKET is not set")?;
    let stored = inherited::stored().context("taking the descriptors that systemd has stored")?;
    keeper::use_store(Store::new(manager, stored, room)?);
    Ok(())
}

/// Returns whether the running server has a holder. The next server has the same one, whatever its
/// options are: the holder ends with the last server that it knows.
pub fn is_offered(takeover: &Takeover) -> bool {
    takeover.has_socket(HOLDER)
}

/// Connects a server to its holder. Call this before the process enters its sandbox.
pub fn connect(takeover: Option<&mut Takeover>) -> anyhow::Result<()> {
    let socket: OwnedFd = match takeover {
        None => inherited::connection().context("--held: standard input is no socket")?,
        Some(takeover) => {
            let parcel = takeover.socket(HOLDER).context("the running server has no holder")?;
            parcel.fds.into_iter().next().context("the holder's connection is missing")?
        }
    };
    keeper::use_holder(socket).context("connecting to the holder")
}

/// Takes the exports that a dead server has left at the holder or in the store. Returns their
/// number.
pub fn take_all(handed: &HandedExports) -> anyhow::Result<usize> {
    let all = keeper::left_behind().context("reading the sessions that were kept")?;
    let mut count = 0;
    for (key, parcel) in all {
        let Some((kind, disk)) = key.split_once(':') else { continue };
        // The server that died could not replace it (`blockyard_export::keeper`).
        if parcel.bytes.is_empty() {
            tracing::error!(disk, "what was kept of it is out of date: its front end is lost");
            stop_listening(&parcel);
            keeper::forget(&key);
            continue;
        }
        handed.put(disk, kind, parcel, Before::Died);
        count += 1;
    }
    Ok(count)
}

/// Makes the listening sockets of a parcel refuse connections. The keeper closes its copies of them
/// later, and the disk could not listen on the same path until then. Inherited sockets have another
/// owner, and go on.
fn stop_listening(parcel: &Parcel) {
    let listens = |fd: &&OwnedFd| sockopt::socket_acceptconn(fd).unwrap_or(false);
    for socket in parcel.fds.iter().filter(listens) {
        if !blockyard_ring::inherited::is_same(socket.as_fd()) {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
}

/// Makes the holder watch this process.
pub fn announce() {
    match own_binary() {
        Ok(program) => keeper::announce(&program),
        Err(e) => tracing::error!("the holder watches another process: {e:#}"),
    }
}

/// Like `announce`. Returns an error if the holder has not taken note of this process.
pub fn announce_surely() -> anyhow::Result<()> {
    if keeper::connection().is_some() {
        keeper::announce(&own_binary()?);
        // The holder answers this after it has read the announcement.
        keeper::left_behind()?;
        anyhow::ensure!(keeper::connection().is_some(), "it has started another server");
    }
    Ok(())
}

/// Passes the holder's connection on to the next server.
pub fn offer(hand_overs: &HandOvers) {
    if keeper::connection().is_some() {
        hand_overs.offer(HOLDER, || {
            let socket = keeper::connection().unwrap_or_else(|| Err(io::Error::other(LOST)))?;
            Ok(Parcel { bytes: Vec::new(), fds: vec![socket] })
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use blockyard_export::Listener;

    use super::*;

    #[test]
    fn a_disk_listens_where_the_keeper_has_a_socket_that_is_out_of_date() {
        let name = format!("blockyard-outdated-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let (kept, (mut connection, mut front_end)) =
            (UnixListener::bind(&path).unwrap(), UnixStream::pair().unwrap());
        let copies = [kept.as_fd(), connection.as_fd()];
        let fds = copies.map(|fd| fd.try_clone_to_owned().unwrap()).into();
        assert!(Listener::bind(&path).is_err(), "the keeper's copy listens");
        stop_listening(&Parcel { bytes: Vec::new(), fds });
        let again = Listener::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        // Sockets that do not listen stay as they are.
        connection.write_all(&[7]).unwrap();
        front_end.read_exact(&mut [0]).unwrap();
        drop(again);
        assert!(!path.exists());
    }
}
