//! The table of disks, driven by messages.

use std::sync::mpsc::sync_channel;

use super::*;
use crate::fixture::{Calls, FakeObserver, FakeWay, LIMIT, context, settings};

/// A keeper on its thread.
struct Kept {
    messages: Sender<Message>,
    calls: Calls,
    observer: Arc<FakeObserver>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let (sender, receiver) = sync_channel(1);
        let _ = self.messages.send(Message::Close(sender));
        let _ = receiver.recv_timeout(LIMIT);
    }
}

/// A command that waits until the sender is dropped.
type Hold = SyncSender<()>;

impl Kept {
    fn start() -> Self {
        let (messages, receiver) = mpsc::channel();
        let observer = FakeObserver::new();
        let keeper = Keeper::new(Arc::new(context(Some(observer.clone()))), messages.clone());
        std::thread::spawn(move || keeper.run(&receiver));
        Kept { messages, calls: Calls::default(), observer }
    }

    fn send(&self, name: &str, state: DiskState, operation: Operation) {
        self.messages.send(Message::Do { name: name.into(), state, operation }).unwrap();
    }

    fn ask<T>(&self, message: impl FnOnce(SyncSender<T>) -> Message) -> T {
        let (sender, receiver) = sync_channel(1);
        self.messages.send(message(sender)).unwrap();
        receiver.recv_timeout(LIMIT).unwrap()
    }

    fn list(&self) -> Vec<(String, DiskState)> {
        self.ask(Message::List).into_iter().map(|disk| (disk.name, disk.state)).collect()
    }

    /// Adds a disk with one export, and waits until it is served.
    fn add(&self, name: &str) {
        let settings = settings(name, "ram:1M", [FakeWay::new("export", &self.calls)]);
        let (sender, receiver) = sync_channel(1);
        let operation: Operation = Box::new(move |context, opener, _| {
            let opened = ServedDisk::open(settings, context, opener);
            (opened.ok().map(|(disk, _)| disk), Box::new(move || sender.send(()).unwrap()))
        });
        self.send(name, DiskState::Opening, operation);
        receiver.recv_timeout(LIMIT).unwrap();
    }

    /// Sends a command that has begun when this returns, and that ends with the result.
    fn hold(&self, name: &str, state: DiskState) -> Hold {
        let ((hold, held), (begin, begun)) = (sync_channel(0), sync_channel(1));
        let operation: Operation = Box::new(move |_, _, disk| {
            begin.send(()).unwrap();
            let _ = held.recv_timeout(LIMIT);
            (disk, Box::new(|| ()))
        });
        self.send(name, state, operation);
        begun.recv_timeout(LIMIT).unwrap();
        hold
    }
}

/// Returns a command that records whether it got a disk.
fn note(log: &Calls, text: &'static str) -> Operation {
    let log = log.clone();
    Box::new(move |_, _, disk| {
        log.lock().unwrap().push(format!("{text} {}", disk.is_some()));
        (disk, Box::new(|| ()))
    })
}

/// Waits until all commands for a disk that were sent have ended.
fn settle(kept: &Kept, name: &str) {
    let (sender, receiver) = sync_channel(1);
    let operation: Operation =
        Box::new(move |_, _, disk| (disk, Box::new(move || sender.send(()).unwrap())));
    kept.send(name, DiskState::Busy, operation);
    receiver.recv_timeout(LIMIT).unwrap();
}

#[test]
fn commands_for_a_disk_run_in_the_order_of_their_messages() {
    let kept = Kept::start();
    kept.add("a");
    let (log, hold) = (Calls::default(), kept.hold("a", DiskState::Busy));
    for text in ["first", "second", "third"] {
        kept.send("a", DiskState::Busy, note(&log, text));
    }
    // Another disk does not wait.
    kept.add("b");
    assert_eq!(
        kept.list(),
        [("a".into(), DiskState::Busy), ("b".into(), DiskState::Serving)],
        "in the order of their arrival"
    );
    assert_eq!(*log.lock().unwrap(), [""; 0]);
    drop(hold);
    settle(&kept, "a");
    assert_eq!(*log.lock().unwrap(), ["first true", "second true", "third true"]);
    assert_eq!(kept.list()[0], ("a".into(), DiskState::Serving));
}

#[test]
fn a_name_without_a_disk_is_no_disk_and_leaves_no_entry() {
    let kept = Kept::start();
    let log = Calls::default();
    let hold = kept.hold("none", DiskState::Busy);
    assert_eq!(kept.list(), []);
    let row = |name: &str| kept.ask(|reply| Message::Info { name: name.into(), reply });
    assert!(row("none").is_none());
    kept.send("none", DiskState::Busy, note(&log, "waits"));
    drop(hold);
    settle(&kept, "none");
    assert_eq!(*log.lock().unwrap(), ["waits false"]);
    kept.add("none");
    assert_eq!(row("none").map(|row| row.state), Some(DiskState::Serving));
}

#[test]
fn a_command_that_must_run_alone_comes_back_while_another_one_runs() {
    let kept = Kept::start();
    kept.add("a");
    let log = Calls::default();
    let try_it = |name: &str, text| {
        let operation = note(&log, text);
        kept.ask(|refused| Message::Try { name: name.into(), operation, refused }).is_some()
    };
    let hold = kept.hold("a", DiskState::Busy);
    assert!(try_it("a", "refused"), "it comes back");
    assert!(!try_it("other", "free"));
    drop(hold);
    settle(&kept, "a");
    assert!(!try_it("a", "alone"));
    settle(&kept, "a");
    settle(&kept, "other");
    let mut noted = log.lock().unwrap().clone();
    noted.sort();
    assert_eq!(noted, ["alone true", "free false"]);
}

#[test]
fn a_disk_that_is_closed_is_still_listed_and_not_found() {
    let kept = Kept::start();
    kept.add("a");
    let find = || kept.ask(|reply| Message::Find { name: "a".into(), reply }).is_some();
    let hold = kept.hold("a", DiskState::Busy);
    assert!(find(), "it stays open while a command runs");
    drop(hold);
    settle(&kept, "a");
    let hold = kept.hold("a", DiskState::Closing);
    assert!(!find());
    assert_eq!(kept.ask(Message::Known).len(), 0);
    assert_eq!(kept.ask(Message::Disks).len(), 1, "its images are still open");
    assert_eq!(kept.list(), [("a".into(), DiskState::Closing)]);
    drop(hold);
    settle(&kept, "a");
    assert!(find());
    assert_eq!(kept.ask(Message::Known).len(), 1);
}

/// A command that panics loses its disk, and blocks neither the name nor the keeper.
#[test]
fn a_panic_in_a_command_frees_the_name() {
    let kept = Kept::start();
    kept.add("a");
    let (log, hold) = (Calls::default(), kept.hold("a", DiskState::Busy));
    kept.send("a", DiskState::Busy, Box::new(|_, _, _| panic!("on purpose")));
    kept.send("a", DiskState::Busy, note(&log, "after"));
    drop(hold);
    settle(&kept, "a");
    assert_eq!(*log.lock().unwrap(), ["after false"]);
    assert_eq!(*kept.calls.lock().unwrap(), ["export start", "export gone"]);
    kept.add("a");
    assert_eq!(kept.list(), [("a".into(), DiskState::Serving)]);
}

#[test]
fn the_end_closes_all_disks_after_their_commands() {
    let kept = Kept::start();
    kept.add("b");
    kept.add("a");
    let (log, hold) = (Calls::default(), kept.hold("a", DiskState::Busy));
    kept.send("a", DiskState::Busy, note(&log, "before"));
    let (sender, receiver) = sync_channel(1);
    kept.messages.send(Message::Close(sender)).unwrap();
    // The keeper answers this after it has begun the end.
    assert!(kept.list().contains(&("a".into(), DiskState::Busy)));
    assert!(receiver.try_recv().is_err(), "a command still runs");
    drop(hold);
    let mut ended: Vec<_> = receiver.recv_timeout(LIMIT).unwrap();
    ended.sort_by(|one, other| one.name.cmp(&other.name));
    let ended: Vec<_> = ended.iter().map(|disk| (&*disk.name, disk.is_flushed)).collect();
    assert_eq!(ended, [("a", true), ("b", true)]);
    assert_eq!(*log.lock().unwrap(), ["before true"]);
    let removed = kept.observer.events().into_iter().filter(|e| e.starts_with("removed"));
    assert_eq!(removed.count(), 2);
}
