//! States, rings and operations of a device, and servers that start and end while the device
//! exists.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_disk::{ClientId, Disk, DiskObserver, DiskOptions, Source};
use blockyard_driver::xen::operation::{BARRIER, DISCARD, FLUSH, INDIRECT, READ, WRITE};
use blockyard_driver::xen::request::indirect;
use blockyard_driver::xen::{Abi, PAGE, Terms};
use blockyard_export::Export;
use blockyard_export::xen::{self, XenData};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::xen::{Host, Node};
use blockyard_storage::sim::Journal;

use crate::guest::{Guest, LIMIT, Setup, disk_with, options, soon, until};

const BACK: &str = "/local/domain/0/backend/blockyard/7/51712";
const FRONT: &str = "/local/domain/7/device/vbd/51712";
const PLAIN: Terms = Terms::PLAIN;

#[test]
fn data_is_read_back_over_rings_of_all_layouts() {
    for (terms, data) in [
        (PLAIN, XenData::Map),
        (PLAIN, XenData::Auto),
        (Terms { persistent: true, ..PLAIN }, XenData::Auto),
        (Terms { persistent: true, ..PLAIN }, XenData::Copy),
        (Terms { abi: Abi::X86_32, ..PLAIN }, XenData::Map),
        (Terms { order: Some(4), persistent: true, ..PLAIN }, XenData::Map),
        (Terms { queues: 4, order: Some(1), ..PLAIN }, XenData::Copy),
    ] {
        let setup = Setup::new(false);
        let mut export = setup.start_with(data);
        let mut front = Guest::new(&setup);
        front.connect(terms);
        assert_eq!(front.back("sectors").as_deref(), Some("32768"));
        // Send more requests than a ring holds, on each queue.
        let queues = terms.queues;
        for round in 0..70 {
            let (queue, number) = (round % queues, round as u8 + 1);
            front.fill(100, number);
            front.fill(101, number ^ 0xff);
            front.ask(queue, round as u64, WRITE, round as u64 * 16, &[100, 101]);
            assert_eq!(front.answer(queue), (round as u64, 0));
        }
        for round in 0..70 {
            let (queue, number) = (round % queues, round as u8 + 1);
            front.ask(queue, round as u64, READ, round as u64 * 16, &[102, 103]);
            assert_eq!(front.answer(queue), (round as u64, 0));
            assert!(front.holds(102, number) && front.holds(103, number ^ 0xff), "{round}");
        }
        let rings = (queues * terms.ring_pages()) as u32;
        let kept = if terms.persistent && data != XenData::Copy { 4 } else { 0 };
        assert_eq!(front.mapped(), rings + kept);
        front.set("state", 6);
        front.wait_for_state(6);
        assert_eq!(front.mapped(), 0);
        export.stop(soon());
    }
}

#[test]
fn flushes_barriers_discards_and_indirect_requests_work() {
    operations(XenData::Map);
    operations(XenData::Copy);
}

fn operations(data: XenData) {
    let setup = Setup::new(false);
    let _export = setup.start_with(data);
    let mut front = Guest::new(&setup);
    front.connect(Terms { persistent: true, ..PLAIN });
    assert_eq!(front.back("feature-max-indirect-segments").as_deref(), Some("256"));
    front.fill(100, 5);
    assert_eq!(front.done(1, FLUSH, 0, &[]), 0);
    assert_eq!(front.done(2, BARRIER, 8, &[100]), 0);
    assert_eq!(front.done(3, BARRIER, 0, &[]), 0);
    assert_eq!(front.done(4, READ, 8, &[101]), 0);
    assert!(front.holds(101, 5));
    // Send one request for 256 pages. Another page describes the request's segments.
    (200..456).for_each(|page| front.fill(page, page as u8));
    let pages: Vec<usize> = (200..456).collect();
    let described = front.segments(&pages);
    front.front.memory.write(110 * PAGE, &described);
    let rest = indirect(front.references[110]);
    front.put(0, 5, 0, [INDIRECT, WRITE, 0, 1], &rest);
    assert_eq!(front.answer(0), (5, 0));
    assert_eq!(front.done(6, READ, 255 * 8, &[101]), 0);
    assert!(front.holds(101, 455u16 as u8));
    let discard = 16u64.to_le_bytes();
    front.put(0, 7, 0, [DISCARD, 0, 0, 0], &discard);
    assert_eq!(front.answer(0), (7, 0));
    assert_eq!(front.done(8, READ, 8, &[101]), 0);
    assert!(front.holds(101, 0));
    front.put(0, 9, 0, [DISCARD, 1, 0, 0], &discard);
    assert_eq!(front.answer(0), (9, -2), "a secure discard is refused as unsupported");
    front.put(0, 10, 0, [77, 0, 0, 0], &[]);
    assert_eq!(front.answer(0), (10, -2));
}

#[test]
fn the_next_server_continues_with_the_same_rings() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 3);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    export.stop(soon());
    assert_eq!((front.mapped(), front.back("state").as_deref()), (0, Some("4")));
    // The guest submits this request while no server runs.
    front.ask(0, 2, READ, 0, &[101]);
    let _export = setup.start();
    assert_eq!(front.answer(0), (2, 0));
    assert!(front.holds(101, 3));
    assert!(!setup.ended.load(Ordering::SeqCst));
}

/// A server that is killed leaves a note that it recorded what it took. The tests cannot kill their
/// own process, so they write the note.
#[test]
fn requests_that_a_killed_server_may_have_completed_are_not_repeated() {
    let folder = std::env::temp_dir().join(format!("blockyard-xen-killed-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let recorded = || xen::XenOptions { records: Some(folder.clone()), ..options() };
    let setup = Setup::new(false);
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    export.stop(soon());
    assert_eq!(front.back("recorded"), None);
    front.ask(0, 2, READ, 0, &[101]);
    // The record says that the last server did not take the request.
    front.front.store.write(&format!("{BACK}/recorded"), "1").unwrap();
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    assert_eq!(front.answer(0), (2, 0));
    export.stop(soon());
    // Without requests in the ring, the record is not needed.
    let lose = |front: &mut Guest| {
        std::fs::remove_file(folder.join("7-xvda-0")).unwrap();
        front.front.store.write(&format!("{BACK}/recorded"), "1").unwrap();
    };
    lose(&mut front);
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    until("the front end is connected", || !export.clients().is_empty());
    assert_eq!(front.done(3, FLUSH, 0, &[]), 0);
    export.stop(soon());
    // A server of an earlier version leaves neither a note nor a record here.
    lose(&mut front);
    front.front.store.remove(&format!("{BACK}/recorded")).unwrap();
    front.ask(0, 6, READ, 0, &[101]);
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    assert_eq!(front.answer(0), (6, 0));
    export.stop(soon());
    lose(&mut front);
    front.ask(0, 4, READ, 0, &[101]);
    for options in [recorded(), options()] {
        let mut refusing = setup.start_of(&setup.disk, options).unwrap();
        front.wait_for_state(5);
        let error = front.back("error").unwrap();
        assert!(error.contains("1 requests of the guest have no response"), "{error}");
        assert!(error.contains("blockyard xen detach --force"), "{error}");
        assert_eq!(front.rings[0].ready(), 0);
        refusing.stop(soon());
    }
    // The guest starts again, with the same pages.
    let _export = setup.start_of(&setup.disk, recorded()).unwrap();
    front.set("state", 6);
    front.wait_for_state(6);
    front.set("state", 1);
    front.connect(PLAIN);
    assert_eq!(front.done(5, FLUSH, 0, &[]), 0);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn requests_of_a_front_end_that_connects_for_the_first_time_are_served() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.wait_for_state(2);
    let (rings, keys) = front.front.rings(&PLAIN, 0, &front.references).unwrap();
    front.rings = rings;
    front.ask(0, 1, READ, 0, &[101]);
    front.front.offer(&keys).unwrap();
    assert_eq!(front.answer(0), (1, 0));
}

#[test]
fn a_device_ends_with_its_domain_or_when_it_is_detached() {
    let setup = Setup::new(true);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    assert_eq!(
        (front.back("info").as_deref(), front.back("feature-discard").as_deref()),
        (Some("4"), Some("0"))
    );
    assert_eq!(front.done(1, WRITE, 0, &[100]), -1, "the disk is read-only");
    let host = Host::Machine(setup.machine.clone());
    let listed = xen::list(&host).unwrap();
    let row: Vec<_> = listed
        .iter()
        .map(|d| (d.domain, d.device.to_string(), d.state, d.sectors, d.read_only))
        .collect();
    assert_eq!(row, [(7, "xvda".to_string(), "connected", Some(32768), true)]);
    // The guest uses the device, so the device stays and is served.
    let device = "xvda".parse().unwrap();
    assert!(!xen::detach(&host, 7, device, false, Duration::from_millis(1)).unwrap());
    front.wait_for_state(5);
    assert_eq!(front.done(2, FLUSH, 0, &[]), 0);
    front.set("state", 6);
    front.front.wait("state", None).unwrap();
    export.stop(soon());
    assert!(setup.ended.load(Ordering::SeqCst));
    assert_eq!((front.mapped(), front.front.store.list(FRONT).unwrap()), (0, Vec::new()));
    assert_eq!(front.front.store.list("/local/domain/0/backend").unwrap(), [""; 0]);
    assert!(matches!(
        xen::detach(&host, 7, device, false, Duration::ZERO),
        Err(xen::XenError::Missing { .. })
    ));
    // The nodes of a destroyed domain are gone.
    let _export = setup.start();
    front.connect(PLAIN);
    front.front.store.remove("/local/domain/7").unwrap();
    front.front.wait("state", None).unwrap();
    assert!(xen::list(&host).unwrap().is_empty());
}

/// `detach --force` runs while the server waits for its disk. Then `attach` makes a device of the
/// same name with another image.
#[test]
fn a_server_does_not_change_a_later_device_of_the_same_name() {
    let mut setup = Setup::new(false);
    setup.disk = disk_with(&["delay:write=500ms"]);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.ask(0, 1, WRITE, 0, &[100]);
    front.wait_until_taken(0);
    let mut store = setup.machine.store(0).unwrap();
    let other = setup.beside();
    let host = Host::Machine(setup.machine.clone());
    xen::detach(&host, 7, "xvda".parse().unwrap(), true, Duration::ZERO).unwrap();
    until("the front end is disconnected", || export.clients().is_empty());
    let _second = other.start();
    let made = store.read(&format!("{BACK}/incarnation")).unwrap();
    assert!(made.is_some());
    export.stop(soon());
    assert_eq!(store.read(&format!("{BACK}/incarnation")).unwrap(), made);
    assert_eq!(store.read(&format!("{BACK}/state")).unwrap().as_deref(), Some("2"));
    assert!(setup.ended.load(Ordering::SeqCst) && !other.ended.load(Ordering::SeqCst));
}

/// One transaction replaces all nodes by the nodes of another device, so that the server finds no
/// node missing.
#[test]
fn a_server_that_finds_another_device_ends_without_a_change() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    let done = front.front.store.transaction(|t| {
        t.write(&format!("{BACK}/incarnation"), "0123456789abcdef")?;
        t.write(&format!("{BACK}/state"), 1)?;
        t.write(&format!("{FRONT}/state"), 5)
    });
    done.unwrap();
    until("the device has ended", || setup.ended.load(Ordering::SeqCst));
    export.stop(soon());
    assert_eq!((front.back("state").as_deref(), front.mapped()), (Some("1"), 0));
}

#[test]
fn requests_complete_while_xenstore_is_lost_and_states_are_followed_later() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    setup.machine.lose_store();
    setup.wait_for_line();
    front.fill(100, 6);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    assert_eq!(export.clients()[0].description, "domain 7");
    // The server sees this state only after it has reconnected.
    front.set("state", 6);
    assert_eq!(front.done(2, READ, 0, &[101]), 0);
    assert!(front.holds(101, 6));
    setup.machine.restore_store();
    // A resize also ends the pause between two attempts to reconnect.
    export.resize();
    front.wait_for_state(6);
    assert_eq!(front.mapped(), 0);
    let lines = setup.lines();
    assert!(lines.len() == 1 && lines[0].contains("its states are not followed"), "{lines:?}");
    assert!(!setup.ended.load(Ordering::SeqCst));
    front.set("state", 1);
    front.connect(PLAIN);
    // A server that stops does not wait for xenstore.
    setup.machine.lose_store();
    export.stop(soon());
    assert_eq!((front.mapped(), front.back("state").as_deref()), (0, Some("4")));
}

/// Reports of clients, as lines.
#[derive(Default)]
struct Reports(Mutex<Vec<String>>);

impl Reports {
    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }
}

impl DiskObserver for Reports {
    fn changed(&self, _: &Arc<str>) -> bool {
        false
    }

    fn connected(&self, _: &str, export: &'static str, client: &ClientId) {
        self.add(format!("{export}: {}", client.description));
    }

    fn disconnected(&self, _: &str, export: &'static str, client: &ClientId, why: &str) {
        self.add(format!("{export}: {}: {why}", client.description));
    }
}

#[test]
fn a_domain_is_reported_when_it_connects_and_when_it_disconnects() {
    let setup = Setup::new(false);
    let reports = Arc::new(Reports::default());
    setup.disk.observe(reports.clone());
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.set("state", 6);
    front.wait_for_state(6);
    front.set("state", 1);
    front.connect(PLAIN);
    export.stop(soon());
    let (comes, goes) = ("xen: domain 7", "xen: domain 7: its device is disconnected");
    assert_eq!(*reports.0.lock().unwrap(), [comes, goes, comes, goes]);
}

#[test]
fn a_new_size_is_announced() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.front.store.write(&format!("{BACK}/sectors"), "old").unwrap();
    export.resize();
    front.front.wait("sectors", Some("32768")).unwrap();
}

#[test]
fn a_front_end_that_was_restored_connects_with_other_rings() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 4);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    // The front end did not close the device before its domain was saved.
    front.offer_again(PLAIN, 8);
    front.ask(0, 2, READ, 0, &[101]);
    assert_eq!(front.answer(0), (2, 0));
    assert!(front.holds(101, 4));
    front.wait_for_state(4);
    assert!(
        front.front.domain.revoke(front.references[0]),
        "its first ring is not mapped any more"
    );
}

/// The server sees one change: from state 4 to state 4.
#[test]
fn other_rings_are_used_although_the_server_did_not_see_state_3() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 4);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    let (rings, keys) = front.front.rings(&PLAIN, 8, &front.references).unwrap();
    front.rings = rings;
    let offered = front.front.store.transaction(|t| {
        keys.iter().try_for_each(|(key, value)| t.write(&format!("{FRONT}/{key}"), value))?;
        t.write(&format!("{FRONT}/state"), 4)
    });
    offered.unwrap();
    front.ask(0, 2, READ, 0, &[101]);
    assert_eq!(front.answer(0), (2, 0));
    assert!(front.holds(101, 4));
}

#[test]
fn the_next_server_accepts_the_queues_that_the_last_one_offered() {
    let setup = Setup::new(false);
    let mut export = setup.start();
    let mut front = Guest::new(&setup);
    front.connect(Terms { queues: 2, ..PLAIN });
    export.stop(soon());
    let _next = setup.start_of(&setup.disk, xen::XenOptions { queues: 1, ..options() }).unwrap();
    for queue in [0, 1] {
        front.ask(queue, 5, READ, 0, &[100]);
        assert_eq!(front.answer(queue), (5, 0));
    }
    assert_eq!(front.back("state").as_deref(), Some("4"));
    // A front end that starts again uses the features that this server offers.
    front.set("state", 6);
    front.wait_for_state(6);
    front.set("state", 1);
    front.wait_for_state(2);
    assert_eq!(front.back("multi-queue-max-queues").as_deref(), Some("1"));
}

/// A guest without persistent grants names one data page 256 times in each request, in a ring of 16
/// pages.
#[test]
fn a_guest_cannot_make_the_server_hold_hundreds_of_megabytes() {
    const REQUESTS: u64 = 150;
    let mut setup = Setup::new(false);
    setup.disk = disk_with(&["delay:write=100ms"]);
    let _export = setup.start_with(XenData::Auto);
    let mut front = Guest::new(&setup);
    front.connect(Terms { order: Some(4), ..PLAIN });
    let described = front.segments(&[111; 256]);
    front.front.memory.write(110 * PAGE, &described);
    let rest = indirect(front.references[110]);
    for id in 0..REQUESTS {
        front.put(0, id, 0, [INDIRECT, WRITE, 0, 1], &rest);
    }
    // Each request needs 257 copies, which are 1 MiB in total.
    let (mut most, mut answered, began) = (0, 0, Instant::now());
    while answered < REQUESTS {
        assert!(began.elapsed() < LIMIT, "{answered} answers");
        let taken = front.front.domain.counts().copied / 257;
        most = most.max(taken.saturating_sub(answered + u64::from(front.rings[0].ready())));
        while let Some(answer) = front.rings[0].pop() {
            assert_eq!(answer.status, 0);
            answered += 1;
        }
        std::thread::yield_now();
    }
    assert!((1..=32).contains(&most), "one ring of one guest held {most} MiB");
}

/// The guest sends flushes only if the server offered flushes when the guest connected.
#[test]
fn writes_are_durable_if_the_last_server_offered_no_flush() {
    let path = std::env::temp_dir().join(format!("blockyard-xen-flush-{}", std::process::id()));
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let journal = Journal::default();
    let chain = ChainOptions {
        cache: CacheMode::Writeback,
        journal: Some(journal.clone()),
        ..ChainOptions::new(&path)
    };
    let source = Source::open(&chain).unwrap();
    let disk = |cache| {
        let (name, serial) = ("flush".into(), String::new());
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        Arc::new(Disk::new(options, source.clone()))
    };
    // Number of lines in the journal for one write: its begin and end, and those of a sync.
    for (first, lines) in [(CacheMode::Writethrough, 4), (CacheMode::Writeback, 2)] {
        let setup = Setup::new(false);
        let mut export = setup.start_of(&disk(first), options()).unwrap();
        let mut front = Guest::new(&setup);
        front.connect(PLAIN);
        export.stop(soon());
        let _next = setup.start_of(&disk(CacheMode::Writeback), options()).unwrap();
        assert_eq!(front.done(1, READ, 0, &[100]), 0);
        let before = journal.len();
        assert_eq!(front.done(2, WRITE, 0, &[100]), 0);
        assert_eq!(journal.len() - before, lines, "{first:?}");
    }
    std::fs::remove_file(&path).unwrap();
}

/// A deadline in the past still leaves a server the time to note that all requests are answered.
#[test]
fn stop_with_a_deadline_in_the_past_ends_and_settles_the_device() {
    let past = Instant::now();
    let folder = std::env::temp_dir().join(format!("blockyard-xen-past-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let recorded = || xen::XenOptions { records: Some(folder.clone()), ..options() };
    let setup = Setup::new(false);
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    front.fill(100, 7);
    assert_eq!(front.done(1, WRITE, 0, &[100]), 0);
    assert_eq!(front.back("recorded").as_deref(), Some("1"));
    export.stop(past);
    assert!(export.clients().is_empty() && !setup.ended.load(Ordering::SeqCst));
    assert_eq!((front.back("recorded"), front.mapped()), (None, 0));
    let mut next = setup.start_of(&setup.disk, recorded()).unwrap();
    assert_eq!(front.done(2, READ, 0, &[101]), 0);
    assert!(front.holds(101, 7));
    next.stop(soon());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_domain_that_does_not_exist_is_refused() {
    let setup = Setup::new(false);
    let host = Host::Machine(setup.machine.clone());
    let started =
        xen::Xen::start(setup.disk.clone(), &options(), &host, setup.reactors.clone(), || ());
    let refused = started.err().expect("there is no domain 7").to_string();
    assert!(refused.contains("domain 7, device xvda: there is no such domain"), "{refused}");
    assert_eq!(setup.machine.store(0).unwrap().list("/local/domain").unwrap(), ["0"]);
}

#[test]
fn a_second_server_of_a_device_in_use_is_refused() {
    let folder = std::env::temp_dir().join(format!("blockyard-xen-second-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let recorded = || xen::XenOptions { records: Some(folder.clone()), ..options() };
    let (setup, other) = (Setup::new(false), Setup::new(false));
    let mut export = setup.start_of(&setup.disk, recorded()).unwrap();
    let mut front = Guest::new(&setup);
    front.connect(PLAIN);
    let refused = |disk, options| {
        setup.start_of(disk, options).err().expect("the second server is not refused").to_string()
    };
    let live = refused(&setup.disk, recorded());
    assert!(live.contains("domain 7, device xvda: another server serves the device"), "{live}");
    assert_eq!((front.done(1, FLUSH, 0, &[]), front.back("state").as_deref()), (0, Some("4")));
    export.stop(soon());
    // The second server is also refused without a folder of records, and so without a lock.
    for options in [recorded(), options()] {
        let image = refused(&other.disk, options);
        assert!(image.contains(&format!("has image {}", setup.disk.name())), "{image}");
    }
    assert_eq!(front.back("state").as_deref(), Some("4"));
    let mut next = setup.start_of(&setup.disk, recorded()).unwrap();
    assert_eq!(front.done(2, FLUSH, 0, &[]), 0);
    // The lock file is removed with the device.
    assert!(folder.join("7-xvda.lock").exists());
    front.front.store.remove("/local/domain/7").unwrap();
    front.front.wait("state", None).unwrap();
    next.stop(soon());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir(&folder).unwrap();
}
