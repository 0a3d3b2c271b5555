//! Calls of the yard with results that depend on what other commands do meanwhile.

use std::sync::mpsc::sync_channel;

use super::*;
use crate::fixture::{Calls, FakeWay, LIMIT, settings, shares};

fn start() -> Yard {
    Yard::start(Arc::new(Reactors::start(1, &[]).unwrap()), shares()).unwrap()
}

/// Adds a disk that waits for `hold` before its image is opened.
fn add_held(yard: &Yard, name: &str, calls: &Calls) -> (SyncHold, Receiver<Result<(), String>>) {
    let ((hold, held), (sender, added)) = (sync_channel(0), sync_channel(1));
    let settings = settings(name, "ram:1M", [FakeWay::new("export", calls)]);
    let wait = move || {
        let _: Result<(), _> = held.recv_timeout(LIMIT);
        Ok(settings)
    };
    let then = move |result: Result<(), YardError>| {
        sender.send(result.map_err(|e| e.to_string())).unwrap();
    };
    yard.add_then(name.into(), wait, then);
    (hold, added)
}

type SyncHold = mpsc::SyncSender<()>;

#[test]
fn a_name_in_use_is_refused_and_its_disk_stays() {
    let (yard, calls) = (start(), Calls::default());
    let add = |size: &str| yard.begin_add(settings("a", size, [FakeWay::new("export", &calls)]));
    let (first, second) = (add("ram:1M"), add("ram:2M"));
    assert!(first.wait_at_most(LIMIT).ok().unwrap().is_ok());
    let refused = second.wait_at_most(LIMIT).ok().unwrap();
    assert!(matches!(refused, Err(YardError::NameTaken { disk }) if disk == "a"));
    assert_eq!(*calls.lock().unwrap(), ["export start"], "the second export never starts");
    assert_eq!(yard.info("a").map(|row| row.capacity), Some(1 << 20));
    // The name is free again with the end of the disk.
    assert!(yard.remove("a").unwrap().is_flushed);
    assert!(add("ram:2M").wait_at_most(LIMIT).ok().unwrap().is_ok());
    assert_eq!(yard.close().len(), 1);
}

#[test]
fn a_command_that_still_runs_is_not_lost() {
    let (yard, calls) = (start(), Calls::default());
    let (hold, added) = add_held(&yard, "a", &calls);
    let pending = yard.begin_remove("a");
    let Err(pending) = pending.wait_at_most(Duration::ZERO) else {
        panic!("it waits for the disk")
    };
    assert!(matches!(yard.disconnect("a", None), Err(YardError::NotFound { .. })));
    drop(hold);
    assert_eq!(added.recv_timeout(LIMIT).unwrap(), Ok(()));
    assert!(pending.wait_at_most(LIMIT).ok().unwrap().unwrap().is_flushed);
    assert_eq!(*calls.lock().unwrap(), ["export start", "export stop", "export gone"]);
}

#[test]
fn a_yard_that_ends_adds_no_disk_and_answers_waiting_commands() {
    let (yard, calls) = (start(), Calls::default());
    let (hold, _added) = add_held(&yard, "a", &calls);
    let waiting = yard.begin_refresh("a");
    assert_eq!(yard.close().len(), 0, "no client has written to a disk that is being opened");
    drop(hold);
    let closing = |result: Result<(), YardError>| matches!(result, Err(YardError::Closing));
    assert!(closing(waiting.wait_at_most(LIMIT).ok().unwrap().map(drop)));
    assert!(closing(yard.add(settings("b", "ram:1M", []))));
    assert!(closing(yard.remove("a").map(drop)));
    assert!(closing(yard.clients("a").map(drop)));
    assert!(closing(yard.resume("a").map(drop)));
    assert!(yard.list().is_empty() && yard.info("a").is_none());
    assert_eq!(*calls.lock().unwrap(), [""; 0], "its export never starts");
}

#[test]
fn a_drain_is_refused_if_an_export_s_requests_may_not_wait_as_long() {
    let (yard, calls) = (start(), Calls::default());
    let longest_hold = Some(Duration::from_secs(20));
    let way = FakeWay { longest_hold, ..FakeWay::new("export", &calls) };
    yard.add(settings("a", "ram:1M", [way])).unwrap();
    let drain = |limit| {
        let pending = yard.begin_drain("a", Duration::from_secs(limit)).unwrap();
        pending.wait_at_most(LIMIT).ok().unwrap()
    };
    let refused = drain(21);
    assert!(matches!(refused, Err(YardError::Holds { what: "a drain", .. })), "{refused:?}");
    assert!(!yard.info("a").unwrap().is_drained);
    drain(20).unwrap();
    let row = yard.info("a").unwrap();
    assert!(row.is_drained && row.drain_left.is_some_and(|left| left <= Duration::from_secs(20)));
    let resumed = yard.resume("a").unwrap();
    assert_eq!((resumed, yard.info("a").unwrap().is_drained), ((true, 0), false));
    yard.close();
}

#[test]
fn a_hand_over_leaves_a_disk_that_cannot_go() {
    let (yard, calls) = (start(), Calls::default());
    yard.add(settings("a", "ram:1M", [FakeWay::new("export", &calls)])).unwrap();
    let handed = |name: &str| {
        let handed = yard.begin_hand_over(name).wait_at_most(LIMIT).ok().unwrap();
        handed.map(|handed| handed.ended.is_flushed)
    };
    let why = handed("a").unwrap_err().to_string();
    let expected = "disk \"a\" cannot be handed over: its data are in the memory of this server";
    assert_eq!(why, expected);
    assert!(matches!(handed("b"), Err(YardError::NotFound { disk }) if disk == "b"));
    assert_eq!(yard.clients("a").unwrap().len(), 1);
    assert_eq!(*calls.lock().unwrap(), ["export start"]);
    let image = crate::fixture::Image::new(1 << 20);
    yard.add(settings("c", &image.0, [])).unwrap();
    assert!(handed("c").unwrap());
    assert!(yard.info("c").is_none());
    yard.close();
}

#[test]
fn a_later_server_opens_the_overlay_of_a_snapshot() {
    let yard = start();
    yard.add(settings("a", "ram:1M", [])).unwrap();
    yard.adopt_overlay("a", "overlay.qcow2".into());
    // A command behind it finds the change.
    assert_eq!(yard.refresh("a").unwrap(), None);
    assert_eq!(yard.info("a").unwrap().image, Some("overlay.qcow2".into()));
    yard.close();
}
