//! Where a reactor runs, seen from its guest.
//!
//! What must hold: home is where the thread was first, not where it has gone to be beside another guest.
//!
//! A guest that is confined to some of the processors may be served best from there: see [`crate::pace`]. This only moves
//! the thread that calls, between the processors it had at first and those of them that are the guest's.

use std::cell::Cell;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

thread_local! {
    /// The processors of this thread, from before the first placement could move it.
    static HOME: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

#[derive(Debug, Default)]
pub struct Placement {
    /// The reactor's own processors and the guest's, where the guest's are fewer.
    sets: Option<(CpuSet, CpuSet)>,
    beside: bool,
}

impl Placement {
    /// For the thread that calls, and a front end's process.
    pub fn new(peer: Option<i32>) -> Self {
        let guest = peer.and_then(Pid::from_raw).and_then(|pid| sched_getaffinity(Some(pid)).ok());
        let own = HOME.get().or_else(|| sched_getaffinity(None).ok());
        HOME.set(own);
        Placement { sets: own.zip(guest).and_then(|(own, guest)| Some((own, narrower(own, guest)?))), beside: false }
    }

    pub fn can_move(&self) -> bool {
        self.sets.is_some()
    }

    /// Goes beside the guest, or home.
    #[inline]
    pub fn set(&mut self, beside: bool) {
        if let Some((own, guest)) = &self.sets
            && beside != self.beside
        {
            // A set that has become impossible (a processor was taken away) leaves the thread where it is.
            let _ = sched_setaffinity(None, if beside { guest } else { own });
            self.beside = beside;
        }
    }
}

/// The processors of both sets, if they are fewer than `own` and there are any.
fn narrower(own: CpuSet, guest: CpuSet) -> Option<CpuSet> {
    let mut both = CpuSet::new();
    for cpu in (0..CpuSet::MAX_CPU).filter(|&cpu| own.is_set(cpu) && guest.is_set(cpu)) {
        both.set(cpu);
    }
    (both.count() > 0 && both.count() < own.count()).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        set
    }

    #[test]
    fn a_guest_that_may_run_anywhere_is_no_reason_to_move() {
        assert!(narrower(set(&[0, 1]), set(&[0, 1, 2])).is_none());
        assert!(narrower(set(&[0]), set(&[1])).is_none(), "no processor in common");
        assert_eq!(narrower(set(&[0, 1, 2]), set(&[1, 2, 3])), Some(set(&[1, 2])));
        assert!(!Placement::new(None).can_move());
    }

    #[test]
    fn a_thread_goes_there_and_comes_home() {
        let own = sched_getaffinity(None).unwrap();
        let first = set(&[(0..CpuSet::MAX_CPU).find(|&cpu| own.is_set(cpu)).unwrap()]);
        let mut placement = Placement { sets: Some((own, first)), beside: false };
        placement.set(true);
        assert_eq!(sched_getaffinity(None).unwrap(), first);
        placement.set(false);
        assert_eq!(sched_getaffinity(None).unwrap(), own);
    }

    #[test]
    fn another_guest_s_processors_are_no_home() {
        let own = sched_getaffinity(None).unwrap();
        let first = set(&[(0..CpuSet::MAX_CPU).find(|&cpu| own.is_set(cpu)).unwrap()]);
        // This thread's first placement knows its home.
        assert!(!Placement::new(None).can_move());
        let mut beside = Placement { sets: Some((own, first)), beside: false };
        beside.set(true);
        // A queue that starts now, of a guest that may run on the same processors as this test's process.
        let late = Placement::new(Some(std::process::id() as i32));
        beside.set(false);
        assert_eq!(HOME.get(), Some(own));
        assert!(late.sets.is_none_or(|(home, _)| home == own));
    }
}
