//! The connections of a reactor, and the reasons to end them: a client that is too slow, and a disk
//! that is removed.
//!
//! What must hold: the server disconnects a client that has not chosen an export in time. It also
//! disconnects a client that reads no replies while others wait for the memory. The end of a disk
//! waits for the requests in flight, but not for the clients.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_disk::{ConnectedClient, Disk, LocalDisk};
use blockyard_ring::{Handle, Remote};

use super::buffers::Buffers;
use super::crowd::Source;
use super::exported::{Exported, Peer};
use super::left::LeftConnection;
use super::shared::Shared;
use super::stream::Stream;
use crate::export::BY_OPERATOR;
use crate::{Client, Reactors};

/// Time between two checks for slow clients, while a client may be slow.
const CHECK_PERIOD: Duration = Duration::from_millis(500);
/// Longest time without progress in a client's transfer while others wait for memory.
const STALLED: Duration = Duration::from_secs(4);
/// Longest time that a client has to read its last replies while its disk ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

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

#[derive(Default)]
struct Links {
    all: RefCell<Vec<Weak<Link>>>,
    /// The task that checks for slow clients runs.
    watched: Cell<bool>,
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
        handle.local::<Links>().all.borrow_mut().push(Rc::downgrade(&link));
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
        if self.is_tls() { self.stream.shutdown_read() } else { self.stream.leave() }
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

    fn is_of(&self, disk: &Arc<Disk>) -> bool {
        self.exported.get().is_some_and(|exported| Arc::ptr_eq(&exported.disk, disk))
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

impl Links {
    fn living(&self) -> Vec<Rc<Link>> {
        self.all.borrow_mut().retain(|link| link.strong_count() > 0);
        self.all.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    /// Checks connections while one of them may be too slow. A connection needs no checks if it has
    /// chosen an export and no request waits for memory. So idle clients cause no wake-ups.
    async fn watch(self: Rc<Self>, handle: Handle) {
        let buffers = handle.local::<Buffers>();
        loop {
            handle.sleep(CHECK_PERIOD).await;
            let living = self.living();
            let short = buffers.are_short();
            let waiting = living.iter().filter(|link| link.check(short)).count();
            if living.is_empty() {
                buffers.forget();
            }
            if waiting == 0 {
                return self.watched.set(false);
            }
        }
    }
}

/// Starts the task that checks for slow clients, unless that task runs already.
pub fn watch(handle: &Handle) {
    let links = handle.local::<Links>();
    if !links.watched.replace(true) {
        handle.spawn(links.watch(handle.clone()));
    }
}

/// Starts no checks on this reactor, so that time disconnects no client.
#[cfg(test)]
pub fn never_watch(handle: &Handle) {
    handle.local::<Links>().watched.set(true);
}

/// Returns the connections of `disk` on this reactor.
pub fn of_disk(handle: &Handle, disk: &Arc<Disk>) -> Vec<Rc<Link>> {
    let mut links = handle.local::<Links>().living();
    links.retain(|link| link.is_of(disk));
    links
}

/// Returns the number of connections of `server` that have not chosen an export.
pub fn undecided(reactors: &Reactors, server: &Arc<Shared>) -> usize {
    let of_reactor = |reactor: &Remote| {
        let server = server.clone();
        reactor.ask(move |handle, reply| {
            let living = handle.local::<Links>().living();
            let is_undecided = |link: &&Rc<Link>| {
                link.exported.get().is_none() && Arc::ptr_eq(&link.server, &server)
            };
            reply.send(living.iter().filter(is_undecided).count());
        })
    };
    reactors.all().filter_map(of_reactor).sum()
}

/// Ends the connections of `server` that have not chosen an export. Returns their number.
pub fn end_undecided(reactors: &Reactors, server: &Arc<Shared>) -> usize {
    let of_reactor = |reactor: &Remote| {
        let server = server.clone();
        reactor.ask(move |handle, reply| {
            let mut living = handle.local::<Links>().living();
            living
                .retain(|link| link.exported.get().is_none() && Arc::ptr_eq(&link.server, &server));
            living.iter().for_each(|link| link.stream.shutdown());
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
            let living = handle.local::<Links>().living();
            living
                .iter()
                .filter(|link| link.is_of(&disk) && link.is_not_allowed())
                .for_each(|link| link.stream.shutdown());
        });
    }
}

/// Ends the connections of clients of `disk` with this description, or of all of them, after their
/// requests are answered. Returns before that.
pub fn disconnect(reactors: &Reactors, disk: &Arc<Disk>, description: Option<&str>) {
    for reactor in reactors.all() {
        let (disk, description) = (disk.clone(), description.map(String::from));
        reactor.run(move |handle| {
            let mut links = of_disk(handle, &disk);
            links.retain(|link| {
                description.as_ref().is_none_or(|d| *d == link.stream.client().description)
            });
            for link in &links {
                link.ends(BY_OPERATOR);
                link.stream.shutdown_read();
            }
            let (links, timer) = (links.iter().map(Rc::downgrade).collect(), handle.clone());
            handle.spawn(async move { hurry(&timer, links).await });
        });
    }
}

/// Disconnects clients that do not read their last replies in time.
async fn hurry(handle: &Handle, links: Vec<Weak<Link>>) {
    let deadline = Instant::now() + LAST_ANSWERS;
    while links.iter().any(|link| link.strong_count() > 0) {
        if Instant::now() > deadline {
            return links.iter().filter_map(Weak::upgrade).for_each(|link| link.stream.shutdown());
        }
        handle.sleep(Duration::from_millis(2)).await;
    }
}

/// Returns the clients of `disk`, ordered by reactor.
pub fn clients(reactors: &Reactors, disk: &Arc<Disk>) -> Vec<Client> {
    let of_reactor = |reactor: &Remote| {
        let disk = disk.clone();
        reactor.ask(move |handle, reply| {
            let living = handle.local::<Links>().living();
            let links = living.iter().filter(|link| link.is_of(&disk));
            reply.send(links.map(|link| link.stream.client().clone()).collect::<Vec<_>>());
        })
    };
    reactors.all().filter_map(of_reactor).flatten().collect()
}

/// Ends the connections of `disk` on all reactors, after their requests are answered. Disconnects
/// clients that have not read the replies at `deadline`, or in [`LAST_ANSWERS`].
pub fn end(reactors: &Reactors, disk: &Arc<Disk>, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LAST_ANSWERS);
    let begin = |reactor: &Remote| {
        let disk = disk.clone();
        reactor.ask_later(move |handle, reply| {
            let asking = handle.clone();
            handle.spawn(async move {
                end_here(&asking, &disk, deadline).await;
                reply.send(());
            });
        })
    };
    // Starts all ends before it waits, because the clients of each reactor share one deadline.
    let ends: Vec<_> = reactors.all().map(begin).collect();
    for end in ends {
        let _ = end.wait();
    }
}

async fn end_here(handle: &Handle, disk: &Arc<Disk>, deadline: Instant) {
    let of_disk = || of_disk(handle, disk);
    if of_disk().is_empty() {
        return;
    }
    // Requests that wait for throttles are admitted now, because the export ends.
    let served = LocalDisk::known(handle, disk);
    served.iter().for_each(|served| served.suspend());
    of_disk().iter().for_each(|link| link.stream.shutdown_read());
    loop {
        let left = of_disk();
        if left.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            left.iter().for_each(|link| link.stream.shutdown());
        }
        drop(left);
        handle.sleep(Duration::from_millis(2)).await;
    }
    served.iter().for_each(|served| served.resume());
}
