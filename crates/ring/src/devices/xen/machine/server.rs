//! The xenstore of a [`super::Machine`]: a tree, and a thread for each connection.
//!
//! A transaction works on a copy of the tree. Its end fails with EAGAIN if the tree was changed
//! since its start.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};

use super::lock;
use crate::devices::xen::abi::{Header, PAYLOAD_MAX, message};

/// Paths and values, and the watches on them.
#[derive(Default)]
pub(super) struct Tree {
    nodes: Nodes,
    generation: u64,
    watches: Vec<Watch>,
}

type Nodes = BTreeMap<String, Vec<u8>>;

struct Watch {
    path: String,
    token: Vec<u8>,
    connection: Arc<Mutex<UnixStream>>,
}

/// A running transaction.
struct Copy {
    nodes: Nodes,
    generation: u64,
    changed: Vec<String>,
}

/// Serves a connection on a thread of its own, until the peer closes it. Returns a weak reference
/// to the stream, which only that thread keeps open.
pub(super) fn serve(
    tree: &Arc<Mutex<Tree>>,
    domain: u16,
    stream: UnixStream,
) -> io::Result<Weak<Mutex<UnixStream>>> {
    let number = format!("/local/domain/{domain}/domid");
    make(&mut lock(tree).nodes, &number);
    lock(tree).nodes.insert(number, domain.to_string().into_bytes());
    let (tree, answers) = (tree.clone(), Arc::new(Mutex::new(stream.try_clone()?)));
    let served = Arc::downgrade(&answers);
    let body = move || {
        let mut connection = Connection { tree, domain, answers, copies: HashMap::new(), last: 0 };
        let mut stream = stream;
        while connection.request(&mut stream).is_ok() {}
        let mine = &connection.answers;
        lock(&connection.tree).watches.retain(|watch| !Arc::ptr_eq(&watch.connection, mine));
    };
    std::thread::Builder::new().name("xenstore".into()).spawn(body)?;
    Ok(served)
}

struct Connection {
    tree: Arc<Mutex<Tree>>,
    domain: u16,
    answers: Arc<Mutex<UnixStream>>,
    copies: HashMap<u32, Copy>,
    last: u32,
}

/// Errors of a xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreError {
    Again,
    Exists,
    Invalid,
    NotFound,
    TooLong,
    Unknown,
}

type Answer = Result<Vec<u8>, StoreError>;

impl StoreError {
    /// Returns the name of the error in a reply.
    fn name(self) -> &'static str {
        match self {
            StoreError::Again => "EAGAIN",
            StoreError::Exists => "EEXIST",
            StoreError::Invalid => "EINVAL",
            StoreError::NotFound => "ENOENT",
            StoreError::TooLong => "E2BIG",
            StoreError::Unknown => "ENOSYS",
        }
    }
}

impl Connection {
    fn request(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        let mut header = [0; Header::BYTES];
        stream.read_exact(&mut header)?;
        let header = Header::parse(&header);
        if header.len as usize > PAYLOAD_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; header.len as usize];
        stream.read_exact(&mut body)?;
        let answer = self.answer(&header, &body);
        let (kind, body) = match answer {
            Ok(body) => (header.kind, body),
            Err(e) => (message::ERROR, [e.name().as_bytes(), b"\0"].concat()),
        };
        send(&self.answers, Header { kind, ..header }, &body)?;
        if header.kind == message::WATCH && kind == message::WATCH {
            // Each watch reports once at the beginning. Other connections may have added watches
            // meanwhile.
            let tree = lock(&self.tree);
            let mine = |watch: &&Watch| Arc::ptr_eq(&watch.connection, &self.answers);
            if let Some(watch) = tree.watches.iter().rfind(mine) {
                watch.report(&watch.path)?;
            }
        }
        Ok(())
    }

    fn answer(&mut self, header: &Header, body: &[u8]) -> Answer {
        let mut parts = body.splitn(2, |byte| *byte == 0);
        let path = std::str::from_utf8(parts.next().unwrap_or_default())
            .map_err(|_| StoreError::Invalid)?;
        let rest = parts.next().unwrap_or_default();
        match header.kind {
            message::TRANSACTION_START => return self.start(),
            message::TRANSACTION_END => return self.end(header.transaction, path),
            message::WATCH | message::UNWATCH => return self.watch(header.kind, path, rest),
            _ => {}
        }
        let own = format!("/local/domain/{}/{path}", self.domain);
        let path = if path.starts_with('/') { path } else { &own };
        if path.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(StoreError::Invalid);
        }
        if header.transaction != 0 {
            let copy = self.copies.get_mut(&header.transaction).ok_or(StoreError::NotFound)?;
            let (answer, changed) = act(&mut copy.nodes, header.kind, path, rest);
            copy.changed.extend(changed.then(|| path.to_string()));
            return answer;
        }
        let mut tree = lock(&self.tree);
        let (answer, changed) = act(&mut tree.nodes, header.kind, path, rest);
        if changed {
            tree.changed(&[path.to_string()]);
        }
        answer
    }

    fn start(&mut self) -> Answer {
        let tree = lock(&self.tree);
        self.last += 1;
        let copy =
            Copy { nodes: tree.nodes.clone(), generation: tree.generation, changed: Vec::new() };
        self.copies.insert(self.last, copy);
        Ok(format!("{}\0", self.last).into_bytes())
    }

    fn end(&mut self, transaction: u32, how: &str) -> Answer {
        let copy = self.copies.remove(&transaction).ok_or(StoreError::NotFound)?;
        let mut tree = lock(&self.tree);
        if how == "T" && !copy.changed.is_empty() {
            if tree.generation != copy.generation {
                return Err(StoreError::Again);
            }
            tree.nodes = copy.nodes;
            tree.changed(&copy.changed);
        }
        Ok(b"OK\0".to_vec())
    }

    fn watch(&mut self, kind: u32, path: &str, rest: &[u8]) -> Answer {
        let token = rest.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        let mut tree = lock(&self.tree);
        let is_it = |watch: &Watch| {
            watch.path == path
                && watch.token == token
                && Arc::ptr_eq(&watch.connection, &self.answers)
        };
        let known = tree.watches.iter().position(is_it);
        match (kind, known) {
            (message::WATCH, Some(_)) => return Err(StoreError::Exists),
            (message::WATCH, None) => {
                tree.watches.push(Watch {
                    path: path.into(),
                    token,
                    connection: self.answers.clone(),
                });
            }
            (_, Some(at)) => drop(tree.watches.remove(at)),
            (_, None) => return Err(StoreError::NotFound),
        }
        Ok(b"OK\0".to_vec())
    }
}

impl Tree {
    fn changed(&mut self, paths: &[String]) {
        self.generation += 1;
        for watch in &self.watches {
            for path in paths {
                // Notify the watches on the changed node and above it. For a removed node, also
                // notify the watches below it.
                if is_below(path, &watch.path)
                    || (is_below(&watch.path, path) && !self.nodes.contains_key(path))
                {
                    // If the connection has ended, its own thread removes its watches.
                    let _ = watch.report(path);
                }
            }
        }
    }
}

impl Watch {
    fn report(&self, path: &str) -> io::Result<()> {
        let body = [path.as_bytes(), b"\0", &self.token, b"\0"].concat();
        let header = Header { kind: message::WATCH_EVENT, request: 0, transaction: 0, len: 0 };
        send(&self.connection, header, &body)
    }
}

fn send(stream: &Mutex<UnixStream>, header: Header, body: &[u8]) -> io::Result<()> {
    let header = Header { len: body.len() as u32, ..header };
    lock(stream).write_all(&[&header.bytes()[..], body].concat())
}

/// Returns whether `path` is `above`, or below it.
fn is_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Executes a request. Returns the reply, and whether it changed a node.
fn act(nodes: &mut Nodes, kind: u32, path: &str, rest: &[u8]) -> (Answer, bool) {
    let ok = || Ok(b"OK\0".to_vec());
    match kind {
        message::READ => (nodes.get(path).cloned().ok_or(StoreError::NotFound), false),
        message::DIRECTORY => (list(nodes, path).and_then(fits), false),
        message::DIRECTORY_PART => (list(nodes, path).and_then(|names| part(&names, rest)), false),
        message::WRITE => {
            make(nodes, path);
            nodes.insert(path.into(), rest.to_vec());
            (ok(), true)
        }
        message::MKDIR => (ok(), make(nodes, path)),
        message::RM => {
            let before = nodes.len();
            nodes.retain(|node, _| !is_below(node, path));
            let changed = nodes.len() < before;
            (if changed { ok() } else { Err(StoreError::NotFound) }, changed)
        }
        message::SET_PERMS => {
            (if nodes.contains_key(path) { ok() } else { Err(StoreError::NotFound) }, false)
        }
        _ => (Err(StoreError::Unknown), false),
    }
}

/// Creates a node and its missing parents. Returns false if the node existed.
fn make(nodes: &mut Nodes, path: &str) -> bool {
    let mut new = false;
    for (at, _) in path.match_indices('/').skip(1).chain([(path.len(), "")]) {
        new |= !nodes.contains_key(&path[..at]);
        nodes.entry(path[..at].into()).or_default();
    }
    new
}

fn list(nodes: &Nodes, path: &str) -> Answer {
    if path != "/" && !nodes.contains_key(path) {
        return Err(StoreError::NotFound);
    }
    let below = format!("{}/", path.trim_end_matches('/'));
    let names = nodes.range(below.clone()..).map_while(|(node, _)| node.strip_prefix(&below));
    let mut answer = Vec::new();
    for name in names.filter(|name| !name.contains('/')) {
        answer.extend_from_slice(name.as_bytes());
        answer.push(0);
    }
    Ok(answer)
}

fn fits(names: Vec<u8>) -> Answer {
    if names.len() > PAYLOAD_MAX { Err(StoreError::TooLong) } else { Ok(names) }
}

/// Returns the names from an offset on that fit into one reply. An empty name ends the last part.
fn part(names: &[u8], offset: &[u8]) -> Answer {
    let offset = std::str::from_utf8(offset)
        .ok()
        .and_then(|text| text.trim_end_matches('\0').parse::<usize>().ok());
    let rest = names.get(offset.ok_or(StoreError::Invalid)?..).unwrap_or_default();
    // The generation of the list is a hash of its content.
    let number = names
        .iter()
        .fold(names.len() as u64, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()));
    let mut answer = format!("{number}\0").into_bytes();
    let room = PAYLOAD_MAX - answer.len() - 1;
    let fitting = match rest.get(..room) {
        Some(part) => part.iter().rposition(|byte| *byte == 0).map_or(0, |at| at + 1),
        None => rest.len(),
    };
    answer.extend_from_slice(&rest[..fitting]);
    if fitting == rest.len() {
        answer.push(0);
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::waits;

    /// Opens a connection.
    fn connect(tree: &Arc<Mutex<Tree>>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        serve(tree, 0, theirs).unwrap();
        ours.set_read_timeout(Some(waits::LIMIT)).unwrap();
        ours
    }

    fn watch(stream: &mut UnixStream, token: &str) {
        let body = [b"/x\0", token.as_bytes(), b"\0"].concat();
        let header =
            Header { kind: message::WATCH, request: 1, transaction: 0, len: body.len() as u32 };
        stream.write_all(&[&header.bytes()[..], &body].concat()).unwrap();
    }

    /// Returns the type and the body of the next message.
    fn next(stream: &mut UnixStream) -> (u32, Vec<u8>) {
        let mut header = [0; Header::BYTES];
        stream.read_exact(&mut header).unwrap();
        let header = Header::parse(&header);
        let mut body = vec![0; header.len as usize];
        stream.read_exact(&mut body).unwrap();
        (header.kind, body)
    }

    fn watches(stream: &mut UnixStream, token: &str) {
        let event = [b"/x\0", token.as_bytes(), b"\0"].concat();
        assert_eq!(next(stream), (message::WATCH, b"OK\0".to_vec()));
        assert_eq!(next(stream), (message::WATCH_EVENT, event));
    }

    #[test]
    fn a_new_watch_reports_itself_even_if_another_connection_adds_one() {
        let tree = Arc::new(Mutex::new(Tree::default()));
        let (mut one, mut two) = (connect(&tree), connect(&tree));
        watch(&mut one, "first");
        watches(&mut one, "first");
        // The reply to the next request waits for this lock.
        let answers = lock(&tree).watches[0].connection.clone();
        let held = lock(&answers);
        watch(&mut one, "second");
        waits::until("the second watch is added", || lock(&tree).watches.len() == 2);
        watch(&mut two, "third");
        watches(&mut two, "third");
        drop(held);
        watches(&mut one, "second");
    }
}
