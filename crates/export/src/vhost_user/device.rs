//! What the queues of a device share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockyard_disk::Disk;
use blockyard_ring::pool::Pool;

use super::caller;
use super::signal::SignalThread;
use crate::log::Log;

/// State of a device that all its queues share. The control thread changes it.
#[derive(Debug)]
pub struct DeviceState {
    pub disk: Arc<Disk>,
    /// The guest sees a volatile write cache, and sends flushes.
    pub write_back: AtomicBool,
    pub log: Log,
    pub signals: Arc<SignalThread>,
    /// The thread that waits for answers on the back channel.
    pub back_channel: Arc<Pool>,
}

impl DeviceState {
    pub fn new(disk: Arc<Disk>, write_back: bool) -> Self {
        let (write_back, signals) = (AtomicBool::new(write_back), SignalThread::new(disk.clone()));
        let back_channel = caller::thread("calls");
        DeviceState { disk, write_back, log: Log::default(), signals, back_channel }
    }
}
