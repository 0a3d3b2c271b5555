//! What the guest is told of a volatile write cache, and what it makes of it.
//!
//! At first it is what the disk was set up with. A guest may switch it (CONFIG_WCE), and relies on
//! that from then on, through the death of a back end too: so it is noted behind the in-flight
//! region.

use std::sync::atomic::Ordering;

use super::config;
use super::inflight::InflightRegion;
use super::session::Session;

impl Session {
    /// What a guest that cannot flush is owed (virtio 1.2, 5.2.5.2): at first no write cache. Only
    /// a driver that takes other features than the last one begins anew: front ends repeat
    /// SET_FEATURES, and the cache may have been switched.
    pub(super) fn settle_write_cache(&mut self, before: u64) {
        const TOLD: u64 = config::F_FLUSH | config::F_CONFIG_WCE;
        if (before ^ self.state.features) & TOLD != 0 || !self.state.has(TOLD) {
            let flushes = self.state.has(config::F_FLUSH);
            self.switch_write_cache(flushes && self.device.disk.options().cache.write_back());
        }
    }

    /// Says what the guest sees from now on, and notes it for a successor; the answer is what it
    /// saw before.
    pub(super) fn switch_write_cache(&mut self, write_back: bool) -> bool {
        if let Some(region) = &self.inflight {
            region.note_write_back(write_back);
        }
        self.device.write_back.store(write_back, Ordering::Relaxed);
        std::mem::replace(&mut self.state.write_back, write_back)
    }

    /// A region that comes back from a killed predecessor tells what its guest had set since, and
    /// still relies on.
    pub(super) fn take_over_write_cache(&mut self, region: &InflightRegion) {
        let (flushes, now) = (self.state.has(config::F_FLUSH), self.state.write_back);
        let write_back = region.write_back().unwrap_or(now) && (flushes || now);
        self.state.write_back = write_back;
        self.device.write_back.store(write_back, Ordering::Relaxed);
        region.note_write_back(write_back);
    }
}
