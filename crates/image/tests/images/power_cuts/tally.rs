//! Statistics over many runs.

use std::fmt;

use super::judge::Judge;
use super::operation::{Done, KINDS, Operation, Outcome};
use crate::lives::Count;

#[derive(Debug, Default)]
pub struct Tally {
    pub cuts: u64,
    /// Number of cuts that were deaths of the process: what the kernel has stays.
    pub deaths: u64,
    pub survived: u64,
    pub flushes: u64,
    pub events: u64,
    pub judged: u64,
    /// Number of errors returned to the guest, and of boots with errors.
    pub errors: u64,
    pub troubled: u64,
    /// Number of images with leaked clusters.
    pub leaky: u64,
    /// Number of images that QEMU has checked. It checks one in `one_in`, or none if that is 0.
    pub by_qemu: u64,
    pub one_in: u64,
    /// Number of commands that a power cut interrupted, by kind; and of commands that were refused.
    pub operations: [u64; KINDS.len()],
    pub refused: u64,
    /// Number of images that had the old state after a power cut, and of those with the new state.
    pub states: [u64; 2],
    /// Number of recoveries that another death interrupted.
    pub recoveries_cut: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            cuts,
            deaths,
            survived,
            flushes,
            events,
            judged,
            errors,
            troubled,
            leaky,
            by_qemu,
            ..
        } = self;
        write!(
            f,
            "{cuts} cuts, {deaths} deaths among them, {survived} whole runs, {flushes} flushes, {events} events, {judged} \
             images judged, "
        )?;
        write!(f, "{leaky} with leaks, {by_qemu} by QEMU too, {errors} errors in {troubled} runs")?;
        if self.operations.iter().sum::<u64>() == 0 {
            return Ok(());
        }
        let kinds: Vec<_> = KINDS
            .iter()
            .zip(self.operations)
            .map(|(kind, cuts)| format!("{cuts} {kind}"))
            .collect();
        let (refused, [old, new]) = (self.refused, self.states);
        write!(
            f,
            "; operations cut: {}, {refused} refused, {old} images old, {new} new",
            kinds.join(", ")
        )
    }
}

impl Tally {
    pub fn count(&mut self, judge: &Judge, survived: bool) {
        self.cuts += u64::from(!survived);
        self.deaths += u64::from(!survived && judge.dies);
        self.survived += u64::from(survived);
        self.flushes += judge.flushes.get();
        self.events += judge.power.events();
        self.errors += judge.errors.get();
        self.troubled += u64::from(judge.errors.get() > 0);
    }

    pub fn operated(&mut self, operation: &Operation, outcome: &Outcome, survived: bool) {
        self.cuts += u64::from(!survived);
        self.survived += u64::from(survived);
        self.events += outcome.events;
        self.operations[operation.kind()] += u64::from(!survived);
        self.refused += u64::from(outcome.done == Some(Done::Refused));
    }

    /// Returns true if cuts interrupted each kind of command often enough, and left the old and the
    /// new state often enough.
    pub fn saw_all_operations(&self) -> bool {
        self.operations.iter().chain(&self.states).all(|&n| n > 10)
    }
}

impl Count for Tally {
    fn cuts(&self) -> u64 {
        self.cuts
    }

    fn add(&mut self, other: &Tally) {
        let Tally {
            cuts,
            survived,
            flushes,
            events,
            judged,
            errors,
            troubled,
            leaky,
            by_qemu,
            refused,
            ..
        } = other;
        self.cuts += cuts;
        self.deaths += other.deaths;
        self.survived += survived;
        self.flushes += flushes;
        self.events += events;
        self.judged += judged;
        self.errors += errors;
        self.troubled += troubled;
        self.leaky += leaky;
        self.by_qemu += by_qemu;
        self.refused += refused;
        self.recoveries_cut += other.recoveries_cut;
        self.operations.iter_mut().zip(other.operations).for_each(|(sum, more)| *sum += more);
        self.states.iter_mut().zip(other.states).for_each(|(sum, more)| *sum += more);
    }
}
