//! The properties of an export that all its connections share, and whether writes may be lost.
//!
//! What must hold: a new connection offers at least what the first one did. Acknowledged writes
//! that may be lost count as lost until the image is opened again.

use std::sync::{Mutex, OnceLock, PoisonError};

use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::uri::Uri;
use blockyard_nbd::wire::export;
use blockyard_nbd::{NbdError, NbdErrorKind};

use super::dial::Dialed;
use super::options::Options;
use crate::Geometry;
use crate::storage::Capabilities;

/// The properties that all connections to an export share.
#[derive(Debug)]
pub struct Export {
    pub uri: Uri,
    pub options: Options,
    pub read_only: bool,
    /// The terms of the first connection. Later ones must not be worse.
    pub terms: Terms,
    /// A connection that is not in use.
    pub(super) idle: Mutex<Option<Dialed>>,
    /// Reason why acknowledged writes may be lost.
    pub(super) lost: OnceLock<String>,
}

/// Requests bypass this host's page cache.
pub(super) const EXPORT: Capabilities = Capabilities { direct: true, fixed_length: true };

pub(super) fn unsuitable(what: impl Into<String>) -> NbdError {
    NbdError::new(NbdErrorKind::Unsuitable, what)
}

impl Export {
    /// Returns the block sizes that the server has announced, in bytes.
    pub fn geometry(&self) -> Geometry {
        let terms = &self.terms;
        Geometry {
            logical_block: terms.minimum.max(512),
            physical_block: terms.preferred.max(512),
            minimum_io: terms.preferred.max(512),
            optimal_io: 0,
            alignment_offset: 0,
            direct_memory: 1,
            direct_offset: terms.minimum,
            rotational: terms.has(export::ROTATIONAL),
        }
    }

    /// Returns a connection that is not in use, if there is one.
    pub fn take_idle(&self) -> Option<Dialed> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Keeps a connection for the next client. At most one is kept.
    pub fn put_idle(&self, dialed: Dialed) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        match &*idle {
            None => *idle = Some(dialed),
            Some(_) => dialed.end(),
        }
    }

    /// Records that acknowledged writes may be lost. All later writes fail until the image is
    /// opened again.
    pub fn lose(&self, why: &str) {
        let why = format!("{why}: writes acknowledged since the last flush may be lost");
        if self.lost.set(why).is_ok() {
            tracing::error!("image {}: {}", self.uri, self.lost.get().map_or("", String::as_str));
        }
    }

    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Returns an error if a new connection offers less than the first one did.
    pub fn check(&self, new: &Terms) -> Result<(), NbdError> {
        let old = &self.terms;
        if new.size != old.size {
            return Err(unsuitable(format!(
                "the export has {} bytes now, but had {} bytes",
                new.size, old.size
            )));
        }
        if new.minimum > old.minimum || new.maximum < old.maximum {
            return Err(unsuitable("the server's limits for request sizes have become stricter"));
        }
        if old.allocation.is_some() && new.allocation.is_none() {
            return Err(unsuitable("the export has no meta context base:allocation any more"));
        }
        let needed = export::SEND_FAST_ZERO
            | export::SEND_FLUSH
            | export::SEND_FUA
            | export::SEND_TRIM
            | export::SEND_WRITE_ZEROES;
        if !self.read_only && (new.has(export::READ_ONLY) || old.flags & needed & !new.flags != 0) {
            return Err(unsuitable(
                "the export supports fewer operations than when it was opened (transmission flags)",
            ));
        }
        Ok(())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(idle) = self.take_idle() {
            idle.end();
        }
    }
}
