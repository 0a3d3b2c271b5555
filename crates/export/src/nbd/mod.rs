//! NBD: disks for clients of the network block device protocol (the host's kernel, QEMU, libnbd),
//! over Unix sockets and TCP.
//!
//! ```text
//!   address ─► acceptor ─► reactor: negotiation ─► receiver ─► workers ─► disk
//!                                                  sender ◄─── replies ◄───┘
//! ```
//! A [`Server`] serves one address, with any number of disks, by name. One thread accepts the
//! clients of all addresses and distributes them over the reactors, which do everything else. A
//! flush on one connection covers the writes of all connections, because the disk flushes as a
//! whole. Source: the NBD project's `proto.md`. Its constants are in crate `nbd`.
//!
//! What must hold:
//! - A client that sends nothing, or reads nothing, costs a bounded amount of memory. If others
//!   wait for that memory, it is disconnected after a bounded time.
//! - A server that ends waits for requests, but not for clients.

mod block_status;
mod buffers;
mod connection;
mod crowd;
mod exported;
mod handover;
mod idle;
mod inbox;
mod left;
mod limits;
mod links;
mod negotiate;
mod quota;
mod receive;
mod refusal;
mod reply;
mod send;
mod shared;
mod spool;
mod stream;
mod terms;
mod worker;

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_ring::parcel::Parcel;
use blockyard_ring::{Handle, Socket};

use crate::acceptor::{Entrance, Registration};
use crate::connections::{self, Accepted};
use crate::descriptors;
use crate::export::{Obstacle, STOP_TIME};
use crate::{Client, Export, Handed, Listener, Reactors};
use crowd::Source;
use exported::Peer;
use inbox::Inbox;
use left::LeftConnection;
use links::{Link, Undecided};
use negotiate::Negotiation;
use receive::{End, Receiver};
use shared::Shared;
use stream::{Remains, Stream};
use terms::Terms;

pub use exported::Exported;
pub use limits::Limits;
pub use shared::Settings;

/// Time in which a client must choose its export when another server takes over.
const CHOICE: Duration = Duration::from_secs(1);

/// A listening server. Drop closes its address, and the connections of clients that have not chosen
/// a disk.
pub struct Server {
    shared: Arc<Shared>,
    /// Not in [`Shared`], because dropping the last reference to the reactors waits until they end.
    /// A client's connection must not hold that last reference.
    reactors: Arc<Reactors>,
    /// None: the server ends.
    registration: Option<Registration>,
}

impl Server {
    /// Accepts clients from now on. `address` appears in the log.
    pub fn start(
        listener: Listener,
        address: &str,
        settings: Arc<Settings>,
        reactors: Arc<Reactors>,
    ) -> io::Result<Arc<Self>> {
        let shared = Shared::new(settings, address);
        let admitting = shared.clone();
        let registration =
            shared.accepting.listen(listener, &reactors, move |reactors, entrance| {
                admit(&admitting, reactors, entrance)
            })?;
        let registration = Some(registration);
        Ok(Arc::new(Server { shared, reactors, registration }))
    }

    fn listener(&self) -> io::Result<&Arc<Listener>> {
        let registration = self.registration.as_ref();
        Ok(registration.ok_or(io::ErrorKind::NotConnected)?.listener())
    }

    /// Returns the address, as the log shows it.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Begins a hand-over: accepts no client any more, and leaves the socket's file to the next
    /// server.
    pub fn pause(&self) -> io::Result<()> {
        self.listener()?.keep_file();
        self.shared.accepting.pause();
        self.shared.disconnected.store(0, Ordering::SeqCst);
        Ok(())
    }

    /// Returns a copy of the listening sockets for the next server. Call [`Server::pause`] before.
    /// Clients that choose their exports may do that until `since` is [`CHOICE`] ago.
    pub fn hand_over(&self, since: Instant) -> io::Result<Parcel> {
        let parcel = self.listener()?.to_parcel();
        while since.elapsed() < CHOICE && links::undecided(&self.reactors, &self.shared) > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = links::end_undecided(&self.reactors, &self.shared);
        if ended > 0 {
            self.shared.disconnected.fetch_add(ended as u64, Ordering::SeqCst);
            let address = &self.shared.address;
            tracing::warn!(
                "{address}: {ended} NBD clients that had chosen no export were disconnected for \
                 the hand-over"
            );
        }
        parcel
    }

    /// Returns the number of clients that the present hand-over has disconnected.
    pub fn disconnected(&self) -> u64 {
        self.shared.disconnected.load(Ordering::SeqCst)
    }

    /// The next server has failed.
    pub fn take_back(&self) {
        if let Ok(listener) = self.listener() {
            listener.remove_file();
        }
        self.shared.accepting.resume();
    }

    /// Continues connections of another server, when this process is the owner.
    fn resume(&self, exported: &Arc<Exported>, left: Vec<LeftConnection>) {
        let mut resumed = self.shared.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        resumed.extend(left.into_iter().map(|connection| (exported.clone(), connection)));
        self.shared.accepting.ring();
    }

    /// Replaces the settings for clients that connect from now on.
    pub fn set(&self, settings: Arc<Settings>) {
        let most = settings.limits.clients;
        *self.shared.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        self.shared.accepting.set_most(most);
    }

    /// Exports one more disk, until the [`Offer`] is dropped.
    pub fn offer(self: &Arc<Self>, exported: Exported) -> Offer {
        let (disk, exported) = (exported.disk.clone(), Arc::new(exported));
        disk.note_export(KIND);
        let mut exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        exports.push(exported.clone());
        Offer { server: self.clone(), disk, exported, is_stopped: false }
    }

    /// Restricts the disk to clients with these names (see [`Exported::only_for`]). Disconnects all
    /// other clients of the disk.
    pub fn allow(&self, disk: &Arc<Disk>, names: Option<&[String]>) {
        self.shared
            .exports()
            .iter()
            .filter(|exported| Arc::ptr_eq(&exported.disk, disk))
            .for_each(|e| e.allow(names));
        links::end_not_allowed(&self.reactors, disk);
    }

    /// Ends the export of a disk: sends the replies to the requests of its clients, and disconnects
    /// them.
    fn remove(&self, disk: &Arc<Disk>, deadline: Instant) {
        self.forget(disk);
        connections::end::<Link>(&self.reactors, disk, deadline);
    }

    /// Offers the disk to no client any more.
    fn forget(&self, disk: &Arc<Disk>) {
        let mut exports = self.shared.exports.lock().unwrap_or_else(PoisonError::into_inner);
        exports.retain(|exported| !Arc::ptr_eq(&exported.disk, disk));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Waits for the callback, so that no client comes after this.
        self.registration = None;
        links::end_undecided(&self.reactors, &self.shared);
    }
}

/// Name of the export in counts and in a hand-over.
pub const KIND: &str = "nbd";

/// A disk that a server exports. When the server's last offer is dropped, the server closes its
/// address.
pub struct Offer {
    server: Arc<Server>,
    disk: Arc<Disk>,
    exported: Arc<Exported>,
    is_stopped: bool,
}

impl Export for Offer {
    /// NBD has no message for a new size. Clients see it when they connect.
    fn resize(&mut self) {}

    fn stop(&mut self, deadline: Instant) {
        if !std::mem::replace(&mut self.is_stopped, true) {
            self.server.remove(&self.disk, deadline);
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        descriptors::obstacle().filter(|_| !self.clients().is_empty())
    }

    fn waits_for_owner(&self) -> bool {
        true
    }

    fn hand_over(&mut self) -> Option<Handed> {
        if std::mem::replace(&mut self.is_stopped, true) { None } else { self.leave() }
    }

    fn allow(&mut self, names: Option<&[String]>) {
        self.server.allow(&self.disk, names);
    }

    fn clients(&self) -> Vec<Client> {
        connections::clients::<Link>(&self.server.reactors, &self.disk)
    }

    fn disconnect(&mut self, description: Option<&str>) -> Vec<Client> {
        connections::disconnect::<Link>(&self.server.reactors, &self.disk, description)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.stop(Instant::now() + STOP_TIME);
    }
}

/// Accepts the clients that wait, after those of another server.
fn admit(shared: &Arc<Shared>, reactors: &Reactors, entrance: Entrance) -> io::Result<()> {
    let mut resumed = shared.resumed.lock().unwrap_or_else(PoisonError::into_inner);
    resumed.drain(..).for_each(|(exported, left)| resume(shared, reactors, exported, left));
    drop(resumed);
    let name = (&shared.log, &*shared.address);
    shared.accepting.admit(entrance, name, |fd| deal_out(shared, reactors, fd))
}

/// Gives a client to the next reactor. Disconnects the client if its source is limited.
fn deal_out(shared: &Arc<Shared>, reactors: &Reactors, fd: Accepted) {
    let source = Source::of(&fd);
    let Some(undecided) = Undecided::enter(shared, source) else {
        // The client may have sent descriptors, so its socket is not closed on this thread. Until
        // it is closed, it counts.
        reactors.next().run(move |handle| drop(Socket::new(handle, fd)));
        return shared.log.warn(
            &shared.address,
            None,
            format_args!(
                "a client was disconnected, because clients of {source} that choose no export \
                 hold many places for long"
            ),
        );
    };
    let client = Arrival { server: shared.clone(), settings: shared.settings() };
    // If the reactor has ended, the closure is dropped without a call.
    reactors.next().run(move |handle| match Stream::new(handle, fd) {
        Ok(stream) => {
            let stream = Rc::new(stream);
            // From now on, the end of the server also ends this connection.
            let (server, limits) = (&client.server, client.settings.limits);
            let link = Link::enter(handle, &stream, server, limits.handshake, Some(undecided));
            handle.spawn(serve(handle.clone(), client, stream, link));
        }
        Err(e) => {
            let server = &client.server;
            server.log.warn(
                &server.address,
                None,
                format_args!("cannot use a client's socket: {e}"),
            );
        }
    });
}

/// Gives a connection of another server to the next reactor.
fn resume(
    shared: &Arc<Shared>,
    reactors: &Reactors,
    exported: Arc<Exported>,
    left: LeftConnection,
) {
    let LeftConnection { stream, headers, contexts, since, remains } = left;
    let fd = shared.accepting.count(stream);
    let (server, handshake) = (shared.clone(), shared.settings().limits.handshake);
    reactors.next().run(move |handle| {
        let place = Cell::new(exported.place(usize::MAX));
        let terms = Terms { exported, headers, contexts, place };
        match Stream::continued(handle, fd, since, remains) {
            Ok(stream) => {
                let stream = Rc::new(stream);
                let link = Link::enter(handle, &stream, &server, handshake, None);
                let agreed = (terms, Peer::default(), Inbox::default());
                handle.spawn(transmit(handle.clone(), server, stream, link, agreed));
            }
            Err(e) => {
                let name = &terms.exported.name;
                server.log.warn(name, None, format_args!("cannot continue with a client: {e}"));
            }
        }
    });
}

/// What a new connection belongs to.
struct Arrival {
    server: Arc<Shared>,
    settings: Arc<Settings>,
}

/// Serves one client from connection to disconnection.
async fn serve(handle: Handle, client: Arrival, stream: Rc<Stream>, link: Rc<Link>) {
    let shared = &*client.server;
    let (mut inbox, from) = (Inbox::default(), stream.from());
    let (terms, peer) = match Negotiation::new(shared, &client.settings, &stream, &mut inbox)
        .run()
        .await
    {
        Ok(Some(agreed)) => agreed,
        Ok(None) => return stream.close(),
        Err(_) if link.was_late() => {
            let limit = client.settings.limits.handshake.as_secs_f64();
            return shared.log.warn(
                &shared.address,
                None,
                format_args!("a client ({from}) chose no export in {limit} s: it was disconnected"),
            );
        }
        // This client has only checked whether a server listens.
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
                format_args!("a client ({from}) was disconnected: {e}"),
            );
        }
    };
    transmit(handle, client.server.clone(), stream, link, (terms, peer, inbox)).await;
}

/// Serves one client from the choice of its export to its disconnection.
async fn transmit(
    handle: Handle,
    shared: Arc<Shared>,
    stream: Rc<Stream>,
    link: Rc<Link>,
    (terms, peer, inbox): (Terms, Peer, Inbox),
) {
    let (exported, from) = (terms.exported.clone(), stream.from());
    let (headers, contexts) = (terms.headers, terms.contexts.clone());
    link.chose(&exported, peer);
    // The export or the client's permission may have been removed during the negotiation.
    if link.is_not_allowed() || !shared.exports().iter().any(|e| Arc::ptr_eq(e, &exported)) {
        return;
    }
    let receiver = match Receiver::new(&handle, stream.clone(), terms) {
        Ok(receiver) => receiver,
        Err(e) => {
            link.ends("its disk cannot be opened");
            return shared.log.warn(
                &exported.name,
                None,
                format_args!("cannot open the disk for a client ({from}): {e}"),
            );
        }
    };
    shared.log.info(&exported.name, None, format_args!("an NBD client connected ({from})"));
    let end = match receiver.run(inbox).await {
        End::Left(unread) => match stream.keep() {
            Ok((fd, unsent)) => {
                let (since, remains) = (stream.client().since, Remains { unread, unsent });
                link.ends("another server continues it");
                let left = LeftConnection { stream: fd, headers, contexts, since, remains };
                return link.put_left(left);
            }
            Err(e) => End::Broken(format!("it cannot be handed over: {e}")),
        },
        end => end,
    };
    stream.close();
    link.ends(&match &end {
        End::Broken(why) => why.to_string(),
        End::Left(_) => "another server continues it".into(),
        End::Gone if link.is_not_allowed() => "its certificate is no longer allowed".into(),
        End::Gone => "it has closed its connection".into(),
    });
    // If this is the last connection of the reactor, dropping the link frees the spare buffers.
    drop(link);
    links::watch(&handle);
    match end {
        End::Left(_) => {}
        End::Gone => shared.log.info(
            &exported.name,
            None,
            format_args!("an NBD client disconnected ({from})"),
        ),
        End::Broken(why) => {
            shared.log.warn(
                &exported.name,
                None,
                format_args!("an NBD client ({from}) was disconnected: {why}"),
            );
        }
    }
}

#[cfg(test)]
mod tests;
