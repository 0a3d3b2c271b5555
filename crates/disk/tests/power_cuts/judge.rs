//! Checks one boot: by the oracle, and by rules for answers that the oracle does not know.
//!
//! - Nothing fails without a cause: an error is the injected one, or Poisoned on a poisoned disk.
//! - A flush returns Ok only if a sync that began after the flush arrived has succeeded, and no
//!   sync had failed by then.
//! - On a poisoned disk no write and no flush returns Ok. Those that arrive later fail with
//!   Poisoned. Reads succeed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use blockyard_disk::{Disk, Failure, Op, Status};
use blockyard_storage::sim::{FlushToken, OpKind, Oracle, Phase, SimDisk, Trace};

use super::plan::Plan;

pub struct Judge {
    pub oracle: Rc<RefCell<Oracle>>,
    pub sim: SimDisk,
    pub disk: Arc<Disk>,
    failure: Option<Failure>,
    /// Answered flushes: the number of disk events before and after, and whether they succeeded.
    flushes: RefCell<Vec<(u64, u64, bool)>>,
    told: Cell<bool>,
    /// If syncs may fail, a read may see their losses before any flush has failed. So, in these
    /// runs, the oracle always has a flush in flight.
    _risk: Option<FlushToken>,
}

/// The state when a request arrived.
#[derive(Clone, Copy)]
pub struct Asked {
    op: Op,
    poisoned: bool,
    events: u64,
}

impl Judge {
    pub fn new(plan: &Plan, oracle: Rc<RefCell<Oracle>>, sim: SimDisk, disk: Arc<Disk>) -> Self {
        let syncs_fail = plan.trouble.as_ref().is_some_and(|t| t.kind == OpKind::Sync);
        let risk = syncs_fail.then(|| {
            let mut oracle = oracle.borrow_mut();
            oracle.expect_failing_flushes();
            oracle.flush_started()
        });
        let failure = plan.trouble.as_ref().and_then(|t| t.failure);
        Judge {
            oracle,
            sim,
            disk,
            failure,
            flushes: RefCell::default(),
            told: Cell::new(false),
            _risk: risk,
        }
    }

    pub fn asked(&self, op: Op) -> Asked {
        Asked { op, poisoned: self.disk.poisoned().is_some(), events: self.sim.events() }
    }

    /// Judges an answer. Returns `Ok(false)` if the power is off, so that no guest receives the
    /// answer.
    pub fn answered(&self, asked: Asked, status: Status) -> Result<bool, String> {
        if self.sim.is_off() {
            return Ok(false);
        }
        let (op, poisoned) = (asked.op, self.disk.poisoned().is_some());
        if poisoned && !self.told.replace(true) {
            // Acknowledged writes that were not flushed may be lost.
            let mut oracle = self.oracle.borrow_mut();
            let failed = oracle.flush_started();
            oracle.flush_answered(failed, false);
        }
        let legal = match status {
            Ok(()) => op == Op::Read || !poisoned,
            Err(Failure::Poisoned) => op != Op::Read && poisoned,
            Err(failure) => Some(failure) == self.failure && (op == Op::Read || !asked.poisoned),
        };
        if op == Op::Flush {
            self.flushes.borrow_mut().push((asked.events, self.sim.events(), status.is_ok()));
        }
        if legal {
            return Ok(true);
        }
        Err(format!(
            "{op:?} was answered {status:?}; poisoned before: {}, after: {poisoned}",
            asked.poisoned
        ))
    }

    /// Checks at the end of a boot that every flush was answered truthfully.
    pub fn flushes_are_true(&self) -> Result<(), String> {
        // Each line of the history, except reads, is one event.
        let trace: Vec<Trace> =
            self.sim.trace().into_iter().filter(|t| t.kind != OpKind::Read).collect();
        let syncs = |phase| {
            let lines = trace.iter().enumerate();
            lines
                .filter(move |(_, t)| t.kind == OpKind::Sync && t.phase == phase)
                .map(|(i, t)| (i as u64, t.op))
        };
        let first_failed = syncs(Phase::Failed).next().map_or(u64::MAX, |(at, _)| at);
        for &(asked, answered, _) in self.flushes.borrow().iter().filter(|f| f.2) {
            let began = |op| syncs(Phase::Started).any(|(at, o)| o == op && at >= asked);
            let mut good =
                syncs(Phase::Answered).filter(|&(at, _)| at < answered && at < first_failed);
            if !good.any(|(_, op)| began(op)) {
                return Err(format!(
                    "a flush asked after {asked} events was answered Ok after {answered}, unsynced"
                ));
            }
        }
        Ok(())
    }

    /// Returns whether the disk was poisoned while it had power.
    pub fn saw_poison(&self) -> bool {
        self.told.get()
    }

    /// Returns the numbers of flushes that succeeded and that failed.
    pub fn flushes(&self) -> (u64, u64) {
        let flushes = self.flushes.borrow();
        let good = flushes.iter().filter(|f| f.2).count();
        (good as u64, (flushes.len() - good) as u64)
    }
}
