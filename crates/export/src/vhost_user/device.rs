//! What the queues of a device share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_ring::pool::Pool;

use super::signal::SignalThread;
use crate::budget::StartDebt;
use crate::log::Log;

/// How long the thread for changes stays.
const LINGER: Duration = Duration::from_secs(1);

/// State of a device that all its queues share. The control thread changes it.
#[derive(Debug)]
pub struct DeviceState {
    pub disk: Arc<Disk>,
    /// The guest sees a volatile write cache, and sends flushes.
    pub write_back: AtomicBool,
    pub log: Log,
    pub signals: Arc<SignalThread>,
    /// The thread that tells the front end of changes. It waits for answers on the back channel.
    pub changes: Arc<Pool>,
    /// What the starts of its queues have cost, also those of earlier front ends.
    starts: Mutex<StartDebt>,
}

impl DeviceState {
    pub fn new(disk: Arc<Disk>, write_back: bool) -> Self {
        let (write_back, signals) = (AtomicBool::new(write_back), SignalThread::new(disk.clone()));
        let changes = Arc::new(Pool::new("config", 1, LINGER));
        let starts = Mutex::default();
        DeviceState { disk, write_back, log: Log::default(), signals, changes, starts }
    }

    fn starts(&self) -> MutexGuard<'_, StartDebt> {
        self.starts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a start of a queue that took a reactor's thread this processor time.
    pub fn count_start(&self, now: Instant, took: Duration) {
        self.starts().count(now, took);
    }

    /// Returns how long the next start of a queue must wait.
    pub fn wait_before_start(&self, now: Instant) -> Duration {
        self.starts().wait(now)
    }
}
