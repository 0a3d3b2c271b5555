//! A number of completions that ends the measured time of several loads at once.

use std::sync::atomic::{AtomicU64, Ordering};

/// Completions until the end. A load ends when it first looks at a quota that is spent. So all
/// loads that share one end together, whatever the machine does meanwhile.
#[derive(Debug)]
pub struct Quota(AtomicU64);

impl Quota {
    pub fn new(completions: u64) -> Self {
        Quota(AtomicU64::new(completions))
    }

    /// Counts a completion.
    #[inline]
    pub fn take(&self) {
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }

    #[inline]
    pub fn is_spent(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}
