//! Xen devices that a toolstack creates, without a hypervisor: devices that are served, refused and
//! released, and failures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_driver::xen::operation::READ;
use blockyard_driver::xen::{Terms, wait_for_node};
use blockyard_export::xen::{self, Wanted, Watch, WatchOptions, Xen, XenData, XenOptions};
use blockyard_export::{Export, Reactors};
use blockyard_ring::xen::{Host, Machine, Node, Store};

use crate::guest::{Guest, LIMIT, XVDA, disk, soon};

const SCRIPT: &str = "block-ours";
const XVDB: u32 = 51728;

/// A watch of `backend/vbd`, and the toolstack.
struct Setup {
    /// Number of the back end's domain.
    own: u16,
    machine: Arc<Machine>,
    reactors: Arc<Reactors>,
    watch: Watch,
    wanted: Receiver<Wanted>,
    store: Store,
}

fn back(number: u32) -> String {
    back_in(0, number)
}

/// Returns the path of a back end's nodes in domain `own`.
fn back_in(own: u16, number: u32) -> String {
    format!("/local/domain/{own}/backend/vbd/7/{number}")
}

fn front(number: u32) -> String {
    format!("/local/domain/7/device/vbd/{number}")
}

fn watch(machine: &Arc<Machine>, script: Option<&str>) -> (Watch, Receiver<Wanted>) {
    let (sender, wanted) = channel();
    let sender = Mutex::new(sender);
    let script = script.map(Into::into);
    let options =
        WatchOptions { kind: "vbd".into(), script, queues: 4, retry: Duration::from_millis(1) };
    let report = move |wanted| sender.lock().unwrap().send(wanted).unwrap_or_default();
    (Watch::start(options, &Host::Machine(machine.clone()), report).unwrap(), wanted)
}

impl Setup {
    fn new() -> Self {
        Self::of(0, Machine::new())
    }

    fn of(own: u16, machine: Arc<Machine>) -> Self {
        let (watch, wanted) = watch(&machine, Some(SCRIPT));
        let mut store = machine.store(0).unwrap();
        store.watch("/local/domain", "any").unwrap();
        Setup {
            own,
            reactors: Arc::new(Reactors::start(1, &[]).unwrap()),
            machine,
            watch,
            wanted,
            store,
        }
    }

    /// Creates the nodes of a device, as libxl does. `others` replaces nodes or adds further ones.
    /// An empty value omits a node.
    fn make(&mut self, number: u32, target: &str, others: &[(&str, &str)]) {
        let (front, frontend, back) = (front(number), front(number), back_in(self.own, number));
        let own = [
            ("frontend", frontend.as_str()),
            ("frontend-id", "7"),
            ("online", "1"),
            ("params", target),
            ("script", "/etc/xen/scripts/block-ours"),
            ("mode", "w"),
            ("device-type", "disk"),
            ("state", "1"),
        ];
        let kept = own.iter().filter(|(key, _)| others.iter().all(|(other, _)| other != key));
        let nodes: Vec<_> = kept.chain(others).filter(|(_, value)| !value.is_empty()).collect();
        let done = self.store.transaction(|t| {
            t.write(&format!("{front}/backend"), &back)?;
            t.write(&format!("{front}/state"), 1)?;
            nodes.iter().try_for_each(|(key, value)| t.write(&format!("{back}/{key}"), value))
        });
        done.unwrap();
    }

    fn wanted(&self) -> Wanted {
        self.wanted.recv_timeout(LIMIT).expect("a disk is requested")
    }

    /// Waits until a node of the back end has this value.
    fn wait(&mut self, number: u32, key: &str, value: Option<&str>) {
        wait_for_node(
            &mut self.store,
            &format!("{}/{key}", back_in(self.own, number)),
            value,
            LIMIT,
        )
        .unwrap();
    }

    fn read(&mut self, number: u32, key: &str) -> Option<String> {
        self.store.read(&format!("{}/{key}", back_in(self.own, number))).unwrap()
    }

    fn set(&mut self, path: &str, value: impl std::fmt::Display) {
        self.store.write(path, value).unwrap();
    }

    /// Requests the removal of a device: the first step of libxl when it removes one.
    fn take_back(&mut self, number: u32) {
        let back = back_in(self.own, number);
        let done = self.store.transaction(|t| {
            t.write(&format!("{back}/online"), 0)?;
            t.write(&format!("{back}/state"), 5)
        });
        done.unwrap();
    }

    fn remove(&mut self, number: u32) {
        self.store.remove(&back_in(self.own, number)).unwrap();
        self.store.remove(&front(number)).unwrap();
    }

    /// Waits until the watch has read all current nodes. It has read them when it reports a device
    /// that is created now.
    fn settle(&mut self) {
        self.make(51952, "settle", &[]);
        let wanted = self.wanted();
        assert_eq!(wanted.target, "settle");
        self.remove(51952);
        self.watch.release(&wanted.device);
    }

    fn take(&self, wanted: &Wanted) -> Result<(Xen, Arc<AtomicBool>), String> {
        let (domain, device) = (wanted.device.domain, wanted.device.device);
        let options = XenOptions { domain, device, queues: 4, data: XenData::Map, records: None };
        let ended = Arc::new(AtomicBool::new(false));
        let (noted, host) = (ended.clone(), Host::Machine(self.machine.clone()));
        let disk = disk(wanted.read_only);
        let ended_by = move || noted.store(true, Ordering::SeqCst);
        let taken = Xen::take(disk, &options, wanted, &host, self.reactors.clone(), ended_by);
        taken.map(|xen| (xen, ended)).map_err(|e| e.to_string())
    }

    /// Connects a guest's driver with a ring of one page.
    fn connect(&self, number: u32) -> Guest {
        let mut guest = Guest::of(&self.machine, 7, number);
        guest.connect(Terms::PLAIN);
        guest
    }
}

/// Waits until a device has ended by itself.
fn wait_for_end(ended: &AtomicBool) {
    let begun = Instant::now();
    while !ended.load(Ordering::SeqCst) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the device has not ended");
        std::thread::yield_now();
    }
}

/// Waits for the end of a device's thread.
fn joined(mut xen: Xen, ended: &AtomicBool) {
    xen.stop(soon());
    assert!(ended.load(Ordering::SeqCst));
}

#[test]
fn a_disk_is_served_until_the_toolstack_takes_it_back() {
    let mut setup = Setup::new();
    setup.make(XVDB, "/other", &[("script", "/etc/xen/scripts/block")]);
    setup.make(XVDA, "/srv/a", &[]);
    let wanted = setup.wanted();
    assert_eq!((wanted.target.as_str(), wanted.read_only, wanted.cdrom), ("/srv/a", false, false));
    assert_eq!(wanted.device.to_string(), "device xvda of domain 7 (backend/vbd)");
    // The device gets state 2 before the disk is open.
    setup.wait(XVDA, "state", Some("2"));
    assert_eq!(setup.read(XVDA, "multi-queue-max-queues").as_deref(), Some("4"));
    let (xen, ended) = setup.take(&wanted).unwrap();
    setup.wait(XVDA, "hotplug-status", Some("connected"));
    let guest = setup.connect(XVDA);
    let listed = xen::list(&Host::Machine(setup.machine.clone())).unwrap();
    let row: Vec<_> = listed
        .iter()
        .map(|d| (d.kind.as_str(), d.device.to_string(), d.state, d.sectors))
        .collect();
    assert_eq!(row, [("vbd", "xvda".to_string(), "connected", Some(32768))]);
    setup.settle();
    assert!(setup.wanted.try_recv().is_err(), "it is reported once");
    setup.take_back(XVDA);
    setup.set(&format!("{}/state", front(XVDA)), 6);
    wait_for_end(&ended);
    // The image is still open, so the back end is not closed yet.
    assert_eq!((setup.read(XVDA, "state").as_deref(), guest.mapped()), (Some("5"), 0));
    joined(xen, &ended);
    setup.watch.release(&wanted.device);
    setup.wait(XVDA, "state", Some("6"));
    setup.remove(XVDA);
    setup.settle();
    assert_eq!(setup.store.list("/local/domain/0/backend/vbd/7").unwrap(), ["51728"]);
    assert_eq!(
        setup.read(XVDB, "state").as_deref(),
        Some("1"),
        "a device of another script is not changed"
    );
}

#[test]
fn a_device_without_a_disk_is_closed_and_can_be_requested_again() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/none", &[]);
    let wanted = setup.wanted();
    setup.watch.refuse(&wanted.device, "there is no such file");
    setup.wait(XVDA, "state", Some("6"));
    for key in ["error", "hotplug-error"] {
        assert_eq!(setup.read(XVDA, key).as_deref(), Some("there is no such file"));
    }
    assert_eq!(setup.read(XVDA, "hotplug-status").as_deref(), Some("error"));
    // A toolstack that removes the refused device must not wait.
    setup.take_back(XVDA);
    setup.wait(XVDA, "state", Some("6"));
    setup.remove(XVDA);
    setup.make(XVDA, "/srv/b", &[]);
    assert_eq!(setup.wanted().target, "/srv/b");
}

#[test]
fn invalid_nodes_are_refused_with_their_name() {
    let mut setup = Setup::new();
    let long = format!("/{}", "x".repeat(600));
    for (key, value) in [
        ("params", "a\nb"),
        ("frontend-id", "8"),
        ("frontend-id", "many"),
        ("frontend", "local/domain/7"),
        ("frontend", "/local/domain/7/de vice"),
        ("frontend", long.as_str()),
        ("mode", "x"),
        ("device-type", "floppy"),
    ] {
        setup.make(XVDA, "/srv/a", &[(key, value)]);
        setup.wait(XVDA, "state", Some("6"));
        let error = setup.read(XVDA, "error").unwrap();
        assert!(error.contains(&format!("the node {key} is")), "{error}");
        setup.remove(XVDA);
    }
    // Make devices with incomplete nodes, and nodes whose names are not devices.
    for key in ["params", "mode", "frontend", "frontend-id", "online"] {
        setup.make(XVDA, "/srv/a", &[(key, "")]);
        setup.settle();
        assert_eq!(setup.read(XVDA, "state").as_deref(), Some("1"), "{key}");
        setup.remove(XVDA);
    }
    setup.set("/local/domain/0/backend/vbd/x/51712/state", 1);
    setup.set("/local/domain/0/backend/vbd/7/xvda/state", 1);
    setup.set("/local/domain/0/backend/vbd/07/51712/state", 1);
    setup.settle();
}

#[test]
fn nodes_of_two_devices_are_never_mixed() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[("online", "")]);
    let (back, front) = (back(XVDA), front(XVDA));
    // Two incomplete devices replace each other, each at once. A watch that does not read all nodes
    // at once reads the first node of one and the last node of the other.
    for _ in 0..3_000 {
        let replaced = setup.store.transaction(|t| {
            t.remove(&format!("{back}/frontend"))?;
            t.write(&format!("{back}/online"), 1)
        });
        replaced.unwrap();
        let replaced = setup.store.transaction(|t| {
            t.write(&format!("{back}/frontend"), &front)?;
            t.remove(&format!("{back}/online"))
        });
        replaced.unwrap();
    }
    setup.settle();
}

#[test]
fn removed_nodes_are_not_created_again() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[]);
    let wanted = setup.wanted();
    setup.remove(XVDA);
    let error = setup.take(&wanted).map(drop).unwrap_err();
    assert!(error.contains("the toolstack has removed or changed the nodes"), "{error}");
    setup.watch.refuse(&wanted.device, &error);
    setup.watch.release(&wanted.device);
    setup.settle();
    assert_eq!(setup.store.list(&back(XVDA)).unwrap(), [""; 0]);
    // Remove the nodes while the device is served.
    setup.make(XVDA, "/srv/a", &[]);
    let wanted = setup.wanted();
    let (xen, ended) = setup.take(&wanted).unwrap();
    let guest = setup.connect(XVDA);
    setup.remove(XVDA);
    wait_for_end(&ended);
    joined(xen, &ended);
    setup.watch.release(&wanted.device);
    setup.settle();
    assert_eq!((setup.store.list(&back(XVDA)).unwrap(), guest.mapped()), (Vec::new(), 0));
}

#[test]
fn a_recreated_device_gets_the_disk_that_it_requests() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[]);
    let first = setup.wanted();
    // Create the device again while the program opens the image.
    setup.remove(XVDA);
    setup.make(XVDA, "/srv/b", &[]);
    let error = setup.take(&first).map(drop).unwrap_err();
    setup.watch.refuse(&first.device, &error);
    let second = setup.wanted();
    assert_eq!((second.target.as_str(), setup.read(XVDA, "error")), ("/srv/b", None));
    // Create the device again while it is served.
    let (xen, ended) = setup.take(&second).unwrap();
    let done = setup.store.transaction(|t| {
        t.write(&format!("{}/params", back(XVDA)), "/srv/c")?;
        t.write(&format!("{}/state", back(XVDA)), 1)
    });
    done.unwrap();
    wait_for_end(&ended);
    joined(xen, &ended);
    setup.watch.release(&second.device);
    assert_eq!(setup.wanted().target, "/srv/c");
}

#[test]
fn a_driver_domain_serves_the_devices_in_its_own_nodes() {
    let mut setup = Setup::of(3, Machine::with_driver_domain(3));
    // This device belongs to another back end, in dom0.
    setup.set(&format!("{}/state", back(XVDB)), 1);
    setup.make(XVDA, "/srv/a", &[]);
    let wanted = setup.wanted();
    let (xen, ended) = setup.take(&wanted).unwrap();
    let guest = setup.connect(XVDA);
    let listed = xen::list(&Host::Machine(setup.machine.clone())).unwrap();
    assert_eq!(listed.iter().map(|d| (d.domain, d.state)).collect::<Vec<_>>(), [(7, "connected")]);
    setup.take_back(XVDA);
    setup.set(&format!("{}/state", front(XVDA)), 6);
    wait_for_end(&ended);
    joined(xen, &ended);
    setup.watch.release(&wanted.device);
    setup.wait(XVDA, "state", Some("6"));
    assert_eq!(
        (guest.mapped(), setup.store.read(&format!("{}/state", back(XVDB))).unwrap().as_deref()),
        (0, Some("1"))
    );
}

#[test]
fn a_cdrom_is_read_only_and_has_its_device_type() {
    let mut setup = Setup::new();
    setup.make(768, "/srv/a.iso", &[("device-type", "cdrom")]);
    let wanted = setup.wanted();
    assert_eq!(
        (wanted.read_only, wanted.cdrom, wanted.device.device.to_string().as_str()),
        (true, true, "768")
    );
    let _xen = setup.take(&wanted).unwrap();
    let _guest = setup.connect(768);
    assert_eq!(
        (setup.read(768, "info").as_deref(), setup.read(768, "feature-discard").as_deref()),
        (Some("5"), Some("0"))
    );
}

#[test]
fn the_next_server_takes_over_the_devices_of_the_last_one() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[]);
    setup.make(XVDB, "/srv/b", &[]);
    let mut both = [setup.wanted(), setup.wanted()];
    both.sort_by_key(|wanted| wanted.device.device.number());
    let (mut xen, _) = setup.take(&both[0]).unwrap();
    let guest = setup.connect(XVDA);
    // The program stops while it opens the image of the second device.
    xen.stop(soon());
    setup.watch.stop();
    assert_eq!((setup.read(XVDA, "state").as_deref(), guest.mapped()), (Some("4"), 0));
    (setup.watch, setup.wanted) = watch(&setup.machine, Some(SCRIPT));
    let mut again = [setup.wanted(), setup.wanted()];
    again.sort_by_key(|wanted| wanted.device.device.number());
    assert_eq!(again, both);
    let (xen, ended) = setup.take(&again[0]).unwrap();
    // The back end is in state 4, so the next server continues with its ring. Then the toolstack
    // takes both devices back.
    setup.take_back(XVDA);
    setup.take_back(XVDB);
    setup.set(&format!("{}/state", front(XVDA)), 6);
    wait_for_end(&ended);
    joined(xen, &ended);
    setup.watch.release(&again[0].device);
    setup.watch.release(&again[1].device);
    setup.wait(XVDA, "state", Some("6"));
    setup.wait(XVDB, "state", Some("6"));
}

#[test]
fn many_devices_are_each_reported_once() {
    // The names of these devices do not fit into one message of xenstore.
    const DEVICES: u32 = 450;
    let machine = Machine::new();
    let mut store = machine.store(0).unwrap();
    let number = |device: u32| 1 << 28 | (device + 16) << 8;
    let made = store.transaction(|t| {
        for device in 0..DEVICES {
            let back = back(number(device));
            let nodes = [
                ("frontend", front(number(device))),
                ("frontend-id", "7".into()),
                ("online", "1".into()),
            ];
            let others =
                [("params", format!("/srv/{device}")), ("mode", "r".into()), ("state", "1".into())];
            nodes
                .iter()
                .chain(&others)
                .try_for_each(|(key, value)| t.write(&format!("{back}/{key}"), value))?;
        }
        Ok(())
    });
    made.unwrap();
    assert_eq!(store.list("/local/domain/0/backend/vbd/7").unwrap().len(), DEVICES as usize);
    let (mut watch, wanted) = watch(&machine, None);
    let mut targets: Vec<_> =
        (0..DEVICES).map(|_| wanted.recv_timeout(LIMIT).unwrap().target).collect();
    watch.stop();
    targets.sort();
    targets.dedup();
    assert_eq!((targets.len(), wanted.try_recv().is_err()), (DEVICES as usize, true));
}

/// The next server cannot open the image while the guest uses the disk, because the image's folder
/// is not mounted yet, or another server has locked the image.
#[test]
fn a_device_in_use_whose_image_cannot_be_opened_is_not_closed() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[]);
    let wanted = setup.wanted();
    let (mut xen, _) = setup.take(&wanted).unwrap();
    let mut guest = setup.connect(XVDA);
    xen.stop(soon());
    setup.watch.stop();
    assert_eq!((setup.read(XVDA, "state").as_deref(), guest.mapped()), (Some("4"), 0));
    (setup.watch, setup.wanted) = watch(&setup.machine, Some(SCRIPT));
    let wanted = setup.wanted();
    setup.watch.refuse(&wanted.device, "the image is locked");
    setup.wait(XVDA, "hotplug-error", Some("the image is locked"));
    assert_eq!(
        setup.read(XVDA, "state").as_deref(),
        Some("4"),
        "the guest sees that its disk is gone"
    );
    assert_eq!(setup.read(XVDA, "hotplug-status").as_deref(), Some("connected"));
    // From now on the image can be opened.
    let again = setup.wanted();
    assert_eq!(again, wanted);
    let (xen, ended) = setup.take(&again).unwrap();
    assert_eq!(guest.done(1, READ, 0, &[100]), 0);
    // After the guest has closed the device, the back end closes it if its image cannot be opened.
    setup.take_back(XVDA);
    guest.set("state", 6);
    wait_for_end(&ended);
    joined(xen, &ended);
    setup.watch.refuse(&again.device, "the image is locked");
    setup.wait(XVDA, "state", Some("6"));
}

#[test]
fn the_watch_keeps_its_knowledge_after_xenstore_was_lost() {
    let mut setup = Setup::new();
    setup.make(XVDA, "/srv/a", &[]);
    let first = setup.wanted();
    setup.machine.lose_store();
    setup.watch.refuse(&first.device, "there is no such file");
    setup.make(XVDB, "/srv/b", &[]);
    setup.machine.restore_store();
    // A verdict also ends the pause between two attempts to reconnect.
    setup.watch.refuse(&first.device, "there is no such file");
    assert_eq!(setup.wanted().target, "/srv/b");
    setup.wait(XVDA, "state", Some("6"));
    setup.settle();
    assert!(setup.wanted.try_recv().is_err(), "a known device is reported again");
}
