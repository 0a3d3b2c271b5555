//! Front ends that make the signals to them slow.

use std::os::fd::OwnedFd;

use blockyard_driver::status;
use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
use rustix::process::Signal;

use crate::common::{Daemon, Folder, SOON, until};
use crate::guest::{Guest, pattern};

/// Adds waiters to an eventfd. They wait for an event that it does not have. So a write to it runs
/// through all of them and wakes none.
fn add_waiters(event: &OwnedFd, number: usize) -> Vec<OwnedFd> {
    const EACH: usize = 200;
    let duplicates: Vec<_> = (0..EACH).map(|_| event.try_clone().unwrap()).collect();
    (0..number / EACH)
        .map(|_| {
            let epoll = create(CreateFlags::CLOEXEC).unwrap();
            for fd in &duplicates {
                add(&epoll, fd, EventData::new_u64(0), EventFlags::PRI).unwrap();
            }
            epoll
        })
        .collect()
}

#[test]
fn a_thread_signals_a_front_end_that_makes_signals_slow() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    let bytes = pattern(1, 4096);
    assert_eq!(guest.write(0, &bytes), status::OK);
    let waiters = add_waiters(&guest.queue().call_eventfd(), 50_000);
    until("a thread sends the signals", SOON, || {
        assert!(guest.read(0, 4096).unwrap() == bytes);
        daemon.log().contains("because its descriptor has many waiters")
    });
    // Each answer comes with a signal: without one, the guest would wait.
    (0..100).for_each(|_| assert!(guest.read(0, 4096).unwrap() == bytes));
    daemon.signal(Signal::USR1);
    daemon.wait_log("and they left the reactor");
    assert!(!daemon.log().contains("left the reactor 0 times"), "{}", daemon.log());
    drop(waiters);
    (0..100).for_each(|_| assert!(guest.read(0, 4096).unwrap() == bytes));
    guest.leave();
    daemon.stop();
}
