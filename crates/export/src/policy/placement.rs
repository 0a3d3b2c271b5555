//! The policy of placement: on which processors a reactor's thread runs.
//!
//! If a guest may run only on some of the host's processors, a reactor on the same processors may
//! serve it fastest. [`super::polling`] measures whether that is so.
//!
//! In: the processors of the reactor's thread and of the guest's process, and whether the reactor
//! should be co-located with the guest. Out: the processors to move to. `placement.rs` reads
//! the processors and moves the thread.

use std::rc::Rc;

use rustix::thread::CpuSet;

use super::Counters;

/// Number of moves of reactors to their guest's processors, and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacementFigures {
    pub to_guest: u64,
    pub home: u64,
}

impl PlacementFigures {
    pub fn merge(&mut self, other: &PlacementFigures) {
        self.to_guest += other.to_guest;
        self.home += other.home;
    }
}

/// Decides on which processors the reactor's thread runs.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The reactor's own processors, and the processors that guest and reactor share. `None` if the
    /// guest may run on all of the reactor's processors.
    sets: Option<(CpuSet, CpuSet)>,
    co_located: bool,
    counters: Rc<Counters>,
}

impl Placement {
    /// `home`: the processors that the reactor's thread had at its start. `None`: these processors
    /// are not known.
    pub fn new(home: Option<CpuSet>, guest: Option<CpuSet>, counters: Rc<Counters>) -> Self {
        let sets = home.zip(guest).and_then(|(home, guest)| Some((home, narrower(home, guest)?)));
        Placement { sets, co_located: false, counters }
    }

    /// Returns whether co-location is possible.
    pub fn can_move(&self) -> bool {
        self.sets.is_some()
    }

    /// Returns the processors to which the thread must move: the guest's, or the reactor's own.
    /// Returns `None` if the thread need not move. `is_away`: the thread is not at home. It has
    /// returned if another queue started meanwhile.
    #[inline]
    pub fn moves(&mut self, co_located: bool, is_away: bool) -> Option<&CpuSet> {
        if self.co_located && !is_away {
            self.co_located = false;
            self.count(|figures| figures.home += 1);
        }
        if co_located != self.co_located && self.can_move() {
            self.count(
                |figures| if co_located { figures.to_guest += 1 } else { figures.home += 1 },
            );
        }
        let (home, guest) = self.sets.as_ref().filter(|_| co_located != self.co_located)?;
        self.co_located = co_located;
        Some(if co_located { guest } else { home })
    }

    fn count(&self, add: impl FnOnce(&mut PlacementFigures)) {
        let mut figures = self.counters.placement.get();
        add(&mut figures);
        self.counters.placement.set(figures);
    }
}

/// Returns the processors that are in both sets. Returns `None` if there are none, or as many as in
/// `own`.
fn narrower(own: CpuSet, guest: CpuSet) -> Option<CpuSet> {
    let mut both = CpuSet::new();
    for cpu in (0..CpuSet::MAX_CPU).filter(|&cpu| own.is_set(cpu) && guest.is_set(cpu)) {
        both.set(cpu);
    }
    (both.count() > 0 && both.count() < own.count()).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::super::seeded::Seeded;
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        set
    }

    #[test]
    fn the_reactor_does_not_move_for_a_guest_that_may_run_on_all_its_processors() {
        let can_move = |home: &[usize], guest: &[usize]| {
            let mut placement = Placement::new(Some(set(home)), Some(set(guest)), Rc::default());
            let moves = placement.moves(true, false).copied();
            assert_eq!(moves.is_some(), placement.can_move());
            moves
        };
        assert_eq!(can_move(&[0, 1], &[0, 1, 2]), None);
        assert_eq!(can_move(&[0], &[1]), None, "no processor in common");
        assert_eq!(can_move(&[0, 1, 2], &[1, 2, 3]), Some(set(&[1, 2])));
        assert!(!Placement::new(None, Some(set(&[0])), Rc::default()).can_move());
        assert!(!Placement::new(Some(set(&[0, 1])), None, Rc::default()).can_move());
    }

    #[test]
    fn it_moves_once_and_returns_once() {
        let counters = Rc::<Counters>::default();
        let mut placement = Placement::new(Some(set(&[0, 1])), Some(set(&[1])), counters.clone());
        let trace = [false, false, true, true, true, false, false, true];
        let mut is_away = false;
        let moves = trace.map(|co_located| {
            let moves = placement.moves(co_located, is_away).copied();
            is_away = moves.map_or(is_away, |_| co_located);
            moves
        });
        let (home, guest) = (Some(set(&[0, 1])), Some(set(&[1])));
        assert_eq!(moves, [None, None, guest, None, None, home, None, guest]);
        let mut figures = counters.placement.get();
        assert_eq!(figures, PlacementFigures { to_guest: 2, home: 1 });
        figures.merge(&counters.placement.get());
        assert_eq!(figures, PlacementFigures { to_guest: 4, home: 2 });
    }

    #[test]
    fn after_a_return_for_another_queue_it_may_move_again() {
        let counters = Rc::<Counters>::default();
        let mut placement = Placement::new(Some(set(&[0, 1])), Some(set(&[1])), counters.clone());
        assert!(placement.moves(true, false).is_some());
        // Another queue started, so the thread is at home.
        assert_eq!(placement.moves(false, false), None);
        assert_eq!(counters.placement.get(), PlacementFigures { to_guest: 1, home: 1 });
        assert_eq!(placement.moves(true, false).copied(), Some(set(&[1])));
    }
    /// A long trace: the polling policy changes its mind at any time, and other queues that start
    /// move the thread home. The thread is where the policy last wanted it, it moves only if it is
    /// elsewhere, and never to a processor that is not its own.
    #[test]
    fn a_seeded_trace_moves_the_thread_only_if_it_must() {
        for seed in 0..50 {
            let mut seeded = Seeded(seed);
            let mut random = |count: f64| (seeded.next() * count) as usize;
            let some = [(); 2].map(|()| (0..8).filter(|_| random(3.0) > 0).collect::<Vec<_>>());
            let [home, guest] = some.each_ref().map(|cpus| set(cpus));
            let counters = Rc::<Counters>::default();
            let mut placement = Placement::new(Some(home), Some(guest), counters.clone());
            let both = some[0].iter().filter(|cpu| some[1].contains(cpu)).copied();
            let both = set(&both.collect::<Vec<_>>());
            let can_move = both.count() > 0 && both != home;
            assert_eq!(placement.can_move(), can_move, "seed {seed}");
            let (mut at, mut wants, mut expected) = (home, false, PlacementFigures::default());
            for step in 0..5000 {
                if random(20.0) == 0 {
                    wants = !wants;
                }
                if random(50.0) == 0 && at != home {
                    // Another queue starts.
                    at = home;
                    expected.home += 1;
                }
                let target = if wants && can_move { both } else { home };
                let moves = placement.moves(wants, at != home).copied();
                assert_eq!(moves, (at != target).then_some(target), "seed {seed}, step {step}");
                expected.to_guest += u64::from(moves == Some(both) && at == home);
                expected.home += u64::from(moves == Some(home));
                at = target;
                assert_eq!(counters.placement.get(), expected, "seed {seed}, step {step}");
            }
        }
    }
}
