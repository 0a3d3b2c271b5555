//! The descriptors of a parcel for the next server, by their places in its list.
//!
//! In: descriptors and a description that has their places. Out: a parcel, and the same from it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use blockyard_ring::parcel::Parcel;
use serde::Serialize;

/// The identity of a descriptor while it is open: its number, and the inode of its file. All
/// eventfds have one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source(i32, u64);

/// Descriptors of a parcel that is being made.
#[derive(Default)]
pub(crate) struct Packed {
    fds: Vec<OwnedFd>,
    /// The descriptors of which `fds` are copies.
    sources: Vec<Source>,
}

impl Packed {
    /// Adds a copy of a descriptor. Returns its place.
    pub fn put(&mut self, fd: impl AsFd) -> io::Result<usize> {
        let fd = fd.as_fd();
        self.sources.push(Source(fd.as_raw_fd(), rustix::fs::fstat(fd)?.st_ino));
        self.fds.push(fd.try_clone_to_owned()?);
        Ok(self.fds.len() - 1)
    }

    pub fn put_some(&mut self, fd: &Option<OwnedFd>) -> io::Result<Option<usize>> {
        fd.as_ref().map(|fd| self.put(fd)).transpose()
    }

    /// Returns the parcel of these descriptors and of a description as JSON.
    pub fn seal(self, description: &impl Serialize) -> io::Result<Parcel> {
        self.seal_with_sources(description).map(|(parcel, _)| parcel)
    }

    /// Returns the parcel, and the identities of the descriptors that were copied for it.
    pub fn seal_with_sources(
        self,
        description: &impl Serialize,
    ) -> io::Result<(Parcel, Vec<Source>)> {
        let bytes = serde_json::to_vec(description)?;
        Ok((Parcel { bytes, fds: self.fds }, self.sources))
    }
}

/// Descriptors of a parcel that is being read. Each place is used once.
pub(crate) struct Unpacked(Vec<Option<OwnedFd>>);

impl Unpacked {
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Unpacked(fds.into_iter().map(Some).collect())
    }

    pub fn take(&mut self, place: usize) -> io::Result<OwnedFd> {
        let found = self.0.get_mut(place).and_then(Option::take);
        found.ok_or_else(|| wrong("a descriptor is missing"))
    }

    pub fn take_some(&mut self, place: Option<usize>) -> io::Result<Option<OwnedFd>> {
        place.map(|place| self.take(place)).transpose()
    }
}

/// Returns the error of a parcel that cannot be read.
pub(crate) fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}
