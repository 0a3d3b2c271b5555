//! Waits of the unit tests. Each has a limit that only something that hangs reaches.

use std::process::{Child, ExitStatus};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Longest wait for an event. The event itself ends the wait.
pub const HANG: Duration = Duration::from_secs(60);

/// Waits until a child has ended, and returns its status.
#[track_caller]
pub fn end_of(child: &mut Child) -> ExitStatus {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    let limit = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    let mut ends = [PollFd::new(&process, PollFlags::IN)];
    if rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, Some(&limit))).unwrap() == 0 {
        let _ = child.kill();
        panic!("the child has not ended within {HANG:?}");
    }
    child.wait().unwrap()
}

/// Waits for the next value of a channel.
#[track_caller]
pub fn next<T>(events: &Receiver<T>) -> T {
    match events.recv_timeout(HANG) {
        Ok(event) => event,
        Err(e) => panic!("no event within {HANG:?}: {e}"),
    }
}
