use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_disk::{
    Backend, ClientId, Disk, DiskObserver, DiskOptions, LocalDisk, OnEnospc, Source,
};
use blockyard_image::{Alignment, CacheMode, ChainOptions, Raw};
use blockyard_ring::{Executor, Handle};
use blockyard_storage::sim::{Fault, OpKind, SimConfig, SimDisk, SimImage};

use super::one_disk::Served;
use super::registry::end_here;
use super::*;
use crate::acceptor::Registration;
use crate::export::BY_OPERATOR;
use crate::log::Log;
use crate::{Export, Listener, Reactors};
use lines::Lines;

mod lines;

const SIZE: u64 = 16 << 20;
/// Longest wait for an event. The event itself ends the wait.
const LIMIT: Duration = Duration::from_secs(60);

fn socket() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("blockyard-lines-{}-{number}", std::process::id()))
}

fn disk(cache: CacheMode) -> Arc<Disk> {
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache,
        filters: Vec::new(),
        on_enospc: OnEnospc::Pause,
    };
    Arc::new(Disk::new(options, Source::open(&ChainOptions::new(format!("ram:{SIZE}"))).unwrap()))
}

/// The reports of disconnected clients: the export, and why.
#[derive(Default)]
struct Reports(Mutex<Vec<(&'static str, String)>>);

impl DiskObserver for Reports {
    fn changed(&self, _disk: &Arc<str>) -> bool {
        false
    }

    fn connected(&self, _disk: &str, _export: &'static str, _client: &ClientId) {}

    fn disconnected(&self, _disk: &str, export: &'static str, _client: &ClientId, why: &str) {
        self.0.lock().unwrap().push((export, why.into()));
    }
}

/// An export of a disk in memory, on one reactor.
struct Exported<P: Protocol> {
    export: OneDisk<P>,
    path: PathBuf,
    reports: Arc<Reports>,
}

impl<P: Protocol> Exported<P> {
    fn new(reactors: &Arc<Reactors>) -> Self {
        let (path, disk, reports) = (socket(), disk(CacheMode::None), Arc::<Reports>::default());
        disk.observe(reports.clone());
        let listener = Listener::bind(&path).unwrap();
        let export = OneDisk::start(disk, listener, reactors.clone()).unwrap();
        Exported { export, path, reports }
    }

    fn connect(&self) -> Caller {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Caller(BufReader::new(stream))
    }

    /// Returns why each client was disconnected, when that is reported for `count` of them.
    fn reasons(&self, count: usize) -> Vec<String> {
        let began = Instant::now();
        loop {
            let reports = self.reports.0.lock().unwrap();
            if reports.len() >= count {
                assert!(reports.iter().all(|(export, _)| *export == P::KIND));
                return reports.iter().map(|(_, why)| why.clone()).collect();
            }
            drop(reports);
            assert!(began.elapsed() < LIMIT, "too few clients were disconnected");
            std::thread::yield_now();
        }
    }
}

fn reactors() -> Arc<Reactors> {
    Arc::new(Reactors::start(1, &[]).unwrap())
}

/// A client that speaks lines.
struct Caller(BufReader<UnixStream>);

impl Caller {
    fn send(&mut self, line: &str) {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Returns the next answer. It is empty at the end of the connection.
    fn answer(&mut self) -> String {
        let mut answer = String::new();
        match self.0.read_line(&mut answer) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
            read => drop(read.unwrap()),
        }
        answer.trim_end().into()
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.answer()
    }
}

fn write(sector: u64, byte: u8) -> String {
    format!("WRITE {sector} {}", format!("{byte:02x}").repeat(512))
}

fn data(byte: u8) -> String {
    format!("OK {}", format!("{byte:02x}").repeat(512))
}

#[test]
fn a_protocol_of_a_few_lines_serves_a_disk() {
    let exported = Exported::<Lines>::new(&reactors());
    let (mut one, mut two) = (exported.connect(), exported.connect());
    assert_eq!(one.ask(&write(5, 7)), "OK");
    assert_eq!((two.ask("READ 5"), two.ask("READ 6")), (data(7), data(0)));
    assert_eq!(two.ask("FLUSH"), "OK");
    assert_eq!(two.ask(&format!("READ {}", SIZE / 512)), "ERR OutOfRange");
    for line in ["READ", "READ 99999999999999999999", "WRITE 1 zz", "\u{fc}", ""] {
        assert_eq!(two.ask(line), "ERR Malformed", "{line:?}");
    }
    two.send(&["READ 5"; 1000].join("\n"));
    (0..1000).for_each(|_| assert_eq!(two.answer(), data(7)));
    assert_eq!(exported.export.clients().len(), 2);
    one.send(&"x".repeat(5000));
    assert_eq!(one.answer(), "");
    drop(two);
    let mut reasons = exported.reasons(2);
    reasons.sort();
    assert_eq!(reasons, ["it has closed its connection", "its line is too long"]);
    assert!(exported.export.clients().is_empty());
}

/// Lines for two clients.
struct Two;

impl Protocol for Two {
    const KIND: &'static str = "two";
    const MOST_CLIENTS: usize = 2;

    async fn serve(connection: &Connection) -> io::Result<()> {
        Lines::serve(connection).await
    }
}

#[test]
fn a_client_beyond_the_limit_waits_until_another_one_leaves() {
    let reactors = reactors();
    let exported = Exported::<Two>::new(&reactors);
    let other = Exported::<Lines>::new(&reactors);
    let (mut one, mut two, mut three) =
        (exported.connect(), exported.connect(), exported.connect());
    three.send("READ 0");
    // The acceptor, one thread for both sockets, has looked at the third client before this one.
    assert_eq!(other.connect().ask("READ 0"), data(0));
    assert_eq!((one.ask("READ 0"), two.ask("READ 0")), (data(0), data(0)));
    assert_eq!(exported.export.clients().len(), 2);
    drop(one);
    assert_eq!(three.answer(), data(0));
}

/// Accepts clients at a socket, and gives them to a channel.
struct Accepts {
    accepting: Arc<Accepting>,
    registration: Registration,
    accepted: Receiver<Accepted>,
    path: PathBuf,
    _reactors: Arc<Reactors>,
}

impl Accepts {
    fn new(most: usize) -> Self {
        let (accepting, path, reactors) = (Accepting::new(most), socket(), reactors());
        let ((taken, accepted), admitting) = (channel(), accepting.clone());
        let log = Log::default();
        let listener = Listener::bind(&path).unwrap();
        let registration = accepting.listen(listener, &reactors, move |_, entrance| {
            admitting.admit(entrance, (&log, "test"), |fd| taken.send(fd).unwrap())
        });
        let registration = registration.unwrap();
        Accepts { accepting, registration, accepted, path, _reactors: reactors }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    fn next(&self) -> Accepted {
        self.accepted.recv_timeout(LIMIT).unwrap()
    }
}

#[test]
fn a_higher_limit_and_the_end_of_a_pause_let_clients_in() {
    let accepts = Accepts::new(1);
    let _clients = [(); 3].map(|()| accepts.connect());
    let first = accepts.next();
    accepts.accepting.set_most(2);
    let second = accepts.next();
    assert!(accepts.accepted.try_recv().is_err());
    drop(first);
    let third = accepts.next();
    accepts.accepting.pause();
    drop((second, third));
    let _fourth = accepts.connect();
    assert!(accepts.accepted.try_recv().is_err());
    assert_eq!(accepts.accepting.clients(), 0);
    accepts.accepting.resume();
    let fourth = accepts.next();
    assert_eq!(accepts.accepting.clients(), 1);
    drop((fourth, accepts.registration));
    // The callback, which has the sender, is gone.
    assert_eq!(accepts.accepted.recv().err(), Some(RecvError));
}

#[test]
fn an_operator_disconnects_clients_and_they_may_come_back() {
    let mut exported = Exported::<Lines>::new(&reactors());
    let (mut one, mut two) = (exported.connect(), exported.connect());
    assert_eq!((one.ask(&write(1, 3)), two.ask("READ 1")), ("OK".into(), data(3)));
    assert!(exported.export.disconnect(Some("pid 0")).is_empty());
    assert_eq!(one.ask("READ 1"), data(3));
    let pid = format!("pid {}", std::process::id());
    let leaving = exported.export.disconnect(Some(&pid));
    assert_eq!(leaving.iter().filter(|client| client.description == pid).count(), 2);
    assert_eq!((one.answer(), two.answer()), (String::new(), String::new()));
    assert_eq!(exported.reasons(2), [BY_OPERATOR; 2]);
    let mut three = exported.connect();
    assert_eq!(three.ask("READ 1"), data(3));
    let began = Instant::now();
    while exported.export.clients().len() > 1 {
        assert!(began.elapsed() < LIMIT, "the first clients stay");
        std::thread::yield_now();
    }
    assert_eq!(exported.export.disconnect(None).len(), 1);
    assert_eq!(three.answer(), "");
    assert_eq!(exported.reasons(3), [BY_OPERATOR; 3]);
}

/// The client reads no answer, so that the socket is full.
#[test]
fn a_stop_does_not_wait_for_a_client_that_does_not_read() {
    let mut exported = Exported::<Lines>::new(&reactors());
    let (mut deaf, mut other) = (exported.connect(), exported.connect());
    deaf.0.get_ref().set_nonblocking(true).unwrap();
    while deaf.0.get_mut().write_all(b"READ 0\n").is_ok() {}
    assert_eq!(other.ask("READ 0"), data(0));
    let path = exported.path.clone();
    let (ended, end) = channel();
    let stopping = std::thread::spawn(move || {
        exported.export.stop(Instant::now());
        // A second stop does nothing.
        exported.export.stop(Instant::now());
        ended.send(exported.reasons(2)).unwrap();
    });
    let reasons = end.recv_timeout(LIMIT).expect("the export ends");
    assert_eq!(reasons, ["the export has ended"; 2]);
    stopping.join().unwrap();
    assert_eq!(other.answer(), "");
    assert!(UnixStream::connect(path).is_err(), "it listens no more");
}

/// A client of a simulated disk, on the simulated clock.
struct Simulated {
    handle: Handle,
    disk: Arc<Disk>,
    client: UnixStream,
    ended: Rc<Cell<bool>>,
    accepting: Arc<Accepting>,
}

impl Simulated {
    fn new(handle: &Handle, sim: &SimDisk, cache: CacheMode) -> Self {
        let (disk, accepting) = (disk(cache), Accepting::new(1));
        let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
        let local = LocalDisk::new(disk.clone(), Backend::Raw(raw), Some(handle.clone()));
        let (client, theirs) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let fd = accepting.count(theirs.into());
        let served = Served::<Lines>::enter(handle, fd, Rc::new(local)).unwrap();
        let ended = Rc::new(Cell::new(false));
        let end = ended.clone();
        handle.spawn(async move {
            served.run(&Log::default()).await;
            end.set(true);
        });
        Simulated { handle: handle.clone(), disk, client, ended, accepting }
    }

    fn send(&mut self, line: &str) {
        self.client.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Lets simulated time pass until `happens` returns true.
    async fn until(&self, what: &str, mut happens: impl FnMut() -> bool) {
        let began = Instant::now();
        while !happens() {
            assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
            self.handle.sleep(Duration::from_micros(50)).await;
        }
    }

    /// Returns all that the client receives until the end of its connection.
    async fn rest(&self) -> String {
        let (mut all, mut room) = (Vec::new(), [0; 4096]);
        self.until("the connection ends", || match (&self.client).read(&mut room) {
            Ok(n) => {
                all.extend(&room[..n]);
                n == 0
            }
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                false
            }
        })
        .await;
        String::from_utf8(all).unwrap()
    }
}

fn simulated(work: impl AsyncFnOnce(Handle) + 'static) {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap();
}

/// The export ends while the disk works on a write, and more requests have arrived.
#[test]
fn the_request_in_flight_is_answered_and_then_all_writes_are_durable() {
    for seed in 0..20 {
        simulated(async move |handle| {
            let mut config = SimConfig::new(seed);
            config.latency.write = 5000;
            let sim = SimDisk::new(SimImage::zeroed(1 << 20), config);
            let mut one = Simulated::new(&handle, &sim, CacheMode::None);
            one.send(&format!("{}\n{}", write(0, 1), write(1, 2)));
            let began = Instant::now();
            while sim.trace().is_empty() {
                assert!(began.elapsed() < LIMIT, "no write begins");
                // Time would pass only after the disk has nothing to do.
                handle.yield_now().await;
            }
            assert_eq!(sim.trace().len(), 1, "the write has not ended");
            end_here::<Served<Lines>>(&handle, &one.disk, Instant::now() + LIMIT).await;
            assert!(one.ended.get(), "the end waits for the connection");
            let (answers, contents) = (one.rest().await, sim.power_cut().bytes());
            assert_eq!(answers, "OK\n", "the export takes no more requests");
            assert_eq!(contents[..512], [1; 512], "seed {seed}");
            // A thread closes the socket.
            one.until("its socket is closed", || one.accepting.clients() == 0).await;
            assert!(of_disk::<Served<Lines>>(&handle, &one.disk).is_empty());
        });
    }
}

#[test]
fn a_write_of_a_disk_without_a_write_cache_is_durable_when_it_is_answered() {
    simulated(async |handle| {
        let sim = SimDisk::new(SimImage::zeroed(1 << 20), SimConfig::new(1));
        let mut one = Simulated::new(&handle, &sim, CacheMode::Writethrough);
        one.send(&write(3, 9));
        let mut answer = [0; 3];
        one.until("the answer", || (&one.client).read(&mut answer).is_ok()).await;
        assert_eq!(answer, *b"OK\n");
        assert_eq!(sim.power_cut().bytes()[3 * 512..4 * 512], [9; 512]);
    });
}

/// The disk waits for space on the host, and no operator resumes it.
#[test]
fn the_end_of_an_export_does_not_wait_for_a_request_that_waits_for_space() {
    simulated(async |handle| {
        const ENOSPC: i32 = 28;
        let sim = SimDisk::new(SimImage::zeroed(1 << 20), SimConfig::new(1));
        sim.fail(Fault::new(OpKind::Write, ENOSPC).always());
        let mut one = Simulated::new(&handle, &sim, CacheMode::None);
        one.send(&write(0, 1));
        one.until("the write waits", || one.disk.paused() > 0).await;
        end_here::<Served<Lines>>(&handle, &one.disk, Instant::now() + LIMIT).await;
        assert_eq!(one.rest().await, "ERR NoSpace\n");
    });
}
