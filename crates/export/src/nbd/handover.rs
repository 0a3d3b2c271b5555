//! Hands the connections of a disk over to another server, and continues those of another server.
//!
//! ```text
//!   old server: reads nothing more ─► answers what it has taken ─► parcel: sockets, terms, bytes
//!   new server: keeps the parcel ─► is the owner (crate::custody) ─► serves the connections
//! ```
//! In: connections in their transmission phase. Out: a parcel of JSON and descriptors. Bytes that
//! arrived and were not handled, and replies that a client has not read, are in memory files.
//!
//! What must hold
//! - A client sees neither a disconnection nor a request without its reply. It cannot delay the
//!   hand-over: a request that has arrived in part goes to the next server, and so do replies that
//!   the client does not read within [`SENDING`].
//! - The new server reads and sends nothing before it is the owner. So the old one can continue
//!   with the same parcel.
//! - A TLS connection is closed after its last reply, because the state of its session stays in
//!   this process.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, UNIX_EPOCH};

use blockyard_disk::{Disk, LocalDisk};
use blockyard_nbd::wire::Headers;
use blockyard_ring::Handle;
use blockyard_ring::parcel::Parcel;
use serde::{Deserialize, Serialize};

use super::block_status::{Context, Contexts};
use super::left::LeftConnection;
use super::links::Link;
use super::spool::Spool;
use super::stream::Remains;
use super::{KIND, Offer};
use crate::connections;
use crate::packing::{Packed, Unpacked, wrong};
use crate::{Handed, Reactors};

/// Version of the format. A change that an older server would misread needs a new number.
const FORMAT: u32 = 1;
/// How long clients may read their replies before the rest goes to the next server.
const SENDING: Duration = Duration::from_millis(50);
/// How long TLS clients may read their last replies.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Wire {
    format: u32,
    clients: Vec<WireClient>,
}

#[derive(Serialize, Deserialize)]
struct WireClient {
    stream: usize,
    headers: WireHeaders,
    /// Ids and names of the metadata contexts.
    contexts: Vec<(u32, String)>,
    /// Seconds since 1970.
    since: Option<u64>,
    unread: Option<WireSpool>,
    unsent: Option<WireSpool>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum WireHeaders {
    Simple,
    Structured,
    Extended,
}

#[derive(Serialize, Deserialize)]
struct WireSpool {
    file: usize,
    from: u64,
    to: u64,
}

impl Offer {
    /// Continues the connections of a parcel of [`crate::Export::hand_over`].
    pub fn resume(&self, parcel: Parcel) -> io::Result<()> {
        self.server.resume(&self.exported, unpack(parcel)?);
        Ok(())
    }

    /// Ends the export, and returns the connections of its clients.
    pub(super) fn leave(&self) -> Option<Handed> {
        self.server.forget(&self.disk);
        let left = hand_over(&self.server.reactors, &self.disk);
        if left.is_empty() {
            return None;
        }
        match pack(&left) {
            Ok(parcel) => Some(Handed { kind: KIND, parcel }),
            Err(e) => {
                let what = format_args!("{} NBD clients are disconnected: {e}", left.len());
                self.server.shared.disconnected.fetch_add(left.len() as u64, Ordering::SeqCst);
                self.server.shared.log.warn(self.disk.name(), None, what);
                None
            }
        }
    }
}

/// Takes the connections of `disk` from all reactors, after the disk has answered their requests.
fn hand_over(reactors: &Reactors, disk: &Arc<Disk>) -> Vec<LeftConnection> {
    let replies: Vec<_> = reactors
        .all()
        .map(|reactor| {
            let disk = disk.clone();
            reactor.ask_later(move |handle, reply| {
                let asking = handle.clone();
                handle.spawn(async move { reply.send(hand_over_here(&asking, &disk).await) });
            })
        })
        .collect();
    replies.into_iter().filter_map(|reply| reply.wait()).flatten().collect()
}

async fn hand_over_here(handle: &Handle, disk: &Arc<Disk>) -> Vec<LeftConnection> {
    let links = connections::of_disk::<Link>(handle, disk);
    if links.is_empty() {
        return Vec::new();
    }
    // Requests in flight must not wait for throttles any more.
    let served = LocalDisk::known(handle, disk);
    served.iter().for_each(|served| served.suspend_for_next());
    links.iter().for_each(|link| link.leave());
    let start = Instant::now();
    // A connection's task has ended when nothing else has its link.
    let serves = |link: &Rc<Link>| Rc::strong_count(link) > 1;
    while links.iter().any(serves) {
        for link in links.iter().filter(|link| serves(link)) {
            link.hurry(start.elapsed() > SENDING, start.elapsed() > LAST_ANSWERS);
        }
        handle.sleep(Duration::from_millis(1)).await;
    }
    served.iter().for_each(|served| served.resume());
    let ended = links.iter().filter(|link| link.is_tls()).inspect(|link| link.note_disconnected());
    let ended = ended.count();
    if ended > 0 {
        let disk = disk.name();
        tracing::warn!(disk, "{ended} NBD clients with TLS were disconnected for the hand-over");
    }
    links.iter().filter_map(|link| link.take_left()).collect()
}

fn pack(left: &[LeftConnection]) -> io::Result<Parcel> {
    let mut fds = Packed::default();
    let mut clients = Vec::new();
    for LeftConnection { stream, headers, contexts, since, remains } in left {
        let since = since.and_then(|since| since.duration_since(UNIX_EPOCH).ok());
        clients.push(WireClient {
            stream: fds.put(stream)?,
            headers: match headers {
                Headers::Simple => WireHeaders::Simple,
                Headers::Structured => WireHeaders::Structured,
                Headers::Extended => WireHeaders::Extended,
            },
            contexts: contexts.iter().map(|c| (c.id(), c.name().into())).collect(),
            since: since.map(|since| since.as_secs()),
            unread: pack_spool(&remains.unread, &mut fds)?,
            unsent: pack_spool(&remains.unsent, &mut fds)?,
        });
    }
    fds.seal(&Wire { format: FORMAT, clients })
}

fn pack_spool(spool: &Option<Spool>, fds: &mut Packed) -> io::Result<Option<WireSpool>> {
    let Some(Spool { file, from, to }) = spool else { return Ok(None) };
    Ok(Some(WireSpool { file: fds.put(file)?, from: *from, to: *to }))
}

fn unpack(parcel: Parcel) -> io::Result<Vec<LeftConnection>> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let Format { format } = serde_json::from_slice(&parcel.bytes)?;
    if format != FORMAT {
        return Err(wrong(format!(
            "the state of NBD connections has format {format}, and this server knows only {FORMAT}"
        )));
    }
    let wire: Wire = serde_json::from_slice(&parcel.bytes)?;
    let mut fds = Unpacked::new(parcel.fds);
    let client = |client: WireClient| {
        let since = client.since.map(|since| UNIX_EPOCH + Duration::from_secs(since));
        Ok(LeftConnection {
            stream: fds.take(client.stream)?,
            headers: match client.headers {
                WireHeaders::Simple => Headers::Simple,
                WireHeaders::Structured => Headers::Structured,
                WireHeaders::Extended => Headers::Extended,
            },
            contexts: unpack_contexts(&client.contexts)?,
            since,
            remains: Remains {
                unread: unpack_spool(client.unread, &mut fds)?,
                unsent: unpack_spool(client.unsent, &mut fds)?,
            },
        })
    };
    wire.clients.into_iter().map(client).collect()
}

/// Clients know contexts by their ids, so these must be the same in both servers.
fn unpack_contexts(wire: &[(u32, String)]) -> io::Result<Contexts> {
    let mut contexts = Contexts::default();
    for (id, name) in wire {
        if !Context::ALL.iter().any(|context| context.id() == *id && context.name() == name) {
            return Err(wrong(format!("an NBD client uses the context {name}, number {id}")));
        }
        contexts.choose(name.as_bytes(), false);
    }
    Ok(contexts)
}

fn unpack_spool(wire: Option<WireSpool>, fds: &mut Unpacked) -> io::Result<Option<Spool>> {
    let Some(WireSpool { file, from, to }) = wire else { return Ok(None) };
    if from > to {
        return Err(wrong("the bytes of an NBD connection end before they begin"));
    }
    Ok(Some(Spool { file: fds.take(file)?, from, to }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> (LeftConnection, std::os::unix::net::UnixStream) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut contexts = Contexts::default();
        contexts.choose(b"blockyard:layers", false);
        contexts.choose(b"base:allocation", false);
        let mut unread = Spool::new().unwrap();
        unread.push(b"a header").unwrap();
        let since = Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        let remains = Remains { unread: Some(unread), unsent: None };
        let headers = Headers::Extended;
        (LeftConnection { stream: ours.into(), headers, contexts, since, remains }, theirs)
    }

    /// Returns the error of a parcel in which a text is replaced.
    fn with(from: &str, to: &str) -> String {
        let mut parcel = pack(&[left().0]).unwrap();
        let text = String::from_utf8(parcel.bytes).unwrap();
        assert!(text.contains(from), "{text}");
        parcel.bytes = text.replace(from, to).into_bytes();
        unpack(parcel).unwrap_err().to_string()
    }

    #[test]
    fn a_connection_comes_back_from_its_parcel() {
        let (before, _theirs) = left();
        let parcel = pack(std::slice::from_ref(&before)).unwrap();
        let after = unpack(parcel).unwrap().remove(0);
        assert_eq!((after.headers, after.since), (before.headers, before.since));
        assert_eq!(after.contexts, before.contexts);
        assert!(after.remains.unsent.is_none());
        let mut unread = after.remains.unread.unwrap();
        let room = blockyard_ring::Segments::buffer(20);
        assert_eq!(unread.read(&room).unwrap(), 8);
        // The old server can still read the same bytes.
        assert_eq!(before.remains.unread.unwrap().read(&room).unwrap(), 8);
    }

    /// If this test fails, the format needs a new number, and the old one needs a reader.
    #[test]
    fn the_format_is_that_of_the_record() {
        let recorded: serde_json::Value =
            serde_json::from_str(include_str!("handover/recorded-1.json")).unwrap();
        let ours = pack(&[left().0]).unwrap();
        let wire: serde_json::Value = serde_json::from_slice(&ours.bytes).unwrap();
        assert_eq!(wire, recorded);
        let bytes = serde_json::to_vec(&recorded).unwrap();
        let left = unpack(Parcel { bytes, fds: ours.fds }).unwrap();
        assert_eq!((left.len(), left[0].headers), (1, Headers::Extended));
    }

    #[test]
    fn a_parcel_that_this_server_does_not_know_is_refused() {
        assert!(with("\"format\":1", "\"format\":2").contains("format 2"));
        assert!(with("blockyard:layers", "blockyard:later").contains("blockyard:later"));
        assert!(with("[3,\"blockyard:layers\"]", "[4,\"blockyard:layers\"]").contains("number 4"));
        assert!(with("\"from\":0", "\"from\":9").contains("end before they begin"));
        assert!(with("\"stream\":0", "\"stream\":7").contains("a descriptor is missing"));
    }
}
