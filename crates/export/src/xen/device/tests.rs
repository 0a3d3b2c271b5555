//! A device with a front end that only writes nodes: states and what they cause, step by step.

use blockyard_disk::{DiskOptions, Source};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::xen::Machine;

use super::*;

const DOMAIN: u16 = 7;

fn options() -> XenOptions {
    let device = "xvda".parse().unwrap();
    XenOptions { domain: DOMAIN, device, queues: 1, data: XenData::Auto, records: None }
}

fn disk() -> Arc<Disk> {
    let options = DiskOptions {
        name: "disk".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: Vec::new(),
        on_enospc: Default::default(),
    };
    Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:1M")).unwrap()))
}

struct Fixture {
    machine: Arc<Machine>,
    device: Device,
    /// The domain's connection to xenstore.
    store: Store,
    paths: Paths,
}

impl Fixture {
    /// Returns a new device, before its first step.
    fn new() -> Self {
        let machine = Machine::new();
        let store = machine.store(DOMAIN).unwrap();
        let host = Host::Machine(machine.clone());
        let mut own = host.store().unwrap();
        let mut paths = Paths::new(0, &options());
        assert!(paths.make(&mut own, 0, &options(), &["a.img".into()], false).unwrap());
        let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
        let control = Arc::new(Control::new().unwrap());
        let device = Device::new(disk(), options(), host, reactors, own, paths.clone(), control);
        Fixture { machine, device, store, paths }
    }

    fn begun() -> Self {
        let mut fixture = Fixture::new();
        fixture.device.begin().unwrap();
        fixture
    }

    /// Sets the state of the front end, and makes the next step.
    fn front(&mut self, state: State) -> Result<Next, NodeError> {
        self.store.write(&format!("{}/state", self.paths.front), state as u8).unwrap();
        self.device.step()
    }

    /// Creates a ring, and sets the nodes that describe it.
    fn lay_ring(&mut self) {
        let domain = self.machine.add(DOMAIN, 8).unwrap();
        let (reference, channel) = (domain.grant(0, false), domain.channel().unwrap());
        for (key, value) in [("ring-ref", reference), ("event-channel", channel.port)] {
            self.store.write(&format!("{}/{key}", self.paths.front), value).unwrap();
        }
    }

    fn back(&mut self) -> Option<State> {
        self.paths.back_state(&mut self.store).unwrap()
    }

    fn node(&mut self, key: &str) -> Option<String> {
        self.store.read(&format!("{}/{key}", self.paths.back)).unwrap()
    }
}

#[test]
fn a_front_end_connects_and_disconnects_step_by_step() {
    let mut fixture = Fixture::begun();
    assert_eq!(fixture.back(), Some(State::InitWait), "the features are offered");
    fixture.lay_ring();
    assert!(fixture.front(State::Initialised).unwrap() == Next::Wait);
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Connected), 1));
    assert_eq!(fixture.node("sectors").as_deref(), Some("2048"));
    assert!(fixture.device.control.connected().is_some());
    // The front end follows, and the same rings stay.
    let setup = fixture.device.setup.clone();
    assert!(fixture.front(State::Connected).unwrap() == Next::Wait);
    assert_eq!((fixture.device.setup.clone(), fixture.device.front_connected), (setup, true));
    assert!(fixture.front(State::Closing).unwrap() == Next::Wait);
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Closing), 1));
    assert!(fixture.front(State::Closed).unwrap() == Next::Wait);
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Closed), 0));
    assert!(fixture.device.control.connected().is_none());
    // The guest's driver begins again.
    assert!(fixture.front(State::Initialising).unwrap() == Next::Wait);
    assert_eq!(fixture.back(), Some(State::InitWait));
}

#[test]
fn a_size_is_announced_to_a_connected_front_end() {
    let mut fixture = Fixture::begun();
    fixture.device.control.resized.store(true, Ordering::SeqCst);
    fixture.lay_ring();
    fixture.front(State::Initialised).unwrap();
    assert!(!fixture.device.control.resized.load(Ordering::SeqCst));
    fixture.store.write(&format!("{}/sectors", fixture.paths.back), 1).unwrap();
    fixture.device.step().unwrap();
    assert_eq!(fixture.node("sectors").as_deref(), Some("1"), "nothing has changed");
    fixture.device.control.resized.store(true, Ordering::SeqCst);
    fixture.device.step().unwrap();
    assert_eq!(fixture.node("sectors").as_deref(), Some("2048"));
}

#[test]
fn rings_that_cannot_be_mapped_close_the_device_with_a_reason() {
    let mut fixture = Fixture::begun();
    fixture.lay_ring();
    fixture.store.write(&format!("{}/ring-ref", fixture.paths.front), 999).unwrap();
    let error = fixture.front(State::Initialised).err().expect("there is no such grant");
    assert!(matches!(error, NodeError::Queue { number: 0, .. }), "{error}");
    fixture.device.close_with_error(&error);
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Closing), 0));
    assert_eq!(fixture.node("error"), Some(error.to_string()));
    // The back end does not try again before the front end begins again.
    assert!(fixture.front(State::Initialised).unwrap() == Next::Wait);
    assert!(fixture.device.refused && fixture.device.queues.is_empty());
    fixture.front(State::Initialising).unwrap();
    fixture.lay_ring();
    fixture.front(State::Initialised).unwrap();
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Connected), 1));
}

#[test]
fn a_device_is_removed_when_its_nodes_say_so() {
    // `detach` asks for the end, and the guest has closed its side.
    let mut fixture = Fixture::begun();
    fixture.paths.request_close(&mut fixture.store).unwrap();
    assert!(fixture.front(State::Connected).is_err(), "no ring is described");
    assert!(fixture.front(State::Closed).unwrap() == Next::Remove);
    // The domain has ended.
    let mut fixture = Fixture::begun();
    fixture.store.remove(&fixture.paths.front).unwrap();
    assert!(fixture.device.step().unwrap() == Next::Remove);
    // Another device has the same name.
    let mut fixture = Fixture::begun();
    fixture.store.write(&format!("{}/incarnation", fixture.paths.back), "other").unwrap();
    assert!(fixture.device.step().unwrap() == Next::Remove);
    assert!(!fixture.device.remove_nodes(), "its nodes stay");
    assert!(fixture.paths.online(&mut fixture.store).unwrap().is_some());
}

#[test]
fn new_rings_of_a_connected_front_end_replace_the_old_ones() {
    let mut fixture = Fixture::begun();
    fixture.lay_ring();
    fixture.front(State::Initialised).unwrap();
    fixture.front(State::Connected).unwrap();
    let before = fixture.device.setup.clone();
    // Invalid nodes of a connected front end change nothing.
    fixture.store.write(&format!("{}/ring-ref", fixture.paths.front), "none").unwrap();
    fixture.device.step().unwrap();
    assert_eq!((fixture.device.setup.clone(), fixture.device.queues.len()), (before.clone(), 1));
    // After a restore in the same domain, the front end has another ring.
    let domain = fixture.machine.add(DOMAIN, 8).unwrap();
    let (_first, second) = (domain.grant(0, false), domain.grant(1, false));
    let channel = domain.channel().unwrap();
    for (key, value) in [("ring-ref", second), ("event-channel", channel.port)] {
        fixture.store.write(&format!("{}/{key}", fixture.paths.front), value).unwrap();
    }
    fixture.device.step().unwrap();
    assert_ne!(fixture.device.setup, before);
    assert_eq!(fixture.device.setup.as_ref().unwrap().queues[0].references, [second]);
    assert_eq!((fixture.back(), fixture.device.queues.len()), (Some(State::Connected), 1));
}

#[test]
fn the_way_of_the_data_follows_the_options_and_the_front_end() {
    let mut fixture = Fixture::new();
    let setup = |persistent| FrontSetup {
        abi: super::super::abi::Abi::X86_64,
        persistent,
        queues: Vec::new(),
    };
    for (data, persistent, expected) in [
        (XenData::Auto, true, Data::Persistent),
        (XenData::Auto, false, Data::Copied),
        (XenData::Copy, true, Data::Copied),
        (XenData::Map, true, Data::Persistent),
        (XenData::Map, false, Data::Mapped),
    ] {
        fixture.device.options.data = data;
        assert_eq!(fixture.device.data(&setup(persistent)), expected, "{data:?} {persistent}");
    }
}

#[test]
fn records_belong_to_a_device_and_its_rings() {
    let mut fixture = Fixture::new();
    let keys = QueueKeys { references: vec![8], port: 3 };
    assert_eq!(fixture.device.record(0, &keys), None, "there is no folder");
    let folder = std::env::temp_dir().join(format!("blockyard-records-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    fixture.device.options.records = Some(folder.clone());
    let (path, key) = fixture.device.record(1, &keys).unwrap();
    assert_eq!((path, key), (folder.join("7-xvda-1"), keys.fingerprint()));
    for name in ["7-xvda-0", "7-xvda-7", "8-xvda-0", "7-xvdb-0"] {
        std::fs::write(folder.join(name), "").unwrap();
    }
    fixture.device.remove_records();
    let entries = std::fs::read_dir(&folder).unwrap();
    let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(left, ["7-xvdb-0", "8-xvda-0"], "other devices keep their records");
}

#[test]
fn the_list_has_the_devices_of_this_program() {
    let mut fixture = Fixture::begun();
    let store = &mut fixture.store;
    for (path, nodes) in [
        // A toolstack's device that this program serves, and one of another program.
        ("vbd/8/51728", &[("server", KIND), ("state", "6"), ("mode", "r"), ("sectors", "7")][..]),
        ("vbd/9/51712", &[("state", "4"), ("mode", "w")][..]),
        ("vbd/text/51712", &[("server", KIND)][..]),
    ] {
        for (key, value) in nodes {
            store.write(&format!("/local/domain/0/backend/{path}/{key}"), value).unwrap();
        }
    }
    let mut listed = list(&fixture.device.host).unwrap();
    listed.sort_by_key(|device| device.domain);
    let shown: Vec<_> = listed
        .iter()
        .map(|d| (&*d.kind, d.domain, d.device.to_string(), d.state, d.sectors, d.read_only))
        .collect();
    let expected = [
        (KIND, 7, "xvda".to_string(), "waiting for the guest", None, false),
        ("vbd", 8, "xvdb".to_string(), "closing", Some(7), true),
    ];
    assert_eq!(shown, expected);
}

#[test]
fn a_detach_waits_for_the_guest_or_removes_the_device_by_force() {
    let mut fixture = Fixture::begun();
    let (host, device) = (fixture.device.host.clone(), options().device);
    let detach = |force| detach(&host, DOMAIN, device, force, std::time::Duration::ZERO);
    assert!(!detach(false).unwrap(), "the guest has not closed the device");
    assert_eq!(fixture.back(), Some(State::Closing));
    assert_eq!(fixture.paths.online(&mut fixture.store).unwrap(), Some(false));
    assert!(detach(true).unwrap());
    assert_eq!(fixture.paths.online(&mut fixture.store).unwrap(), None);
    assert!(matches!(detach(false), Err(XenError::Missing { domain: DOMAIN, .. })));
}
