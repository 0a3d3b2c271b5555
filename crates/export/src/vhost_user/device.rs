//! What the queues of a device share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use blockyard_disk::Disk;
use blockyard_ring::pool::Pool;

use super::signal::SignalThread;
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
}

impl DeviceState {
    pub fn new(disk: Arc<Disk>, write_back: bool) -> Self {
        let (write_back, signals) = (AtomicBool::new(write_back), SignalThread::new(disk.clone()));
        let changes = Arc::new(Pool::new("config", 1, LINGER));
        DeviceState { disk, write_back, log: Log::default(), signals, changes }
    }
}
