//! Limits log lines that a guest or a front end can cause at any rate.
//!
//! What must hold: the log grows slowly at any rate of events, and says how many lines were
//! suppressed. Information and warnings have separate limits, so that a front end which reconnects
//! all the time does not suppress warnings.

use std::fmt::Arguments;
use std::time::Instant;

pub(crate) use blockyard_ring::log_budget::{Budget, Withheld};

/// The limits for the lines of one disk.
#[derive(Debug, Default)]
pub struct Log {
    infos: Budget,
    warnings: Budget,
}

impl Log {
    /// Logs `what` as information on a disk or its queue, unless there were too many such lines.
    pub fn info(&self, disk: &str, queue: Option<u16>, what: Arguments<'_>) {
        if let Some(withheld) = self.infos.admit(Instant::now()) {
            tracing::info!(disk, queue, "{what}{}", Withheld(withheld));
        }
    }

    /// Logs `what` as a warning on a disk or its queue, unless there were too many such lines.
    pub fn warn(&self, disk: &str, queue: Option<u16>, what: Arguments<'_>) {
        if let Some(withheld) = self.warnings.admit(Instant::now()) {
            tracing::warn!(disk, queue, "{what}{}", Withheld(withheld));
        }
    }
}
