//! Counts the connected clients of a disk, for each kind of export.
//!
//! In: clients that connect and disconnect. Out: their numbers, without a question to a reactor or
//! an export. A kind remains in the count when its last client is gone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::disk::Disk;

#[derive(Debug, Default)]
pub(crate) struct ClientCounts(Mutex<BTreeMap<&'static str, u64>>);

/// A connected client, until this is dropped.
#[derive(Debug)]
pub struct ConnectedClient {
    disk: Arc<Disk>,
    export: &'static str,
}

impl ClientCounts {
    fn change(&self, export: &'static str, change: impl FnOnce(&mut u64)) {
        change(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(export).or_default());
    }
}

impl Disk {
    /// Notes that the disk has an export of this kind, so that its count is shown while it has no
    /// client.
    pub fn note_export(&self, export: &'static str) {
        self.clients.change(export, |_| ());
    }

    /// Counts a client of an export.
    pub fn client(self: &Arc<Self>, export: &'static str) -> ConnectedClient {
        self.clients.change(export, |count| *count += 1);
        ConnectedClient { disk: self.clone(), export }
    }

    /// Returns the number of connected clients for each kind of export.
    pub fn clients(&self) -> BTreeMap<&'static str, u64> {
        self.clients.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ConnectedClient {
    fn drop(&mut self) {
        self.disk.clients.change(self.export, |count| *count -= 1);
    }
}
