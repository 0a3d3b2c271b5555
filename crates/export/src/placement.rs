//! Reads the processors of reactors and guests, and moves a reactor's thread.
//! [`crate::policy::placement`] decides whether to move.
//!
//! What must hold: a thread's home is the processors that the thread had at its start, even while
//! it is co-located with a guest. The thread moves only between its home and those processors of
//! its home that the guest may use. It returns before another queue, connection or device starts on
//! it: a guest may be slow or hostile, and must not choose the processors of others.

use std::cell::Cell;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

thread_local! {
    /// The processors of this thread at its start. They are read before the first move.
    static HOME: Cell<Option<CpuSet>> = const { Cell::new(None) };
    /// The thread runs on a guest's processors.
    static IS_AWAY: Cell<bool> = const { Cell::new(false) };
}

/// Returns the processors that the calling thread had at its start.
pub fn home() -> Option<CpuSet> {
    let home = HOME.get().or_else(|| sched_getaffinity(None).ok());
    HOME.set(home);
    home
}

/// Returns the processors on which a front end's process may run.
pub fn guest(peer: Option<i32>) -> Option<CpuSet> {
    peer.and_then(Pid::from_raw).and_then(|pid| sched_getaffinity(Some(pid)).ok())
}

/// Moves the calling thread to `processors`. Does nothing if that is impossible, for example
/// because a processor is offline.
pub fn move_to(processors: &CpuSet) {
    if sched_setaffinity(None, processors).is_ok() {
        IS_AWAY.set(HOME.get().is_some_and(|home| home != *processors));
    }
}

/// Returns whether the calling thread runs on a guest's processors.
pub fn is_away() -> bool {
    IS_AWAY.get()
}

/// Moves the calling thread to its home, if it runs on a guest's processors.
pub fn go_home() {
    if let Some(home) = HOME.get().filter(|_| is_away()) {
        move_to(&home);
    }
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
    fn a_thread_moves_and_returns() {
        let own = sched_getaffinity(None).unwrap();
        move_to(&first_of(&own));
        assert_eq!(sched_getaffinity(None).unwrap(), first_of(&own));
        move_to(&own);
        assert_eq!(sched_getaffinity(None).unwrap(), own);
        // With an empty set the thread stays.
        move_to(&CpuSet::new());
        assert_eq!(sched_getaffinity(None).unwrap(), own);
    }

    #[test]
    fn the_home_stays_the_same_after_a_move() {
        let own = sched_getaffinity(None).unwrap();
        assert_eq!(home(), Some(own));
        move_to(&first_of(&own));
        // A queue starts while the thread is on other processors than at its start. The guest may
        // run on the same processors as this test's process.
        let guest = guest(Some(std::process::id() as i32));
        assert!(guest.is_some());
        assert_eq!(home(), Some(own));
        let mut late = Placement::new(home(), guest, Rc::default());
        let late = [false, true].map(|to_guest| late.moves(to_guest, is_away()).copied());
        assert!(late[0].is_none() && late[1].is_none_or(|to| to != own));
        go_home();
        assert_eq!((sched_getaffinity(None).unwrap(), is_away()), (own, false));
    }

    #[test]
    fn an_unknown_process_has_no_processors() {
        assert_eq!(guest(None), None);
    }
}
