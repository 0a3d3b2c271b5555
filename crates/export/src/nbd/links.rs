//! The connections of a reactor, and the ends of those that are too slow or not allowed any more.
//!
//! What must hold: the server disconnects a client that has not chosen an export in time. It also
//! disconnects a client that reads no replies while others wait for the memory.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_disk::{ConnectedClient, Disk};
use blockyard_ring::{Handle, Remote};

use super::buffers::Buffers;
use super::crowd::Source;
use super::exported::{Exported, Peer};
use super::left::LeftConnection;
use super::shared::Shared;
use super::stream::Stream;
use crate::connections::{self, Member};
use crate::{Client, Reactors};

/// Time between two checks for slow clients, while a client may be slow.
const CHECK_PERIOD: Duration = Duration::from_millis(500);
/// Longest time without progress in a client's transfer while others wait for memory.
const STALLED: Duration = Duration::from_secs(4);

/// One connection.
pub struct Link {
    server: Arc<Shared>,
    stream: Rc<Stream>,
    /// Time until which the client must have chosen an export.
    deadline: Instant,
    late: Cell<bool>,
    /// Counts the client until it has chosen an export.
    undecided: Cell<Option<Undecided>>,
    exported: OnceCell<Arc<Exported>>,
    /// The client's identity, when it is known.
    peer: OnceCell<Peer>,
    counted: OnceCell<ConnectedClient>,
    /// The connection as another server continues it.
    left: Cell<Option<LeftConnection>>,
}

/// Counts a client that has not chosen an export, until this is dropped.
pub struct Undecided {
    server: Arc<Shared>,
    source: Source,
}

impl Undecided {
    /// Counts a client that has connected. Returns `None` if its source is limited.
    pub fn enter(server: &Arc<Shared>, source: Source) -> Option<Self> {
        let limits = server.settings().limits;
        let is_admitted = server.crowds.enter(source, &limits, Instant::now());
        is_admitted.then(|| Undecided { server: server.clone(), source })
    }
}

impl Drop for Undecided {
    fn drop(&mut self) {
        let limits = self.server.settings().limits;
        self.server.crowds.leave(self.source, &limits, Instant::now());
    }
}

/// Whether the task that checks for slow clients runs on this reactor.
#[derive(Default)]
struct Watched(Cell<bool>);

impl Member for Link {
    fn client(&self) -> &Client {
        self.stream.client()
    }

    fn disk(&self) -> Option<&Arc<Disk>> {
        self.exported.get().map(|exported| &exported.disk)
    }

    fn end(&self, why: &'static str) {
        self.ends(why);
        self.stream.shutdown_read();
    }

    fn shutdown(&self) {
        self.stream.shutdown();
    }
}

impl Link {
    /// Registers a new connection of this reactor. `handshake`: time in which the client must
    /// choose an export. `undecided`: counts the client until then.
    pub fn enter(
        handle: &Handle,
        stream: &Rc<Stream>,
        server: &Arc<Shared>,
        handshake: Duration,
        undecided: Option<Undecided>,
    ) -> Rc<Self> {
        let deadline = Instant::now() + handshake;
        let (late, exported, peer, counted, left) = Default::default();
        let link = Rc::new(Link {
            server: server.clone(),
            stream: stream.clone(),
            deadline,
            late,
            undecided: Cell::new(undecided),
            exported,
            peer,
            counted,
            left,
        });
        connections::enter(handle, &link);
        handle.local::<Buffers>().on_shortage(watch);
        watch(handle);
        link
    }

    /// Records the export that the client has chosen.
    pub fn chose(&self, exported: &Arc<Exported>, peer: Peer) {
        drop(self.undecided.take());
        let _ = self.peer.set(peer);
        self.stream.chose(&exported.disk);
        let _ = self.counted.set(exported.disk.client(super::KIND, self.stream.client().id()));
        let _ = self.exported.set(exported.clone());
    }

    /// Notes why the client is about to be disconnected.
    pub fn ends(&self, why: &str) {
        if let Some(counted) = self.counted.get() {
            counted.ends(why);
        }
    }

    /// Returns whether the client was disconnected because it had chosen no export in time.
    pub fn was_late(&self) -> bool {
        self.late.get()
    }

    /// Lets another server continue the connection. TLS connections end instead.
    pub fn leave(&self) {
        match self.is_tls() {
            true => self.end("the export has ended"),
            false => self.stream.leave(),
        }
    }

    /// Counts this client as disconnected by the present hand-over.
    pub fn note_disconnected(&self) {
        self.server.disconnected.fetch_add(1, Ordering::SeqCst);
    }

    pub fn is_tls(&self) -> bool {
        self.stream.is_tls()
    }

    /// Ends the wait for a client that reads its last replies slowly.
    pub fn hurry(&self, keeps_replies: bool, ends_tls: bool) {
        match self.is_tls() {
            true if ends_tls => self.stream.shutdown(),
            false if keeps_replies => self.stream.collect(),
            _ => {}
        }
    }

    /// Notes the connection for another server.
    pub fn put_left(&self, left: LeftConnection) {
        self.left.set(Some(left));
    }

    pub fn take_left(&self) -> Option<LeftConnection> {
        self.left.take()
    }

    /// Returns whether the client has chosen no export of `server` yet.
    fn is_undecided(&self, server: &Arc<Shared>) -> bool {
        self.exported.get().is_none() && Arc::ptr_eq(&self.server, server)
    }

    /// Returns whether the client has lost its permission to use the chosen export.
    pub fn is_not_allowed(&self) -> bool {
        let chosen = self.exported.get().zip(self.peer.get());
        chosen.is_some_and(|(exported, peer)| !exported.is_for(peer))
    }

    /// Checks the deadlines, and disconnects a client that has missed one. Returns whether this
    /// connection needs further checks. `short`: requests wait for memory.
    fn check(&self, short: bool) -> bool {
        if self.exported.get().is_none() && Instant::now() >= self.deadline {
            self.late.set(true);
            self.stream.shutdown();
        }
        if (short && self.stream.stalls(STALLED)) || self.stream.stalls_next() {
            self.stream.shutdown();
        }
        self.exported.get().is_none() || short || self.stream.carries()
    }
}

/// Checks connections while one of them may be too slow. A connection needs no checks if it has
/// chosen an export and no request waits for memory. So idle clients cause no wake-ups.
async fn check_all(watched: Rc<Watched>, handle: Handle) {
    let buffers = handle.local::<Buffers>();
    loop {
        handle.sleep(CHECK_PERIOD).await;
        let living = connections::living::<Link>(&handle);
        let short = buffers.are_short();
        let waiting = living.iter().filter(|link| link.check(short)).count();
        if living.is_empty() {
            buffers.forget();
        }
        if waiting == 0 {
            return watched.0.set(false);
        }
    }
}

/// Starts the task that checks for slow clients, unless that task runs already.
pub fn watch(handle: &Handle) {
    let watched = handle.local::<Watched>();
    if !watched.0.replace(true) {
        handle.spawn(check_all(watched, handle.clone()));
    }
}

/// Starts no checks on this reactor, so that time disconnects no client.
#[cfg(test)]
pub fn never_watch(handle: &Handle) {
    handle.local::<Watched>().0.set(true);
}

/// Returns the number of connections of `server` that have not chosen an export.
pub fn undecided(reactors: &Reactors, server: &Arc<Shared>) -> usize {
    each_undecided(reactors, server, |_| ())
}

/// Ends the connections of `server` that have not chosen an export. Returns their number.
pub fn end_undecided(reactors: &Reactors, server: &Arc<Shared>) -> usize {
    each_undecided(reactors, server, Member::shutdown)
}

fn each_undecided(reactors: &Reactors, server: &Arc<Shared>, call: fn(&Link)) -> usize {
    let of_reactor = |reactor: &Remote| {
        let server = server.clone();
        reactor.ask(move |handle, reply| {
            let mut living = connections::living::<Link>(handle);
            living.retain(|link| link.is_undecided(&server));
            living.iter().for_each(|link| call(link));
            reply.send(living.len());
        })
    };
    reactors.all().filter_map(of_reactor).sum()
}

/// Ends the connections of clients that have lost their permission to use `disk`.
pub fn end_not_allowed(reactors: &Reactors, disk: &Arc<Disk>) {
    for reactor in reactors.all() {
        let disk = disk.clone();
        reactor.run(move |handle| {
            let mut links = connections::of_disk::<Link>(handle, &disk);
            links.retain(|link| link.is_not_allowed());
            links.iter().for_each(|link| link.shutdown());
        });
    }
}
