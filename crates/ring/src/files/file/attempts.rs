//! Work that the reactor does itself although it may block, if [`Pauses`] allows it.

use std::time::Instant;

use crate::files::host;
use crate::policy::pauses::Pauses;

/// Does the work, unless [`Pauses`] forbids it now. `clock` returns the time.
pub fn attempt<T>(
    pauses: &Pauses,
    clock: impl Fn() -> Instant,
    work: impl FnOnce() -> T,
) -> Option<T> {
    let began = clock();
    if !pauses.allows(began) {
        return None;
    }
    let switches = host::voluntary_switches();
    let done = work();
    pauses.done(began, clock(), || host::voluntary_switches() != switches);
    Some(done)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::testing::waits;

    /// Waits until a thread of this process has gone to sleep more often than `before`.
    fn until_asleep(thread: rustix::process::Pid, before: i64) {
        let path = format!("/proc/self/task/{}/status", thread.as_raw_nonzero());
        waits::until("the thread sleeps", || {
            let status = std::fs::read_to_string(&path).unwrap();
            let (_, rest) = status.split_once("\nvoluntary_ctxt_switches:").unwrap();
            rest.split_whitespace().next().unwrap().parse::<i64>().unwrap() > before
        });
    }

    /// The work sleeps until another thread answers, and takes 100 ms by the clock.
    #[test]
    fn work_is_not_attempted_after_it_blocked() {
        let (pauses, now) = (Pauses::default(), Cell::new(Instant::now()));
        let pass = |time| now.set(now.get() + time);
        let clock = || now.get();
        assert_eq!(attempt(&pauses, clock, || 7), Some(7));
        let (asked, asks) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let other = std::thread::spawn(move || {
            let (thread, before) = waits::receive(&asks, "the work begins");
            until_asleep(thread, before);
            answer.send(()).unwrap();
        });
        let work = || {
            asked.send((rustix::thread::gettid(), host::voluntary_switches())).unwrap();
            waits::receive(&answers, "the work has slept");
            pass(Duration::from_millis(100));
        };
        assert_eq!(attempt(&pauses, clock, work), Some(()));
        pass(Duration::from_millis(1999));
        assert_eq!(attempt(&pauses, clock, || 8), None, "a pause of 2 s");
        pass(Duration::from_millis(1));
        assert_eq!(attempt(&pauses, clock, || 9), Some(9));
        waits::join(other, "it has answered");
    }
}
