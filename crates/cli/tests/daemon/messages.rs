//! `serve --keep-sessions`: a server that is killed while it handles a message of a front end. The
//! message is still in the socket, or the keeper has what it has changed. So the next server gives
//! the answer, and the front end sees nothing. strace kills the server at a chosen system call.

use std::os::fd::AsFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use blockyard_driver::connection::PROTOCOL_WITHOUT_INFLIGHT;
use blockyard_driver::ring::Ring;
use blockyard_driver::{Data, Memory, PackedRing, Plan, Session, SplitRing, request, status};
use rustix::process::{Pid, Signal, kill_process};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::FrontendReq;

use crate::common::{Daemon, Lines, SOON, TOOL, tool_command, until};
use crate::guest::pattern;
use crate::handover::Case;
use crate::holder::{Keeper, end, keep};

const BLOCK: usize = 4096;
const DEPTH: u16 = 8;

/// When the server dies: the system call, and the number of calls for a message.
#[derive(Clone, Copy)]
enum Moment {
    /// It has handled a message that changes the session, and begins to describe it to the keeper.
    Handled,
    /// The keeper has the session, and the message is still in the socket. (The calls before: two
    /// peeks.)
    Kept,
}

/// Runs `work` while strace waits for the `n`-th message of a thread, to kill the server at this
/// moment of it. Returns whether the server was killed.
fn is_killed_at(holder: &Daemon, moment: Moment, n: usize, work: impl FnOnce()) -> bool {
    let (call, n) = match moment {
        Moment::Handled => ("memfd_create", n),
        Moment::Kept => ("recvfrom", 3 * n),
    };
    // The holder may have another child for a moment, and then none counts.
    let running = || {
        let mut kept = None;
        until("a server runs", SOON, || {
            kept = holder.kept();
            kept.is_some()
        });
        kept
    };
    let server = running();
    let mut strace = tool_command("strace");
    strace.args(["-f", "-o", "/dev/null", "-p", &server.unwrap().to_string()]);
    strace.args(["-e", &format!("trace={call}")]);
    strace.args(["-e", &format!("inject={call}:signal=KILL:when={n}")]);
    let mut strace = strace.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = Lines::of(strace.stderr.take().unwrap());
    let attached = lines.find(|line| line.contains("attached") || line.contains("ptrace"));
    assert!(attached.is_some_and(|line| line.contains("attached")), "strace cannot attach");
    work();
    let is_killed = running() != server;
    if !is_killed {
        kill_process(Pid::from_child(&strace), Signal::TERM).unwrap();
    }
    until("strace has ended", SOON, || strace.try_wait().unwrap().is_some());
    is_killed
}

/// A front end without in-flight region, and the number of its writes.
struct Front<R> {
    session: Session<R>,
    writes: u64,
}

impl<R: Ring> Front<R> {
    fn connect(case: &Case) -> Self {
        let plan = Plan {
            protocol: PROTOCOL_WITHOUT_INFLIGHT,
            queue_size: 64,
            slots: DEPTH,
            data_len: BLOCK as u32,
            answer_limit: TOOL,
            ..Plan::default()
        };
        let session = Session::start(&case.socket, &plan).unwrap();
        session.link.connection.socket().set_read_timeout(Some(SOON)).unwrap();
        Front { session, writes: 0 }
    }

    /// Publishes a write in each slot.
    fn submit(&mut self) {
        let queue = &mut self.session.queues[0];
        for slot in 0..DEPTH {
            self.writes += 1;
            queue.write_data(slot, &pattern(self.writes, BLOCK));
            let sector = self.writes % 1024 * 8;
            queue.submit(slot, request::OUT, sector, Data::ToDevice(BLOCK as u32));
        }
        queue.publish().unwrap();
    }

    /// Waits until each write has one answer, and reads the data.
    fn finish(&mut self) {
        let queue = &mut self.session.queues[0];
        let (mut done, begin) = (0, Instant::now());
        while done < DEPTH {
            match queue.reap().unwrap() {
                Some((_, answer)) => {
                    assert_eq!(answer, status::OK);
                    done += 1;
                }
                None => {
                    assert!(begin.elapsed() < SOON, "{done} answers after {} writes", self.writes);
                    queue.sleep(Some(Duration::from_millis(20))).unwrap();
                }
            }
        }
        for write in self.writes - u64::from(DEPTH) + 1..=self.writes {
            let (mut found, len) = (vec![0; BLOCK], BLOCK as u32);
            let sector = write % 1024 * 8;
            let read = queue.call(request::IN, sector, Data::FromDevice(len), &mut found, SOON);
            assert_eq!(read.unwrap(), status::OK);
            assert!(found == pattern(write, BLOCK), "write {write} of {}", self.writes);
        }
        assert_eq!(queue.in_flight(), 0);
    }

    /// Stops the ring and starts it again while writes wait in it. Then changes its kick while it
    /// runs.
    fn restart_ring(&mut self) {
        let setup = self.session.queues[0].setup();
        let link = &mut self.session.link;
        let base = link.connection.stop_ring(0).unwrap();
        self.submit();
        let link = &mut self.session.link;
        link.connection.set_ring(&setup, base, &link.memory).unwrap();
        link.connection.enable(0, true).unwrap();
        self.session.queues[0].kick().unwrap();
        self.finish();
        let kick = FrontendReq::SET_VRING_KICK as u32;
        let connection = &self.session.link.connection;
        connection.message(kick, &[0; 8], &[setup.kick.as_fd()]).unwrap();
        self.submit();
        self.session.queues[0].kick().unwrap();
        self.finish();
    }

    /// Adds a memory region and removes it. Sends the whole table.
    fn change_memory(&mut self) {
        let more = Memory::new(1 << 20).unwrap();
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 1 << 40,
            userspace_addr: 1 << 41,
            ..more.region()
        };
        let link = &mut self.session.link;
        link.connection.frontend().add_mem_region(&region).unwrap();
        link.connection.frontend().remove_mem_region(&region).unwrap();
        link.connection.set_memory(&link.memory).unwrap();
        self.submit();
        self.finish();
    }
}

/// Kills a server at each message of `work`. Returns the number of kills.
fn kill_at_each<R: Ring>(
    holder: &Daemon,
    front: &mut Front<R>,
    work: fn(&mut Front<R>),
    moment: Moment,
) -> usize {
    let mut kills = 0;
    while is_killed_at(holder, moment, kills + 1, || work(front)) {
        kills += 1;
    }
    kills
}

fn killed_during_messages<R: Ring>(keeper: Keeper) {
    let case = Case::new();
    let holder = keep(&case, keeper);
    let mut front = Front::<R>::connect(&case);
    front.submit();
    front.finish();
    // The end of the ring, its kick, its call, and the kick of the running ring change the session.
    for (moment, least) in [(Moment::Handled, 4), (Moment::Kept, 8)] {
        let kills = kill_at_each(&holder, &mut front, Front::restart_ring, moment);
        assert!(kills >= least, "{kills} kills for the messages of a ring");
        let kills = kill_at_each(&holder, &mut front, Front::change_memory, moment);
        assert_eq!(kills, 3, "three messages change the memory");
    }
    drop(front);
    end(holder, keeper);
    case.is_clean();
}

#[test]
fn a_message_that_a_killed_server_has_handled_is_answered_by_the_next_one() {
    killed_during_messages::<SplitRing>(Keeper::Holder);
}

#[test]
fn a_message_is_answered_by_the_next_server_with_packed_rings() {
    killed_during_messages::<PackedRing>(Keeper::Holder);
}

#[test]
fn a_message_is_answered_by_the_next_server_if_systemd_keeps_the_descriptors() {
    killed_during_messages::<SplitRing>(Keeper::Systemd);
}

/// The first copy that the keeper gets has the connection. A kill before it disconnects the front
/// end.
#[test]
fn a_session_begins_although_its_server_is_killed_at_each_message() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let mut kills = 0;
    let ends = || holder.log().matches("the front end disconnected").count();
    let begin = |sessions: usize| {
        let mut front = Front::<SplitRing>::connect(&case);
        front.submit();
        front.session.queues[0].kick().unwrap();
        front.finish();
        drop(front);
        // The server may also be killed when it describes the end.
        until("the session has ended", SOON, || ends() == sessions);
    };
    while is_killed_at(&holder, Moment::Handled, kills + 2, || begin(kills + 1)) {
        kills += 1;
    }
    // Of the messages that change something.
    assert!(kills >= 9, "{kills} kills for the messages of a session");
    end(holder, Keeper::Holder);
    case.is_clean();
}
