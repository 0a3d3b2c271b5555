//! Exports that another server has handed over, until this one continues or ends them.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Mutex, PoisonError};

use blockyard_export::Handed;
use blockyard_export::vhost_user::Before;
use blockyard_ring::parcel::Parcel;

use super::end_handed;

/// Exports of another server, by disk, until this server continues them.
#[derive(Default)]
pub struct HandedExports(Mutex<HashMap<(String, String), (Parcel, Before)>>);

impl HandedExports {
    pub fn put(&self, disk: &str, kind: &str, parcel: Parcel, before: Before) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((disk.into(), kind.into()), (parcel, before));
    }

    /// Returns the parcel of an export of this kind, once.
    pub fn take(&self, disk: &str, kind: &str) -> Option<(Parcel, Before)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&(disk.into(), kind.into()))
    }

    /// Returns whether nothing has taken the parcel of an export yet.
    pub fn has(&self, disk: &str, kind: &str) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.contains_key(&(disk.into(), kind.into()))
    }

    /// Returns whether nothing has taken the parcel of an export yet, and `is_meant` holds for it.
    pub fn has_such(&self, disk: &str, kind: &str, is_meant: fn(&Parcel) -> bool) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&(disk.into(), kind.into())).is_some_and(|(parcel, _)| is_meant(parcel))
    }

    /// Returns the disks with exports that nothing has taken.
    pub fn disks(&self) -> BTreeSet<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.keys().map(|(disk, _)| disk.clone()).collect()
    }

    /// Returns copies of the exports of a disk that nothing has taken, each with its kind.
    pub fn copies(&self, disk: &str) -> io::Result<Vec<(String, Parcel)>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_disk = all.iter().filter(|((name, _), _)| name == disk);
        let copy = |((_, kind), (parcel, _)): (&(String, String), &(Parcel, Before))| {
            Ok((kind.clone(), parcel.try_clone()?))
        };
        of_disk.map(copy).collect()
    }

    /// Drops what nothing has taken, except for these disks. Closes its connections, and removes
    /// what is kept of it for later servers.
    pub fn clear(&self, except: &[String]) {
        self.drop_kept(|name| except.iter().all(|disk| disk != name));
    }

    /// Ends the exports of a disk that no server may serve any more. Like `clear` for one disk.
    pub fn end_disk(&self, disk: &str, exports: Vec<Handed>) {
        for Handed { kind, parcel } in exports {
            self.put(disk, kind, parcel, Before::Died);
        }
        self.drop_kept(|name| name == disk);
    }

    /// Drops the exports of other disks than these, which the configuration or the server has.
    /// Returns the names of the others. A disk of the configuration that cannot be opened may be
    /// opened later.
    pub fn drop_others(&self, known: &BTreeSet<String>) -> Vec<String> {
        self.drop_kept(|name| !known.contains(name))
    }

    fn drop_kept(&self, ends: impl Fn(&str) -> bool) -> Vec<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = all.extract_if(|(disk, _), _| ends(disk)).collect::<Vec<_>>();
        drop(all);
        let mut disks = Vec::new();
        for ((disk, kind), (parcel, before)) in ended {
            if end_handed(&disk, &kind, parcel, before) {
                disks.push(disk);
            }
        }
        disks
    }
}
