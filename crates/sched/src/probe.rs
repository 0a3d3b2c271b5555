//! A probe: a short time in which disks over their share are held, so that the device shows what
//! operations take without them.
//!
//! ```text
//!   Off ── begin ──► Draining ── nothing of the held disks is in flight ──► Quiet ──► Off
//! ```
//!
//! In: the time, whether the held disks are drained, and the number of samples. Out: the phase.
//! What must hold: a probe ends at its deadline, whatever the disks do. The quiet phases together
//! take at most a fiftieth of the time. Up to a tenth while the first probes have few samples.
//!
//! A disk that shares a busy device from its first operation on would otherwise never show its
//! service time without neighbours. Congestion control has the same problem: BBR drains its queue
//! for a moment to measure the round-trip time (Cardwell and others, "BBR: Congestion-Based
//! Congestion Control", 2016).

use crate::Time;

/// Number of samples that end a probe, and that end it after a quarter of a control period.
const ENOUGH: u64 = 32;
const FEW: u64 = 8;
/// Longest time in which operations in flight must complete, in nanoseconds. A probe gives up after
/// it.
const MAX_DRAIN_NS: u64 = 100_000_000;
/// Pause after a probe, as a multiple of the duration of its quiet phase.
const PAUSE_FACTOR: u64 = 50;
/// The same after a probe with few samples, for each such probe in a row up to this number.
const SHORT_PAUSE_FACTOR: u64 = 10;
/// The same after a probe that has shown a change of the device, which may change again soon.
const CHANGED_PAUSE_FACTOR: u64 = 10;
const MAX_FRUITLESS: u64 = 20;

#[derive(Debug, Default)]
pub(crate) struct Probe {
    phase: Phase,
    began_at: Time,
    next_at: Time,
    ended_at: Time,
    /// Duration of the last probe's quiet phase in nanoseconds.
    lasted: u64,
    /// Number of probes in a row with few samples.
    fruitless: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Phase {
    #[default]
    Off,
    Draining,
    Quiet {
        since: Time,
    },
}

impl Probe {
    pub fn is_on(&self) -> bool {
        self.phase != Phase::Off
    }

    /// Returns whether a probe may begin: the last one took at most its part of the time.
    pub fn may_begin(&self, now: Time) -> bool {
        !self.is_on() && now >= self.next_at
    }

    /// Returns for how long no probe was on, in nanoseconds.
    pub fn age(&self, now: Time) -> u64 {
        now.saturating_sub(self.ended_at)
    }

    pub fn begin(&mut self, now: Time) {
        (self.phase, self.began_at) = (Phase::Draining, now);
    }

    /// Returns when the probe changes its phase at the latest. `period`: length of a control period
    /// in nanoseconds.
    pub fn deadline(&self, now: Time, period: u64) -> Option<Time> {
        match self.phase {
            Phase::Off => None,
            Phase::Draining => Some(self.began_at + MAX_DRAIN_NS),
            Phase::Quiet { since } if now < since + period / 4 => Some(since + period / 4),
            Phase::Quiet { since } => Some(since + 2 * period),
        }
    }

    /// Changes the phase if it is due. `is_drained`: nothing of the held disks is in flight.
    /// `samples`: operations that began and completed in the quiet phase. Returns whether the phase
    /// has changed.
    pub fn step(&mut self, now: Time, period: u64, is_drained: bool, samples: u64) -> bool {
        match self.phase {
            Phase::Draining if is_drained => self.phase = Phase::Quiet { since: now },
            Phase::Draining if now >= self.began_at + MAX_DRAIN_NS => self.end(now, samples),
            Phase::Quiet { since }
                if samples >= ENOUGH
                    || now >= since + 2 * period
                    || (samples >= FEW && now >= since + period / 4) =>
            {
                self.end(now, samples);
            }
            _ => return false,
        }
        true
    }

    /// Returns the duration of the last probe's quiet phase, in nanoseconds. 0: it had none.
    pub fn lasted(&self) -> u64 {
        self.lasted
    }

    /// Records that the probe that has just ended has shown a change of the device.
    pub fn has_shown_change(&mut self) {
        let pause = self.next_at.saturating_sub(self.ended_at);
        if self.fruitless == 0 {
            self.next_at = self.ended_at + pause * CHANGED_PAUSE_FACTOR / PAUSE_FACTOR;
        }
    }

    /// Ends the probe. `samples`: as in [`Probe::step`].
    pub fn end(&mut self, now: Time, samples: u64) {
        self.fruitless = if samples < FEW { self.fruitless + 1 } else { 0 };
        // While the held disks drain, the device is busy.
        let cost = match self.phase {
            Phase::Quiet { since } if self.fruitless > 0 => {
                let factor = SHORT_PAUSE_FACTOR * self.fruitless.min(MAX_FRUITLESS);
                factor * now.saturating_sub(since)
            }
            Phase::Quiet { since } => PAUSE_FACTOR * now.saturating_sub(since),
            // A device that does not answer must not hold the disks half of the time.
            _ => self.fruitless.min(MAX_FRUITLESS) * now.saturating_sub(self.began_at),
        };
        self.lasted = match self.phase {
            Phase::Quiet { since } => now.saturating_sub(since),
            _ => 0,
        };
        self.phase = Phase::Off;
        self.ended_at = now;
        self.next_at = now + cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: u64 = 20_000_000;

    #[test]
    fn a_probe_drains_measures_and_pauses() {
        let mut probe = Probe::default();
        assert!(probe.may_begin(1) && probe.deadline(1, PERIOD).is_none());
        probe.begin(1000);
        assert!(!probe.step(2000, PERIOD, false, 0), "operations are in flight");
        assert!(probe.step(1_000_000, PERIOD, true, 0) && probe.is_on());
        assert!(!probe.step(2_000_000, PERIOD, true, ENOUGH - 1));
        assert!(probe.step(3_000_000, PERIOD, true, ENOUGH) && !probe.is_on());
        assert_eq!(probe.lasted(), 2_000_000, "its quiet phase");
        assert!(!probe.may_begin(102_999_999) && probe.may_begin(103_000_000));
        assert_eq!(probe.age(4_000_000), 1_000_000);
    }

    #[test]
    fn a_probe_that_shows_a_change_is_followed_by_a_short_pause() {
        let mut probe = Probe::default();
        probe.begin(0);
        probe.step(0, PERIOD, true, 0);
        probe.step(2_000_000, PERIOD, true, ENOUGH);
        probe.has_shown_change();
        assert!(!probe.may_begin(21_999_999) && probe.may_begin(22_000_000));
    }

    #[test]
    fn few_samples_end_a_probe_later_and_none_at_the_latest_deadline() {
        for (samples, ends) in [(FEW, PERIOD / 4), (FEW - 1, 2 * PERIOD), (0, 2 * PERIOD)] {
            let mut probe = Probe::default();
            probe.begin(0);
            probe.step(0, PERIOD, true, 0);
            let mut now = 0;
            while !probe.step(now, PERIOD, true, samples) {
                now = probe.deadline(now, PERIOD).unwrap();
            }
            assert_eq!((now, probe.is_on()), (ends, false), "{samples} samples");
        }
    }

    #[test]
    fn a_probe_gives_up_if_the_device_does_not_drain() {
        let mut probe = Probe::default();
        probe.begin(0);
        let deadline = probe.deadline(0, PERIOD).unwrap();
        assert!(!probe.step(deadline - 1, PERIOD, false, 0));
        assert!(probe.step(deadline, PERIOD, false, 0) && !probe.is_on());
        assert_eq!(probe.lasted(), 0);
        assert!(!probe.may_begin(deadline) && probe.may_begin(2 * deadline));
    }
}
