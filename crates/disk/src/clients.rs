//! Counts the connected clients of a disk, for each kind of export.
//!
//! In: clients that connect and disconnect. Out: their numbers, without a question to a reactor or
//! an export. A kind remains in the count when its last client is gone.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::disk::Disk;
use crate::observer::ClientId;

/// A connected client, until this is dropped.
#[derive(Debug)]
pub struct ConnectedClient {
    disk: Arc<Disk>,
    export: &'static str,
    id: ClientId,
    why: OnceLock<String>,
}

impl Disk {
    /// Notes that the disk has an export of this kind, so that its count is shown while it has no
    /// client.
    pub fn note_export(&self, export: &'static str) {
        self.clients.change(export, |_| ());
    }

    /// Counts a client of an export, and reports it.
    pub fn client(self: &Arc<Self>, export: &'static str, id: ClientId) -> ConnectedClient {
        self.clients.change(export, |count| *count += 1);
        if let Some(observed) = self.observed.get() {
            observed.observer.connected(self.name(), export, &id);
        }
        ConnectedClient { disk: self.clone(), export, id, why: OnceLock::new() }
    }

    /// Returns the number of connected clients for each kind of export.
    pub fn clients(&self) -> BTreeMap<&'static str, u64> {
        self.clients.all()
    }
}

impl ConnectedClient {
    /// Notes why the client is about to be disconnected. The first reason counts.
    pub fn ends(&self, why: impl Into<String>) {
        let _ = self.why.set(why.into());
    }
}

impl Drop for ConnectedClient {
    fn drop(&mut self) {
        let ConnectedClient { disk, export, id, why } = self;
        disk.clients.change(export, |count| *count -= 1);
        if let Some(observed) = disk.observed.get() {
            let why = why.get().map_or("the export has ended", String::as_str);
            observed.observer.disconnected(disk.name(), export, id, why);
        }
    }
}
