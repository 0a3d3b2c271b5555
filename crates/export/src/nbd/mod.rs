//! NBD: disks for clients of the network block device protocol (the host's kernel, QEMU, libnbd),
//! over Unix sockets and TCP.
//!
//! ```text
//!   address ─► thread (accept) ─► reactor: negotiation ─► receiver ─► workers (requests, side by side) ─► sender
//! ```
//! A `Server` is one address; it has any number of disks, by name. Its thread accepts clients and
//! deals them out to the reactors; all else happens there. A flush on one connection covers what
//! was written on all of them, because it is the disk's. Source: the NBD project's proto.md, whose
//! numbers are in crate `nbd`.
//!
//! What must hold: a client that says nothing, or takes nothing, costs a bounded amount, for a
//! bounded time where others wait; a server that ends waits for requests, not for clients.

mod block_status;
mod buffers;
mod connection;
mod exported;
mod idle;
mod inbox;
mod links;
mod negotiate;
mod receive;
mod reply;
mod room;
mod send;
mod shared;
mod stream;
mod terms;
mod worker;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_disk::Disk;
use blockyard_ring::Handle;

use crate::descriptors;
use crate::log::Log;
use crate::{Export, Listener, Reactors};
use inbox::Inbox;
use links::Link;
use negotiate::Negotiation;
use receive::{End, Receiver};
use shared::Shared;
use stream::Stream;

pub use exported::Exported;
pub use shared::{Limits, Settings};

/// How soon a server that could not accept a client tries again.
const RETRY: Duration = Duration::from_millis(200);

/// A listening server. Drop closes its address, and the connections of clients that have not chosen
/// a disk.
pub struct Server {
    shared: Arc<Shared>,
    /// Not among what clients share: the last of these ends the reactors, and waits for them.
    reactors: Arc<Reactors>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(
        listener: Listener,
        address: &str,
        settings: Arc<Settings>,
        reactors: Arc<Reactors>,
    ) -> io::Result<Arc<Self>> {
        listener.refuse_descriptors();
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let shared = Arc::new(Shared {
            exports: Mutex::default(),
            settings: Mutex::new(settings),
            log: Log::default(),
            address: address.into(),
            clients: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, flags)?,
        });
        let (body, dealt) = (shared.clone(), reactors.clone());
        let thread = std::thread::Builder::new()
            .name("nbd".into())
            .stack_size(256 << 10)
            .spawn(move || listen(&body, &listener, &dealt))?;
        Ok(Arc::new(Server { shared, reactors, thread: Some(thread) }))
    }

    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Other settings, for clients that come from now on.
    pub fn set(&self, settings: Arc<Settings>) {
        *self.shared.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        // It may have room for more.
        self.shared.ring();
    }

    /// Offers one more disk, until the offer is dropped.
    pub fn offer(self: &Arc<Self>, exported: Exported) -> Offer {
        let disk = exported.disk.clone();
        self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(exported));
        Offer { server: self.clone(), disk, is_stopped: false }
    }

    /// From now on only clients of these names may have the disk, as [`Exported::only_for`] says;
    /// others who have it go.
    pub fn allow(&self, disk: &Arc<Disk>, names: &[String]) {
        self.shared
            .exports()
            .iter()
            .filter(|exported| Arc::ptr_eq(&exported.disk, disk))
            .for_each(|e| e.allow(names));
        links::end_strangers(&self.reactors, disk);
    }

    /// Offers a disk no more: answers what its clients have asked, and lets them go.
    fn remove(&self, disk: &Arc<Disk>) {
        let mut exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        exports.retain(|exported| !Arc::ptr_eq(&exported.disk, disk));
        drop(exports);
        links::end(&self.reactors, disk);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        links::end_undecided(&self.reactors, &self.shared);
    }
}

/// A disk that a server offers. The address is closed with its last offer.
pub struct Offer {
    server: Arc<Server>,
    disk: Arc<Disk>,
    is_stopped: bool,
}

impl Export for Offer {
    /// NBD has no message for it: clients see the size when they connect.
    fn resize(&mut self) {}

    fn stop(&mut self) {
        if !std::mem::replace(&mut self.is_stopped, true) {
            self.server.remove(&self.disk);
        }
    }

    fn allow(&mut self, names: &[String]) {
        self.server.allow(&self.disk, names);
    }

    fn clients(&self) -> Vec<String> {
        links::clients(&self.server.reactors, &self.disk)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The server's thread.
fn listen(shared: &Arc<Shared>, listener: &Listener, reactors: &Reactors) {
    while !shared.stop.load(Ordering::SeqCst) {
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        // In this order: a client that goes after it was counted here rings by this limit, or by a
        // later one, which rings itself.
        let many = shared.settings().limits.clients;
        if shared.clients.load(Ordering::SeqCst) >= many {
            shared.log.warn(
                &shared.address,
                None,
                format_args!("{many} clients are here: others wait until one goes"),
            );
            wait(shared, None);
            continue;
        }
        if let Some((left, limit)) = descriptors::too_few() {
            shared.log.warn(
                &shared.address,
                None,
                format_args!(
                    "{left} of {limit} descriptors are left, which are kept for the server itself: clients wait until others go \
                     (raise the limit: ulimit -n, LimitNOFILE)"
                ),
            );
            wait(shared, Some(RETRY));
            continue;
        }
        match listener.accept(shared.wake.as_fd()) {
            Ok(Some(fd)) => deal_out(shared, reactors, fd),
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: listening goes on, slowly.
                shared.log.warn(
                    &shared.address,
                    None,
                    format_args!("accepting a client failed: {e}"),
                );
                wait(shared, Some(RETRY));
            }
        }
    }
}

/// Gives a client to the next reactor.
fn deal_out(shared: &Arc<Shared>, reactors: &Reactors, fd: OwnedFd) {
    shared.clients.fetch_add(1, Ordering::SeqCst);
    let fd = Accepted { fd, server: shared.clone() };
    let client = Client { server: shared.clone(), settings: shared.settings() };
    // Dropped unrun when the reactor has ended.
    reactors.next().run(move |handle| match Stream::new(handle, fd) {
        Ok(stream) => {
            let stream = Rc::new(stream);
            // Known from here on to what ends the server.
            let link =
                Link::enter(handle, &stream, &client.server, client.settings.limits.handshake);
            handle.spawn(serve(handle.clone(), client, stream, link));
        }
        Err(e) => {
            let server = &client.server;
            server.log.warn(&server.address, None, format_args!("a client's socket: {e}"));
        }
    });
}

/// Until somebody rings: a client that has gone, or the end; or until that time is over.
fn wait(shared: &Shared, limit: Option<Duration>) {
    let mut fds = [rustix::event::PollFd::new(&shared.wake, rustix::event::PollFlags::IN)];
    let limit = limit.and_then(|limit| rustix::event::Timespec::try_from(limit).ok());
    let _ = rustix::event::poll(&mut fds, limit.as_ref());
}

struct Client {
    server: Arc<Shared>,
    settings: Arc<Settings>,
}

/// A client's socket. The client is counted until it is closed, also if a thread closes descriptors
/// that the client has sent.
struct Accepted {
    fd: OwnedFd,
    server: Arc<Shared>,
}

impl AsFd for Accepted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        let before = self.server.clients.fetch_sub(1, Ordering::SeqCst);
        if before >= self.server.settings().limits.clients {
            self.server.ring();
        }
    }
}

/// One client, from its first byte to its last.
async fn serve(handle: Handle, client: Client, stream: Rc<Stream>, link: Rc<Link>) {
    let shared = &*client.server;
    let (mut inbox, from) = (Inbox::default(), stream.from());
    let (terms, peer) =
        match Negotiation::new(shared, &client.settings, &stream, &mut inbox).run().await {
            Ok(Some(settled)) => settled,
            Ok(None) => return stream.close(),
            Err(_) if link.was_late() => {
                let limit = client.settings.limits.handshake.as_secs_f64();
                return shared.log.warn(
                    &shared.address,
                    None,
                    format_args!("a client ({from}) chose nothing in {limit} s: it was let go"),
                );
            }
            // It looked whether anybody listens.
            Err(e)
                if e.kind() == io::ErrorKind::UnexpectedEof
                    || e.kind() == io::ErrorKind::ConnectionReset =>
            {
                return;
            }
            Err(e) => {
                return shared.log.warn(
                    &shared.address,
                    None,
                    format_args!("a client ({from}) was let go: {e}"),
                );
            }
        };
    let exported = terms.exported.clone();
    link.chose(&exported, peer);
    // It was removed, or the client's name was, while it chose.
    if link.is_strange() || !shared.exports().iter().any(|e| Arc::ptr_eq(e, &exported)) {
        return;
    }
    let receiver = match Receiver::new(&handle, stream.clone(), terms) {
        Ok(receiver) => receiver,
        Err(e) => {
            return shared.log.warn(
                &exported.name,
                None,
                format_args!("opening the disk for a client ({from}): {e}"),
            );
        }
    };
    shared.log.info(&exported.name, None, format_args!("an NBD client connected ({from})"));
    let end = receiver.run(inbox).await;
    stream.close();
    // The last one that goes takes the reactor's spare buffers with it.
    drop(link);
    links::watch(&handle);
    match end {
        End::Gone => {
            shared.log.info(&exported.name, None, format_args!("an NBD client went ({from})"))
        }
        End::Broken(why) => {
            shared.log.warn(
                &exported.name,
                None,
                format_args!("an NBD client ({from}) was let go: {why}"),
            );
        }
    }
}

#[cfg(test)]
mod tests;
