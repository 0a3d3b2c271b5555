//! What the next server needs if this one dies, at the holder (`blockyard_ring::holder`) or in
//! systemd's store of descriptors ([`Store`]).
//!
//! In: parcels, by key. Out: the same parcels in the next server. A parcel's bytes are in a memory
//! file, which is its first descriptor.
//!
//! What must hold
//! - A keeper that does not read delays this server at most [`SEND_TIME`] once. Then the server
//!   goes on without it.
//! - The next server does not use a parcel that is out of date: the rings of such a session may be
//!   other memory of the guest. This server empties the description of a parcel that it can neither
//!   replace nor remove.

mod store;

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_ring::holder::{MOST_BYTES, MOST_FDS, MOST_KEY, kind};
use blockyard_ring::parcel::Parcel;
use rustix::fs::MemfdFlags;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, sockopt,
};
use rustix::process::Pid;

pub use store::Store;

/// Longest wait until the holder or systemd reads.
const SEND_TIME: Duration = Duration::from_secs(1);
/// Longest description of a session in bytes.
const MOST_DESCRIPTION: u64 = 4 << 20;

/// Where parcels are kept.
enum Keeper {
    Holder(OwnedFd),
    Store(Store),
}

/// The keeper, and what it has of this server.
struct Held {
    keeper: Option<Keeper>,
    /// Systemd's store, after it has been given up. It still has descriptors of this service.
    lost: Option<Store>,
    /// Descriptions of the parcels, by key.
    descriptions: BTreeMap<String, OwnedFd>,
}

static HELD: Mutex<Held> =
    Mutex::new(Held { keeper: None, lost: None, descriptions: BTreeMap::new() });

fn held() -> MutexGuard<'static, Held> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps parcels at the holder from now on.
pub fn use_holder(socket: OwnedFd) -> io::Result<()> {
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(SEND_TIME))?;
    held().keeper = Some(Keeper::Holder(socket));
    Ok(())
}

/// Keeps parcels in systemd's store from now on.
pub fn use_store(store: Store) {
    held().keeper = Some(Keeper::Store(store));
}

/// Returns whether sessions are kept, or have been kept and must not become out of date.
pub fn is_on() -> bool {
    let held = held();
    held.keeper.is_some() || !held.descriptions.is_empty()
}

/// Returns a copy of the holder's connection, for a server that takes over. None: there is no
/// holder.
pub fn connection() -> Option<io::Result<OwnedFd>> {
    match &held().keeper {
        Some(Keeper::Holder(socket)) => Some(socket.try_clone()),
        _ => None,
    }
}

/// Returns the name of a parcel in systemd's store, for a server that takes over, and a copy of its
/// description. None: the store does not have it. No description: this server has emptied it.
pub fn stored(key: &str) -> Option<(String, Option<OwnedFd>)> {
    held().stored(key)
}

/// Notes that another server has kept a parcel in systemd's store by this name. `description`: so
/// that this server can empty it.
pub fn adopt(key: String, name: String, description: Option<OwnedFd>) {
    held().adopt(key, name, description);
}

/// Makes the holder watch this process, and start `program` if it dies. (systemd learns the process
/// from the server that hands over.)
pub fn announce(program: &Path) {
    let mut message = vec![kind::SERVER];
    message.extend((std::process::id() as i32).to_ne_bytes());
    message.extend(program.as_os_str().as_bytes());
    message.truncate(MOST_BYTES);
    held().tell("announcing this server", |keeper| match keeper {
        Keeper::Holder(socket) => send(socket, &message, &[]),
        Keeper::Store(_) => Ok(()),
    });
}

/// Makes the holder kill a process if the server dies. During a hand-over, this is the next server,
/// and after it, this server itself. None: there is no such process. (systemd ends all processes of
/// a service before it starts it again.)
pub fn announce_taker(pid: Option<Pid>) {
    let number = pid.map_or(0, |pid| pid.as_raw_nonzero().get());
    let message = [&[kind::TAKER][..], &number.to_ne_bytes()].concat();
    held().tell("announcing the next server", |keeper| match keeper {
        Keeper::Holder(socket) => send(socket, &message, &[]),
        Keeper::Store(_) => Ok(()),
    });
}

/// Replaces what is kept under a key. Returns false if the keeper has no room. Error: the parcel
/// cannot be kept, and the keeper still has the old one. The caller then makes it forget that.
pub fn keep(key: &str, parcel: &Parcel) -> io::Result<bool> {
    if key.len() > MOST_KEY {
        let what = format!("its name is longer than {MOST_KEY} bytes, the most of the holder");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    // One more descriptor has the description.
    let fds = parcel.fds.len() + 1;
    if fds > MOST_FDS {
        let what = format!("it has {fds} descriptors, and the holder keeps at most {MOST_FDS}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    held().keep(key, parcel)
}

/// Forgets what is kept under a key.
pub fn forget(key: &str) {
    held().forget(key);
}

impl Held {
    fn keep(&mut self, key: &str, parcel: &Parcel) -> io::Result<bool> {
        if self.keeper.is_none() {
            self.empty(key);
            return Ok(false);
        }
        let description = rustix::fs::memfd_create("blockyard-session", MemfdFlags::CLOEXEC)
            .and_then(|file| rustix::io::pwrite(&file, &parcel.bytes, 0).map(|_| file))
            .map_err(|e| io::Error::other(format!("cannot describe it for the holder: {e}")))?;
        let fds: Vec<_> = std::iter::once(description.as_fd())
            .chain(parcel.fds.iter().map(AsFd::as_fd))
            .collect();
        let message = message(kind::KEEP, key);
        let is_kept = self.tell(key, |keeper| match keeper {
            Keeper::Holder(socket) => send(socket, &message, &fds).map(|()| true),
            Keeper::Store(store) => store.keep(key, &message, &fds),
        });
        match is_kept {
            Some(true) => {
                self.descriptions.insert(key.into(), description);
            }
            // The keeper has removed the old one, or never had one.
            Some(false) => {
                self.descriptions.remove(key);
            }
            None => {
                self.empty(key);
                // systemd may have the new one and not have removed the old one.
                empty(key, &description);
            }
        }
        Ok(is_kept.unwrap_or(false))
    }

    fn forget(&mut self, key: &str) {
        let is_told = self.tell(key, |keeper| match keeper {
            Keeper::Holder(socket) => send(socket, &message(kind::FORGET, key), &[]),
            Keeper::Store(store) => store.forget(key),
        });
        match is_told {
            Some(()) => drop(self.descriptions.remove(key)),
            None => self.empty(key),
        }
    }

    fn stored(&self, key: &str) -> Option<(String, Option<OwnedFd>)> {
        let name = match &self.keeper {
            Some(Keeper::Store(store)) => store.name(key),
            _ => self.lost.as_ref().and_then(|store| store.name(key)),
        };
        let description = self.descriptions.get(key);
        Some((name?, description.and_then(|file| file.try_clone().ok())))
    }

    fn adopt(&mut self, key: String, name: String, description: Option<OwnedFd>) {
        if let Some(description) = description {
            self.descriptions.insert(key.clone(), description);
        }
        if let Some(Keeper::Store(store)) = &mut self.keeper {
            store.adopt(key, name);
        }
    }

    /// Returns what other servers have kept. From now on, this server can empty their descriptions.
    fn left_behind(&mut self) -> io::Result<Vec<(String, Parcel)>> {
        let all = match &mut self.keeper {
            Some(Keeper::Holder(socket)) => at_holder(socket)?,
            Some(Keeper::Store(store)) => store.left_behind(),
            None => Vec::new(),
        };
        let noted = all.into_iter().map(|Left { key, parcel, description }| {
            self.descriptions.insert(key.clone(), description);
            (key, parcel)
        });
        Ok(noted.collect())
    }

    /// Makes the next server refuse what is kept under a key.
    fn empty(&mut self, key: &str) {
        if let Some(description) = self.descriptions.remove(key) {
            empty(key, &description);
        }
    }

    /// Sends something to the keeper. Gives the keeper up if that fails. Returns `None` if there is
    /// no keeper.
    fn tell<T>(
        &mut self,
        what: &str,
        send: impl FnOnce(&mut Keeper) -> io::Result<T>,
    ) -> Option<T> {
        let present = self.keeper.as_mut()?;
        match send(present) {
            Ok(told) => Some(told),
            Err(e) => {
                let name = match present {
                    Keeper::Holder(_) => "the holder",
                    Keeper::Store(_) => "systemd's store of descriptors",
                };
                tracing::error!("{what}: {name} cannot be reached, nothing is kept any more: {e}");
                if let Some(Keeper::Store(store)) = self.keeper.take() {
                    self.lost = Some(store);
                }
                None
            }
        }
    }
}

/// Empties a description that another process has, too.
fn empty(key: &str, description: &OwnedFd) {
    if let Err(e) = rustix::fs::ftruncate(description, 0) {
        tracing::error!("{key}: what is kept of it is out of date, and stays: {e}");
    }
}

fn message(kind: u8, key: &str) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend(&key.as_bytes()[..key.len().min(MOST_KEY)]);
    message
}

fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::NOSIGNAL;
    let piece = [IoSlice::new(message)];
    // The socket has a timeout: SIGSTOP and SIGCONT interrupt the call without any handler.
    retry_on_intr(|| rustix::net::sendmsg(&socket, &piece, &mut control, flags))?;
    Ok(())
}

/// Returns all that is kept: what servers that have died left, or the server before this one.
pub fn left_behind() -> io::Result<Vec<(String, Parcel)>> {
    held().left_behind()
}

fn at_holder(socket: &OwnedFd) -> io::Result<Vec<Left>> {
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(SEND_TIME * 30))?;
    send(socket, &[kind::ALL], &[])?;
    let mut all = Vec::new();
    loop {
        match receive(socket, RecvFlags::empty())? {
            Received::Kept(left) => all.push(left),
            Received::End => return Ok(all),
        }
    }
}

/// A parcel that is kept.
struct Left {
    key: String,
    parcel: Parcel,
    /// The file with the parcel's bytes.
    description: OwnedFd,
}

/// A message of the holder, or one that is kept in systemd's store.
enum Received {
    Kept(Left),
    End,
}

fn receive(socket: impl AsFd, flags: RecvFlags) -> io::Result<Received> {
    let mut bytes = [0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let piece = &mut [IoSliceMut::new(&mut bytes)];
    let receive = || rustix::net::recvmsg(&socket, piece, &mut control, flags);
    let got = retry_on_intr(receive)?.bytes;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    match bytes[..got].split_first() {
        Some((&kind::KEEP, key)) if !fds.is_empty() => {
            let description = fds.remove(0);
            let parcel = Parcel { bytes: read(&description)?, fds };
            let key = String::from_utf8_lossy(key).into_owned();
            Ok(Received::Kept(Left { key, parcel, description }))
        }
        Some((&kind::END, _)) => Ok(Received::End),
        _ => Err(io::Error::other("the holder sent nonsense, or has ended")),
    }
}

fn read(description: &OwnedFd) -> io::Result<Vec<u8>> {
    let len = rustix::fs::fstat(description)?.st_size as u64;
    if len > MOST_DESCRIPTION {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len as usize];
    let got = rustix::io::pread(description, &mut bytes, 0)?;
    bytes.truncate(got);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    /// A server with a holder, and the other end of the holder's connection.
    fn with_holder() -> (Held, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, holder) =
            rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        (with(Keeper::Holder(ours)), holder)
    }

    fn with(keeper: Keeper) -> Held {
        Held { keeper: Some(keeper), lost: None, descriptions: BTreeMap::new() }
    }

    /// A server of a service with systemd's store, and the manager's end of the connection.
    fn with_store() -> (Held, UnixDatagram) {
        let (ours, manager) = UnixDatagram::pair().unwrap();
        (with(Keeper::Store(Store::new(ours, Vec::new(), 8).unwrap())), manager)
    }

    fn session() -> Parcel {
        Parcel { bytes: b"session".to_vec(), fds: Vec::new() }
    }

    /// A keeper that fails once, such as a busy service manager, has the parcels of before. Those
    /// of sessions that change later must not be used.
    #[test]
    fn a_parcel_that_cannot_be_replaced_is_emptied() {
        let (mut held, holder) = with_holder();
        ["a", "b", "c"].iter().for_each(|key| assert!(held.keep(key, &session()).unwrap()));
        let theirs = ["a", "b", "c"].map(|key| held.descriptions[key].try_clone().unwrap());
        let left = || theirs.each_ref().map(|fd| read(fd).unwrap().len());
        drop(holder);
        assert_eq!(left(), [7, 7, 7]);
        assert!(!held.keep("a", &session()).unwrap());
        assert_eq!(left(), [0, 7, 7]);
        held.forget("b");
        held.empty("b");
        assert_eq!(left(), [0, 0, 7]);
    }

    #[test]
    fn a_parcel_of_another_server_is_emptied() {
        let (mut first, _holder) = with_holder();
        assert!(first.keep("a", &session()).unwrap());
        let kept = &first.descriptions["a"];
        let (mut next, holder) = with_holder();
        send(&holder, &message(kind::KEEP, "a"), &[kept.as_fd()]).unwrap();
        send(&holder, &[kind::END], &[]).unwrap();
        assert_eq!(next.left_behind().unwrap()[0].1.bytes, b"session");
        drop(holder);
        assert!(!next.keep("a", &session()).unwrap());
        assert_eq!(read(kept).unwrap(), b"");
    }

    /// A server that takes over does not read systemd's store: it learns the names and descriptions
    /// from the server before.
    #[test]
    fn a_parcel_that_a_server_has_taken_over_is_emptied() {
        let (mut first, _manager) = with_store();
        assert!(first.keep("a", &session()).unwrap());
        let (name, description) = first.stored("a").unwrap();
        let (mut next, manager) = with_store();
        next.adopt("a".into(), name.clone(), description);
        assert_eq!(next.stored("a").unwrap().0, name);
        drop(manager);
        assert!(!next.keep("a", &session()).unwrap());
        assert_eq!(read(&first.descriptions["a"]).unwrap(), b"");
    }

    /// systemd counts what it has of a server that has given it up. The next server must do it too.
    #[test]
    fn the_next_server_learns_what_a_store_that_was_given_up_still_has() {
        let (mut held, manager) = with_store();
        ["a", "b"].iter().for_each(|key| assert!(held.keep(key, &session()).unwrap()));
        let before = ["a", "b"].map(|key| held.stored(key).unwrap().0);
        drop(manager);
        assert!(!held.keep("a", &session()).unwrap());
        assert!(held.keeper.is_none());
        let after = ["a", "b"].map(|key| held.stored(key).unwrap());
        assert_eq!(after.each_ref().map(|(name, _)| name.clone()), before);
        // The next server replaces the emptied parcel, and can empty the other one.
        assert_eq!(after.map(|(_, description)| description.is_some()), [false, true]);
        assert!(held.stored("c").is_none());
    }
}
