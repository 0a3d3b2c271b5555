//! The nodes of a device in a xenstore in memory.

use std::sync::Arc;

use blockyard_disk::DiskOptions;
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::xen::Machine;

use super::*;

const OWN: u16 = 0;
const DOMAIN: u16 = 7;
const XVDA: u32 = 51712;

fn options() -> XenOptions {
    let device = "xvda".parse().unwrap();
    XenOptions { domain: DOMAIN, device, queues: 4, data: XenData::Auto, records: None }
}

fn disk(read_only: bool) -> Disk {
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap())
}

/// Returns a xenstore in which domain 7 exists, and the machine that keeps it.
fn store() -> (Arc<Machine>, Store) {
    let machine = Machine::new();
    drop(machine.store(DOMAIN).unwrap());
    let store = machine.store(OWN).unwrap();
    (machine, store)
}

fn images(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

/// Returns the paths of a device that this program has created.
fn made(store: &mut Store) -> Paths {
    let mut paths = Paths::new(OWN, &options());
    assert!(paths.make(store, OWN, &options(), &images(&["a.img"]), false).unwrap());
    paths
}

/// Reads a node of the back end.
fn back(store: &mut Store, paths: &Paths, key: &str) -> Option<String> {
    store.read(&format!("{}/{key}", paths.back)).unwrap()
}

/// Writes nodes of the front end.
fn write(store: &mut Store, paths: &Paths, nodes: &[(&str, &str)]) {
    for (key, value) in nodes {
        store.write(&format!("{}/{key}", paths.front), value).unwrap();
    }
}

/// Returns a device that a toolstack has created, in state 1.
fn of_toolstack(store: &mut Store) -> (Paths, Wanted) {
    let device =
        ToolstackDevice { kind: "vbd".into(), domain: DOMAIN, device: "xvda".parse().unwrap() };
    let (target, frontend, mode) = ("a.img", format!("/local/domain/7/device/vbd/{XVDA}"), "w");
    let wanted = Wanted {
        device,
        target: target.into(),
        read_only: false,
        cdrom: false,
        frontend: frontend.clone(),
        mode: mode.into(),
    };
    let paths = Paths::of_toolstack(OWN, &wanted);
    for (key, value) in [
        ("params", target),
        ("frontend", &frontend),
        ("mode", mode),
        ("online", "1"),
        ("state", "1"),
    ] {
        store.write(&format!("{}/{key}", paths.back), value).unwrap();
    }
    (paths, wanted)
}

#[test]
fn states_have_the_numbers_of_xenbus() {
    for number in 1..=6 {
        assert_eq!(State::parse(&number.to_string()).map(|state| state as u8), Some(number));
    }
    for text in ["", "0", "7", "04", " 4", "4x", "connected"] {
        assert_eq!(State::parse(text), None, "{text}");
    }
}

#[test]
fn a_device_is_made_once_for_its_image() {
    let (_machine, mut store) = store();
    let mut paths = made(&mut store);
    assert_eq!(paths.back, format!("/local/domain/0/backend/blockyard/7/{XVDA}"));
    let node = |store: &mut Store, key: &str| back(store, &paths, key);
    assert_eq!(node(&mut store, "frontend").as_ref(), Some(&paths.front));
    assert_eq!(node(&mut store, "frontend-id").as_deref(), Some("7"));
    assert_eq!(node(&mut store, "mode").as_deref(), Some("w"));
    assert_eq!(paths.back_state(&mut store).unwrap(), Some(State::Initialising));
    assert_eq!(paths.front_state(&mut store).unwrap(), Some(State::Initialising));
    let front = |key: &str| format!("{}/{key}", paths.front);
    assert_eq!(store.read(&front("backend")).unwrap().as_ref(), Some(&paths.back));
    assert_eq!(store.read(&front("virtual-device")).unwrap(), Some(XVDA.to_string()));

    // The next server of the disk takes the device over, also if the disk has a new top image.
    let mut again = Paths::new(OWN, &options());
    let both = images(&["b.img", "a.img"]);
    assert!(!again.make(&mut store, OWN, &options(), &both, false).unwrap());
    assert_eq!(again, paths, "it is the same incarnation");
    assert_eq!(back(&mut store, &paths, "image").as_deref(), Some("b.img"));
    let other = paths.make(&mut store, OWN, &options(), &images(&["c.img"]), false);
    assert!(matches!(other, Err(NodeError::OtherImage(image)) if image == "b.img"));
}

#[test]
fn a_device_needs_its_domain_and_a_free_name() {
    let machine = Machine::new();
    let mut store = machine.store(OWN).unwrap();
    let mut paths = Paths::new(OWN, &options());
    let none = paths.make(&mut store, OWN, &options(), &[], false);
    assert!(matches!(none, Err(NodeError::NoDomain)), "{none:?}");
    assert_eq!(store.list("/local/domain/0/backend").unwrap(), [""; 0], "nothing is left");

    drop(machine.store(DOMAIN).unwrap());
    let foreign = "/local/domain/0/backend/vbd/7/51712";
    write(&mut store, &paths, &[("backend", foreign)]);
    let taken = paths.make(&mut store, OWN, &options(), &[], false).unwrap_err();
    assert!(taken.to_string().ends_with("domain 7 already has a device xvda"), "{taken}");
    assert_eq!(paths.online(&mut store).unwrap(), None);
}

#[test]
fn the_nodes_of_a_later_device_are_not_changed() {
    let (_machine, mut store) = store();
    let old = made(&mut store);
    assert!(old.remove(&mut store).unwrap());
    assert_eq!(old.online(&mut store).unwrap(), None);
    assert_eq!(store.list("/local/domain/0/backend").unwrap(), [""; 0], "no parent is left");
    // Writes create no nodes of a device that is gone.
    old.set_state(&mut store, State::Closing).unwrap();
    old.write_error(&mut store, "late").unwrap();
    assert_eq!(store.list(&old.back).unwrap(), [""; 0]);

    let new = made(&mut store);
    assert!(!old.is_same(&mut store).unwrap() && new.is_same(&mut store).unwrap());
    old.set_state(&mut store, State::Closing).unwrap();
    old.request_close(&mut store).unwrap();
    old.note_recorded(&mut store).unwrap();
    old.connect(&mut store, &disk(false)).unwrap();
    assert!(!old.remove(&mut store).unwrap());
    assert_eq!(new.back_state(&mut store).unwrap(), Some(State::Initialising));
    assert_eq!(new.online(&mut store).unwrap(), Some(true));
    assert!(!new.is_recorded(&mut store).unwrap());
    assert_eq!(back(&mut store, &new, "sectors"), None);

    let mut adopted = Paths::new(OWN, &options());
    adopted.adopt(&mut store).unwrap();
    assert_eq!(adopted, new);
}

#[test]
fn a_note_says_that_requests_are_in_records() {
    let (_machine, mut store) = store();
    let paths = made(&mut store);
    assert!(!paths.is_recorded(&mut store).unwrap());
    paths.note_recorded(&mut store).unwrap();
    assert!(paths.is_recorded(&mut store).unwrap());
    paths.note_settled(&mut store).unwrap();
    assert!(!paths.is_recorded(&mut store).unwrap());
}

#[test]
fn features_follow_the_disk_and_the_way_of_its_data() {
    let (_machine, mut store) = store();
    let paths = made(&mut store);
    let number = |store: &mut Store, key: &str| back(store, &paths, key);
    paths.offer(&mut store, &disk(false), &options()).unwrap();
    for (key, value) in [
        (FLUSH, "1"),
        ("feature-barrier", "1"),
        ("feature-persistent", "1"),
        ("feature-discard", "1"),
        (QUEUES, "4"),
        ("max-ring-page-order", "4"),
        ("state", "2"),
    ] {
        assert_eq!(number(&mut store, key).as_deref(), Some(value), "{key}");
    }
    assert!(!paths.offered_no_flush(&mut store).unwrap());
    let copies = XenOptions { data: XenData::Copy, queues: 100, ..options() };
    paths.offer(&mut store, &disk(true), &copies).unwrap();
    assert_eq!(number(&mut store, "feature-persistent").as_deref(), Some("0"));
    assert_eq!(number(&mut store, "feature-discard").as_deref(), Some("0"));
    assert_eq!(number(&mut store, QUEUES).as_deref(), Some("8"));
}

#[test]
fn a_connected_front_end_gets_the_shape_of_the_disk() {
    let (_machine, mut store) = store();
    let mut paths = made(&mut store);
    paths.connect(&mut store, &disk(false)).unwrap();
    let shape = |store: &mut Store, paths: &Paths| {
        ["sectors", "sector-size", "info", "state"].map(|key| back(store, paths, key).unwrap())
    };
    assert_eq!(shape(&mut store, &paths), ["2048", "512", "0", "4"]);
    paths.cdrom = true;
    paths.connect(&mut store, &disk(true)).unwrap();
    assert_eq!(shape(&mut store, &paths), ["2048", "512", "5", "4"], "read-only, and a CD-ROM");
}

#[test]
fn a_claim_takes_only_a_new_device() {
    let (_machine, mut store) = store();
    let (paths, wanted) = of_toolstack(&mut store);
    assert!(paths.claim(&mut store, 3).unwrap());
    assert_eq!(paths.back_state(&mut store).unwrap(), Some(State::InitWait));
    assert_eq!(back(&mut store, &paths, QUEUES).as_deref(), Some("3"));
    assert!(!paths.claim(&mut store, 5).unwrap(), "it is not new any more");
    assert_eq!(back(&mut store, &paths, QUEUES).as_deref(), Some("3"));

    let other = Wanted { target: "b.img".into(), ..wanted.clone() };
    assert!(!paths.accept(&mut store, &other).unwrap(), "the nodes request another disk");
    assert_eq!(back(&mut store, &paths, "hotplug-status"), None);
    assert!(paths.accept(&mut store, &wanted).unwrap());
    assert_eq!(back(&mut store, &paths, SERVER).as_deref(), Some(KIND));
    assert_eq!(back(&mut store, &paths, "hotplug-status").as_deref(), Some("connected"));
}

#[test]
fn a_refused_device_is_closed_unless_a_guest_uses_it() {
    let (_machine, mut store) = store();
    let (paths, _) = of_toolstack(&mut store);
    assert!(!paths.refuse(&mut store, "no such image").unwrap());
    assert_eq!(back(&mut store, &paths, "hotplug-error").as_deref(), Some("no such image"));
    assert_eq!(back(&mut store, &paths, "hotplug-status").as_deref(), Some("error"));
    assert_eq!(paths.back_state(&mut store).unwrap(), Some(State::Closed));

    for (front, in_use) in [("4", true), ("5", true), ("6", false)] {
        store.write(&format!("{}/state", paths.back), 4).unwrap();
        write(&mut store, &paths, &[("state", front)]);
        assert_eq!(paths.refuse(&mut store, "busy").unwrap(), in_use, "{front}");
        let state = if in_use { State::Connected } else { State::Closed };
        assert_eq!(paths.back_state(&mut store).unwrap(), Some(state), "{front}");
    }
    // The guest's path is no path.
    store.write(&format!("{}/state", paths.back), 4).unwrap();
    store.write(&format!("{}/frontend", paths.back), "no path").unwrap();
    assert!(!paths.in_use(&mut store).unwrap());
}

#[test]
fn a_closed_device_is_not_a_new_one_with_its_name() {
    let (_machine, mut store) = store();
    let (paths, _) = of_toolstack(&mut store);
    let state = |store: &mut Store| paths.back_state(store).unwrap();
    assert!(!paths.close(&mut store).unwrap(), "it is new");
    assert_eq!(state(&mut store), Some(State::Initialising));
    // The toolstack waits for state 6 of a device that it removes.
    store.write(&format!("{}/online", paths.back), 0).unwrap();
    assert!(!paths.close(&mut store).unwrap());
    assert_eq!(state(&mut store), Some(State::Closed));
    store.write(&format!("{}/state", paths.back), 4).unwrap();
    assert!(paths.close(&mut store).unwrap());
    assert_eq!(state(&mut store), Some(State::Closed));
}

/// Returns the setup, or the error, of a front end with these nodes.
fn setup(nodes: &[(&str, &str)]) -> Result<FrontSetup, String> {
    let (_machine, mut store) = store();
    let paths = made(&mut store);
    paths.offer(&mut store, &disk(false), &options()).unwrap();
    write(&mut store, &paths, nodes);
    paths.front_setup(&mut store, &options()).map_err(|e| e.to_string())
}

#[test]
fn rings_are_described_with_one_page_or_several() {
    let one = setup(&[("ring-ref", "8"), ("event-channel", "3")]).unwrap();
    let keys = |references: &[u32], port| QueueKeys { references: references.to_vec(), port };
    let expected = FrontSetup { abi: Abi::X86_64, persistent: false, queues: vec![keys(&[8], 3)] };
    assert_eq!(one, expected);
    // Order 0 is written with a number, or without.
    for key in ["ring-ref", "ring-ref0"] {
        let nodes = [("ring-page-order", "0"), (key, "8"), ("event-channel", "3")];
        assert_eq!(setup(&nodes).unwrap(), expected, "{key}");
    }
    let nodes = [
        ("protocol", "x86_32-abi"),
        ("feature-persistent", "1"),
        ("multi-queue-num-queues", "2"),
        ("ring-page-order", "1"),
        ("queue-0/ring-ref0", "8"),
        ("queue-0/ring-ref1", "9"),
        ("queue-0/event-channel", "3"),
        ("queue-1/ring-ref0", "10"),
        ("queue-1/ring-ref1", "4294967295"),
        ("queue-1/event-channel", "4"),
    ];
    let queues = vec![keys(&[8, 9], 3), keys(&[10, u32::MAX], 4)];
    assert_eq!(setup(&nodes).unwrap(), FrontSetup { abi: Abi::X86_32, persistent: true, queues });
}

#[test]
fn a_front_end_gets_no_more_than_was_offered() {
    let ring = [("ring-ref", "8"), ("event-channel", "3")];
    let with = |key: &str, value: &str| setup(&[&ring[..], &[(key, value)]].concat()).unwrap_err();
    for (key, value, wanted) in [
        ("multi-queue-num-queues", "5", "a number from 1 to 4 is expected"),
        ("multi-queue-num-queues", "0", "a number from 1 to 4 is expected"),
        ("ring-page-order", "5", "a number from 0 to 4 is expected"),
        ("ring-page-order", "-1", "a number from 0 to 4 is expected"),
        ("protocol", "arm-abi", "x86_64-abi and x86_32-abi are supported"),
        ("ring-ref", "4294967296", "a number from 0 to 4294967295 is expected"),
        ("event-channel", "", "a number from 0 to 4294967295 is expected"),
    ] {
        assert_eq!(with(key, value), format!("the front end's {key} is \"{value}\"; {wanted}"));
    }
    assert_eq!(setup(&ring[..1]).unwrap_err(), "the front end has no event-channel");
    assert_eq!(setup(&ring[1..]).unwrap_err(), "the front end has no ring-ref");
    let second = [("ring-page-order", "1"), ("ring-ref0", "8"), ("event-channel", "3")];
    assert_eq!(setup(&second).unwrap_err(), "the front end has no ring-ref1");
    // A connected front end relies on the offer of the last server.
    let (_machine, mut store) = store();
    let paths = made(&mut store);
    let few = XenOptions { queues: 1, ..options() };
    write(&mut store, &paths, &[("multi-queue-num-queues", "3")]);
    assert!(paths.front_setup(&mut store, &few).is_err());
    paths.offer(&mut store, &disk(false), &options()).unwrap();
    let missing = paths.front_setup(&mut store, &few).unwrap_err();
    assert_eq!(missing.to_string(), "the front end has no queue-0/event-channel");
}

#[test]
fn rings_with_other_pages_or_ports_have_other_fingerprints() {
    let of = |references: &[u32], port| {
        QueueKeys { references: references.to_vec(), port }.fingerprint()
    };
    assert_eq!(of(&[1, 2], 3), of(&[1, 2], 3));
    for other in [of(&[2, 1], 3), of(&[1], 3), of(&[1, 2], 4), of(&[1, 2, 3], 3)] {
        assert_ne!(other, of(&[1, 2], 3));
    }
}

#[test]
fn text_of_a_guest_is_short_and_printable() {
    assert_eq!(short("a\nb\u{7}\"c"), "a\\nb\\u{7}\\\"c");
    assert_eq!(short(&"x".repeat(1000)).len(), 40);
}
