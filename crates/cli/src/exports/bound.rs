//! Sockets that a reload has bound before it closes the disks which will listen on them.
//!
//! In: the new addresses of disks that are closed and opened again. Out: a listening socket for
//! each of them, or an error before a client is disconnected. What must hold: what no export has
//! taken is closed at the end of the reload. Addresses of the server's present disks are not tried,
//! because they become free later, and TCP ports neither: an address may be a part of another one.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use blockyard_export::Listener;

use super::{Listens, listens, tcp};
use crate::options::disk::DiskArgs;
use crate::process::looks;

/// An address on which a disk listens, equal for two texts of one address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    Unix(PathBuf),
    Tcp(String, u16),
}

impl Address {
    pub fn unix(path: PathBuf) -> Self {
        Address::Unix(std::path::absolute(&path).unwrap_or(path))
    }

    /// Returns whether a listener on this address may exclude one on the other address.
    fn excludes(&self, other: &Self) -> bool {
        match (self, other) {
            (Address::Tcp(_, port), Address::Tcp(_, other)) => port == other,
            _ => self == other,
        }
    }
}

/// Returns the addresses of a disk, with the paths as they were given.
fn given(args: &DiskArgs) -> Vec<(Address, PathBuf)> {
    let unix = listens(args).into_iter().filter_map(|listens| match listens {
        Listens::Alone(path) | Listens::Shared(path) => Some((Address::unix(path.clone()), path)),
        Listens::Inherited { .. } => None,
    });
    let tcp = tcp(args).map(|(host, port)| (Address::Tcp(host, port), PathBuf::new()));
    unix.chain(tcp).collect()
}

/// Returns the addresses on which disks listen.
pub fn addresses<'a>(disks: impl Iterator<Item = &'a DiskArgs>) -> HashSet<Address> {
    disks.flat_map(given).map(|(address, _)| address).collect()
}

/// Returns an error if a disk cannot listen on one of its addresses, except for `present` ones.
pub fn probe(args: &DiskArgs, present: &HashSet<Address>) -> anyhow::Result<()> {
    let is_taken = |address: &Address| present.iter().any(|other| other.excludes(address));
    let new = given(args).into_iter().filter(|(address, _)| !is_taken(address));
    new.into_iter().try_for_each(|(address, path)| {
        beside(address, path, |address, path| {
            let tried = match address {
                Address::Unix(_) => Listener::probe(&path),
                Address::Tcp(host, port) => Listener::probe_tcp(&host, port),
            };
            Ok(tried?)
        })
    })
}

/// The sockets that no export has taken yet.
#[derive(Default)]
pub struct Bound(Mutex<HashMap<Address, Listener>>);

impl Bound {
    fn all(&self) -> MutexGuard<'_, HashMap<Address, Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Binds the addresses of a disk, except for `present` ones. After an error the disk has none.
    pub fn bind(&self, args: &DiskArgs, present: &HashSet<Address>) -> anyhow::Result<()> {
        let mut new = Vec::new();
        for (address, path) in given(args) {
            let is_taken = present.iter().any(|other| other.excludes(&address));
            if is_taken || self.all().contains_key(&address) {
                continue;
            }
            let listener = beside(address.clone(), path, |address, path| {
                Ok(match address {
                    Address::Unix(_) => Listener::bind(&path)?,
                    Address::Tcp(host, port) => Listener::bind_tcp(&host, port)?,
                })
            });
            new.push((address, listener?));
        }
        self.all().extend(new);
        Ok(())
    }

    /// Returns the socket of an address, once.
    pub fn take(&self, address: &Address) -> Option<Listener> {
        self.all().remove(address)
    }

    /// Closes what no export has taken.
    pub fn clear(&self) {
        self.all().clear();
    }
}

/// Runs a call on a thread of [`looks`], which may make sockets, unlike those of the API. Its file
/// system may not answer.
fn beside<T: Send + 'static>(
    address: Address,
    path: PathBuf,
    call: fn(Address, PathBuf) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let file = path.clone();
    looks::look(&file, looks::LIMIT, move || call(address, path)).context("socket").flatten()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn disk(keys: &str) -> DiskArgs {
        format!("image = \"ram:1M\"\n{keys}").parse::<toml::Table>().unwrap().try_into().unwrap()
    }

    #[test]
    fn new_addresses_are_tried_and_nothing_stays_behind() {
        let folder = std::env::temp_dir().join(format!("blockyard-bound-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (free, used) = (folder.join("free"), folder.join("used"));
        let _listener = UnixListener::bind(&used).unwrap();
        let tcp = Listener::bind_tcp("127.0.0.1", 0).unwrap();
        let port = tcp.port().unwrap();
        let bound = Bound::default();
        let none = HashSet::new();
        for (keys, part) in [
            (format!("vhost-user = {used:?}\n"), "another server listens on it"),
            (format!("vhost-user = {:?}\n", folder.join("x/s")), "does not exist: create it"),
            (format!("nbd = \"tcp:127.0.0.1:{port}\"\n"), "cannot listen on it"),
            (format!("vhost-user = {free:?}\nnbd = \"unix:{}\"\n", used.display()), "another"),
        ] {
            let args = disk(&keys);
            for tried in [probe(&args, &none), bound.bind(&args, &none)] {
                let error = format!("{:#}", tried.unwrap_err());
                assert!(error.contains(part), "{error}");
            }
            assert!(bound.all().is_empty() && !free.exists(), "{keys}");
            // The disk listens there already.
            let present = addresses([&args].into_iter());
            probe(&args, &present).unwrap();
            bound.bind(&args, &present).unwrap();
        }
        // The old address of the disk covers the new one.
        let old = disk(&format!("nbd = \"tcp:*:{port}\"\n"));
        let args = disk(&format!("nbd = \"tcp:127.0.0.1:{port}\"\n"));
        let present = addresses([&old].into_iter());
        probe(&args, &present).unwrap();
        bound.bind(&args, &present).unwrap();
        assert!(bound.all().is_empty());
        let args = disk(&format!("vhost-user = {free:?}\n"));
        probe(&args, &none).unwrap();
        assert!(!free.exists());
        bound.bind(&args, &none).unwrap();
        assert!(free.exists() && bound.take(&Address::unix(free.clone())).is_some());
        bound.bind(&args, &none).unwrap();
        bound.clear();
        assert!(!free.exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
