//! A simulated machine with domains, without a hypervisor: xenstore, event channels and grants in
//! this process.
//!
//! A back end uses it as [`super::Host::Machine`], through the same types as the
//! kernel's devices. The
//! front end of a test or a benchmark is a [`Domain`].
//!
//! What must hold: a mapped page stays granted, as in Xen. A front end may do anything with its own
//! memory, grants and nodes.

mod domain;
mod server;

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use domain::{Domain, FrontChannel, GrantCounts};

use super::{Channel, Store};
use server::Tree;

/// A simulated machine; see the module documentation.
#[derive(Default)]
pub struct Machine {
    /// Number of the back end's domain.
    own: u16,
    tree: Arc<Mutex<Tree>>,
    domains: Mutex<HashMap<u16, Arc<Domain>>>,
    connections: Mutex<Connections>,
}

/// The back end's connections to xenstore.
#[derive(Default)]
struct Connections {
    refused: bool,
    streams: Vec<Weak<Mutex<UnixStream>>>,
}

impl Machine {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Creates a machine with its back end in domain `own`, a driver domain.
    pub fn with_driver_domain(own: u16) -> Arc<Self> {
        Arc::new(Machine { own, ..Machine::default() })
    }

    /// Opens a connection of the back end to xenstore.
    pub(super) fn own_store(&self) -> io::Result<Store> {
        let mut connections = lock(&self.connections);
        if connections.refused {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (store, stream) = self.open(self.own)?;
        connections.streams.retain(|stream| stream.strong_count() > 0);
        connections.streams.push(stream);
        Ok(store)
    }

    /// Closes the back end's connections to xenstore, and refuses new ones until
    /// [`Machine::restore_store`].
    pub fn lose_store(&self) {
        let mut connections = lock(&self.connections);
        connections.refused = true;
        for stream in connections.streams.drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = lock(&stream).shutdown(Shutdown::Both);
        }
    }

    pub fn restore_store(&self) {
        lock(&self.connections).refused = false;
    }

    /// Opens a connection of domain `domain` to xenstore. Permissions are stored, but not enforced.
    pub fn store(&self, domain: u16) -> io::Result<Store> {
        self.open(domain).map(|(store, _)| store)
    }

    fn open(&self, domain: u16) -> io::Result<(Store, Weak<Mutex<UnixStream>>)> {
        let (ours, theirs) = UnixStream::pair()?;
        let stream = server::serve(&self.tree, domain, theirs)?;
        Ok((Store::over(ours.into()), stream))
    }

    /// Creates a domain with `pages` pages of memory.
    pub fn add(&self, number: u16, pages: usize) -> io::Result<Arc<Domain>> {
        let domain = Arc::new(Domain::new(number, pages)?);
        lock(&self.domains).insert(number, domain.clone());
        Ok(domain)
    }

    /// Removes a domain. Its mapped pages stay mapped until they are unmapped.
    pub fn remove(&self, number: u16) {
        lock(&self.domains).remove(&number);
    }

    pub(super) fn grants(&self, domain: u16) -> io::Result<Arc<Domain>> {
        lock(&self.domains).get(&domain).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(super) fn bind(&self, domain: u16, port: u32) -> io::Result<Channel> {
        self.grants(domain)?.bind(port)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn copy_of(fd: &OwnedFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}

#[cfg(test)]
mod tests;
