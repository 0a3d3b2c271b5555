//! A client of xenstore, the tree of nodes that all domains share, over its wire protocol.
//!
//! In: paths and values. Out: values, or the tokens of watches after a change of their nodes. Calls
//! block, each for at most [`PATIENCE`], so a reactor's thread must not call them.
//!
//! What must hold
//! - Other domains write these nodes. A value is a limited number of bytes, and is text only if it
//!   is UTF-8 without NUL.
//! - However often a watched node changes, one token is kept until the caller takes it.
//! - After an invalid message the connection is not used again.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::abi::{Header, PAYLOAD_MAX, message};

/// How long to wait for a reply.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of requests to list one node's children, each of which returns up to
/// [`PAYLOAD_MAX`] bytes.
const PARTS_MOST: usize = 256;

/// How often a transaction is repeated because others changed the same nodes.
const CONFLICTS: u32 = 100;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("xenstore: {0}")]
    Io(#[from] io::Error),
    /// The error that xenstored returned, such as `EACCES`.
    #[error("xenstore: {path}: {name}")]
    Refused { path: String, name: String },
    #[error("xenstore: {0}: path and value must fit into {PAYLOAD_MAX} bytes, without NUL")]
    TooLong(String),
    #[error("xenstore: {0}: the value is not text")]
    NoText(String),
    #[error("xenstore: {0}")]
    Protocol(&'static str),
    #[error("xenstore: {0}: the node has too many children")]
    TooMany(String),
    #[error("xenstore: a transaction conflicts with other domains again and again")]
    Conflict,
}

impl StoreError {
    /// Returns whether the node does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, StoreError::Refused { name, .. } if name == "ENOENT")
    }

    /// Returns whether the connection cannot be used any more. Other errors concern one request.
    pub fn is_lost(&self) -> bool {
        matches!(self, StoreError::Io(_) | StoreError::Protocol(_))
    }
}

/// Rights of a domain on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    None,
    Read,
    Write,
    Both,
}

impl Access {
    fn letter(self) -> char {
        match self {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        }
    }
}

/// A connection to xenstore.
pub struct Store {
    file: OwnedFd,
    last: u32,
    events: BTreeSet<String>,
    broken: bool,
    /// The time after which no call waits; see [`Store::set_limit`].
    limit: Option<Instant>,
    /// The same; see [`Store::share_limit`].
    shared: Arc<Mutex<Option<Instant>>>,
}

/// Changes that others see all at once, or not at all; see [`Store::transaction`].
pub struct Transaction<'a> {
    store: &'a mut Store,
    id: u32,
}

/// Operations on nodes, inside and outside of transactions.
pub trait Node {
    /// Sends one request, and returns the reply.
    fn ask(&mut self, kind: u32, path: &str, body: &[&[u8]]) -> Result<Vec<u8>, StoreError>;

    /// Returns the value of a node, or `None` if it does not exist.
    fn read(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        let value = match self.ask(message::READ, path, &[path.as_bytes(), b"\0"]) {
            Err(e) if e.is_missing() => return Ok(None),
            value => value?,
        };
        let text = String::from_utf8(value).ok().filter(|text| !text.contains('\0'));
        text.map(Some).ok_or_else(|| StoreError::NoText(path.into()))
    }

    /// Writes a node. Creates it and its parents if they are missing.
    fn write(&mut self, path: &str, value: impl Display) -> Result<(), StoreError>
    where
        Self: Sized,
    {
        let value = value.to_string();
        self.ask(message::WRITE, path, &[path.as_bytes(), b"\0", value.as_bytes()]).map(drop)
    }

    /// Creates an empty node, if it does not exist.
    fn make(&mut self, path: &str) -> Result<(), StoreError> {
        self.ask(message::MKDIR, path, &[path.as_bytes(), b"\0"]).map(drop)
    }

    /// Removes a node and everything below it, if it exists.
    fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        match self.ask(message::RM, path, &[path.as_bytes(), b"\0"]) {
            Err(e) if e.is_missing() => Ok(()),
            done => done.map(drop),
        }
    }

    /// Returns the names of a node's children; none if the node does not exist.
    fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        let names = match self.ask(message::DIRECTORY, path, &[path.as_bytes(), b"\0"]) {
            Err(e) if e.is_missing() => return Ok(Vec::new()),
            Err(StoreError::Refused { name, .. }) if name == "E2BIG" => self.list_in_parts(path)?,
            names => names?,
        };
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// Returns names that do not fit into one message, each followed by NUL.
    fn list_in_parts(&mut self, path: &str) -> Result<Vec<u8>, StoreError> {
        let mut names: Vec<u8> = Vec::new();
        let mut generation = Vec::new();
        for _ in 0..PARTS_MOST {
            let offset = format!("{}\0", names.len());
            let part = self.ask(
                message::DIRECTORY_PART,
                path,
                &[path.as_bytes(), b"\0", offset.as_bytes()],
            )?;
            let at = part
                .iter()
                .position(|byte| *byte == 0)
                .ok_or(StoreError::Protocol("a part of a list has no generation"))?;
            if !names.is_empty() && part[..at] != generation {
                // The names have changed between two requests, so start again.
                names.clear();
                continue;
            }
            generation = part[..at].to_vec();
            let more = &part[at + 1..];
            names.extend_from_slice(more);
            // An empty name marks the end.
            if more.is_empty() || more == b"\0" || more.ends_with(b"\0\0") {
                return Ok(names);
            }
        }
        Err(StoreError::TooMany(path.into()))
    }

    /// Sets the owner of a node, the rights of the `named` domains, and `others` for all other
    /// domains. Nodes that are created below it later inherit this.
    fn set_access(
        &mut self,
        path: &str,
        owner: u16,
        others: Access,
        named: &[(u16, Access)],
    ) -> Result<(), StoreError> {
        let mut body = format!("{path}\0{}{owner}\0", others.letter());
        for (domain, access) in named {
            body.push_str(&format!("{}{domain}\0", access.letter()));
        }
        self.ask(message::SET_PERMS, path, &[body.as_bytes()]).map(drop)
    }
}

impl Store {
    /// Opens the connection of this domain's kernel.
    pub(super) fn open() -> io::Result<Self> {
        let file =
            rustix::fs::open("/dev/xen/xenbus", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self::over(file))
    }

    /// Creates a connection over a descriptor that speaks the protocol.
    pub fn over(file: OwnedFd) -> Self {
        let (events, shared) = Default::default();
        Store { file, last: 0, events, broken: false, limit: None, shared }
    }

    /// Limits the waits of later calls to the time in `limit`, which another thread may set.
    pub fn share_limit(&mut self, limit: &Arc<Mutex<Option<Instant>>>) {
        self.shared = limit.clone();
    }

    /// Limits the waits of later calls to `deadline`, instead of the shared time.
    pub fn set_limit(&mut self, deadline: Instant) {
        self.limit = Some(deadline);
    }

    /// Returns the time until which a call that begins now waits.
    fn deadline(&self) -> Instant {
        let deadline = Instant::now() + PATIENCE;
        let shared = || *self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        self.limit.or_else(shared).map_or(deadline, |limit| limit.min(deadline))
    }

    /// Makes changes that others see all at once. `changes` may run several times. If it fails,
    /// nothing changes.
    pub fn transaction<T>(
        &mut self,
        mut changes: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        for _ in 0..CONFLICTS {
            let id = self.send(0, message::TRANSACTION_START, "", &[b"\0"])?;
            let id =
                std::str::from_utf8(&id).ok().and_then(|id| id.trim_end_matches('\0').parse().ok());
            let id = id.ok_or(StoreError::Protocol("a transaction has no number"))?;
            let done = changes(&mut Transaction { store: self, id });
            let end: &[u8] = if done.is_ok() { b"T\0" } else { b"F\0" };
            let ended = self.send(id, message::TRANSACTION_END, "", &[end]);
            match ended {
                Err(StoreError::Refused { name, .. }) if name == "EAGAIN" && done.is_ok() => {
                    continue;
                }
                Err(e) if done.is_ok() => return Err(e),
                _ => return done,
            }
        }
        Err(StoreError::Conflict)
    }

    /// Watches a node and everything below it: reports each change by `token`, and once at the
    /// beginning.
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.ask(message::WATCH, path, &[path.as_bytes(), b"\0", token.as_bytes(), b"\0"]).map(drop)
    }

    /// Ends a watch. Drops its token if that was not taken yet.
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.ask(message::UNWATCH, path, &[path.as_bytes(), b"\0", token.as_bytes(), b"\0"])?;
        self.events.remove(token);
        Ok(())
    }

    /// Takes the token of a watch after a change of its nodes. Waits for one until `deadline` or
    /// until `wake` is readable.
    pub fn event(
        &mut self,
        wake: BorrowedFd<'_>,
        deadline: Option<Instant>,
    ) -> Result<Option<String>, StoreError> {
        loop {
            if let Some(token) = self.events.pop_first() {
                return Ok(Some(token));
            }
            if self.broken {
                return Err(StoreError::Protocol("the connection is broken"));
            }
            match wait(&[self.file.as_fd(), wake], deadline)? {
                Some(0) => {
                    let (header, body) = self.receive(self.deadline())?;
                    self.note(header, &body)?;
                }
                _ => return Ok(None),
            }
        }
    }

    fn send(
        &mut self,
        transaction: u32,
        kind: u32,
        path: &str,
        body: &[&[u8]],
    ) -> Result<Vec<u8>, StoreError> {
        if self.broken {
            return Err(StoreError::Protocol("the connection is broken"));
        }
        let len = body.iter().map(|part| part.len()).sum::<usize>();
        if len > PAYLOAD_MAX || path.contains('\0') {
            return Err(StoreError::TooLong(path.chars().take(100).collect()));
        }
        self.last = self.last.wrapping_add(1);
        let header = Header { kind, request: self.last, transaction, len: len as u32 };
        let mut bytes = header.bytes().to_vec();
        body.iter().for_each(|part| bytes.extend_from_slice(part));
        // The connection counts as broken until the reply was read completely.
        self.broken = true;
        self.write_all(&bytes)?;
        let deadline = self.deadline();
        loop {
            let (header, body) = self.receive(deadline)?;
            if header.kind == message::WATCH_EVENT {
                self.note(header, &body)?;
                continue;
            }
            if header.request != self.last || (header.kind != kind && header.kind != message::ERROR)
            {
                return Err(StoreError::Protocol("received a reply to another request"));
            }
            self.broken = false;
            if header.kind == message::ERROR {
                let name = String::from_utf8_lossy(&body).trim_end_matches('\0').to_string();
                return Err(StoreError::Refused { path: path.into(), name });
            }
            return Ok(body);
        }
    }

    /// Keeps the token of a watch event.
    fn note(&mut self, header: Header, body: &[u8]) -> Result<(), StoreError> {
        let mut parts = body.split(|byte| *byte == 0);
        let (_path, token) = (parts.next(), parts.next());
        match token.and_then(|token| std::str::from_utf8(token).ok()) {
            Some(token) if header.kind == message::WATCH_EVENT => {
                self.events.insert(token.into());
                Ok(())
            }
            _ => {
                self.broken = true;
                Err(StoreError::Protocol("received a message that is neither a reply nor an event"))
            }
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<(Header, Vec<u8>), StoreError> {
        let mut header = [0; Header::BYTES];
        self.read_all(&mut header, deadline)?;
        let header = Header::parse(&header);
        if header.len as usize > PAYLOAD_MAX {
            self.broken = true;
            return Err(StoreError::Protocol("received a message that is too long"));
        }
        let mut body = vec![0; header.len as usize];
        self.read_all(&mut body, deadline)?;
        Ok((header, body))
    }

    fn read_all(&mut self, bytes: &mut [u8], deadline: Instant) -> Result<(), StoreError> {
        let mut have = 0;
        while have < bytes.len() {
            if wait(&[self.file.as_fd()], Some(deadline))?.is_none() {
                self.broken = true;
                return Err(StoreError::Io(io::ErrorKind::TimedOut.into()));
            }
            match rustix::io::read(&self.file, &mut bytes[have..]) {
                Ok(0) => {
                    self.broken = true;
                    return Err(StoreError::Io(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(n) => have += n,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => {
                    self.broken = true;
                    return Err(StoreError::Io(e.into()));
                }
            }
        }
        Ok(())
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.file, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                Err(e) => return Err(StoreError::Io(e.into())),
            }
        }
        Ok(())
    }
}

impl Node for Store {
    fn ask(&mut self, kind: u32, path: &str, body: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
        self.send(0, kind, path, body)
    }
}

impl Node for Transaction<'_> {
    fn ask(&mut self, kind: u32, path: &str, body: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
        self.store.send(self.id, kind, path, body)
    }
}

/// Returns which of the descriptors is readable; `None`: none until the deadline.
fn wait(fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> io::Result<Option<usize>> {
    loop {
        let mut polled: Vec<_> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        });
        match rustix::event::poll(&mut polled, left.as_ref()) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(polled.iter().position(|fd| !fd.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests;
