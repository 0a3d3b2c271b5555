//! Parcels of an export, without servers.

use std::os::fd::{AsFd, OwnedFd};

use blockyard_ring::parcel::Parcel;
use rustix::fs::MemfdFlags;

use super::super::config;
use super::*;

fn file() -> OwnedFd {
    rustix::fs::memfd_create("file", MemfdFlags::CLOEXEC).unwrap()
}

fn number(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

fn numbers<const N: usize>(fds: [&Option<OwnedFd>; N]) -> [Option<u64>; N] {
    fds.map(|fd| fd.as_ref().map(number))
}

/// Returns a listener on a socket that has no file any more.
fn listener(name: &str) -> Listener {
    let name = format!("blockyard-handed-{name}-{}", std::process::id());
    Listener::bind(&std::env::temp_dir().join(name)).unwrap()
}

fn vring(started: bool) -> Vring {
    Vring {
        size: 64,
        parts: Some(Parts { descriptors: 16, available: 32, used: 48 }),
        log: Some(0x1234),
        base: 7,
        is_base_valid: true,
        is_base_lost: false,
        next_base: None,
        kick: Some(file()),
        call: Some(file()),
        error: Some(file()),
        enabled: started,
        started,
    }
}

/// Returns a state in which each field has a value of its own.
fn state() -> SessionState {
    let mut state = SessionState::new(2, false);
    state.features = config::F_PROTOCOL | config::F_PACKED;
    state.protocol = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::LOG_SHMFD;
    let region =
        MemoryRegion { guest: 4096, user: 8192, size: 12288, offset: 512, file: Some(file()) };
    state.memory.push(region);
    state.inflight =
        Some(InflightFile { file: file(), offset: 64, len: 640, queues: 3, own: Some(true) });
    state.log = Some(LogFile { file: file(), offset: 128, len: 1280 });
    state.log_event = Some(file());
    let owed = Owed { socket: file(), acknowledged: true, owed: 2, begun: vec![1, 2, 3] };
    state.back_channel = Some(Arc::new(BackChannel::continued(owed)));
    state.vrings = vec![vring(true), vring(false)];
    state
}

fn parcel(state: &SessionState, name: &str) -> Parcel {
    let (stream, _) = UnixStream::pair().unwrap();
    let (process, since) = (Some(11), Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)));
    let (waiting, _) = UnixStream::pair().unwrap();
    let waiting = VecDeque::from([FrontEnd { stream: waiting, process: Some(12) }]);
    let present = Present { stream: &stream, process, since, state };
    pack(&listener(name), Some(present), &waiting).unwrap()
}

#[test]
fn the_next_server_gets_all_of_a_session() {
    let mut ours = state();
    ours.protocol |= dirty_memory::PROTOCOL;
    ours.vrings[0].next_base = Some(9);
    let handed = HandedSocket::unpack(parcel(&ours, "all"), Before::Drained).unwrap();
    assert_eq!((handed.queues(), handed.waiting.len()), (Some(2), 1));
    assert_eq!(handed.waiting[0].process, Some(12));
    let Served { front_end, since, state } = handed.served.unwrap();
    assert_eq!(front_end.process, Some(11));
    assert_eq!(since, Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)));
    assert_eq!((state.features, state.protocol), (ours.features, ours.protocol));
    assert!(!state.write_back);

    let region = |state: &SessionState| {
        let MemoryRegion { guest, user, size, offset, file } = &state.memory[0];
        (*guest, *user, *size, *offset, numbers([file]))
    };
    assert_eq!((region(&state), state.memory.len()), (region(&ours), 1));
    let inflight = |state: &SessionState| {
        let InflightFile { file, offset, len, queues, own } = state.inflight.as_ref().unwrap();
        (number(file), *offset, *len, *queues, *own)
    };
    assert_eq!(inflight(&state), inflight(&ours));
    let log = |state: &SessionState| {
        let LogFile { file, offset, len } = state.log.as_ref().unwrap();
        (number(file), *offset, *len, numbers([&state.log_event]))
    };
    assert_eq!(log(&state), log(&ours));
    let channel = |state: &SessionState| {
        let owed = state.back_channel.as_ref().unwrap().owed().unwrap();
        (number(owed.socket), owed.acknowledged, owed.owed, owed.begun)
    };
    assert_eq!(channel(&state), channel(&ours));
    for (vring, ours) in state.vrings.iter().zip(&ours.vrings) {
        let of = |v: &Vring| {
            let fds = numbers([&v.kick, &v.call, &v.error]);
            let flags = [v.is_base_valid, v.is_base_lost, v.enabled, v.started];
            (v.size, v.parts, v.log, v.base, v.next_base, flags, fds)
        };
        assert_eq!(of(vring), of(ours));
    }
}

/// A later server must understand what this one has kept, also across the death of a server. If
/// this test fails, the format needs a new number, and the old one needs a reader.
#[test]
fn the_format_is_that_of_the_record() {
    let recorded: serde_json::Value =
        serde_json::from_str(include_str!("recorded-1.json")).unwrap();
    let ours = parcel(&state(), "record");
    let mut wire: serde_json::Value = serde_json::from_slice(&ours.bytes).unwrap();
    wire["listener"]["made"] = recorded["listener"]["made"].clone();
    assert_eq!(wire, recorded);
    let bytes = serde_json::to_vec(&recorded).unwrap();
    let unpack = |path: &str| {
        let fds = parcel(&state(), "record").fds;
        HandedSocket::unpack_at(
            Parcel { bytes: bytes.clone(), fds },
            Before::Drained,
            path.as_ref(),
        )
    };
    let wrong = unpack("/run/other.sock").err().unwrap().to_string();
    assert_eq!(wrong, "the other server listens on /run/vm.sock, not on /run/other.sock");
    let handed = unpack("/run/vm.sock").unwrap();
    assert_eq!((handed.queues(), handed.waiting.len()), (Some(2), 1));
}

/// Only rings that ran can have moved since the front end set their positions.
#[test]
fn a_death_makes_the_positions_of_running_rings_unknown() {
    for (before, started_lost) in [(Before::Drained, false), (Before::Died, true)] {
        let handed = HandedSocket::unpack(parcel(&state(), "death"), before).unwrap();
        let vrings = handed.served.unwrap().state.vrings;
        let of: Vec<_> = vrings.iter().map(|v| (v.is_base_valid, v.is_base_lost)).collect();
        assert_eq!(of, [(!started_lost, started_lost), (true, false)], "{before:?}");
    }
}

#[test]
fn a_parcel_that_is_not_understood_is_refused() {
    let refused = |change: fn(&mut serde_json::Value), what: &str| {
        let mut parcel = parcel(&state(), "refused");
        let mut wire = serde_json::from_slice(&parcel.bytes).unwrap();
        change(&mut wire);
        parcel.bytes = serde_json::to_vec(&wire).unwrap();
        let error = HandedSocket::unpack(parcel, Before::Drained).err().expect(what).to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(|wire| wire["format"] = (FORMAT + 1).into(), "format 2");
    refused(|wire| wire["format"] = (FORMAT - 1).into(), "format 0");
    refused(|wire| wire["served"]["protocol"] = (1u64 << 63).into(), "protocol feature");
    // A descriptor is used once.
    refused(
        |wire| wire["served"]["log_event"] = wire["served"]["log"]["file"].clone(),
        "descriptor is missing",
    );
    refused(|wire| wire["served"]["log_event"] = 1000.into(), "descriptor is missing");
}

#[test]
fn a_session_without_a_descriptor_of_its_memory_is_not_handed_over() {
    let mut state = state();
    state.memory[0].file = None;
    let (stream, _) = UnixStream::pair().unwrap();
    let present = Present { stream: &stream, process: None, since: None, state: &state };
    let error = pack(&listener("memory"), Some(present), &VecDeque::new()).unwrap_err();
    assert!(error.to_string().contains("ulimit -n"), "{error}");
}
