//! Invalid actions of a front end. Each one ends with an error status or a closed device, and one
//! line in the log. Other guests are unharmed.

use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_driver::xen::operation::{DISCARD, FLUSH, INDIRECT, READ, WRITE};
use blockyard_driver::xen::request::indirect;
use blockyard_driver::xen::{PAGE, Terms, segment, state};
use blockyard_export::xen::XenData;
use blockyard_ring::xen::Node;
use blockyard_ring::xen::abi::message;

use crate::guest::{Guest, Setup, XVDA};

const BACK: &str = "/local/domain/0/backend/blockyard/7/51712";
const FRONT: &str = "/local/domain/7/device/vbd/51712";
const PLAIN: Terms = Terms::PLAIN;

/// How data is transferred, and whether the front end has persistent grants.
const DATA: [(XenData, bool); 3] =
    [(XenData::Map, false), (XenData::Map, true), (XenData::Copy, false)];

#[test]
fn only_invalid_requests_fail() {
    for (persistent, data) in [(false, XenData::Map), (true, XenData::Map), (false, XenData::Copy)]
    {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        front.fill(100, 9);
        // One batch contains several invalid references. The valid references succeed.
        front.references[300] = 99_999;
        front.references[301] = front.front.domain.grant(100_000, false);
        front.references[302] = front.front.domain.grant(302, true);
        front.ask(0, 1, WRITE, 0, &[100, 300]);
        front.ask(0, 2, WRITE, 8, &[100]);
        front.ask(0, 3, READ, 8, &[301]);
        front.ask(0, 4, READ, 0, &[302]);
        front.ask(0, 5, READ, u64::MAX, &[101]);
        front.ask(0, 6, READ, 32768, &[101]);
        front.ask(0, 7, READ, 32767, &[101]);
        front.put(0, 8, 0, [READ, 12, 0, 0], &[]);
        front.put(0, 9, 0, [READ, 0, 0, 0], &[]);
        let outside = segment(front.references[101], 0, 8);
        front.put(0, 10, 0, [READ, 1, 0, 0], &outside);
        let lie = indirect(99_999);
        front.put(0, 11, 0, [INDIRECT, READ, 5, 0], &lie);
        front.put(0, 12, 0, [INDIRECT, READ, 1, 1], &lie);
        let answers = front.answers(0, 12);
        let bad = |id: &u64| *id != 2;
        let expected: Vec<_> = (1..13).map(|id| (id, if bad(&id) { -1 } else { 0 })).collect();
        assert_eq!(answers, expected, "persistent: {persistent}, {data:?}");
        assert_eq!(front.done(13, READ, 8, &[101]), 0);
        assert!(front.holds(101, 9));
    }
}

#[test]
fn an_index_too_far_ahead_stops_its_queue_until_the_front_end_reconnects() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(Terms { queues: 2, ..PLAIN });
    // However often the front end repeats an invalid index, the log has one line.
    (1000..1100).for_each(|index| front.rings[0].store_producer(index));
    // The other queue continues.
    front.ask(1, 1, FLUSH, 0, &[]);
    assert_eq!(front.answer(1), (1, 0));
    setup.wait_for_line();
    front.set("state", 5);
    front.wait_for_state(5);
    front.set("state", 6);
    front.wait_for_state(6);
    assert_eq!(front.mapped(), 0);
    let lines = setup.lines();
    assert!(
        lines.len() == 1 && lines[0].contains("requests without a response in a ring of 32"),
        "{lines:?}"
    );
    front.set("state", 1);
    front.connect(Terms { queues: 2, ..PLAIN });
    front.ask(0, 2, FLUSH, 0, &[]);
    assert_eq!(front.answer(0), (2, 0));
}

#[test]
fn invalid_nodes_close_the_device_until_the_front_end_starts_again() {
    for (key, value, part) in [
        ("ring-ref", "lots", "ring-ref is \"lots\""),
        ("ring-ref", "4294967296", "ring-ref is"),
        ("ring-ref", "99999", "cannot map its ring"),
        ("event-channel", "77", "cannot bind its event channel 77"),
        ("ring-page-order", "5", "a number from 0 to 4 is expected"),
        ("ring-page-order", "2", "the front end has no ring-ref1"),
        ("multi-queue-num-queues", "5", "a number from 1 to 4 is expected"),
        ("multi-queue-num-queues", "3", "the front end has no queue-0/event-channel"),
        ("protocol", "sparc\u{1b}[2J", "protocol is \"sparc\\u{1b}[2J\""),
    ] {
        let setup = Setup::new(false);
        let _export = setup.start();
        let mut front = Guest::new(&setup);
        front.wait_for_state(2);
        offer_with(&mut front, key, value);
        front.wait_for_state(5);
        let error = front.back("error").unwrap();
        assert!(error.contains(part), "{error}");
        assert_eq!((front.mapped(), setup.lines().len()), (0, 1), "{:?}", setup.lines());
        front.front.store.remove(&format!("{FRONT}/{key}")).unwrap();
        front.set("state", 1);
        front.connect(PLAIN);
        assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    }
}

/// The back end watches its own nodes too. An error that it writes must not cause the next one.
#[test]
fn a_state_that_is_not_text_causes_one_error() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.wait_for_state(2);
    let path = format!("{FRONT}/state");
    let garbage = [path.as_bytes(), b"\0", b"\xff"];
    front.front.store.ask(message::WRITE, &path, &garbage).unwrap();
    front.wait_for_state(5);
    assert!(front.back("error").unwrap().contains("not text"));
    // If the back end wrote another error, that error would replace this value.
    front.front.store.write(&format!("{BACK}/error"), "seen").unwrap();
    front.front.store.ask(message::WRITE, &path, &garbage).unwrap();
    front.set("state", 1);
    front.connect(PLAIN);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.back("error").as_deref(), Some("seen"));
}

#[test]
fn states_that_flap_end_in_the_initial_state() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    for state in ["4", "17", "", "5", "x", "6", "3", "6", "5", "2", "6", "1"].repeat(5) {
        front.set("state", state);
    }
    // The back end may still answer one of these states. It has answered all of them when it has
    // closed the device.
    front.set("state", state::CLOSED);
    front.wait_for_state(state::CLOSED);
    front.set("state", state::INITIALISING);
    front.connect(PLAIN);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.mapped(), 1);
}

/// Offers one ring with the parameters `PLAIN`, and changes one node of the offer.
fn offer_with(front: &mut Guest, key: &str, value: &str) {
    let order = (key == "ring-page-order").then_some(0);
    let (_, mut keys) = front.front.rings(&Terms { order, ..PLAIN }, 0, &front.references).unwrap();
    keys.retain(|(name, _)| *name != key);
    keys.push((key.into(), value.into()));
    front.front.offer(&keys).unwrap();
}

/// XSA-155: the values that the back end checked are the values that it uses, even if the front end
/// changes the entry later.
#[test]
fn a_request_cannot_change_after_it_was_taken() {
    for (data, persistent) in DATA {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        front.fill(100, 5);
        front.fill(101, 6);
        let table = front.segments(&[100, 101]);
        front.front.memory.write(110 * PAGE, &table);
        let held = setup.disk.quiesce("a test").unwrap();
        let rest = indirect(front.references[110]);
        front.put(0, 1, 16, [INDIRECT, WRITE, 2, 0], &rest);
        front.wait_until_taken(0);
        // Overwrite the part of the entry after the bytes of its response: sector, number of pages,
        // references.
        let entry = front.rings[0].place(0);
        front.front.memory.write(entry + 12, &[0xff; 100]);
        front.front.memory.write(110 * PAGE, &[0xff; PAGE]);
        drop(held);
        assert_eq!(front.answer(0), (1, 0), "{data:?}, persistent: {persistent}");
        assert_eq!(front.done(2, READ, 16, &[102, 103]), 0);
        assert!(front.holds(102, 5) && front.holds(103, 6));
        assert_eq!(setup.lines(), [""; 0]);
    }
}

/// Sets the flag on drop, which ends a thread that polls the flag, even if the test fails.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The front end changes the ring's entries all the time. Each request either succeeds as a whole
/// or fails.
#[test]
fn entries_that_change_while_they_are_taken_affect_only_themselves() {
    for (data, persistent) in DATA {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        // Random references name the granted page, which is read-only, so that nothing is ever
        // written to it. The references change byte by byte. No mixture may name the ring's page,
        // because a read into the ring's page would break the ring.
        let domain = &front.front.domain;
        let mut guards = std::iter::repeat_with(|| domain.grant(300, true));
        let guard = guards.find(|guard| *guard as u8 != front.references[0] as u8).unwrap();
        front.fill(300, 77);
        let (memory, over) = (front.front.memory.clone(), AtomicBool::new(false));
        let entries: Vec<_> = (0..32).map(|index| front.rings[0].place(index)).collect();
        let scribble = segment(guard, 0, 255);
        std::thread::scope(|scope| {
            let over = &over;
            let _end = SetAtEnd(over);
            scope.spawn(move || {
                for at in (0..).map(|n: usize| n * 7 % scribble.len()) {
                    // Overwrite sector, reference, first and last sector, but not the bytes of
                    // responses.
                    entries
                        .iter()
                        .for_each(|entry| memory.write(entry + 24 + at, &scribble[at..=at]));
                    entries.iter().for_each(|entry| memory.write(entry + 16, &[at as u8]));
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for id in 0..300 {
                let operation = if id % 2 == 0 { READ } else { WRITE };
                front.ask(0, id, operation, 8, &[100, 101]);
                let (answered, status) = front.answer(0);
                assert!(answered == id && (-1..=0).contains(&status), "{id}: {answered}, {status}");
            }
        });
        assert!(front.holds(300, 77));
        assert_eq!(front.done(300, FLUSH, 0, &[]), 0);
    }
}

#[test]
fn grants_revoked_in_use_fail_their_request_or_stay() {
    for (data, persistent) in DATA {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        let domain = front.front.domain.clone();
        front.fill(100, 8);
        assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
        assert!(!domain.revoke(front.references[0]), "the ring's page is mapped");
        assert_eq!(
            domain.revoke(front.references[100]),
            !persistent,
            "a page that stays mapped stays granted"
        );
        // A page is revoked before the request: that request fails, and its neighbour does not.
        assert!(domain.revoke(front.references[101]));
        front.ask(0, 2, READ, 0, &[101]);
        front.ask(0, 3, READ, 0, &[102]);
        assert_eq!(front.answers(0, 2), [(2, -1), (3, 0)]);
        assert!(front.holds(102, 8));
        // A page is revoked between the request and the end of the read. A mapped page stays
        // granted.
        let held = setup.disk.quiesce("a test").unwrap();
        front.ask(0, 4, READ, 0, &[103]);
        front.wait_until_taken(0);
        let is_copied = data == XenData::Copy;
        assert_eq!(
            domain.revoke(front.references[103]),
            is_copied,
            "{data:?}, persistent: {persistent}"
        );
        drop(held);
        assert_eq!(front.answer(0), (4, if is_copied { -1 } else { 0 }));
        assert_eq!(front.holds(103, 8), !is_copied);
        assert_eq!(front.done(5, READ, 0, &[104]), 0);
        assert!(front.holds(104, 8));
        front.set("state", 6);
        front.wait_for_state(6);
        assert_eq!(front.mapped(), 0);
    }
}

#[test]
fn invalid_indirect_pages_fail_their_request() {
    for (data, persistent) in DATA {
        let setup = Setup::new(false);
        let _export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(Terms { persistent, ..PLAIN });
        let good = front.references[100];
        let tables = [
            [segment(good, 0, 7), segment(good, 5, 4)],
            [segment(good, 0, 7), segment(good, 0, 8)],
            [segment(good, 255, 255), segment(good, 0, 7)],
            [segment(good, 0, 7), segment(99_999, 0, 7)],
            [segment(0, 0, 7), segment(u32::MAX, 0, 7)],
        ];
        for (at, table) in tables.iter().enumerate() {
            front.front.memory.write((110 + at) * PAGE, &table.concat());
            let rest = indirect(front.references[110 + at]);
            front.put(0, at as u64, 0, [INDIRECT, READ, 2, 0], &rest);
        }
        // Use invalid numbers of segments, and invalid operations.
        let rest = indirect(front.references[110]);
        for (at, head) in [
            [READ, 0, 0],
            [READ, 1, 1],
            [READ, 255, 255],
            [FLUSH, 1, 0],
            [INDIRECT, 1, 0],
            [77, 1, 0],
        ]
        .into_iter()
        .enumerate()
        {
            let [operation, low, high] = head;
            front.put(0, 10 + at as u64, 0, [INDIRECT, operation, low, high], &rest);
        }
        let expected: Vec<_> = (0..5).chain(10..16).map(|id| (id, -1)).collect();
        assert_eq!(front.answers(0, 11), expected, "{data:?}, persistent: {persistent}");
        assert_eq!(front.done(20, READ, 0, &[101]), 0);
    }
}

#[test]
fn requests_with_overflowing_sectors_fail() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 3);
    let sectors = 32768u64;
    let bad = [
        (u64::MAX, 1),
        (0, u64::MAX),
        (1 << 55, 1 << 55),
        (sectors, 1),
        (sectors - 1, 2),
        (1, sectors),
    ];
    for (id, (sector, count)) in (0..).zip(bad) {
        front.put(0, id, sector, [DISCARD, 0, 0, 0], &count.to_le_bytes());
    }
    for (id, sector) in (10..).zip([u64::MAX, u64::MAX / 512, 1 << 55, sectors - 7]) {
        front.ask(0, id, WRITE, sector, &[100]);
    }
    let expected: Vec<_> = (0..6).chain(10..14).map(|id| (id, -1)).collect();
    assert_eq!(front.answers(0, 10), expected);
    assert_eq!(front.done(20, READ, sectors - 8, &[101]), 0);
    assert!(front.holds(101, 0));
}

/// The target of a read is the ring's own page, so the disk's data overwrites the ring.
#[test]
fn a_read_into_the_ring_itself_stops_the_queue_at_worst() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(Terms { queues: 2, ..PLAIN });
    front.fill(100, 0xa5);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    front.ask(0, 2, READ, 0, &[0]);
    front.rings[0].kick();
    front.ask(1, 3, FLUSH, 0, &[]);
    assert_eq!(front.answer(1), (3, 0));
    front.set("state", 6);
    front.wait_for_state(6);
    assert_eq!(front.mapped(), 0);
    front.set("state", 1);
    front.connect(PLAIN);
    assert_eq!(front.done(4, FLUSH, 0, &[]), 0);
    assert!(setup.lines().len() <= 1, "{:?}", setup.lines());
}

#[test]
fn nodes_with_garbage_close_the_device_with_one_line() {
    for (key, value) in [
        ("state", &b"\xff\xfe"[..]),
        ("protocol", b"\0\x01"),
        ("ring-ref", &[b'9'; 3000]),
        ("event-channel", b"-1"),
    ] {
        let setup = Setup::new(false);
        let _export = setup.start();
        let mut front = Guest::new(&setup);
        front.wait_for_state(2);
        let path = format!("{FRONT}/{key}");
        let (_, keys) = front.front.rings(&PLAIN, 0, &front.references).unwrap();
        for (key, value) in &keys {
            front.set(key, value);
        }
        front.front.store.ask(message::WRITE, &path, &[path.as_bytes(), b"\0", value]).unwrap();
        if key != "state" {
            front.set("state", 3);
        }
        front.wait_for_state(5);
        for _ in 0..10 {
            front.front.store.ask(message::WRITE, &path, &[path.as_bytes(), b"\0", value]).unwrap();
        }
        let lines = setup.lines();
        assert!(lines.len() == 1 && lines[0].len() < 300, "{key}: {lines:?}");
        front.front.store.remove(&path).unwrap();
        front.set("state", 1);
        front.connect(PLAIN);
        assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
        // The device did not react to its own error node.
        assert_eq!(setup.lines().len(), 1, "{key}: {:?}", setup.lines());
    }
}

#[test]
fn a_front_end_that_flaps_does_not_fill_the_log_or_delay_other_guests() {
    let setup = Setup::new(false);
    let good = setup.beside();
    let (_export, _other) = (setup.start(), good.start_for(8, XenData::Copy));
    let (mut front, mut neighbour) = (Guest::new(&setup), Guest::of(&good.machine, 8, XVDA));
    neighbour.connect(PLAIN);
    front.wait_for_state(2);
    offer_with(&mut front, "ring-ref", "none");
    for round in 0..50 {
        front.wait_for_state(5);
        front.set("state", 1);
        front.wait_for_state(2);
        front.set("state", 3);
        neighbour.fill(100, round);
        assert_eq!(neighbour.done(round.into(), WRITE, u64::from(round) * 8, &[100]), 0);
        assert_eq!(neighbour.done(round.into(), READ, u64::from(round) * 8, &[101]), 0);
        assert!(neighbour.holds(101, round));
    }
    front.wait_for_state(5);
    // The log admits a burst, and one more line per pause.
    assert!((10..20).contains(&setup.lines().len()), "{:?}", setup.lines());
    assert_eq!((good.lines(), front.mapped(), neighbour.mapped()), (Vec::new(), 0, 1));
}
