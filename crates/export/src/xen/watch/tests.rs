//! What a watch makes of nodes that a toolstack, or a guest, has written.

use std::cell::RefCell;
use std::rc::Rc;

use blockyard_ring::xen::{Machine, Node};

use super::*;

struct Fixture {
    watcher: Watcher<Box<dyn Fn(Wanted)>>,
    reported: Rc<RefCell<Vec<Wanted>>>,
    device: ToolstackDevice,
}

impl Fixture {
    fn new(script: Option<&str>) -> Self {
        let machine = Machine::new();
        let host = Host::Machine(machine);
        let (kind, retry) = ("vbd".to_string(), Duration::from_secs(60));
        let reported = Rc::<RefCell<Vec<_>>>::default();
        let report = reported.clone();
        let wanted: Box<dyn Fn(Wanted)> = Box::new(move |wanted| report.borrow_mut().push(wanted));
        let watcher = Watcher {
            store: host.store().unwrap(),
            host,
            own: 0,
            kind: kind.as_str().into(),
            options: WatchOptions { kind, script: script.map(Into::into), queues: 4, retry },
            control: Arc::new(Control::new().unwrap()),
            verdicts: Arc::default(),
            known: HashMap::new(),
            wanted,
            lines: Budget::default(),
        };
        let device = "xvda".parse().unwrap();
        let device = ToolstackDevice { kind: "vbd".into(), domain: 7, device };
        Fixture { watcher, reported, device }
    }

    fn set(&mut self, key: &str, value: &str) {
        let path = format!("{}/{key}", self.device.path(0));
        self.watcher.store.write(&path, value).unwrap();
    }

    fn node(&mut self, key: &str) -> Option<String> {
        self.watcher.store.read(&format!("{}/{key}", self.device.path(0))).unwrap()
    }

    /// Writes all nodes of a new device.
    fn create(&mut self) {
        for (key, value) in [
            ("script", "/etc/xen/scripts/block-ours"),
            ("frontend", "/local/domain/7/device/vbd/51712"),
            ("frontend-id", "7"),
            ("params", "a.img"),
            ("mode", "w"),
            ("online", "1"),
            ("state", "1"),
        ] {
            self.set(key, value);
        }
    }

    fn parse(&mut self) -> Parsed {
        let (device, path) = (self.device.clone(), self.device.path(0));
        self.watcher.parse(&device, &path).unwrap()
    }

    /// Returns the reason why the nodes are invalid.
    fn invalid(&mut self) -> String {
        match self.parse() {
            Parsed::Invalid(why) => why,
            Parsed::Disk(_) => panic!("they are valid"),
            Parsed::Nothing => panic!("they are incomplete"),
        }
    }

    /// Scans the nodes. Returns the disks that the program must serve.
    fn scan(&mut self) -> Vec<String> {
        self.watcher.scan().unwrap();
        self.reported.borrow_mut().drain(..).map(|wanted| wanted.target).collect()
    }

    fn say(&mut self, verdict: Verdict) {
        lock(&self.watcher.verdicts).push(verdict);
        self.watcher.handle_verdicts().unwrap();
    }
}

#[test]
fn nodes_of_a_toolstack_become_a_disk() {
    let mut fixture = Fixture::new(Some("block-ours"));
    assert!(matches!(fixture.parse(), Parsed::Nothing), "there are no nodes");
    fixture.create();
    let Parsed::Disk(wanted) = fixture.parse() else { panic!("no disk") };
    assert_eq!((&*wanted.target, wanted.read_only, wanted.cdrom), ("a.img", false, false));
    assert_eq!((&*wanted.frontend, &*wanted.mode), ("/local/domain/7/device/vbd/51712", "w"));
    for (mode, kind, read_only, cdrom) in [
        ("w!", "disk", false, false),
        ("rw", "disk", false, false),
        ("r", "disk", true, false),
        ("ro", "disk", true, false),
        ("w", "cdrom", true, true),
        ("r", "cdrom", true, true),
    ] {
        fixture.set("mode", mode);
        fixture.set("device-type", kind);
        let Parsed::Disk(wanted) = fixture.parse() else { panic!("{mode} {kind}") };
        assert_eq!((wanted.read_only, wanted.cdrom), (read_only, cdrom), "{mode} {kind}");
    }
    for script in ["/etc/xen/scripts/block", "block-ours2", "block-ours/", ""] {
        fixture.set("script", script);
        assert!(matches!(fixture.parse(), Parsed::Nothing), "{script}");
    }
}

#[test]
fn nodes_that_a_guest_could_abuse_are_refused() {
    let mut fixture = Fixture::new(None);
    let long = format!("/{}", "a".repeat(PATH_MOST));
    for (key, value) in [
        ("frontend-id", "8"),
        ("frontend-id", "07"),
        ("frontend", "local/domain/7"),
        ("frontend", "/local/domain/7/../8"),
        ("frontend", long.as_str()),
        ("params", ""),
        ("params", "a\nb"),
        ("device-type", "tape"),
        ("mode", "x"),
    ] {
        fixture.create();
        fixture.set("device-type", "disk");
        fixture.set(key, value);
        assert_eq!(fixture.invalid(), format!("the node {key} is \"{}\"", short(value)));
    }
    // An incomplete device may become complete later.
    for key in ["frontend", "frontend-id", "params", "mode", "online"] {
        let mut fixture = Fixture::new(None);
        fixture.create();
        let path = format!("{}/{key}", fixture.device.path(0));
        fixture.watcher.store.remove(&path).unwrap();
        assert!(matches!(fixture.parse(), Parsed::Nothing), "{key}");
        assert_eq!(fixture.scan(), [""; 0]);
        assert_eq!(fixture.node("error"), None);
        let value = if key == "frontend-id" || key == "online" { "7" } else { "w" };
        fixture.set(key, if key == "online" { "1" } else { value });
        if key == "frontend" {
            fixture.set(key, "/local/domain/7/device/vbd/51712");
        }
        assert_eq!(fixture.scan().len(), 1, "{key}");
    }
}

#[test]
fn a_device_is_reported_once_until_it_is_released() {
    let mut fixture = Fixture::new(None);
    assert_eq!(fixture.scan(), [""; 0]);
    fixture.create();
    assert_eq!(fixture.scan(), ["a.img"]);
    assert_eq!(fixture.node("state").as_deref(), Some("2"), "it is claimed");
    fixture.set("state", "1");
    assert_eq!(fixture.scan(), [""; 0], "the program has it");
    let device = fixture.device.clone();
    fixture.set("state", "4");
    fixture.say(Verdict::Release(device));
    assert_eq!(fixture.node("state").as_deref(), Some("6"));
    assert_eq!(fixture.scan(), [""; 0], "it is not new");
    fixture.create();
    assert_eq!(fixture.scan(), ["a.img"]);
}

#[test]
fn a_refused_device_gets_the_reason_and_may_be_created_again() {
    let mut fixture = Fixture::new(None);
    fixture.create();
    assert_eq!(fixture.scan().len(), 1);
    let device = fixture.device.clone();
    // The toolstack has created the device again meanwhile, so the verdict is about an older one.
    fixture.set("state", "1");
    fixture.say(Verdict::Refuse(device.clone(), "no such image".into()));
    assert_eq!((fixture.node("error"), fixture.scan().len()), (None, 1));
    fixture.say(Verdict::Refuse(device, "é".repeat(3000)));
    assert_eq!(fixture.node("error").map(|why| why.chars().count()), Some(1000));
    assert_eq!(fixture.node("state").as_deref(), Some("6"));
    assert_eq!(fixture.scan(), [""; 0]);
    fixture.create();
    assert_eq!(fixture.scan(), ["a.img"]);
}

/// The last server of the device was killed. The guest uses the device, and its image is missing.
#[test]
fn a_refused_device_that_is_in_use_is_reported_again_later() {
    let mut fixture = Fixture::new(None);
    fixture.create();
    fixture.set("state", "4");
    let front = "/local/domain/7/device/vbd/51712/state";
    fixture.watcher.store.write(front, 4).unwrap();
    assert_eq!(fixture.scan().len(), 1);
    let device = fixture.device.clone();
    fixture.say(Verdict::Refuse(device.clone(), "no such image".into()));
    assert!(matches!(fixture.watcher.known[&device], Known::Postponed(_)));
    assert_eq!((fixture.node("state").as_deref(), fixture.scan().len()), (Some("4"), 0));
    // The time has come.
    fixture.watcher.known.insert(device.clone(), Known::Postponed(Instant::now()));
    assert_eq!(fixture.scan().len(), 1);
    // Meanwhile the toolstack removes the device, and the guest has closed it.
    fixture.say(Verdict::Refuse(device, "no such image".into()));
    fixture.set("online", "0");
    assert_eq!((fixture.scan().len(), fixture.node("state").as_deref()), (0, Some("4")));
    fixture.watcher.store.write(front, 6).unwrap();
    assert_eq!((fixture.scan().len(), fixture.node("state").as_deref()), (0, Some("6")));
}

#[test]
fn names_that_are_no_numbers_are_no_devices() {
    let mut fixture = Fixture::new(None);
    for path in ["07/51712", "x/51712", "70000/51712", "7/051712", "7/xvda", "7/-1"] {
        for (key, value) in [("params", "a.img"), ("online", "1"), ("state", "1")] {
            let path = format!("{}/{path}/{key}", top(0, "vbd"));
            fixture.watcher.store.write(&path, value).unwrap();
        }
    }
    assert_eq!(fixture.scan(), [""; 0]);
    assert!(fixture.watcher.known.is_empty());
}

#[test]
fn verdicts_stay_until_xenstore_is_there_again() {
    let machine = Machine::new();
    let mut fixture = Fixture::new(None);
    let host = Host::Machine(machine.clone());
    fixture.watcher.store = host.store().unwrap();
    fixture.create();
    let device = fixture.device.clone();
    machine.lose_store();
    lock(&fixture.watcher.verdicts).push(Verdict::Release(device.clone()));
    lock(&fixture.watcher.verdicts).push(Verdict::Refuse(device, "why".into()));
    assert!(fixture.watcher.handle_verdicts().is_err_and(|e| e.is_lost()));
    assert_eq!(lock(&fixture.watcher.verdicts).len(), 2);
    machine.restore_store();
    fixture.watcher.store = host.store().unwrap();
    fixture.set("state", "4");
    fixture.watcher.handle_verdicts().unwrap();
    assert_eq!(lock(&fixture.watcher.verdicts).len(), 0);
    assert_eq!(fixture.node("state").as_deref(), Some("6"));
}
