use super::*;
use config::{F_FLUSH, F_PACKED, F_PROTOCOL, F_VERSION_1};

const OFFERED: u64 = F_FLUSH | F_PACKED | F_PROTOCOL | F_VERSION_1;
const PARTS: Parts = Parts { descriptors: 0x1000, available: 0x2002, used: 0x3004 };

fn event() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

fn accept(accepted: u64) -> Change {
    Change::Features { accepted, offered: OFFERED }
}

/// Accepts protocol features of a device that offers all but in-band notifications.
fn accept_protocol(accepted: VhostUserProtocolFeatures) -> Change {
    let offered =
        VhostUserProtocolFeatures::all() - VhostUserProtocolFeatures::INBAND_NOTIFICATIONS;
    Change::Protocol { accepted: accepted.bits(), offered }
}

/// Returns a state of two queues with negotiated features.
fn state() -> SessionState {
    let mut state = SessionState::new(2, true);
    assert_eq!(state.apply(accept(F_PROTOCOL | F_VERSION_1)), Ok(Effect::Features { before: 0 }));
    state
}

#[test]
fn each_message_changes_its_part_and_returns_the_effect() {
    let mut state = state();
    let protocol = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
    let (kick, call, error) = (event(), event(), event());
    let numbers = [&kick, &call, &error].map(|fd| format!("{fd:?}"));
    for (change, effect) in [
        (accept_protocol(protocol), Effect::None),
        (Change::Size { index: 1, entries: 32768 }, Effect::None),
        (Change::Addresses { index: 1, flags: 0, parts: PARTS, log: 0 }, Effect::Marks(1)),
        (Change::Base { index: 1, base: 7 }, Effect::None),
        (Change::Kick { index: 1, fd: Some(kick) }, Effect::Restart(1)),
        (Change::Call { index: 1, fd: Some(call) }, Effect::Call(1)),
        (Change::Error { index: 1, fd: Some(error) }, Effect::Error(1)),
        (Change::Enable { index: 1, state: 1 }, Effect::Enable(1)),
    ] {
        let what = format!("{change:?}");
        assert_eq!(state.apply(change), Ok(effect), "{what}");
    }
    assert_eq!((state.features, state.protocol), (F_PROTOCOL | F_VERSION_1, protocol));
    assert!(state.acknowledges() && !state.in_band());
    let vring = &state.vrings[1];
    assert_eq!((vring.size, vring.parts, vring.base, vring.enabled), (32768, Some(PARTS), 7, true));
    let fds =
        [&vring.kick, &vring.call, &vring.error].map(|fd| format!("{:?}", fd.as_ref().unwrap()));
    assert_eq!(fds, numbers);
    assert!(!vring.started, "only the handler starts a ring");
    assert_eq!(
        format!("{:?}", state.vrings[0]),
        format!("{:?}", Vring::default()),
        "the other ring is unchanged"
    );
    assert_eq!(state.apply(Change::Enable { index: 1, state: 0 }), Ok(Effect::Enable(1)));
    assert!(!state.vrings[1].enabled);
    assert_eq!(state.apply(Change::Call { index: 1, fd: None }), Ok(Effect::Call(1)));
    assert!(state.vrings[1].call.is_none());
}

#[test]
fn a_refused_change_leaves_the_state_as_it_was() {
    let mut state = state();
    let set = [
        Change::Size { index: 0, entries: 64 },
        Change::Addresses { index: 0, flags: 0, parts: PARTS, log: 0 },
        Change::Kick { index: 0, fd: Some(event()) },
        Change::Enable { index: 0, state: 1 },
    ];
    set.into_iter().for_each(|change| drop(state.apply(change).unwrap()));
    let before = format!("{state:?}");
    let no_queue = Refusal::NoSuchQueue { index: 2, queues: 2 };
    let in_band = VhostUserProtocolFeatures::INBAND_NOTIFICATIONS;
    for (change, refusal) in [
        (accept(F_PROTOCOL | 1 << 63), Refusal::Features(1 << 63)),
        (accept_protocol(in_band), Refusal::Protocol(in_band.bits())),
        (Change::Size { index: 0, entries: 0 }, Refusal::Size { index: 0, entries: 0 }),
        (Change::Size { index: 0, entries: 32769 }, Refusal::Size { index: 0, entries: 32769 }),
        (Change::Enable { index: 0, state: 2 }, Refusal::Enable { index: 0, state: 2 }),
    ] {
        let what = format!("{change:?}");
        assert_eq!(state.apply(change), Err(refusal), "{what}");
        assert_eq!(format!("{state:?}"), before, "{what}");
    }
    for change in [
        Change::Size { index: 2, entries: 64 },
        Change::Addresses { index: 2, flags: 0, parts: PARTS, log: 0 },
        Change::Base { index: 2, base: 1 },
        Change::Kick { index: 2, fd: None },
        Change::Call { index: 2, fd: None },
        Change::Error { index: 2, fd: None },
        Change::Enable { index: 2, state: 1 },
    ] {
        let what = format!("{change:?}");
        assert_eq!(state.apply(change).as_ref(), Err(&no_queue), "{what}");
        assert_eq!(format!("{state:?}"), before, "{what}");
    }
    let _ = state.apply(accept(F_VERSION_1)).unwrap();
    let refusal = state.apply(Change::Enable { index: 0, state: 0 });
    assert_eq!(refusal, Err(Refusal::Enable { index: 0, state: 0 }), "without protocol features");
    assert!(state.vrings[0].enabled);
}

#[test]
fn a_ring_loses_its_addresses_if_new_ones_are_refused() {
    for (flags, parts) in [
        (0, Parts { descriptors: 0x1008, ..PARTS }),
        (0, Parts { available: 0x2001, ..PARTS }),
        (0, Parts { used: 0x3002, ..PARTS }),
        (2, PARTS),
    ] {
        let mut state = state();
        let _ =
            state.apply(Change::Addresses { index: 1, flags: 0, parts: PARTS, log: 0 }).unwrap();
        let refusal = Refusal::Addresses { index: 1, flags, parts };
        assert_eq!(state.apply(Change::Addresses { index: 1, flags, parts, log: 0 }), Err(refusal));
        assert_eq!(state.vrings[1].parts, None, "{parts:?}");
    }
}

#[test]
fn an_in_flight_region_that_is_too_small_is_refused() {
    let mut state = state();
    let region = |mmap_size, num_queues, queue_size| VhostUserInflight {
        mmap_size,
        mmap_offset: 0,
        num_queues,
        queue_size,
    };
    for (queues, entries, good) in
        [(1, 1, true), (2, 32768, true), (0, 1, false), (3, 1, false), (1, 0, false)]
    {
        assert_eq!(
            state.check_inflight_shape(&region(0, queues, entries)).is_ok(),
            good,
            "{queues} of {entries}"
        );
    }
    assert!(state.check_inflight_shape(&region(0, 1, 40000)).is_err());
    for packed in [false, true] {
        let _ =
            state.apply(accept(if packed { F_PACKED | F_PROTOCOL } else { F_PROTOCOL })).unwrap();
        let need = 2 * queue_bytes(64, packed);
        state.check_inflight_room(&region(need, 2, 64)).unwrap();
        let refusal = Refusal::InflightRoom { bytes: need - 1, queues: 2, entries: 64 };
        assert_eq!(state.check_inflight_room(&region(need - 1, 2, 64)), Err(refusal));
        assert!(state.check_inflight_room(&region(need, 0, 64)).is_err());
        assert!(state.check_inflight_room(&region(need, 2, 0)).is_err());
    }
    let feature = VhostUserProtocolFeatures::INFLIGHT_SHMFD;
    assert_eq!(state.negotiated(feature), Err(Refusal::NotNegotiated(feature)));
    let _ = state.apply(accept_protocol(feature)).unwrap();
    assert_eq!(state.negotiated(feature), Ok(()));
}

#[test]
fn a_reset_clears_rings_and_features_and_keeps_the_rest() {
    let mut state = state();
    let protocol = VhostUserProtocolFeatures::RESET_DEVICE;
    let changes = [
        accept_protocol(protocol),
        Change::Addresses { index: 0, flags: 0, parts: PARTS, log: 0 },
        Change::Base { index: 0, base: 3 },
        Change::Enable { index: 0, state: 1 },
    ];
    changes.into_iter().for_each(|change| drop(state.apply(change).unwrap()));
    state.memory.push(MemoryRegion { guest: 0, user: 0, size: 4096, offset: 0, file: None });
    state.reset();
    assert_eq!((state.features, state.protocol, state.memory.len()), (0, protocol, 1));
    let reset = format!("{:?}", Vring { is_base_valid: true, ..Vring::default() });
    state.vrings.iter().for_each(|vring| assert_eq!(format!("{vring:?}"), reset));
}

#[test]
fn the_base_of_a_ring_is_valid_only_if_the_ring_was_stopped() {
    let mut vring = Vring { base: 5, started: true, ..Vring::default() };
    vring.stopped(Some(9));
    assert_eq!((vring.base, vring.is_base_valid, vring.started), (9, true, false));
    vring.started = true;
    vring.stopped(None);
    assert_eq!((vring.base, vring.is_base_valid, vring.started), (9, false, false));
}

#[test]
fn a_front_end_acknowledges_only_if_it_has_negotiated_that() {
    let mut state = state();
    assert!(!state.acknowledges());
    assert_eq!(state.apply(accept_protocol(VhostUserProtocolFeatures::MQ)), Ok(Effect::None));
    assert!(!state.acknowledges());
    let protocol = VhostUserProtocolFeatures::REPLY_ACK;
    assert_eq!(state.apply(accept_protocol(protocol)), Ok(Effect::None));
    assert!(state.acknowledges());
}

/// Virtio 1.2, sections 2.7 and 2.8.
#[test]
fn a_used_ring_ends_with_the_event_index() {
    assert_eq!(used_bytes(8, false, false), 4 + 8 * 8);
    assert_eq!(used_bytes(8, false, true), 4 + 8 * 8 + 2);
    assert_eq!((used_bytes(8, true, false), used_bytes(8, true, true)), (4, 4));
}

#[test]
fn a_log_is_bounded() {
    let state = SessionState::new(2, true);
    assert_eq!(state.check_log_room(MOST_LOG), Ok(()));
    assert_eq!(state.check_log_room(MOST_LOG + 1), Err(Refusal::LogSize(MOST_LOG + 1)));
}

#[test]
fn the_memory_table_and_the_logged_rings_are_logged() {
    let mut state = state();
    let memory: [(u64, u64); 2] = [(0, 8192), (1 << 40, 4096)];
    for (guest, size) in memory {
        state.memory.push(MemoryRegion { guest, user: guest, size, offset: 0, file: None });
    }
    assert_eq!(state.logged().collect::<Vec<_>>(), memory);
    let changes = [
        Change::Size { index: 1, entries: 8 },
        Change::Addresses { index: 1, flags: 1, parts: PARTS, log: 0x5000 },
    ];
    changes.into_iter().for_each(|change| drop(state.apply(change).unwrap()));
    assert_eq!(state.logged_memory().collect::<Vec<_>>(), memory);
    assert_eq!((state.logged_ring(0), state.logged_ring(2)), (None, None));
    let ring = (0x5000, 4 + 8 * 8);
    assert_eq!(state.logged_ring(1), Some(ring));
    assert_eq!(state.logged().collect::<Vec<_>>(), [memory[0], memory[1], ring]);
}
