//! Disks of the configuration that could not be opened, so that they appear beside those that are
//! served.
//!
//! In: errors of a start, a reload or a late addition; and disks that are served after all. Out:
//! the list for the API and the metrics, and an event for each new error. What must hold: a disk is
//! in the list if and only if the configuration has it and the last attempt to open it failed.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use blockyard_control::types::UnopenedDisk;

use crate::options::disk::DiskArgs;

/// The disks that could not be opened, by their names.
#[derive(Default)]
pub struct Unopened(Mutex<BTreeMap<String, UnopenedDisk>>);

impl Unopened {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, UnopenedDisk>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn all(&self) -> Vec<UnopenedDisk> {
        self.entries().values().cloned().collect()
    }

    pub fn count(&self) -> usize {
        self.entries().len()
    }

    /// Notes why a disk could not be opened. Returns false if the last attempt had the same error.
    pub fn note(&self, args: &DiskArgs, error: &str) -> bool {
        let name = args.name();
        let mut entries = self.entries();
        let before = entries.get(&name);
        let is_new = before.is_none_or(|before| before.error != error);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let since = before.map_or(now, |before| before.since);
        let image = args.image.display().to_string();
        let entry = UnopenedDisk { name: name.clone(), image, error: error.into(), since };
        entries.insert(name, entry);
        is_new
    }

    /// Takes a disk out that is served now.
    pub fn clear(&self, disk: &str) {
        self.entries().remove(disk);
    }

    /// Forgets the disks that have none of these names.
    pub fn retain(&self, names: &HashSet<String>) {
        self.entries().retain(|name, _| names.contains(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_stays_in_the_list_until_it_is_served_or_gone() {
        let args = |name: &str| {
            let keys = format!("name = \"{name}\"\nimage = \"/i\"\nvhost-user = \"/s\"\n");
            keys.parse::<toml::Table>().unwrap().try_into::<DiskArgs>().unwrap()
        };
        let list = Unopened::default();
        assert!(list.note(&args("a"), "one") && list.note(&args("b"), "one"));
        let first = list.all()[0].clone();
        assert!(!list.note(&args("a"), "one"), "no second event");
        assert!(list.note(&args("a"), "two"));
        assert_eq!(list.all()[0], UnopenedDisk { error: "two".into(), ..first });
        list.clear("a");
        assert_eq!((list.count(), list.all()[0].name.as_str()), (1, "b"));
        list.retain(&HashSet::new());
        assert_eq!(list.count(), 0);
    }
}
