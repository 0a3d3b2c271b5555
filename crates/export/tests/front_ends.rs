//! Front ends and an export in the test's process. A test can block or end the export's reactor.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskOptions, LocalDisk, OpKind, Source};
use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::ring::{Buffer, Ring, RingOptions};
use blockyard_driver::{Connection, Memory, RingSetup, SplitRing, feature};
use blockyard_export::policy::SignalFigures;
use blockyard_export::vhost_user::{QueueShape, SecondClient, Tuning, VhostUser};
use blockyard_export::{Export, Listener, PolicyFigures, PollMode, Reactors, STOP_TIME};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::NoReply;
use rustix::event::EventfdFlags;
use vhost::vhost_user::message::FrontendReq as R;

/// Longest wait for an event. The event itself ends the wait.
const LIMIT: Duration = Duration::from_secs(60);

/// Number of a system call on this machine. All architectures except x86-64 have the numbers of the
/// kernel's generic table.
const fn call(x86_64: u64, generic: u64) -> u64 {
    if cfg!(target_arch = "x86_64") { x86_64 } else { generic }
}
const FUTEX: u64 = call(202, 98);
const SENDMSG: u64 = call(46, 211);

/// Waits until `happens` returns true.
#[track_caller]
fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happens() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}

/// An export of a disk in memory. The name of the disk is unique in this process.
struct Fixture {
    export: VhostUser,
    disk: Arc<Disk>,
    reactors: Arc<Reactors>,
    socket: PathBuf,
}

impl Fixture {
    fn start(second_client: SecondClient) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let socket = std::env::temp_dir()
            .join(format!("blockyard-front-end-{}-{number}", std::process::id()));
        let (name, serial) = (format!("disk{number}"), "disk".to_string());
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk =
            Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()));
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let tuning = Tuning {
            poll: PollMode::Off,
            in_band: false,
            pin_memory: false,
            any_memory_file: false,
            second_client,
        };
        let (listener, shape) =
            (Listener::bind(&socket).unwrap(), QueueShape { queues: 1, size: 64 });
        let export =
            VhostUser::start(disk.clone(), listener, shape, tuning, reactors.clone()).unwrap();
        Fixture { export, disk, reactors, socket }
    }

    /// Blocks the reactor until the sender is dropped.
    fn hold(&self) -> SyncSender<()> {
        let (sender, receiver) = sync_channel(0);
        self.reactors.next().run(move |_| {
            let _ = receiver.recv();
        });
        sender
    }

    fn end_reactor(&self) {
        self.reactors.next().run(|handle| handle.stop());
        // An ended reactor drops all calls.
        until("the reactor ends", || {
            let answer = self.reactors.next().ask_later(|_, reply| reply.send(()));
            answer.until(Instant::now() + LIMIT) == Err(NoReply::Ended)
        });
    }

    /// Returns whether the thread of the session sleeps in the system call `number`.
    fn session_sleeps_in(&self, number: u64) -> bool {
        let name = format!("vhost {}", self.disk.name());
        assert!(name.len() < 16, "the kernel shortens the name");
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let read = |task: &PathBuf, file| {
            // A thread may end meanwhile.
            std::fs::read_to_string(task.join(file)).unwrap_or_default()
        };
        let sessions: Vec<_> = tasks
            .map(|task| task.path())
            .filter(|task| read(task, "comm").trim_end() == name)
            .collect();
        let [session] = &sessions[..] else { return false };
        let switches = || {
            let status = read(session, "status");
            let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
            counts.map(String::from).collect::<Vec<_>>()
        };
        // With the same counts, the thread has slept all the time.
        let before = switches();
        // The file begins with the number of the call, or contains `running`.
        let call = read(session, "syscall");
        call.split_whitespace().next() == Some(&number.to_string()) && before == switches()
    }

    fn connect(&self) -> Client {
        let mut connection = Connection::open(&self.socket).unwrap();
        connection.socket().set_read_timeout(Some(LIMIT)).unwrap();
        connection.negotiate(feature::GUEST, 0, PROTOCOL).unwrap();
        let mut memory = Memory::new(1 << 20).unwrap();
        connection.set_memory(&memory).unwrap();
        let options = RingOptions { size: 64, slots: 4, event_idx: true, indirect: false };
        let ring = SplitRing::new(&mut memory, options).unwrap();
        let setup = RingSetup {
            index: 0,
            size: 64,
            addresses: ring.addresses(),
            kick: event(),
            call: event(),
        };
        Client { connection, memory, ring, setup }
    }
}

fn event() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

struct Client {
    connection: Connection,
    memory: Memory,
    ring: SplitRing,
    setup: RingSetup,
}

impl Client {
    fn start_ring(&mut self) {
        self.connection.set_ring(&self.setup, 0, &self.memory).unwrap();
        self.connection.enable(0, true).unwrap();
    }

    /// Sends a message that asks for an acknowledgement, and does not read the acknowledgement.
    fn send(&self, request: R, body: &[u8], fds: &[&OwnedFd]) {
        let mut bytes: Vec<u8> = [request as u32, 1 | 8, body.len() as u32]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect();
        bytes.extend(body);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.connection.send_bytes(&bytes, &fds).unwrap();
    }

    /// Returns the body of a reply, or `None` if the session has ended.
    fn reply(&self, request: R) -> Option<Vec<u8>> {
        let mut head = [0; 12];
        let mut socket = self.connection.socket();
        socket.read_exact(&mut head).ok()?;
        assert_eq!(head[..4], (request as u32).to_ne_bytes());
        let mut body = vec![0; usize::from(head[8])];
        socket.read_exact(&mut body).unwrap();
        Some(body)
    }

    fn ask(&self, request: R, body: &[u8], fds: &[&OwnedFd]) -> Option<Vec<u8>> {
        self.send(request, body, fds);
        self.reply(request)
    }

    /// Returns whether the session has sent something that the front end has not read.
    fn is_answered(&self) -> bool {
        rustix::io::ioctl_fionread(self.connection.socket()).unwrap() > 0
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

const DONE: [u8; 8] = [0; 8];

/// Runs `work` on another thread, and fails if `work` does not end in time.
fn bounded<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{what} does not end"))
}

#[test]
fn changes_are_acknowledged_when_the_reactor_has_made_them() {
    let export = Fixture::start(SecondClient::Wait);
    let mut client = export.connect();
    client.start_ring();
    let file = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    let at = 0x40_0000_0000u64;
    let region = words(&[0, at, 4096, at, 0]);
    let (start, len) = client.memory.range();
    let table = words(&[2, start, len, client.memory.user_address(start), 0, at, 4096, at, 0]);
    let path = format!("/proc/self/fd/{}", client.memory.region().mmap_handle);
    let memory: OwnedFd =
        std::fs::File::options().read(true).write(true).open(path).unwrap().into();
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let changes = [
        (R::ADD_MEM_REG, region.clone(), vec![&file]),
        (R::REM_MEM_REG, region, vec![]),
        (R::SET_MEM_TABLE, table, vec![&memory, &file]),
        (R::SET_VRING_ENABLE, words(&[0]), vec![]),
        (R::SET_VRING_CALL, words(&[0]), vec![&event]),
        (R::SET_VRING_ERR, words(&[0]), vec![&event]),
    ];
    for (request, body, fds) in changes {
        let held = export.hold();
        client.send(request, &body, &fds);
        // The session has submitted its call, and waits for the reactor.
        until(&format!("{request:?} waits for the reactor"), || {
            client.is_answered() || export.session_sleeps_in(FUTEX)
        });
        assert!(!client.is_answered(), "{request:?} is answered before the reactor knows of it");
        drop(held);
        assert_eq!(client.reply(request).unwrap(), DONE, "{request:?}");
    }
}

#[test]
fn a_front_end_that_reads_no_replies_does_not_block_stop() {
    let fixture = Fixture::start(SecondClient::Wait);
    let mut deaf = UnixStream::connect(&fixture.socket).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let ask: Vec<u8> =
        [R::GET_FEATURES as u32, 1, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    // Send until the replies fill the other direction of the socket, and the session is blocked in
    // the send of one more reply.
    until("the session is blocked", || {
        while let Ok(written) = deaf.write(&ask) {
            assert_eq!(written, ask.len());
        }
        fixture.session_sleeps_in(SENDMSG)
    });
    let Fixture { mut export, reactors, .. } = fixture;
    bounded("the export", move || export.stop(Instant::now() + STOP_TIME));
    drop((deaf, reactors));
}

#[test]
fn an_in_flight_description_needs_no_padding() {
    let export = Fixture::start(SecondClient::Wait);
    let client = export.connect();
    let mut body = words(&[0, 0]);
    body.extend([1, 0, 64, 0]);
    let reply = client.ask(R::GET_INFLIGHT_FD, &body, &[]).expect("the session goes on");
    assert_eq!((reply.len(), &reply[16..]), (20, &body[16..]), "it is as long as the question");
    let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let mut body = words(&[4096, 0]);
    body.extend([1, 0, 64, 0]);
    assert_eq!(client.ask(R::SET_INFLIGHT_FD, &body, &[&file]).unwrap(), DONE);
    assert_ne!(client.ask(R::SET_INFLIGHT_FD, &body, &[]).unwrap(), DONE, "no descriptor");
}

#[test]
fn the_session_continues_after_an_invalid_message() {
    let export = Fixture::start(SecondClient::Wait);
    let mut client = export.connect();
    let user = client.memory.user_address(client.memory.range().0);
    for parts in [[8, 8192, 4096], [0, 8194, 4096], [0, 8192, 4097]] {
        let [desc, used, avail] = parts.map(|offset| user + offset);
        let refused = client.ask(R::SET_VRING_ADDR, &words(&[0, desc, used, avail, 0]), &[]);
        assert_eq!(refused.expect("the session goes on"), 1u64.to_ne_bytes(), "{parts:?}");
    }
    let flags =
        client.ask(R::SET_VRING_ADDR, &words(&[2 << 32, user, user + 8192, user + 4096, 0]), &[]);
    assert_eq!(flags.unwrap(), 1u64.to_ne_bytes(), "unknown flags");
    assert_eq!(
        client.ask(R::SET_VRING_ENABLE, &words(&[2 << 32]), &[]).unwrap(),
        1u64.to_ne_bytes()
    );
    client.start_ring();
    assert_eq!(client.ask(R::SET_VRING_ENABLE, &words(&[0]), &[]).unwrap(), DONE);
}

/// Reads from the disk to an address outside guest memory, and waits for the answer.
fn read_outside_memory(client: &mut Client) {
    let (at, slice) = client.memory.piece(64, 64).unwrap();
    slice.copy_in(32, [0xff]);
    let buffer = |addr, len, device_writes| Buffer { addr, len, device_writes };
    client
        .ring
        .lay(0, &[buffer(at, 16, false), buffer(1 << 60, 512, true), buffer(at + 32, 1, true)]);
    client.ring.submit(0);
    client.ring.publish();
    rustix::io::write(&*client.setup.kick, &1u64.to_ne_bytes()).unwrap();
    bounded("the request", move || {
        while slice.copy_out(32) == [0xff] {
            std::thread::yield_now();
        }
        assert_eq!(slice.copy_out(32), [1], "IOERR");
    });
}

#[test]
fn a_request_for_data_outside_memory_is_counted_as_an_error() {
    let export = Fixture::start(SecondClient::Wait);
    let mut client = export.connect();
    client.start_ring();
    read_outside_memory(&mut client);
    let disk = export.disk.clone();
    let summary = export.reactors.next().ask(move |handle, reply| {
        reply.send(
            LocalDisk::known(handle, &disk)
                .and_then(|served| served.statistics().summary(OpKind::Read)),
        );
    });
    let summary = summary.flatten().expect("a read was counted");
    assert_eq!((summary.requests, summary.errors), (1, 1));
}

#[test]
fn figures_of_policies_outlive_the_queue() {
    let export = Fixture::start(SecondClient::Wait);
    let mut client = export.connect();
    client.start_ring();
    read_outside_memory(&mut client);
    // The queue publishes the used element and signals before it ends.
    assert!(client.ask(R::GET_VRING_BASE, &words(&[0]), &[]).is_some());
    drop(client);
    let figures = |disk: Arc<Disk>| {
        export
            .reactors
            .next()
            .ask(move |handle, reply| reply.send(PolicyFigures::known(handle, &disk)))
            .unwrap()
    };
    let SignalFigures { completions, signals } = figures(export.disk.clone()).signals;
    assert_eq!((completions, signals), (1, 1));
    let other = Fixture::start(SecondClient::Wait);
    assert_eq!(figures(other.disk.clone()), PolicyFigures::default(), "a disk of another reactor");
}

#[test]
fn a_ring_whose_reactor_has_ended_has_no_base() {
    let export = Fixture::start(SecondClient::Wait);
    let mut client = export.connect();
    client.start_ring();
    export.end_reactor();
    assert_eq!(client.ask(R::GET_VRING_BASE, &words(&[0]), &[]), None, "no base is an answer");
}

#[test]
fn switching_the_write_cache_off_fails_if_the_disk_cannot_be_synced() {
    let export = Fixture::start(SecondClient::Wait);
    let client = export.connect();
    // The body: offset 32, one byte, flag 1 (written by the guest), and the byte 0, which means
    // write-through.
    let body: Vec<u8> = [32u32, 1, 1].iter().flat_map(|w| w.to_ne_bytes()).chain([0]).collect();
    let on: Vec<u8> = body[..12].iter().copied().chain([1]).collect();
    assert_eq!(client.ask(R::SET_CONFIG, &on, &[]).unwrap(), DONE);
    export.end_reactor();
    assert_eq!(client.ask(R::SET_CONFIG, &body, &[]).unwrap(), 1u64.to_ne_bytes());
}

#[test]
fn a_second_front_end_waits_or_is_refused() {
    let export = Fixture::start(SecondClient::Wait);
    let first = export.connect();
    let second = UnixStream::connect(&export.socket).unwrap();
    (&second).write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(first.ask(R::SET_VRING_NUM, &words(&[64 << 32]), &[]).unwrap(), DONE);
    drop(first);
    second.set_read_timeout(Some(LIMIT)).unwrap();
    (&second).read_exact(&mut [0; 20]).unwrap();
    drop(second);

    let export = Fixture::start(SecondClient::Refuse);
    let first = export.connect();
    let second = UnixStream::connect(&export.socket).unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!((&second).read_to_end(&mut Vec::new()).unwrap(), 0, "closed");
    assert_eq!(first.ask(R::SET_VRING_NUM, &words(&[64 << 32]), &[]).unwrap(), DONE);
}

#[test]
fn front_ends_that_wait_are_served_in_the_order_of_their_connections() {
    let export = Fixture::start(SecondClient::Wait);
    let first = export.connect();
    let waiting = [(); 2].map(|()| {
        let stream = UnixStream::connect(&export.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        (&stream).write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        // The export answers the first front end after it has accepted the others.
        assert_eq!(first.ask(R::SET_VRING_NUM, &words(&[64 << 32]), &[]).unwrap(), DONE);
        stream
    });
    drop(first);
    for stream in waiting {
        (&stream).read_exact(&mut [0; 20]).unwrap();
    }
}
