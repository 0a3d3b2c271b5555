//! Checks the answers to the guest's requests during one boot: against the oracle, and against
//! these rules, which the oracle does not know.
//!
//! - Without an injected error no request fails.
//! - After a failed sync of the image's files no flush succeeds. From then on reads are not
//!   checked.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;
use blockyard_storage::sim::{FlushToken, OpKind, Oracle, Phase, Power, ReadToken, WriteToken};

use super::chain::Disks;
use super::plan::Plan;

pub struct Judge {
    pub oracle: Rc<RefCell<Oracle>>,
    pub disks: Rc<Disks>,
    pub power: Power,
    /// Whether errors are injected. After some of them the disk may refuse all further work.
    trouble: bool,
    syncs_fail: bool,
    /// Whether the process dies at the end, and not the power: then all answered writes last.
    pub dies: bool,
    poisoned: Cell<bool>,
    pub flushes: Cell<u64>,
    pub errors: Cell<u64>,
}

impl Judge {
    pub fn new(
        plan: &Plan,
        oracle: Rc<RefCell<Oracle>>,
        disks: Rc<Disks>,
        power: Power,
        dies: bool,
    ) -> Self {
        let syncs_fail = plan.trouble.as_ref().is_some_and(|t| t.kind == OpKind::Sync);
        Judge {
            oracle,
            disks,
            power,
            trouble: plan.trouble.is_some(),
            syncs_fail,
            dies,
            poisoned: Cell::new(false),
            flushes: Cell::new(0),
            errors: Cell::new(0),
        }
    }

    /// Returns true if the disk accepts only reads.
    pub fn poisoned(&self) -> bool {
        self.poisoned.get()
    }

    /// Handles a request's answer. Returns false after the power cut, because the guest then did
    /// not receive the answer.
    fn heard(&self, what: &str, result: &io::Result<()>) -> Result<bool, String> {
        if self.power.is_off() {
            return Ok(false);
        }
        if let Err(e) = result {
            self.errors.set(self.errors.get() + 1);
            if !self.trouble {
                return Err(format!("{what}: {e}"));
            }
        }
        Ok(true)
    }

    /// Records that data which were acknowledged but not flushed may be lost.
    fn poison(&self) {
        if !self.poisoned.replace(true) {
            let mut oracle = self.oracle.borrow_mut();
            let failed = oracle.flush_started();
            oracle.flush_answered(failed, false);
        }
    }

    pub fn changed(
        &self,
        what: &str,
        token: WriteToken,
        result: io::Result<()>,
    ) -> Result<bool, String> {
        let heard = self.heard(what, &result)?;
        if heard {
            if result.is_err() && self.syncs_fail {
                self.poison();
            }
            self.oracle.borrow_mut().write_answered(token, result.is_ok(), self.dies);
        }
        Ok(heard)
    }

    /// Handles the answer of a request that changes nothing.
    pub fn answered(&self, what: &str, result: io::Result<()>) -> Result<bool, String> {
        let heard = self.heard(what, &result)?;
        if heard && result.is_err() && self.syncs_fail {
            self.poison();
        }
        Ok(heard)
    }

    pub fn flushed(&self, token: FlushToken, result: io::Result<()>) -> Result<bool, String> {
        let heard = self.heard("flush", &result)?;
        if !heard {
            return Ok(false);
        }
        if result.is_ok() && self.a_sync_has_failed() {
            return Err("a flush succeeded after a failed sync".into());
        }
        self.flushes.set(self.flushes.get() + 1);
        self.oracle.borrow_mut().flush_answered(token, result.is_ok());
        if result.is_err() {
            self.poison();
        }
        Ok(true)
    }

    fn a_sync_has_failed(&self) -> bool {
        let failed =
            |t: &blockyard_storage::sim::Trace| t.kind == OpKind::Sync && t.phase == Phase::Failed;
        self.syncs_fail && self.disks.top().any(|disk| disk.trace().iter().any(failed))
    }

    pub fn read(
        &self,
        token: ReadToken,
        offset: u64,
        segments: &Segments,
        result: io::Result<()>,
    ) -> Result<bool, String> {
        let heard = self.heard("read", &result)?;
        // A read may return stale data: the failed sync lost either the new data or the entry that
        // names them.
        let mut oracle = self.oracle.borrow_mut();
        if heard && result.is_ok() && !self.a_sync_has_failed() {
            let mut content = vec![0; segments.len()];
            segments.copy_out(0, &mut content);
            oracle.check_read(token, offset, &content).map_err(|e| e.to_string())?;
        }
        Ok(heard)
    }
}
