//! One disk and its exports, without a yard.

use std::sync::Mutex;

use blockyard_image::CacheMode;

use super::*;
use crate::fixture::{Calls, FakeObserver, FakeWay, Image, context, settings, until};

fn open(settings: DiskSettings, context: &Context) -> Result<ServedDisk, YardError> {
    ServedDisk::open(settings, context, &Opener::default()).map(|(disk, _)| disk)
}

fn calls(calls: &Calls) -> Vec<String> {
    std::mem::take(&mut *calls.lock().unwrap())
}

#[test]
fn exports_start_in_order_and_stop_before_the_image_is_closed() {
    let observer = FakeObserver::new();
    let (context, log) = (context(Some(observer.clone())), Calls::default());
    let ways = ["first", "second"].map(|name| FakeWay::new(name, &log));
    let deadlines = ways.clone().map(|way| way.deadline);
    let disk = open(settings("a", "ram:1M", ways), &context).unwrap();
    assert_eq!(calls(&log), ["first start", "second start"]);
    let report = disk.exports.report(&disk.disk, &context.reactors);
    let names: Vec<_> = report.clients.iter().map(|client| &*client.description).collect();
    assert_eq!(names, ["client of first", "client of second"]);
    let (weak, before) = (Arc::downgrade(&disk.disk), Instant::now());
    let ended = disk.close(&context);
    let after = Instant::now();
    assert_eq!((&*ended.name, ended.is_flushed), ("a", true));
    assert_eq!(calls(&log), ["first stop", "second stop", "first gone", "second gone"]);
    for deadline in deadlines.map(|deadline| deadline.lock().unwrap().expect("it was stopped")) {
        assert!((before + STOP_TIME..=after + STOP_TIME).contains(&deadline));
    }
    // A reactor may drop its reference just after its reply.
    until("the reactors leave the disk", || weak.strong_count() == 0);
    let expected = ["added a 1048576 [\"/first\", \"/second\"]", "removed a true None"];
    assert_eq!(observer.events(), expected);
}

/// An export that cannot start leaves neither the earlier exports nor the open image behind.
#[test]
fn a_failed_offer_leaves_nothing_behind() {
    let observer = FakeObserver::new();
    let (context, log) = (context(Some(observer.clone())), Calls::default());
    let image = Image::new(1 << 20);
    /// Keeps the disk that it was started for.
    struct Keeps(Mutex<std::sync::Weak<Disk>>);
    impl crate::interface::settings::Way for Keeps {
        fn describe(&self) -> String {
            "/keeps".into()
        }
        fn start(
            &self,
            disk: &Arc<Disk>,
            reactors: &Arc<Reactors>,
        ) -> Result<Box<dyn Export>, crate::interface::settings::WayError> {
            *self.0.lock().unwrap() = Arc::downgrade(disk);
            // The first client of an export opens the image on a reactor.
            let opened = disk.clone();
            let is_open = reactors.next().ask(move |handle, reply| {
                reply.send(LocalDisk::local(handle, &opened).is_ok());
            });
            assert_eq!(is_open, Some(true));
            FakeWay::new("keeps", &Calls::default()).start(disk, reactors)
        }
    }
    let keeps = Arc::new(Keeps(Mutex::default()));
    let failing = FakeWay { fails: true, ..FakeWay::new("third", &log) };
    let mut wrong = settings("a", &image.0, [FakeWay::new("first", &log), failing]);
    wrong.ways.insert(1, keeps.clone());
    let error = open(wrong, &context).err().unwrap();
    assert!(matches!(error, YardError::Export { ref disk, .. } if disk == "a"), "{error}");
    assert_eq!(calls(&log), ["first start", "third start", "first gone"]);
    // A reactor may drop its reference just after its reply.
    until("the reactors leave the disk", || keeps.0.lock().unwrap().strong_count() == 0);
    let events = observer.events();
    assert_eq!(events[1..], ["removed a true Some(\"the address is taken\")"]);
    // The image is not locked.
    let disk = open(settings("a", &image.0, [FakeWay::new("first", &log)]), &context).unwrap();
    assert!(disk.close(&context).is_flushed);
}

#[test]
fn no_export_starts_if_another_server_opens_the_disks() {
    let (context, log) = (context(None), Calls::default());
    context.openings.hold(Duration::ZERO).unwrap().for_good();
    let refused = open(settings("a", "ram:1M", [FakeWay::new("first", &log)]), &context);
    assert!(matches!(refused.err(), Some(YardError::Closing)));
    assert_eq!(calls(&log), [""; 0]);
}

#[test]
fn a_new_size_reaches_all_exports() {
    let observer = FakeObserver::new();
    let (context, log, image) =
        (context(Some(observer.clone())), Calls::default(), Image::new(1 << 20));
    let ways = ["first", "second", "third"].map(|name| FakeWay::new(name, &log));
    let mut disk = open(settings("a", &image.0, ways), &context).unwrap();
    calls(&log);
    assert_eq!(disk.refresh(&context).unwrap(), None);
    assert_eq!(calls(&log), [""; 0], "the size is the same");
    let size = Resized { old: 1 << 20, new: 3 << 20 };
    assert_eq!(disk.grow(3 << 20, &context).unwrap(), Some(size));
    assert_eq!(calls(&log), ["first resize", "second resize", "third resize"]);
    assert_eq!(std::fs::metadata(&image.0).unwrap().len(), 3 << 20);
    // An image never shrinks this way, and no export hears of it.
    assert!(disk.grow(1 << 20, &context).is_err());
    assert_eq!((calls(&log).len(), disk.disk.capacity()), (0, 3 << 20));
    let events = observer.events();
    let growth =
        ["grows a 3145728", "grown a None", "resized a 1048576 3145728", "grows a 1048576"];
    assert_eq!(events[1..5], growth);
    assert!(events[5].starts_with("grown a Some("), "{events:?}");
    assert_eq!(events.len(), 6);
    disk.close(&context);
}

#[test]
fn the_most_impatient_export_limits_how_long_requests_are_held() {
    let (context, log) = (context(None), Calls::default());
    let ways = [(Some(20), "first"), (None, "second"), (Some(5), "third")].map(|(limit, name)| {
        let longest_hold = limit.map(Duration::from_secs);
        FakeWay { longest_hold, ..FakeWay::new(name, &log) }
    });
    let disk = open(settings("a", "ram:1M", ways), &context).unwrap();
    let check = |limit: Option<u64>| disk.check_hold("a drain", limit.map(Duration::from_secs));
    assert!(check(Some(5)).is_ok());
    for limit in [Some(6), Some(20), None] {
        let Err(YardError::Holds { disk, what, longest }) = check(limit) else {
            panic!("{limit:?}");
        };
        let time = Duration::from_secs(5);
        assert_eq!((&*disk, what, longest.time), ("a", "a drain", time), "{limit:?}");
    }
    disk.close(&context);
    let patient = open(settings("b", "ram:1M", [FakeWay::new("first", &log)]), &context).unwrap();
    assert!(patient.check_hold("a drain", None).is_ok());
    patient.close(&context);
}

#[test]
fn a_change_takes_effect_as_a_whole_or_not_at_all() {
    let (context, log) = (context(None), Calls::default());
    let ways = [Some(Duration::from_secs(9)), None]
        .map(|longest_hold| FakeWay { longest_hold, ..FakeWay::new("export", &log) });
    let [limited, free] = ways.map(|way| open(settings("a", "ram:1M", [way]), &context).unwrap());
    let change = Change {
        knobs: Some(Knobs { weight: 7, ..Knobs::default() }),
        clients: Some(Some(vec!["x".into()])),
        on_enospc: Some(OnEnospc::Pause),
    };
    calls(&log);
    for (mut disk, is_refused) in [(limited, true), (free, false)] {
        let changed = disk.change(&change);
        assert_eq!(matches!(changed, Err(YardError::Holds { .. })), is_refused);
        assert_eq!(changed.is_err(), is_refused);
        let (weight, on_enospc) = if is_refused {
            (Knobs::default().weight, OnEnospc::Error)
        } else {
            (7, OnEnospc::Pause)
        };
        assert_eq!((disk.settings.knobs.weight, disk.settings.on_enospc), (weight, on_enospc));
        assert_eq!(disk.disk.share().figures().weight, f64::from(weight));
        let allowed = if is_refused { vec![] } else { vec!["export allow Some([\"x\"])"] };
        assert_eq!(calls(&log), allowed);
        disk.close(&context);
        calls(&log);
    }
}

#[test]
fn a_change_of_nothing_changes_nothing() {
    let (context, log) = (context(None), Calls::default());
    let mut disk = open(settings("a", "ram:1M", [FakeWay::new("export", &log)]), &context).unwrap();
    calls(&log);
    disk.change(&Change::default()).unwrap();
    assert_eq!(calls(&log), [""; 0]);
    disk.change(&Change { clients: Some(None), ..Change::default() }).unwrap();
    assert_eq!(calls(&log), ["export allow None"]);
    disk.close(&context);
}

/// Returns why a disk cannot be handed over.
fn obstacle(disk: &ServedDisk, context: &Context) -> Option<String> {
    disk.obstacle(context, &Opener::default()).map(|why| why.to_string())
}

#[test]
fn a_disk_stays_as_long_as_something_would_be_lost() {
    let (context, log, image) = (context(None), Calls::default(), Image::new(1 << 20));
    let in_memory = open(settings("m", "ram:1M", []), &context).unwrap();
    let why = "its data are in the memory of this server";
    assert_eq!(obstacle(&in_memory, &context).as_deref(), Some(why));
    in_memory.close(&context);

    let device = Some("/dev/ublkb7".into());
    let with_device = FakeWay { device, ..FakeWay::new("device", &log) };
    let disk = open(settings("d", &image.0, [with_device]), &context).unwrap();
    let why = "/dev/ublkb7 ends with its server";
    assert_eq!(obstacle(&disk, &context).as_deref(), Some(why));
    disk.close(&context);

    let disk = open(settings("a", &image.0, [FakeWay::new("export", &log)]), &context).unwrap();
    assert_eq!(obstacle(&disk, &context), None);
    disk.disk.drain(Duration::from_secs(60)).unwrap();
    let why = obstacle(&disk, &context).unwrap();
    assert!(why.starts_with("it is drained"), "{why}");
    disk.disk.resume();
    assert_eq!(obstacle(&disk, &context), None);
    // The next server would open another file, or none.
    let elsewhere = image.0.with_extension("moved");
    std::fs::rename(&image.0, &elsewhere).unwrap();
    let why = obstacle(&disk, &context).expect("the image is gone");
    std::fs::rename(&elsewhere, &image.0).unwrap();
    assert!(why.contains(&*image.0.to_string_lossy()), "{why}");
    assert_eq!(obstacle(&disk, &context), None);
    disk.close(&context);
}

#[test]
fn a_disk_is_handed_over_with_the_exports_that_can_go_on() {
    let (context, log, image) = (context(None), Calls::default(), Image::new(1 << 20));
    let hands_over = FakeWay { hands_over: true, ..FakeWay::new("second", &log) };
    let ways = [FakeWay::new("first", &log), hands_over];
    let disk = open(settings("a", &image.0, ways), &context).unwrap();
    calls(&log);
    let handed = disk.hand_over(&context);
    let exports: Vec<_> = handed.exports.iter().map(|h| (h.kind, &*h.parcel.bytes)).collect();
    assert_eq!(exports, [("fake", &b"second"[..])]);
    assert_eq!((&*handed.settings.name, handed.ended.is_flushed), ("a", true));
    let carried = handed.carried.expect("it is flushed");
    assert!(carried.shown.is_some(), "clients have seen the disk");
    assert!(handed.program.unwrap().is_none());
    let order = calls(&log);
    assert_eq!(order[..2], ["first hand over", "second hand over"]);
    assert_eq!(order[2..], ["first stop", "second stop", "first gone", "second gone"]);
}

#[test]
fn a_serial_number_is_cut_between_characters() {
    for (given, expected) in [("a".repeat(30), "a".repeat(20)), ("ü".repeat(30), "ü".repeat(10))]
    {
        let with_serial = DiskSettings { serial: given, ..settings("a", "ram:1M", []) };
        assert_eq!(options(&with_serial).serial, expected);
    }
    // The second byte of the last character would be byte 21.
    let odd =
        DiskSettings { serial: format!("a{}", "ü".repeat(30)), ..settings("a", "ram:1M", []) };
    assert_eq!(options(&odd).serial.len(), 19);
}

/// Another server may write to the image, so this one must not lock it yet.
#[test]
fn an_image_that_is_activated_later_is_only_looked_at() {
    let mut later = settings("a", "disk.raw", []);
    later.image.cache = CacheMode::Writeback;
    (later.image.prime, later.image.copy_on_read) = (true, true);
    let first = first_options(&later);
    assert!(!first.read_only && !first.force_share && first.prime && first.copy_on_read);
    later.activation = Activation::Rings;
    let first = first_options(&later);
    assert!(first.read_only && first.force_share && !first.prime && !first.copy_on_read);
    assert!(first.shared.is_none());
}
