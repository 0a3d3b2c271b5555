//! The connections of each reactor, and their ends.
//!
//! In: connections, as they begin. Out: the clients of a disk, and the end of its connections for
//! an operator or with the export. What must hold: the requests that were taken are answered first.
//! No end waits for a client that does not read its answers. A connection stays on its reactor, so
//! no lock is necessary.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, LocalDisk};
use blockyard_ring::{Handle, Remote};

use crate::export::BY_OPERATOR;
use crate::{Client, Reactors};

/// Longest time that a client has to read its last replies while its connection ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Time between two checks for the ends of connections.
const CHECK_PERIOD: Duration = Duration::from_millis(2);

/// A connection of one kind of export. The connection has ended when nothing else holds it.
pub trait Member: 'static {
    fn client(&self) -> &Client;

    /// Returns the disk of the client. `None`: the client has not chosen one.
    fn disk(&self) -> Option<&Arc<Disk>>;

    /// Notes why the client is about to be disconnected, if no reason is noted yet, and takes no
    /// more requests. The connection ends after the answers to those that were taken.
    fn end(&self, why: &'static str);

    /// Disconnects the client at once.
    fn shutdown(&self);
}

/// The connections of a kind on one reactor.
struct Registry<M>(RefCell<Vec<Weak<M>>>);

impl<M> Default for Registry<M> {
    fn default() -> Self {
        Registry(RefCell::default())
    }
}

/// Registers a new connection of this reactor.
pub fn enter<M: Member>(handle: &Handle, member: &Rc<M>) {
    handle.local::<Registry<M>>().0.borrow_mut().push(Rc::downgrade(member));
}

/// Returns the connections of this reactor.
pub fn living<M: Member>(handle: &Handle) -> Vec<Rc<M>> {
    let registry = handle.local::<Registry<M>>();
    let mut all = registry.0.borrow_mut();
    all.retain(|member| member.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Returns the connections of `disk` on this reactor.
pub fn of_disk<M: Member>(handle: &Handle, disk: &Arc<Disk>) -> Vec<Rc<M>> {
    let mut members = living::<M>(handle);
    members.retain(|member| member.disk().is_some_and(|of| Arc::ptr_eq(of, disk)));
    members
}

/// Returns the clients of `disk`, ordered by reactor.
pub fn clients<M: Member>(reactors: &Reactors, disk: &Arc<Disk>) -> Vec<Client> {
    let of_reactor = |reactor: &Remote| {
        let disk = disk.clone();
        reactor.ask(move |handle, reply| {
            let members = of_disk::<M>(handle, &disk);
            reply.send(members.iter().map(|member| member.client().clone()).collect::<Vec<_>>());
        })
    };
    reactors.all().filter_map(of_reactor).flatten().collect()
}

/// Ends the connections of clients of `disk` with this description, or of all of them, after their
/// requests are answered. Returns these clients, before that.
pub fn disconnect<M: Member>(
    reactors: &Reactors,
    disk: &Arc<Disk>,
    description: Option<&str>,
) -> Vec<Client> {
    let mut leaving = clients::<M>(reactors, disk);
    leaving.retain(|client| description.is_none_or(|d| d == client.description));
    for reactor in reactors.all() {
        let (disk, description) = (disk.clone(), description.map(String::from));
        reactor.run(move |handle| {
            let mut members = of_disk::<M>(handle, &disk);
            members.retain(|member| {
                description.as_ref().is_none_or(|d| *d == member.client().description)
            });
            members.iter().for_each(|member| member.end(BY_OPERATOR));
            let (members, timer) = (members.iter().map(Rc::downgrade).collect(), handle.clone());
            handle.spawn(async move { hurry(&timer, members).await });
        });
    }
    leaving
}

/// Disconnects clients that do not read their last replies in time.
async fn hurry<M: Member>(handle: &Handle, members: Vec<Weak<M>>) {
    let deadline = Instant::now() + LAST_ANSWERS;
    while members.iter().any(|member| member.strong_count() > 0) {
        if Instant::now() > deadline {
            return members.iter().filter_map(Weak::upgrade).for_each(|member| member.shutdown());
        }
        handle.sleep(CHECK_PERIOD).await;
    }
}

/// Ends the connections of `disk` on all reactors, after their requests are answered. Disconnects
/// clients that have not read the replies at `deadline`, or in [`LAST_ANSWERS`].
pub fn end<M: Member>(reactors: &Reactors, disk: &Arc<Disk>, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LAST_ANSWERS);
    let begin = |reactor: &Remote| {
        let disk = disk.clone();
        reactor.ask_later(move |handle, reply| {
            let asking = handle.clone();
            handle.spawn(async move {
                end_here::<M>(&asking, &disk, deadline).await;
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

pub(super) async fn end_here<M: Member>(handle: &Handle, disk: &Arc<Disk>, deadline: Instant) {
    let of_disk = || of_disk::<M>(handle, disk);
    if of_disk().is_empty() {
        return;
    }
    // Requests that wait for throttles are admitted now, because the export ends.
    let served = LocalDisk::known(handle, disk);
    served.iter().for_each(|served| served.suspend());
    of_disk().iter().for_each(|member| member.end("the export has ended"));
    loop {
        let left = of_disk();
        if left.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            left.iter().for_each(|member| member.shutdown());
        }
        drop(left);
        handle.sleep(CHECK_PERIOD).await;
    }
    served.iter().for_each(|served| served.resume());
}
