//! Overlays that were abandoned: their backing file was opened for writing without them.
//!
//! In: a chain with its images open. Out: an error, or a warning for commands that only read. What
//! must hold: no disk shows an overlay over a backing file that has changed beneath it, unless the
//! operator has named the backing file again (`image rebase`).

use blockyard_storage::OpenError;

use super::error::ChainError;
use super::open::Chain;

impl Chain {
    /// Returns an error if an image of the chain was abandoned and has the backing file of that
    /// time below it.
    pub(super) fn check_abandoned(&self) -> Result<(), ChainError> {
        for (depth, layer) in self.layers.iter().enumerate() {
            let below = &self.layers[depth + 1..];
            if below.is_empty() {
                break;
            }
            let Some(mark) = layer.file.abandoned()? else { continue };
            // An overlay that was rebased before has nothing of that file.
            if !below.iter().any(|below| mark.is_about(below.file.id())) {
                continue;
            }
            let error = OpenError::Abandoned { path: layer.file.path().into(), base: mark.base };
            if !self.options.may_show_abandoned() {
                return Err(error.into());
            }
            tracing::warn!("{error}");
        }
        Ok(())
    }
}
