//! A session over a socket pair. The test sends a message and then lets the session handle it, on
//! one thread.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_driver::ring::{Buffer, Ring, RingOptions};
use blockyard_driver::{Memory, SplitRing};
use blockyard_image::{CacheMode, ChainOptions};
use config::{F_CONFIG_WCE, F_EVENT_IDX, F_FLUSH, F_PROTOCOL, F_VERSION_1};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::message::FrontendReq as Req;

use super::super::conversation::Messages;
use super::super::refusal::as_unusable;
use super::super::{SecondClient, state};
use super::*;
use crate::{PollMode, Reactors};

mod parts;
mod rebinding;
mod resets;
mod starts;

const FEATURES: u64 = F_PROTOCOL | F_VERSION_1 | F_EVENT_IDX | F_FLUSH | F_CONFIG_WCE;
const SIZE: u16 = 64;
/// In the number of a ring: the message has no descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;
const DONE: Option<u64> = Some(0);
const REFUSED: Option<u64> = Some(1);

fn export() -> Arc<Shared> {
    let (name, serial) = ("disk".to_string(), "disk".to_string());
    let options = DiskOptions {
        name,
        serial,
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()));
    let tuning = Tuning {
        poll: PollMode::Off,
        in_band: false,
        pin_memory: false,
        any_memory_file: false,
        second_client: SecondClient::Wait,
    };
    let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
    Shared::new(disk, QueueShape { queues: 2, size: SIZE }, tuning, reactors).unwrap()
}

fn event() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn session(export: &Arc<Shared>, state: SessionState) -> Result<Session> {
    Session::new(export.clone(), None, state, Arc::new(event()))
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Returns the body of a message that carries a ring's index and a number.
fn of_ring(index: u32, number: u32) -> Vec<u8> {
    [index, number].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Returns the description of an in-flight region for `queues` queues, without padding.
fn inflight(bytes: u64, queues: u16) -> Vec<u8> {
    let mut body = words(&[bytes, 0]);
    body.extend([queues, SIZE].iter().flat_map(|half| half.to_ne_bytes()));
    body
}

/// A front end, and the session at the other end of its socket.
struct Front<R = SplitRing> {
    export: Arc<Shared>,
    stream: UnixStream,
    messages: Messages,
    memory: Memory,
    ring: R,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Front {
    /// Connects, and negotiates features.
    fn new() -> Self {
        Front::of_ring(true)
    }

    /// Sets memory, in-flight region and ring 0, and starts the ring.
    fn started() -> Self {
        Front::started_with(Some(event()))
    }

    /// `kick`: the descriptor of the kicks. `None`: there are none.
    fn started_with(kick: Option<OwnedFd>) -> Self {
        let mut front = Front::new();
        front.start(kick, true);
        front
    }
}

/// Returns the options of the test's rings.
fn options(event_idx: bool) -> RingOptions {
    RingOptions { size: SIZE, slots: 4, event_idx, indirect: false }
}

impl<R: Ring> Front<R> {
    /// Connects, and negotiates the features of a ring layout.
    fn of_ring(event_idx: bool) -> Self {
        let export = export();
        let (stream, theirs) = UnixStream::pair().unwrap();
        let session = session(&export, export.new_state()).unwrap();
        let messages = Messages::new(theirs, UnixStream::pair().unwrap(), session);
        let mut memory = Memory::new(1 << 20).unwrap();
        let ring = R::new(&mut memory, options(event_idx)).unwrap();
        let mut front =
            Front { export, stream, messages, memory, ring, kick: event(), call: event() };
        let features = if event_idx { FEATURES } else { FEATURES & !F_EVENT_IDX } | R::FEATURES;
        let offered = front.send(Req::GET_FEATURES, &[], &[]).unwrap();
        assert_eq!(offered & features, features);
        assert_eq!(
            front.send(Req::SET_FEATURES, &words(&[features]), &[]),
            None,
            "no acknowledgement yet"
        );
        let protocol = VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        front.send(Req::SET_PROTOCOL_FEATURES, &words(&[protocol.bits()]), &[]);
        front
    }

    /// Sets memory and ring 0, and starts the ring. `has_region`: sets an in-flight region.
    fn start(&mut self, kick: Option<OwnedFd>, has_region: bool) {
        let (memory, region) = self.region();
        assert_eq!(self.send(Req::ADD_MEM_REG, &region, &[&memory]), DONE);
        if has_region {
            let (file, len) = inflight::allocate(2, SIZE, self.is_packed()).unwrap();
            assert_eq!(self.send(Req::SET_INFLIGHT_FD, &inflight(len, 2), &[&file]), DONE);
        }
        self.set_up(kick);
    }

    /// Sets ring 0 from its begin, and starts the ring.
    fn set_up(&mut self, kick: Option<OwnedFd>) {
        let call = self.call.try_clone().unwrap();
        assert_eq!(self.send(Req::SET_VRING_CALL, &words(&[0]), &[&call]), DONE);
        assert_eq!(self.send(Req::SET_VRING_NUM, &of_ring(0, SIZE.into()), &[]), DONE);
        assert_eq!(self.send(Req::SET_VRING_BASE, &of_ring(0, 0), &[]), DONE);
        assert_eq!(self.send(Req::SET_VRING_ADDR, &self.addresses(), &[]), DONE);
        self.kick_off(kick);
    }

    /// Sets the kick descriptor of ring 0, and enables the ring.
    fn kick_off(&mut self, kick: Option<OwnedFd>) {
        let ring = words(&[if kick.is_some() { 0 } else { NO_DESCRIPTOR }]);
        let fds: Vec<_> = kick.iter().collect();
        assert_eq!(self.send(Req::SET_VRING_KICK, &ring, &fds), DONE);
        self.kick = kick.unwrap_or_else(event);
        assert_eq!(self.send(Req::SET_VRING_ENABLE, &of_ring(0, 1), &[]), DONE);
    }

    fn is_packed(&self) -> bool {
        R::FEATURES & config::F_PACKED != 0
    }

    /// Returns the memory's descriptor, and the body of the message that adds it.
    fn region(&self) -> (OwnedFd, Vec<u8>) {
        let path = format!("/proc/self/fd/{}", self.memory.region().mmap_handle);
        let file = File::options().read(true).write(true).open(path).unwrap();
        let (start, len) = self.memory.range();
        (file.into(), words(&[0, start, len, self.memory.user_address(start), 0]))
    }

    fn addresses(&self) -> Vec<u8> {
        let at = self.ring.addresses();
        let [desc, used, avail] =
            [at.desc, at.used, at.avail].map(|guest| self.memory.user_address(guest));
        words(&[0, desc, used, avail, 0])
    }

    /// Sends a message and lets the session handle it. Returns the first 8 bytes of the answer's
    /// body, if there is an answer.
    fn send(&mut self, request: Req, body: &[u8], fds: &[&OwnedFd]) -> Option<u64> {
        self.post(request, body, fds);
        self.next()
    }

    /// Sends a message.
    fn post(&self, request: Req, body: &[u8], fds: &[&OwnedFd]) {
        let mut bytes: Vec<u8> = [request as u32, 1 | 8, body.len() as u32]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        bytes.extend(body);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        let parts = [std::io::IoSlice::new(&bytes)];
        rustix::net::sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    /// Lets the session handle the next message. Returns what `send` returns.
    fn next(&mut self) -> Option<u64> {
        assert!(self.messages.next(|_| ()).unwrap(), "the session goes on");
        self.stream.set_nonblocking(true).unwrap();
        let mut answer = [0; 64];
        match self.stream.read(&mut answer) {
            Ok(_) => Some(u64::from_ne_bytes(answer[12..20].try_into().unwrap())),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn session(&self) -> std::sync::MutexGuard<'_, Session> {
        super::super::lock(&self.messages.session)
    }

    /// Returns the state as text, with its descriptors' numbers.
    fn state(&self) -> String {
        format!("{:?}", self.session().state)
    }

    /// Reads a sector through the ring.
    fn read(&mut self) {
        let (at, slice) = self.memory.piece(1024, 64).unwrap();
        slice.copy_in(528, [0xff]);
        let buffer = |addr, len, device_writes| Buffer { addr, len, device_writes };
        self.ring.lay(
            0,
            &[buffer(at, 16, false), buffer(at + 16, 512, true), buffer(at + 528, 1, true)],
        );
        self.ring.submit(0);
        self.ring.publish();
        let signalled = self.ring.arm();
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        while !signalled && !self.ring.ready() {
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert!(
                rustix::event::poll(&mut fds, Some(&minute)).unwrap() > 0,
                "the request is not answered"
            );
            rustix::io::read(&self.call, &mut [0; 8]).unwrap();
        }
        assert_eq!((slice.copy_out(528), self.ring.reap().is_some()), ([0], true));
    }
}

impl<R> Drop for Front<R> {
    fn drop(&mut self) {
        super::super::lock(&self.messages.session).release();
    }
}

#[test]
fn messages_lead_to_the_state_that_they_describe() {
    let front = Front::started();
    let session = front.session();
    let state = &session.state;
    let (start, len) = front.memory.range();
    assert_eq!(state.features, FEATURES);
    assert!(
        state.acknowledges() && state.protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    );
    let [region] = &state.memory[..] else { panic!("{:?}", state.memory) };
    assert_eq!((region.guest, region.size, region.offset), (start, len, 0));
    assert_eq!(region.user, front.memory.user_address(start));
    assert!(region.file.is_some());
    assert_eq!(state.inflight.as_ref().map(|file| (file.offset, file.queues)), Some((0, 2)));
    let at = front.ring.addresses();
    let [descriptors, available, used] =
        [at.desc, at.avail, at.used].map(|guest| front.memory.user_address(guest));
    let ring = &state.vrings[0];
    assert_eq!((ring.size, ring.base, ring.enabled, ring.started), (SIZE.into(), 0, true, true));
    assert_eq!(ring.parts, Some(Parts { descriptors, available, used }));
    assert!(ring.kick.is_some() && ring.call.is_some() && ring.error.is_none());
    assert!(!state.vrings[1].started && !state.vrings[1].enabled);
}

/// Virtio 1.2, section 5.2.5.2.
#[test]
fn a_driver_that_cannot_flush_has_no_write_cache() {
    use super::super::config::F_FLUSH;

    let mut front = Front::new();
    let write_back = |front: &Front| front.session().state.write_back;
    assert_eq!(front.send(Req::SET_FEATURES, &words(&[FEATURES | F_FLUSH]), &[]), DONE);
    assert!(write_back(&front));
    assert_eq!(front.send(Req::SET_FEATURES, &words(&[FEATURES & !F_FLUSH]), &[]), DONE);
    assert!(!write_back(&front));
    assert!(!front.session().device.write_back.load(std::sync::atomic::Ordering::Relaxed));
}

#[test]
fn a_refused_message_leaves_the_state_unchanged() {
    let mut front = Front::started();
    front.read();
    let before = front.state();
    let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let (memory, region) = front.region();
    let at = 0x40_0000_0000u64;
    let no_region = words(&[0, at, 4096, at, 0]);
    let protocol = front.session().state.protocol | VhostUserProtocolFeatures::INBAND_NOTIFICATIONS;
    let messages: [(Req, Vec<u8>, &[&OwnedFd]); 14] = [
        (Req::SET_FEATURES, words(&[FEATURES | 1 << 63]), &[]),
        (Req::SET_PROTOCOL_FEATURES, words(&[protocol.bits()]), &[]),
        (Req::SET_VRING_NUM, of_ring(0, 0), &[]),
        (Req::SET_VRING_NUM, of_ring(2, 64), &[]),
        (Req::SET_VRING_BASE, of_ring(2, 0), &[]),
        (Req::SET_VRING_ENABLE, of_ring(0, 2), &[]),
        (Req::SET_VRING_ENABLE, of_ring(9, 1), &[]),
        (Req::SET_VRING_KICK, words(&[0]), &[&pipe]),
        (Req::SET_VRING_CALL, words(&[0]), &[&pipe]),
        (Req::SET_VRING_ERR, words(&[0]), &[&file]),
        // The region overlaps an existing region.
        (Req::ADD_MEM_REG, region, &[&memory]),
        (Req::ADD_MEM_REG, words(&[0, at, 8192, at, 0]), &[&file]),
        (Req::REM_MEM_REG, no_region, &[]),
        (Req::SET_INFLIGHT_FD, inflight(64, 2), &[&file]),
    ];
    for (request, body, fds) in messages {
        assert_eq!(front.send(request, &body, fds), REFUSED, "{request:?}");
        assert_eq!(front.state(), before, "{request:?}");
    }
    // If a region of a new table cannot be mapped, the old table stays.
    let (start, len) = front.memory.range();
    let user = front.memory.user_address(start);
    let (memory, _) = front.region();
    assert_eq!(
        front.send(Req::SET_MEM_TABLE, &words(&[1, start, len * 2, user, 0]), &[&memory]),
        REFUSED
    );
    assert_eq!(front.state(), before, "SET_MEM_TABLE");
    front.read();
}

#[test]
fn a_ring_without_addresses_keeps_its_old_kick_and_runs_on() {
    let mut front = Front::new();
    let before = front.state();
    assert_eq!(front.send(Req::SET_VRING_KICK, &words(&[0]), &[&event()]), REFUSED);
    assert_eq!(front.state(), before, "a ring that does not run");
    let mut front = Front::started();
    front.read();
    let mut misaligned = front.addresses();
    misaligned[8] |= 1;
    assert_eq!(front.send(Req::SET_VRING_ADDR, &misaligned, &[]), REFUSED);
    let before = front.state();
    assert_eq!(front.send(Req::SET_VRING_KICK, &words(&[0]), &[&event()]), REFUSED);
    assert_eq!(front.state(), before, "a running ring");
    assert!(front.session().running(0).is_some());
    front.read();
}

/// A reactor reads no kicks, so a descriptor that becomes readable must not need a read.
#[test]
fn a_kick_descriptor_that_is_no_eventfd_is_refused() {
    let mut front = Front::started();
    let (socket, _peer) = UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    assert_eq!(front.send(Req::SET_VRING_CALL, &words(&[1]), &[&socket]), DONE);
    let before = front.state();
    assert_eq!(front.send(Req::SET_VRING_KICK, &words(&[0]), &[&socket]), REFUSED);
    assert_eq!(front.state(), before);
    front.read();
}

/// Without in-band notifications, nothing else tells of requests.
#[test]
fn a_ring_without_a_kick_descriptor_is_read_by_a_timer() {
    let mut front = Front::started_with(None);
    front.read();
    front.read();
}

#[test]
fn a_call_or_error_descriptor_that_cannot_be_used_leaves_the_old_one() {
    let mut front = Front::started();
    front.read();
    assert_eq!(front.send(Req::SET_VRING_ERR, &words(&[0]), &[&event()]), DONE);
    let before = front.state();
    // The descriptor cannot be used, because no queue has the index of the change.
    let refused = |session: &mut Session, descriptor, change| {
        assert!(session.exchange(0, descriptor, change).is_err());
    };
    let (wrong, fd) = (9, || Some(event()));
    let mut session = front.session();
    refused(&mut session, |ring| &mut ring.call, Change::Call { index: wrong, fd: fd() });
    refused(&mut session, |ring| &mut ring.error, Change::Error { index: wrong, fd: fd() });
    drop(session);
    assert_eq!(front.state(), before);
    front.read();
}

#[test]
fn memory_that_is_removed_leaves_the_state() {
    let mut front = Front::new();
    let (memory, region) = front.region();
    assert_eq!(front.send(Req::ADD_MEM_REG, &region, &[&memory]), DONE);
    let file = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    let at = 0x40_0000_0000u64;
    assert_eq!(front.send(Req::ADD_MEM_REG, &words(&[0, at, 4096, at, 4096]), &[&file]), DONE);
    let regions = |front: &Front| {
        front.session().state.memory.iter().map(|r| (r.guest, r.offset)).collect::<Vec<_>>()
    };
    let (start, _) = front.memory.range();
    assert_eq!(regions(&front), [(start, 0), (at, 4096)]);
    assert_eq!(front.send(Req::REM_MEM_REG, &region, &[]), DONE);
    assert_eq!(regions(&front), [(at, 4096)]);
    let (_, len) = front.memory.range();
    let table = words(&[1, start, len, front.memory.user_address(start), 0]);
    assert_eq!(front.send(Req::SET_MEM_TABLE, &table, &[&memory]), DONE);
    assert_eq!(regions(&front), [(start, 0)]);
}

/// A new session continues with the state of another one, and serves the same ring.
#[test]
fn a_session_continues_with_the_state_of_another_one() {
    let mut front = Front::started();
    (0..3).for_each(|_| front.read());
    let mut state = front.session().release();
    assert_eq!(front.session().state.features, 0, "the session that released its state is as new");
    let ring = &state.vrings[0];
    assert_eq!((ring.base, ring.is_base_valid, ring.started, ring.enabled), (3, true, true, true));
    assert_eq!(state.features, FEATURES);
    // The test changes the write cache to a value that a new session does not start with.
    assert!(std::mem::replace(&mut state.write_back, false));
    let (parts, memory) = (ring.parts, format!("{:?}", state.memory));
    let next = session(&front.export, state).unwrap();
    assert!(!front.export.device.write_back.load(Ordering::Relaxed));
    *front.session() = next;
    {
        let session = front.session();
        let ring = &session.state.vrings[0];
        assert!(session.running(0).is_some() && session.running(1).is_none());
        assert_eq!(
            (session.state.features, ring.parts, ring.started, ring.enabled),
            (FEATURES, parts, true, true)
        );
        assert_eq!(format!("{:?}", session.state.memory), memory);
        assert!(session.inflight.is_some());
    }
    (0..2).for_each(|_| front.read());
    assert_eq!(
        front.send(Req::GET_VRING_BASE, &of_ring(0, 0), &[]),
        Some(5 << 32),
        "queue 0, base 5"
    );
    let session = front.session();
    let ring = &session.state.vrings[0];
    assert_eq!((ring.base, ring.is_base_valid, ring.started), (5, true, false));
    assert!(ring.kick.is_none() && ring.call.is_none());
}

/// In the next session, a disabled ring stays disabled, and a stopped ring stays stopped.
#[test]
fn a_disabled_or_stopped_ring_stays_so_in_the_next_session() {
    let mut front = Front::started();
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    let state = front.session().release();
    let next = session(&front.export, state).unwrap();
    assert!(next.running(0).is_some() && !next.state.vrings[0].enabled);
    *front.session() = next;
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 1), &[]), DONE);
    front.read();
    assert_eq!(front.send(Req::GET_VRING_BASE, &of_ring(0, 0), &[]), Some(1 << 32));
    let state = front.session().release();
    let next = session(&front.export, state).unwrap();
    assert!(next.running(0).is_none());
}

/// Releases the session of a front end, changes its state, and returns the error of the next one.
fn cannot_go_on(change: impl FnOnce(&mut SessionState)) -> Error {
    let front = Front::started();
    let mut state = front.session().release();
    change(&mut state);
    let error = session(&front.export, state).err().expect("the session goes on");
    let reactor = front.export.reactors.next();
    assert!(reactor.ask(|_, reply| reply.send(())).is_some(), "the reactor goes on");
    error
}

#[test]
fn a_fault_of_the_front_ends_state_differs_from_a_lack_of_the_server() {
    let is_unusable = |error: Error| as_unusable(&error).is_some();
    let is_missing = cannot_go_on(|state| state.memory[0].file = None);
    assert!(!is_unusable(is_missing), "an earlier server had no descriptor for it");
    let is_short = cannot_go_on(|state| {
        rustix::fs::ftruncate(state.memory[0].file.as_ref().unwrap(), 4096).unwrap();
    });
    assert!(is_unusable(is_short));
    let is_no_file = cannot_go_on(|state| {
        state.memory[0].file = Some(std::fs::File::open("/dev/null").unwrap().into());
    });
    assert!(is_unusable(is_no_file));
    let is_shrunk = cannot_go_on(|state| {
        rustix::fs::ftruncate(&state.inflight.as_ref().unwrap().file, 0).unwrap();
    });
    assert!(is_unusable(is_shrunk));
    // The memory can be mapped, but the ring's addresses are outside it.
    let parts = Parts { descriptors: 0, available: 0, used: 0 };
    assert!(is_unusable(cannot_go_on(|state| state.vrings[0].parts = Some(parts))));
}

#[test]
fn a_reset_keeps_memory_and_in_flight_region() {
    let mut front = Front::started();
    front.read();
    assert_eq!(front.send(Req::RESET_DEVICE, &[], &[]), DONE);
    let session = front.session();
    let reset = state::Vring { is_base_valid: true, ..state::Vring::default() };
    assert_eq!(format!("{:?}", session.state.vrings[0]), format!("{reset:?}"));
    assert_eq!((session.state.features, session.state.memory.len()), (0, 1));
    assert!(session.state.inflight.is_some() && session.running(0).is_none());
}

/// A peek at a message also copies the descriptors of the one behind it.
#[test]
fn each_message_has_its_own_descriptors_although_others_follow() {
    let mut front = Front::new();
    let (first, second) = (event(), event());
    front.post(Req::SET_VRING_NUM, &of_ring(0, 32), &[]);
    front.post(Req::SET_VRING_CALL, &words(&[0]), &[&first]);
    front.post(Req::SET_VRING_CALL, &words(&[1 | NO_DESCRIPTOR]), &[]);
    front.post(Req::SET_VRING_CALL, &words(&[1]), &[&second]);
    front.post(Req::SET_VRING_BASE, &of_ring(0, 7), &[]);
    let answers = [(); 5].map(|()| front.next());
    assert_eq!(answers, [DONE; 5]);
    let session = front.session();
    let number = |fd: &OwnedFd| {
        // All eventfds have one inode. Their values tell them apart.
        let mut value = [0; 8];
        rustix::io::read(fd, &mut value).unwrap();
        u64::from_ne_bytes(value)
    };
    for (value, fd) in [(1u64, &first), (2, &second)] {
        rustix::io::write(fd, &value.to_ne_bytes()).unwrap();
    }
    let calls = [0, 1].map(|ring| number(session.state.vrings[ring].call.as_ref().unwrap()));
    assert_eq!(calls, [1, 2]);
    assert_eq!((session.state.vrings[0].size, session.state.vrings[0].base), (32, 7));
}
