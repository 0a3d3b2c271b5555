//! The socket of `--control`, on which new servers take over that something else has started.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use blockyard_export::Listener;
use blockyard_ring::host;
use blockyard_ring::parcel::Parcel;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::alone::Alone;
use super::old::{hand_over, refuse};
use super::{FromOld, MESSAGE_TIME, Peer};
use crate::server::Server;

/// Waits for new servers on the socket of `--control`. Drop ends it.
pub struct Control {
    stop: Arc<OwnedFd>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Control {
    /// Listens on the socket. `handed`: that of the server from which this one takes over.
    pub fn open(path: &Path, handed: Option<Parcel>) -> anyhow::Result<Listener> {
        let Some(parcel) = handed else { return Ok(Listener::bind(path)?) };
        let listener = Listener::from_parcel(parcel)?;
        if let Some(own) = listener.path().filter(|own| *own != path) {
            let (own, path) = (own.display(), path.display());
            bail!(
                "--control: the running server listens on {own}, not on {path}: a restart changes \
                 that"
            );
        }
        Ok(listener)
    }

    pub fn start(listener: Listener, server: Arc<Server>) -> anyhow::Result<Control> {
        // The next server must know this process, not the one that made the socket.
        listener.become_peer()?;
        let listener = Arc::new(listener);
        let offered = listener.clone();
        server.hand_overs.offer("control", move || offered.to_parcel());
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(rustix::event::eventfd(0, flags)?);
        let wake = stop.clone();
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || listen(&server, &listener, &wake))?;
        Ok(Control { stop, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(server: &Arc<Server>, listener: &Listener, stop: &OwnedFd) {
    let is_stopped = || {
        let mut fds = [PollFd::new(stop, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    };
    while !is_stopped() && !server.hand_overs.is_done() {
        match listener.accept(stop.as_fd()) {
            Ok(Some(stream)) => came(server, stream.into()),
            Ok(None) => {}
            Err(e) => {
                tracing::warn!("control: cannot accept a connection: {e}");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

fn came(server: &Arc<Server>, stream: UnixStream) {
    let peer = host::peer(&stream);
    let own = rustix::process::geteuid().as_raw();
    let Some(pid) = peer.filter(|peer| peer.user == own).and_then(|peer| peer.process) else {
        let what = "only a process of this server's user, in its PID namespace, may take over";
        tracing::warn!("control: refused a connection: {what}");
        let _ = Peer::new(stream, MESSAGE_TIME).send(&FromOld::Refused { what: what.into() });
        return;
    };
    match Alone::of(server) {
        // The log has the outcome.
        Ok(alone) => drop(hand_over(server, stream, pid, false, alone)),
        Err(e) => refuse(&Peer::new(stream, MESSAGE_TIME), &e.into()),
    }
}
