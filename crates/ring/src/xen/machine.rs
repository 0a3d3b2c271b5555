//! A machine with domains, without a hypervisor: a xenstore, event channels and granted pages in this process.
//!
//! A back end reaches it as [`super::Host::Machine`], by the same types as the devices of a kernel. A front end of our own, in a
//! test or a benchmark, is a [`Domain`]. What must hold: a page that is mapped stays granted, as with Xen; what a front end does
//! with its own memory, grants and nodes is up to it.

mod domain;
mod server;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use domain::{Domain, FrontChannel};

use super::{Channel, Store};
use server::Tree;

/// See the module's page.
#[derive(Default)]
pub struct Machine {
    tree: Arc<Mutex<Tree>>,
    domains: Mutex<HashMap<u16, Arc<Domain>>>,
}

impl Machine {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A connection of domain `domain` to xenstore. It stores permissions and does not enforce them.
    pub fn store(&self, domain: u16) -> io::Result<Store> {
        let (ours, theirs) = UnixStream::pair()?;
        server::serve(&self.tree, domain, theirs)?;
        Ok(Store::over(ours.into()))
    }

    /// Makes a domain with `pages` pages of memory.
    pub fn add(&self, number: u16, pages: usize) -> io::Result<Arc<Domain>> {
        let domain = Arc::new(Domain::new(number, pages)?);
        lock(&self.domains).insert(number, domain.clone());
        Ok(domain)
    }

    /// Takes a domain away. What is mapped of it stays until it is unmapped.
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
