//! The exports of one disk, which its commands and its jobs share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_export::{Client, Export};

/// The exports of a disk. Empty while the disk is being closed. Clones are of the same disk.
///
/// No command holds the lock while it waits for the storage, so that a report of a disk with a
/// command that hangs has its clients.
#[derive(Clone, Default)]
pub(crate) struct Exports(Arc<Mutex<Vec<Box<dyn Export>>>>);

impl Exports {
    pub fn new(exports: Vec<Box<dyn Export>>) -> Self {
        Exports(Arc::new(Mutex::new(exports)))
    }

    pub fn all(&self) -> MutexGuard<'_, Vec<Box<dyn Export>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to disconnect the clients with this description, or all of them. Returns those that
    /// will leave.
    pub fn disconnect(&self, description: Option<&str>) -> Vec<Client> {
        self.all().iter_mut().flat_map(|export| export.disconnect(description)).collect()
    }

    pub fn clients(&self) -> Vec<Client> {
        self.all().iter().flat_map(|export| export.clients()).collect()
    }

    /// Makes the exports keep for the next server which images the disk has now.
    pub fn keep_images(&self) {
        self.all().iter_mut().for_each(|export| export.keep_images());
    }
}
