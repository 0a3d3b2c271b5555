//! The number of connected clients of a disk, for each kind of export.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A kind remains in the counts when its last client is gone.
#[derive(Debug, Default)]
pub(crate) struct ClientCounts(Mutex<BTreeMap<&'static str, u64>>);

impl ClientCounts {
    /// Changes the count of a kind.
    pub fn change(&self, export: &'static str, change: impl FnOnce(&mut u64)) {
        change(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(export).or_default());
    }

    /// Returns the counts by kind.
    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
