//! An in-flight region that the server makes if the front end of a session has none (User Mode
//! Linux, Firecracker, crosvm). The next server gets it with the session's state.
//!
//! What must hold: the region has the layout of the rings that use it, so it ends with the features
//! for which it was made.

use vhost::vhost_user::Result;

use super::config;
use super::inflight;
use super::session::Session;
use super::state::{InflightFile, SessionState};
use crate::keeper;

impl Session {
    /// Like `release`, for another server. The state then has an in-flight region, so that this
    /// server can go on if the other one serves the rings and dies.
    pub fn release_for_next(&mut self) -> SessionState {
        let mut state = self.release();
        if state.inflight.is_none() && state.vrings.iter().any(|vring| vring.started) {
            state.inflight = self.own_region(&state);
        }
        state
    }

    /// Makes a region for all queues of a session. Logs an error and returns `None` if the process
    /// has no memory or no descriptor for it.
    pub(super) fn own_region(&self, state: &SessionState) -> Option<InflightFile> {
        let is_packed = state.has(config::F_PACKED);
        let queues = state.vrings.len() as u16;
        let largest = state.vrings.iter().map(|vring| vring.size).max().unwrap_or(0);
        let entries = largest.max(self.export.shape.size.into()).min(32768) as u16;
        match inflight::allocate(queues, entries, is_packed) {
            Ok((file, len)) => {
                Some(InflightFile { file, offset: 0, len, queues, own: Some(is_packed) })
            }
            Err(e) => {
                let what = format_args!(
                    "cannot record requests in flight, so the guest hangs if the server dies: {e}"
                );
                self.device.log.warn(self.device.disk.name(), None, what);
                None
            }
        }
    }

    /// Makes a region before the first ring starts, if a holder keeps the session and its front end
    /// has no region.
    pub(super) fn ensure_region(&mut self) -> Result<()> {
        if self.inflight.is_some() || !keeper::is_on() {
            return Ok(());
        }
        if let Some(region) = self.own_region(&self.state) {
            let file = self.duplicate(&region.file)?;
            self.inflight =
                Some(self.map_inflight(file, (region.offset, region.len), region.queues)?);
            self.state.inflight = Some(region);
        }
        Ok(())
    }

    /// Forgets a region that this program has made, because its layout may be wrong for the next
    /// rings.
    pub(super) fn drop_own_region(&mut self) {
        let is_own = self.state.inflight.as_ref().is_some_and(|region| region.own.is_some());
        if is_own && self.queues().next().is_none() {
            self.state.inflight = None;
            self.inflight = None;
        }
    }
}
