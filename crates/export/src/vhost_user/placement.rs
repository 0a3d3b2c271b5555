//! The processors of reactors and guests: reads them, and moves the thread. Whether to move is
//! decided by [`crate::policy::placement`].
//!
//! What must hold: home is where the thread was first, not where it has gone to be beside another
//! guest. The thread that calls only moves between the processors it had at first and those of them
//! that are the guest's.

use std::cell::Cell;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

thread_local! {
    /// The processors of this thread, from before the first placement could move it.
    static HOME: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// Returns the processors that the thread which calls had at first.
pub fn home() -> Option<CpuSet> {
    let home = HOME.get().or_else(|| sched_getaffinity(None).ok());
    HOME.set(home);
    home
}

/// Returns the processors of a front end's process.
pub fn guest(peer: Option<i32>) -> Option<CpuSet> {
    peer.and_then(Pid::from_raw).and_then(|pid| sched_getaffinity(Some(pid)).ok())
}

/// Moves the thread that calls. A set that has become impossible (a processor was taken away)
/// leaves it where it is.
pub fn move_to(processors: &CpuSet) {
    let _ = sched_setaffinity(None, processors);
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::policy::placement::Placement;

    fn first_of(own: &CpuSet) -> CpuSet {
        let mut first = CpuSet::new();
        first.set((0..CpuSet::MAX_CPU).find(|&cpu| own.is_set(cpu)).unwrap());
        first
    }

    #[test]
    fn a_thread_goes_there_and_comes_home() {
        let own = sched_getaffinity(None).unwrap();
        move_to(&first_of(&own));
        assert_eq!(sched_getaffinity(None).unwrap(), first_of(&own));
        move_to(&own);
        assert_eq!(sched_getaffinity(None).unwrap(), own);
        // No processor: it stays.
        move_to(&CpuSet::new());
        assert_eq!(sched_getaffinity(None).unwrap(), own);
    }

    #[test]
    fn another_guest_s_processors_are_no_home() {
        let own = sched_getaffinity(None).unwrap();
        assert_eq!(home(), Some(own));
        move_to(&first_of(&own));
        // A queue that starts now, of a guest that may run on the same processors as this test's
        // process.
        let guest = guest(Some(std::process::id() as i32));
        assert!(guest.is_some());
        assert_eq!(home(), Some(own));
        let mut late = Placement::new(home(), guest, Rc::default());
        assert!(late.moves(false).is_none() && late.moves(true).is_none_or(|to| *to != own));
        move_to(&own);
    }

    #[test]
    fn a_process_that_is_not_known_has_no_processors() {
        assert_eq!(guest(None), None);
    }
}
