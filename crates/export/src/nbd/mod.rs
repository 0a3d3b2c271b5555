//! NBD: disks for whoever speaks the network block device protocol: the host's kernel, QEMU, libnbd; over Unix sockets and TCP.
//!
//! ```text
//!   address ─► thread (accept) ─► reactor: negotiation ─► connection ─► requests, side by side
//! ```
//! A `Server` is one address; it has any number of disks, by name. Its thread accepts clients and deals them out to the
//! reactors; all else happens there. A flush on one connection covers what was written on all of them, because it is the
//! disk's. Source: the NBD project's proto.md, whose numbers are in crate `nbd`.
//!
//! What must hold: a client that says nothing, or takes nothing, costs a bounded amount, for a bounded time where others
//! wait; a server that ends waits for requests, not for clients.

mod block_status;
mod buffers;
mod connection;
mod idle;
mod inbox;
mod lane;
mod links;
mod negotiate;
mod reply;
mod room;
mod stream;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_disk::Disk;
use blockyard_nbd::ServerTls;
use blockyard_nbd::wire::{self, Headers, export};
use blockyard_ring::Handle;

use crate::descriptors;
use crate::log::Log;
use crate::{Export, Listener, PollMode, Reactors};
use connection::{Connection, End};
use inbox::Inbox;
use links::Link;
use negotiate::{Negotiation, Peer};
use stream::Stream;

/// How soon a server that could not accept a client tries again.
const RETRY: Duration = Duration::from_millis(200);

/// What clients may do to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Clients at a time; others wait until one goes.
    pub clients: usize,
    /// The time in which a client must have chosen its export.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { clients: 256, handshake: Duration::from_secs(10) }
    }
}

/// How a server takes clients up.
#[derive(Debug, Default)]
pub struct Settings {
    pub limits: Limits,
    pub tls: Option<ServerTls>,
}

/// A disk under its name.
#[derive(Debug)]
pub struct Exported {
    pub disk: Arc<Disk>,
    pub name: String,
    /// Told to clients that ask.
    pub description: String,
    flags: u16,
    block: BlockSize,
    /// What a connection does that has nothing to take.
    poll: PollMode,
    /// Names of client certificates, one of which a client must have; none: any client may have the disk.
    allowed: Mutex<Vec<String>>,
}

/// What the protocol takes for a string: not too long, and without NUL.
fn as_string(text: &str) -> String {
    let mut len = 0;
    let fits = |c: &char| {
        len += c.len_utf8();
        len <= wire::MOST_STRING
    };
    text.chars().filter(|c| *c != '\0').take_while(fits).collect()
}

/// What requests should be multiples of, in bytes.
#[derive(Clone, Copy, Debug)]
struct BlockSize {
    minimum: u32,
    preferred: u32,
}

impl Exported {
    /// The transmission flags for a client that has chosen these headers.
    fn flags(&self, headers: Headers) -> u16 {
        let (mut flags, extended) = (self.flags, headers == Headers::Extended);
        if headers == Headers::Simple {
            flags &= !export::SEND_DF;
        }
        if extended { flags } else { flags & !export::BLOCK_STATUS_PAYLOAD }
    }

    /// `block`: the smallest one that clients are told to use, where it is not to be the smallest that the disk takes.
    pub fn new(disk: Arc<Disk>, name: &str, description: &str, block: Option<u32>) -> Self {
        let source = disk.source();
        let mut flags = export::HAS_FLAGS | export::SEND_FLUSH | export::SEND_FUA | export::SEND_DF;
        flags |= export::CAN_MULTI_CONN | export::SEND_CACHE | export::BLOCK_STATUS_PAYLOAD;
        flags |= match disk.options().read_only {
            true => export::READ_ONLY,
            false => export::SEND_TRIM | export::SEND_WRITE_ZEROES | export::SEND_FAST_ZERO,
        };
        // A raw image takes single bytes (what O_DIRECT does not take goes through a buffer); others take sectors.
        let minimum = if source.chain().is_some() { blockyard_image::SECTOR as u32 } else { 1 };
        let minimum = block.unwrap_or(minimum).clamp(minimum, 4096).next_power_of_two();
        let preferred = source.logical_block().max(4096);
        let (name, description) = (as_string(name), as_string(description));
        let block = BlockSize { minimum, preferred };
        Exported { disk, name, description, flags, block, poll: PollMode::Auto, allowed: Mutex::default() }
    }

    /// What its connections do when they have nothing to take, where that is not to be found out by trial.
    pub fn polled(self, poll: PollMode) -> Self {
        Exported { poll, ..self }
    }

    /// Only clients with a certificate that has one of these names may see it; no names: all may.
    pub fn only_for(self, names: &[String]) -> Self {
        self.allow(names);
        self
    }

    fn allow(&self, names: &[String]) {
        *self.allowed.lock().unwrap_or_else(PoisonError::into_inner) = names.to_vec();
    }

    fn is_for(&self, peer: &Peer) -> bool {
        let knows = |name: &String| peer.names.iter().any(|has| has.eq_ignore_ascii_case(name));
        let allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        allowed.is_empty() || allowed.iter().any(knows)
    }
}

/// What the accepting thread, the reactors and the program share.
pub struct Shared {
    exports: Mutex<Vec<Arc<Exported>>>,
    /// Of clients that come; who is here keeps those under which he came.
    settings: Mutex<Arc<Settings>>,
    log: Log,
    /// What it is called in the log.
    address: String,
    clients: AtomicUsize,
    stop: AtomicBool,
    wake: OwnedFd,
}

impl Shared {
    fn exports(&self) -> Vec<Arc<Exported>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn settings(&self) -> Arc<Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those that a client may see.
    fn visible(&self, peer: &Peer) -> Vec<Arc<Exported>> {
        let mut exports = self.exports();
        exports.retain(|exported| exported.is_for(peer));
        exports
    }

    /// Whether there are exports for clients of certain names only.
    fn has_exports_under_tls(&self) -> bool {
        let is_open = |exported: &Arc<Exported>| exported.is_for(&Peer::default());
        !self.exports().iter().all(is_open)
    }

    /// The export of that name. The empty name means the only one. What a client may not see is not there.
    fn find(&self, name: &[u8], peer: &Peer) -> Option<Arc<Exported>> {
        let exports = self.visible(peer);
        let named = exports.iter().find(|exported| exported.name.as_bytes() == name);
        named.or(if name.is_empty() && exports.len() == 1 { exports.first() } else { None }).cloned()
    }
}

/// A listening server. Drop closes its address, and the connections of clients that have not chosen a disk.
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

    /// From now on only clients of these names may have the disk, as [`Exported::only_for`] says; others who have it go.
    pub fn allow(&self, disk: &Arc<Disk>, names: &[String]) {
        self.shared.exports().iter().filter(|exported| Arc::ptr_eq(&exported.disk, disk)).for_each(|e| e.allow(names));
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

impl Shared {
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The server's thread.
fn listen(shared: &Arc<Shared>, listener: &Listener, reactors: &Reactors) {
    while !shared.stop.load(Ordering::SeqCst) {
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        // In this order: a client that goes after it was counted here rings by this limit, or by a later one, which rings itself.
        let many = shared.settings().limits.clients;
        if shared.clients.load(Ordering::SeqCst) >= many {
            shared.log.warn(&shared.address, None, format_args!("{many} clients are here: others wait until one goes"));
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
            Ok(Some(fd)) => {
                shared.clients.fetch_add(1, Ordering::SeqCst);
                let fd = Accepted { fd, server: shared.clone() };
                let client = Client { server: shared.clone(), settings: shared.settings() };
                // Dropped unrun when the reactor has ended.
                reactors.next().run(move |handle| match Stream::new(handle, fd) {
                    Ok(stream) => {
                        let stream = Rc::new(stream);
                        // Known from here on to whoever ends the server.
                        let link = Link::enter(handle, &stream, &client.server, client.settings.limits.handshake);
                        handle.spawn(serve(handle.clone(), client, stream, link));
                    }
                    Err(e) => {
                        let server = &client.server;
                        server.log.warn(&server.address, None, format_args!("a client's socket: {e}"));
                    }
                });
            }
            Ok(None) => {}
            Err(e) => {
                // Out of descriptors, most likely: listening goes on, slowly.
                shared.log.warn(&shared.address, None, format_args!("accepting a client failed: {e}"));
                wait(shared, Some(RETRY));
            }
        }
    }
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

/// A client's socket. The client is counted until it is closed, also if a thread closes descriptors that the client has sent.
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
    let (terms, peer) = match Negotiation::new(shared, &client.settings, &stream, &mut inbox).run().await {
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
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof || e.kind() == io::ErrorKind::ConnectionReset => return,
        Err(e) => return shared.log.warn(&shared.address, None, format_args!("a client ({from}) was let go: {e}")),
    };
    let exported = terms.exported.clone();
    link.chose(&exported, peer);
    // It was removed, or the client's name was, while it chose.
    if link.is_strange() || !shared.exports().iter().any(|e| Arc::ptr_eq(e, &exported)) {
        return;
    }
    let connection = match Connection::new(&handle, stream.clone(), terms) {
        Ok(connection) => connection,
        Err(e) => {
            return shared.log.warn(&exported.name, None, format_args!("opening the disk for a client ({from}): {e}"));
        }
    };
    shared.log.info(&exported.name, None, format_args!("an NBD client connected ({from})"));
    let end = connection.run(inbox).await;
    stream.close();
    // The last one that goes takes the reactor's spare buffers with it.
    drop(link);
    links::watch(&handle);
    match end {
        End::Gone => shared.log.info(&exported.name, None, format_args!("an NBD client went ({from})")),
        End::Broken(why) => {
            shared.log.warn(&exported.name, None, format_args!("an NBD client ({from}) was let go: {why}"));
        }
    }
}

#[cfg(test)]
mod tests;
