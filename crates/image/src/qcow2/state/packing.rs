//! Where compressed clusters are written: one behind the other.

use std::sync::Mutex;

use blockyard_ring::semaphore::Semaphore;
use blockyard_storage::RangeLock;

/// Where the next compressed cluster is written.
#[derive(Debug)]
pub struct Packing {
    pub one_at_a_time: Semaphore,
    pub room: Mutex<ReservedBytes>,
    pub writing: RangeLock,
}

/// A range of the file that was allocated for compressed data and is not used yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReservedBytes {
    pub next: u64,
    pub end: u64,
}

impl Default for Packing {
    fn default() -> Self {
        Packing {
            one_at_a_time: Semaphore::new(1),
            room: Mutex::default(),
            writing: RangeLock::default(),
        }
    }
}
