//! The power supply of one or several disks: counts their events, and goes off for all of them at
//! once.

use std::cell::Cell;
use std::rc::Rc;

/// A power supply. Clones are the same one: disks that share it lose power together, as the files
/// of one host do.
///
/// An event is the start or the answer of a write, sync, discard, zero or set_len. A test that cuts
/// the power after 0, 1, 2, ... events, until a run ends with power, has cut at every write and
/// flush.
#[derive(Clone, Debug, Default)]
pub struct Power(Rc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    events: Cell<u64>,
    cut_after: Cell<Option<u64>>,
    off: Cell<bool>,
}

impl Power {
    /// Returns a power supply that stays on until [`Power::cut`].
    pub fn on() -> Self {
        Power::default()
    }

    /// Returns a power supply that stays on for `events` events. The next event finds it off.
    pub fn cut_after(events: u64) -> Self {
        let power = Power::on();
        power.arm(events);
        power
    }

    /// Lets the power stay on for `events` more events. The next event finds it off.
    pub fn arm(&self, events: u64) {
        self.0.cut_after.set(Some(self.events() + events));
    }

    /// Returns the number of events so far.
    pub fn events(&self) -> u64 {
        self.0.events.get()
    }

    pub fn is_off(&self) -> bool {
        self.0.off.get()
    }

    /// Cuts the power.
    pub fn cut(&self) {
        self.0.off.set(true);
    }

    /// Counts an event. Returns false if the power is off; then the event does not happen.
    pub(super) fn event(&self) -> bool {
        if self.0.cut_after.get() == Some(self.0.events.get()) {
            self.cut();
        }
        if self.is_off() {
            return false;
        }
        self.0.events.set(self.0.events.get() + 1);
        true
    }
}
