//! State of one boot, which its jobs and its lanes share.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use blockyard_image::Format;
use blockyard_storage::sim::{Oracle, Rng, SimFiles};

use super::scratch::Scratch;
use super::{Job, Plan, Tally};
use crate::disk::Disk;

/// The target of a backup.
pub struct Target {
    pub name: String,
    pub format: Format,
    /// The contents of the disk at the moment of the backup.
    pub moment: Option<Vec<u8>>,
    /// Whether the target has its name.
    pub is_named: bool,
}

pub struct Stage {
    pub plan: Plan,
    pub size: u64,
    pub disk: Arc<Disk>,
    pub files: SimFiles,
    pub scratch: Rc<Scratch>,
    pub oracle: Rc<RefCell<Oracle>>,
    /// The contents of the disk, as the answers say.
    pub model: RefCell<Vec<u8>>,
    pub job: Cell<Option<Job>>,
    pub tally: RefCell<Tally>,
    /// Number of overlays and targets that were made.
    pub made: Cell<u64>,
    pub target: RefCell<Option<Target>>,
    pub rng: RefCell<Rng>,
    pub is_stopped: Cell<bool>,
    pub failed: RefCell<Option<String>>,
    /// Number of lanes that run.
    pub running: Cell<usize>,
    pub iterations: Cell<u64>,
}

impl Stage {
    pub fn is_off(&self) -> bool {
        self.files.power().is_off()
    }

    pub fn goes_on(&self) -> bool {
        !self.is_off() && !self.is_stopped.get() && self.failed.borrow().is_none()
    }

    pub fn fail(&self, error: String) {
        self.failed.borrow_mut().get_or_insert(error);
    }

    /// Counts what happens while a job runs.
    pub fn note(&self, count: impl FnOnce(&mut Tally)) {
        if self.job.get().is_some() {
            count(&mut self.tally.borrow_mut());
        }
    }
}
