//! Front ends connect, disconnect and die, and a disk closes, while the server quiesces requests to
//! exchange images.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_disk::{Disk, SnapshotOptions, Why, Work, WorkError};
use blockyard_driver::{Data, Plan, Queue, Session, SplitRing, request};

use crate::common::{Folder, SOON, Server, tool, until};
use crate::killed::Over;

const SIZE: u64 = 16 << 20;
/// Delay of each request. It is long, so that most of the time a quiesce waits for requests in
/// flight, and other requests wait for the quiesce.
const SLOW: &str = "delay:write=15ms,read=15ms";

/// Exchanges the images of a disk in a loop.
struct Exchanges {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<Result<(), WorkError>>,
}

impl Exchanges {
    fn start(disk: &Arc<Disk>, folder: PathBuf) -> Self {
        let (stop, rounds): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let (disk, until, count) = (disk.clone(), stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            while !until.load(Ordering::SeqCst) {
                let round = count.load(Ordering::SeqCst);
                let overlay = folder.join(format!("{round}.qcow2"));
                disk.snapshot(&SnapshotOptions::new(overlay))?;
                if round % 2 == 0 {
                    disk.commit(&Work::default())?;
                } else {
                    disk.stream(&Work::default())?;
                }
                count.store(round + 1, Ordering::SeqCst);
            }
            Ok(())
        });
        Exchanges { stop, rounds, thread }
    }

    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }
}

/// A front end that writes on two queues and then disconnects with requests in flight and without a
/// message, as a killed process does.
struct Dying {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    calls: Vec<Arc<OwnedFd>>,
    thread: JoinHandle<()>,
}

impl Dying {
    fn start(socket: &Path) -> Self {
        let plan = Plan { queues: 2, ..Plan::default() };
        let session = Session::<SplitRing>::start(socket, &plan).unwrap();
        let calls = session.queues.iter().map(Queue::call_eventfd).collect();
        let (stop, answers): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let (until, count) = (stop.clone(), answers.clone());
        let thread = std::thread::spawn(move || {
            // The thread owns the whole session, because its connection must stay open.
            let mut session = session;
            let mut next = 0;
            let mut submit = |queue: &mut Queue<SplitRing>, slot| {
                next += 1;
                let sector = next * 7919 % (SIZE / 4096) * 8;
                queue.submit(slot, request::OUT, sector, Data::ToDevice(4096));
            };
            for queue in &mut session.queues {
                (0..plan.slots).for_each(|slot| submit(queue, slot));
                queue.publish().unwrap();
            }
            while !until.load(Ordering::SeqCst) {
                for queue in &mut session.queues {
                    while let Some((slot, _)) = queue.reap().unwrap() {
                        count.fetch_add(1, Ordering::SeqCst);
                        submit(queue, slot);
                    }
                    queue.publish().unwrap();
                    queue.sleep(None).unwrap();
                }
            }
        });
        Dying { stop, answers, calls, thread }
    }

    fn answers(&self) -> u64 {
        self.answers.load(Ordering::SeqCst)
    }

    fn die(self) {
        self.stop.store(true, Ordering::SeqCst);
        for call in &self.calls {
            rustix::io::write(call, &1u64.to_ne_bytes()).unwrap();
        }
        self.thread.join().unwrap();
    }
}

#[test]
fn front_ends_may_connect_disconnect_and_die_during_exchanges() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("base.img", SIZE), folder.join("s"));
    let server = Server::start(&image, &socket, &[SLOW]);
    let exchanges = Exchanges::start(&server.disk, folder.to_path_buf());
    for round in 0..6 {
        // A front end that disconnects properly: it stops its queues, each after its last request.
        let load = LoadOptions {
            rw: Pattern::Randrw,
            queues: 2,
            depth: 16,
            runtime: 3600.0,
            flush_every: 20,
            verify: true,
            ..LoadOptions::for_socket(socket.clone())
        };
        let report = std::thread::scope(|scope| {
            let client = scope.spawn(|| measure(&load));
            let over = Over(&load.over);
            let before = server.writes();
            until("the front end has answers", SOON, || server.writes() >= before + 32);
            let exchanged = exchanges.rounds();
            until("an exchange is over", SOON, || exchanges.rounds() > exchanged);
            drop(over);
            client.join().unwrap().unwrap()
        });
        assert_eq!((report.errors, report.first_error), (0, None), "round {round}");
        assert!(report.verified_blocks > 0);
        // A front end that dies.
        let client = Dying::start(&socket);
        until("the front end has answers", SOON, || client.answers() >= 16 + 3 * (round % 6));
        client.die();
    }
    exchanges.stop.store(true, Ordering::SeqCst);
    exchanges.thread.join().unwrap().unwrap();
    server.end();
}

/// A disk that closes, as at SIGTERM, ends the exchange, keeps acknowledged writes, and leaves a
/// consistent image.
#[test]
fn a_disk_closes_during_an_exchange() {
    for round in 0..4 {
        let folder = Folder::new();
        let (image, socket) = (folder.image("base.img", SIZE), folder.join("s"));
        let server = Server::start(&image, &socket, &[SLOW]);
        let client = Dying::start(&socket);
        let exchanges = Exchanges::start(&server.disk, folder.to_path_buf());
        until("there is an overlay", SOON, || folder.join("0.qcow2").exists());
        until("images were exchanged", SOON, || exchanges.rounds() > round);
        server.end();
        let error = exchanges.thread.join().unwrap().unwrap_err();
        assert!(matches!(*error.why, Why::Ended), "{error}");
        client.die();
        let last =
            (0..100).rev().map(|n| folder.join(format!("{n}.qcow2"))).find(|path| path.exists());
        tool("qemu-img", ["check".as_ref(), last.expect("an overlay").as_os_str()]).good();
    }
}
