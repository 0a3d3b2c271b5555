//! The volatile write cache as the guest sees it.
//!
//! The initial value is the disk's configuration. A guest may switch the cache on or off
//! (CONFIG_WCE), and relies on its choice from then on, even if the back end is killed. So the
//! choice is also stored after the in-flight region.

use std::sync::atomic::Ordering;

use super::config;
use super::inflight::InflightRegion;
use super::session::Session;

impl Session {
    /// Resets the write cache after SET_FEATURES. A driver that cannot flush must start without a
    /// write cache (virtio 1.2, 5.2.5.2). Front ends repeat SET_FEATURES. So the reset happens only
    /// if the driver's features for the write cache have changed, or if the driver has none of
    /// these features.
    pub(super) fn reset_write_cache(&mut self, before: u64) {
        const CACHE_FEATURES: u64 = config::F_FLUSH | config::F_CONFIG_WCE;
        if (before ^ self.state.features) & CACHE_FEATURES != 0 || !self.state.has(CACHE_FEATURES) {
            let flushes = self.state.has(config::F_FLUSH);
            self.switch_write_cache(flushes && self.device.disk.options().cache.write_back());
        }
    }

    /// Sets whether the guest sees a write cache, and stores that for the next back end. Returns
    /// the previous value.
    pub(super) fn switch_write_cache(&mut self, write_back: bool) -> bool {
        if let Some(region) = &self.inflight {
            region.note_write_back(write_back);
        }
        self.device.write_back.store(write_back, Ordering::Relaxed);
        std::mem::replace(&mut self.state.write_back, write_back)
    }

    /// Adopts the write cache setting from the in-flight region of a back end that was killed,
    /// because the guest still relies on that setting.
    pub(super) fn take_over_write_cache(&mut self, region: &InflightRegion) {
        let (flushes, now) = (self.state.has(config::F_FLUSH), self.state.write_back);
        let write_back = region.write_back().unwrap_or(now) && (flushes || now);
        self.state.write_back = write_back;
        self.device.write_back.store(write_back, Ordering::Relaxed);
        region.note_write_back(write_back);
    }
}
