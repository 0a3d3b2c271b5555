//! Holds disks back that are being opened, while a hand-over runs.
//!
//! In: additions that have opened an image, and a caller that holds them. Out: when the exports of
//! such a disk may start. What must hold: while a caller holds the openings, no disk begins to be
//! served, so each disk is either served or has no export. The image may still be opened meanwhile,
//! because storage that hangs cannot be stopped.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Hold {
    #[default]
    Free,
    Held,
    /// Another server opens the disks.
    ForGood,
}

#[derive(Default)]
struct State {
    hold: Hold,
    /// Number of disks with exports that start.
    starting: usize,
}

#[derive(Default)]
pub(crate) struct Openings {
    state: Mutex<State>,
    changed: Condvar,
}

impl Openings {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until exports may start. None: another server opens the disk. The caller keeps the
    /// value until the table has the disk.
    pub fn begin(self: &Arc<Self>) -> Option<Starting> {
        let held = |state: &mut State| state.hold == Hold::Held;
        let waited = self.changed.wait_while(self.state(), held);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.hold == Hold::ForGood {
            return None;
        }
        state.starting += 1;
        Some(Starting(self.clone()))
    }

    /// Holds disks back if their exports have not begun to start. None: exports that start already
    /// take longer than `limit`.
    pub fn hold(self: &Arc<Self>, limit: Duration) -> Option<HeldOpenings> {
        let mut state = self.state();
        state.hold = Hold::Held;
        let held = HeldOpenings(self.clone());
        let starts = |state: &mut State| state.starting > 0;
        let waited = self.changed.wait_timeout_while(state, limit, starts);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        (!waited.timed_out()).then_some(held)
    }

    fn free(&self) {
        let mut state = self.state();
        if state.hold == Hold::Held {
            state.hold = Hold::Free;
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// A disk with exports that start.
pub(crate) struct Starting(Arc<Openings>);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.state().starting -= 1;
        self.0.changed.notify_all();
    }
}

/// Disks that are being opened wait. Drop lets them go on.
pub struct HeldOpenings(Arc<Openings>);

impl HeldOpenings {
    /// Ends the additions of these disks with [`crate::YardError::Closing`], and all later ones:
    /// another server has the disks.
    pub fn for_good(self) {
        self.0.state().hold = Hold::ForGood;
    }
}

impl Drop for HeldOpenings {
    fn drop(&mut self) {
        self.0.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_that_start_end_before_the_hold_begins() {
        let openings = Arc::new(Openings::default());
        let starting = openings.begin().unwrap();
        assert!(openings.hold(Duration::ZERO).is_none());
        // The failed attempt holds nothing.
        drop(openings.begin().unwrap());
        drop(starting);
        let held = openings.hold(Duration::ZERO).unwrap();
        held.for_good();
        assert!(openings.begin().is_none());
    }
}
