//! The policies of exports. Each policy receives the time and its caller's observations, and
//! returns decisions.
//!
//! ```text
//!   polling     what a queue does when it has no request to take
//!   placement   on which processors a reactor runs
//!   unkicked    when a queue without kicks looks at its ring
//! ```
//!
//! What must hold: nothing in this folder calls the system, starts a thread or reads a clock. The
//! caller carries out the decisions. [`PolicyFigures`] reports the decisions and the measured rates
//! of each disk.

pub mod placement;
pub mod polling;
#[cfg(test)]
mod seeded;
pub mod unkicked;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Weak};

use blockyard_disk::Disk;
use blockyard_ring::{Handle, SlowCallCounters, SlowCallFigures};

use placement::PlacementFigures;
use polling::PollingFigures;
use unkicked::LookFigures;

/// The decisions of the policies for a disk, and the rates that they measured.
/// [`PolicyFigures::merge`] adds the figures of several reactors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyFigures {
    pub polling: PollingFigures,
    pub signals: SignalFigures,
    pub placement: PlacementFigures,
    pub looks: LookFigures,
    /// Signals to guests, and calls on the connections of NBD clients.
    pub slow_calls: SlowCallFigures,
}

/// Number of signals to the guest, and of the completions for which it wanted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalFigures {
    pub completions: u64,
    pub signals: u64,
}

impl SignalFigures {
    fn merge(&mut self, other: &SignalFigures) {
        self.completions += other.completions;
        self.signals += other.signals;
    }
}

impl PolicyFigures {
    /// Returns the figures of `disk` on the reactor of `handle`.
    pub fn known(handle: &Handle, disk: &Arc<Disk>) -> Self {
        handle.local::<Disks>().of(disk).map_or_else(Self::default, |counters| counters.figures())
    }

    pub fn merge(&mut self, other: &PolicyFigures) {
        self.polling.merge(&other.polling);
        self.signals.merge(&other.signals);
        self.placement.merge(&other.placement);
        self.looks.merge(&other.looks);
        self.slow_calls.merge(&other.slow_calls);
    }
}

/// The figures of one disk on one reactor. All queues and connections of the disk on that reactor
/// add to these figures. The figures outlive the queues and connections.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub polling: Cell<PollingFigures>,
    pub signals: Cell<SignalFigures>,
    pub placement: Cell<PlacementFigures>,
    pub looks: Cell<LookFigures>,
    pub slow_calls: Rc<SlowCallCounters>,
}

/// The counters of a reactor, by disk. The entry of a closed disk is removed when the next disk is
/// added.
#[derive(Default)]
struct Disks(RefCell<Vec<(Weak<Disk>, Rc<Counters>)>>);

impl Disks {
    fn of(&self, disk: &Arc<Disk>) -> Option<Rc<Counters>> {
        let all = self.0.borrow();
        all.iter()
            .find(|(of, _)| of.as_ptr() == Arc::as_ptr(disk))
            .map(|(_, counters)| counters.clone())
    }
}

impl Counters {
    /// Returns the counters of `disk` on the reactor of `handle`.
    pub fn local(handle: &Handle, disk: &Arc<Disk>) -> Rc<Self> {
        let all = handle.local::<Disks>();
        all.of(disk).unwrap_or_else(|| {
            let counters = Rc::<Counters>::default();
            let mut entries = all.0.borrow_mut();
            entries.retain(|(of, _)| of.strong_count() > 0);
            entries.push((Arc::downgrade(disk), counters.clone()));
            counters
        })
    }

    fn figures(&self) -> PolicyFigures {
        PolicyFigures {
            polling: self.polling.get(),
            signals: self.signals.get(),
            placement: self.placement.get(),
            looks: self.looks.get(),
            slow_calls: self.slow_calls.figures(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_reactors_are_added() {
        let signals = SignalFigures { completions: 1, signals: 2 };
        let mut both = PolicyFigures { signals, ..PolicyFigures::default() };
        both.merge(&both.clone());
        assert_eq!(both.signals, SignalFigures { completions: 2, signals: 4 });
    }
}
