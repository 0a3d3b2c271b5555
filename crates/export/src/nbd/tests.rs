use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::channel;

use blockyard_disk::{DiskOptions, LocalDisk, OpKind, Source};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_nbd::wire::{self, Headers, Request, cmd, handshake, opt};
use blockyard_ring::rights;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

use super::*;
use crate::PollMode;

pub(super) mod connected;
mod negotiation;
mod simulated;
mod transmission;

/// Name of the only export, a disk in memory.
const NAME: &str = "disk";
const SIZE: u64 = 16 << 20;
/// Longest wait for an event. The event itself ends the wait.
const LIMIT: Duration = Duration::from_secs(60);

fn socket() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("blockyard-nbd-{}-{number}", std::process::id()))
}

pub(super) fn disk(name: &str, read_only: bool) -> Arc<Disk> {
    let (name, serial, filters) = (name.to_string(), String::new(), Vec::new());
    let options = DiskOptions {
        name,
        serial,
        read_only,
        cache: CacheMode::None,
        filters,
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, Source::open(&ChainOptions::new(format!("ram:{SIZE}"))).unwrap()))
}

/// Starts a server on one reactor.
fn serve_on(listener: Listener) -> (Offer, Arc<Disk>, Arc<Reactors>) {
    let disk = disk(NAME, false);
    let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
    let server = Server::start(listener, "test", Arc::default(), reactors.clone()).unwrap();
    let offer = server.offer(Exported::new(disk.clone(), NAME, "", None).polled(PollMode::Off));
    (offer, disk, reactors)
}

/// A server with clients at the other ends of socket pairs.
struct Paired {
    server: Arc<Server>,
    offers: Vec<Offer>,
}

impl Paired {
    /// Starts a server with these exports.
    fn offering(all: impl IntoIterator<Item = Exported>) -> Self {
        let listener = Listener::bind(&socket()).unwrap();
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let server = Server::start(listener, "test", Arc::default(), reactors).unwrap();
        let offers =
            all.into_iter().map(|exported| server.offer(exported.polled(PollMode::Off))).collect();
        Paired { server, offers }
    }

    /// Starts a server with one export, [`NAME`].
    fn new() -> Self {
        Self::offering([Exported::new(disk(NAME, false), NAME, "a disk in memory", None)])
    }

    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        let Server { shared, reactors, .. } = &*self.server;
        deal_out(shared, reactors, shared.accepting.count(theirs.into()));
        ours
    }
}

fn bytes<const N: usize>(stream: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Returns true if the server closes the connection without sending more.
fn is_disconnected(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 1]) {
        Ok(n) => n == 0,
        Err(e) if e.kind() == io::ErrorKind::Interrupted => is_disconnected(stream),
        Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
    }
}

struct Client(UnixStream);

impl Client {
    /// Returns a client that has chosen the export.
    fn ready(mut stream: UnixStream) -> Self {
        stream.read_exact(&mut [0; 18]).unwrap();
        let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        let mut bytes = flags.to_be_bytes().to_vec();
        bytes.extend(wire::OPTION.to_be_bytes());
        bytes.extend([opt::EXPORT_NAME, NAME.len() as u32].map(u32::to_be_bytes).as_flattened());
        bytes.extend(NAME.as_bytes());
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; 10]).unwrap();
        Client(stream)
    }

    fn read_of(offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        Request { flags: 0, command: cmd::READ, cookie: 7, offset, len }
            .put(Headers::Simple, &mut bytes);
        bytes
    }

    /// Receives the reply to a read of `len` bytes.
    fn take_read(&mut self, len: usize) {
        let mut bytes = vec![0xff; 16 + len];
        self.0.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[4..8], [0; 4], "no error");
    }

    fn reads(&mut self) {
        self.0.write_all(&Self::read_of(512, 512)).unwrap();
        self.take_read(512);
    }

    fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }
}

#[test]
fn a_client_is_undecided_until_it_has_chosen_an_export_or_has_gone() {
    let paired = Paired::new();
    let undecided = || paired.server.shared.crowds.undecided();
    let (one, two) = (paired.connect(), paired.connect());
    assert_eq!(undecided(), 2);
    let mut one = Client::ready(one);
    one.reads();
    assert_eq!(undecided(), 1);
    drop(two);
    let began = Instant::now();
    while undecided() > 0 {
        assert!(began.elapsed() < LIMIT, "the client is not forgotten");
        std::thread::yield_now();
    }
    one.reads();
}

/// Returns a TCP connection with SO_LINGER of an hour and a full send buffer. Its close blocks
/// until the other side is closed.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    (ours, theirs)
}

#[test]
fn the_kernel_refuses_descriptors_from_clients_if_it_can() {
    let path = socket();
    let (_offer, ..) = serve_on(Listener::bind(&path).unwrap());
    let mut client = Client::ready(UnixStream::connect(&path).unwrap());
    let sent = client.send_with(&Client::read_of(0, 512), &[client.0.as_fd()]);
    // A kernel before 6.16 accepts descriptors. The next test covers that case.
    let refuses = rights::refuse(UnixStream::pair().unwrap().0);
    assert_eq!(sent.err(), refuses.then_some(Errno::PERM));
    if refuses {
        client.reads();
    }
}

/// A client of an inherited socket may have connected before this server could refuse descriptors,
/// and older kernels cannot refuse descriptors. If the reactor closed the descriptor, this test
/// would never end.
#[test]
fn a_client_that_sends_a_descriptor_is_disconnected_and_blocks_no_other() {
    let path = socket();
    let listener = Listener::bind(&path).unwrap();
    let (early, late) = (UnixStream::connect(&path).unwrap(), UnixStream::connect(&path).unwrap());
    let (offer, _disk, reactors) = serve_on(listener);
    let (lingers, other) = lingering();
    let (mut client, mut other_client) = (Client::ready(early), Client::ready(late));
    client.reads();
    // The reactor is busy until the test has closed its own descriptor. So the descriptor that the
    // server received is the last reference.
    let ((began, busy), (release, released)) = (channel(), channel::<()>());
    reactors.next().run(move |_| {
        began.send(()).unwrap();
        let _ = released.recv();
    });
    busy.recv_timeout(LIMIT).unwrap();
    client.send_with(&Client::read_of(0, 512), &[lingers.as_fd()]).unwrap();
    drop((lingers, release));
    assert!(
        client.0.read(&mut [0; 16]).is_ok_and(|n| n == 0),
        "it is disconnected without an answer"
    );
    other_client.reads();
    assert_eq!(
        offer.server.shared.accepting.clients(),
        2,
        "it is counted until its socket is closed"
    );
    drop((other_client, other));
    // The reactor replies, so no close blocks it.
    let answer = reactors.next().ask_later(|_, reply| reply.send(()));
    answer.until(Instant::now() + LIMIT).unwrap();
}

/// A task on the same reactor counts the reads of each iteration.
#[test]
fn requests_that_complete_at_once_leave_time_to_others() {
    const READS: u64 = 400;
    const LEN: u64 = 64 << 10;
    let path = socket();
    let (_offer, disk, reactors) = serve_on(Listener::bind(&path).unwrap());
    let mut client = Client::ready(UnixStream::connect(&path).unwrap());
    let (sender, most) = channel();
    reactors.next().run(move |handle| {
        let tasks = handle.clone();
        handle.spawn(async move {
            let served = LocalDisk::local(&tasks, &disk).unwrap();
            let (mut most, mut before, mut checks) = (0, 0, 0);
            while before < READS {
                tasks.yield_now().await;
                checks += 1;
                assert!(checks < 10_000_000, "{before} reads were answered");
                let now =
                    served.statistics().summary(OpKind::Read).map_or(0, |summary| summary.requests);
                most = most.max(now - before);
                before = now;
            }
            sender.send(most).unwrap();
        });
    });
    let pipeline: Vec<u8> = (0..READS).flat_map(|n| Client::read_of(n % 256 * LEN, LEN)).collect();
    client.0.write_all(&pipeline).unwrap();
    (0..READS).for_each(|_| client.take_read(LEN as usize));
    let most = most.recv_timeout(LIMIT).unwrap();
    // Two iterations may pass between two checks. Each iteration takes at most 1 MiB (16 reads of
    // 64 KiB) and one further read.
    assert!(most <= 2 * 17, "{most} reads of 64 KiB between two checks");
}
