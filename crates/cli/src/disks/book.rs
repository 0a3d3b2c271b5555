//! The configuration of each disk that the server has, without the disks of toolstacks.
//!
//! In: disks that start, change and end. Out: what each disk was configured as. What must hold: at
//! most one command works on a disk at a time. A disk that is closed to be opened again stays in
//! the book, so that a reload does not add it. The lock is never held during a command, so that a
//! slow image delays no other disk.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use toml::{Table, Value};

use crate::claims::{Claims, ImageId};
use crate::options::disk::DiskArgs;
use crate::process::looks;

/// Reasons why a command cannot have a disk.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error("the server's configuration has no disk \"{0}\"")]
    NotFound(String),
    #[error("another command works on disk \"{0}\": try again when it has ended")]
    Busy(String),
}

/// Keys that calls have set and that no file keeps, each with its value in the file.
pub type SetKeys = BTreeMap<String, Option<Value>>;

/// A disk as it was configured.
#[derive(Clone)]
pub struct Entry {
    pub args: DiskArgs,
    /// The keys that were given, for messages about changes.
    pub keys: Table,
    /// Whether a call of the API added the disk, and no configuration file has it.
    pub by_api: bool,
    /// What calls have set since the file was read.
    pub set: SetKeys,
    pub image: Option<ImageId>,
    /// Number of jobs that have held the disk, and may have changed its image and its file.
    pub jobs: u64,
    /// Number of calls that have changed the disk and its file.
    pub kept: u64,
    /// Number of the disk in the order of arrival.
    arrival: u64,
    is_held: bool,
    /// Whether the disk is held until it is open. What it continues of another server is in
    /// [`crate::exports::HandedExports`] until then.
    pub is_opening: bool,
}

impl Entry {
    /// Returns the keys of the disk's file.
    pub fn file_keys(&self) -> Table {
        let mut keys = self.keys.clone();
        for (key, value) in &self.set {
            keys.remove(key);
            keys.extend(value.clone().map(|value| (key.clone(), value)));
        }
        keys
    }
}

#[derive(Default)]
struct Entries {
    all: HashMap<String, Entry>,
    removed: BTreeMap<String, Table>,
    arrivals: u64,
    claims: Claims,
}

/// The configured disks; see the module documentation.
#[derive(Default)]
pub struct Book(Mutex<Entries>);

impl Book {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all disks in the order of their arrival.
    pub fn all(&self) -> Vec<Entry> {
        let mut all: Vec<_> = self.entries().all.values().cloned().collect();
        all.sort_by_key(|entry| entry.arrival);
        all
    }

    pub fn find(&self, name: &str) -> Option<Entry> {
        self.entries().all.get(name).cloned()
    }

    /// Enters a disk that is about to be opened. Returns an error if it conflicts with another one.
    /// `image`: [`ImageId::within`].
    pub fn reserve(
        &self,
        args: DiskArgs,
        keys: Table,
        by_api: bool,
        image: Option<ImageId>,
    ) -> Result<HeldDisk<'_>, String> {
        let name = args.name();
        let mut entries = self.entries();
        entries.claims.add(&args, image.clone())?;
        entries.arrivals += 1;
        let (arrival, is_held, is_opening, jobs, kept) = (entries.arrivals, true, true, 0, 0);
        let set = SetKeys::new();
        let entry =
            Entry { args, keys, by_api, set, image, jobs, kept, arrival, is_held, is_opening };
        entries.all.insert(name.clone(), entry);
        Ok(HeldDisk { book: self, name, is_leaving: true })
    }

    /// Holds a disk for a command.
    pub fn hold(&self, name: &str) -> Result<HeldDisk<'_>, HoldError> {
        let mut entries = self.entries();
        let entry = entries.all.get_mut(name);
        let entry = entry.ok_or_else(|| HoldError::NotFound(name.into()))?;
        if std::mem::replace(&mut entry.is_held, true) {
            return Err(HoldError::Busy(name.into()));
        }
        Ok(HeldDisk { book: self, name: name.into(), is_leaving: false })
    }

    /// Returns a disk that [`HeldDisk::lend`] has lent to a job.
    pub fn lent(&self, name: String) -> HeldDisk<'_> {
        let held = HeldDisk { book: self, name, is_leaving: false };
        held.with(|entry| entry.jobs += 1);
        held
    }

    /// Returns the disks that calls have removed and that the files still have, with their keys
    /// there.
    pub fn removed(&self) -> BTreeMap<String, Table> {
        self.entries().removed.clone()
    }

    /// Records that a call has removed a disk which a file has with these keys.
    pub fn note_removed(&self, disk: &str, keys: Table) {
        self.entries().removed.insert(disk.into(), keys);
    }

    /// Records what calls of an earlier server have set.
    pub fn note_set(&self, disk: &str, set: SetKeys) {
        if let Some(entry) = self.entries().all.get_mut(disk) {
            entry.set = set;
        }
    }

    /// Records that a reload has read these disks from the files. It takes back what calls have
    /// set and removed. A call that holds a disk sets it after the reload.
    pub fn follow(&self, disks: &[DiskArgs]) {
        self.adopt(disks);
        let mut entries = self.entries();
        entries.removed.clear();
        for disk in disks {
            let entry = entries.all.get_mut(&disk.name());
            let is_followed = |entry: &&mut Entry| entry.args == *disk && !entry.is_held;
            entry.filter(is_followed).into_iter().for_each(|entry| entry.set.clear());
        }
    }

    /// Records that the configuration file has these disks.
    pub fn adopt(&self, disks: &[DiskArgs]) {
        let mut entries = self.entries();
        for disk in disks {
            if let Some(entry) = entries.all.get_mut(&disk.name()) {
                entry.by_api = false;
            }
        }
    }
}

/// A disk on which a command works. No other command has it until this is dropped. Dropping a disk
/// of [`Book::reserve`] removes it, unless it was kept.
pub struct HeldDisk<'a> {
    book: &'a Book,
    name: String,
    is_leaving: bool,
}

impl HeldDisk<'_> {
    pub fn args(&self) -> DiskArgs {
        self.with(|entry| entry.args.clone())
    }

    pub fn entry(&self) -> Entry {
        self.with(|entry| entry.clone())
    }

    /// Changes keys that cannot conflict with those of other disks.
    pub fn set(&self, args: DiskArgs, keys: Table) {
        self.with(|entry| (entry.args, entry.keys) = (args, keys));
    }

    /// Records that a call sets keys without a file. `before`: the keys until then.
    pub fn note_set<'k>(&self, before: &Table, keys: impl Iterator<Item = &'k String>) {
        self.with(|entry| {
            for key in keys.filter(|_| !entry.by_api) {
                entry.set.entry(key.clone()).or_insert_with(|| before.get(key).cloned());
            }
        });
    }

    /// Records that the disk's file has these keys as they are set.
    pub fn forget_set<'k>(&self, keys: impl Iterator<Item = &'k String>) {
        self.with(|entry| keys.for_each(|key| drop(entry.set.remove(key))));
    }

    /// Records that the disk has all values of its file.
    pub fn follows_file(&self) {
        self.with(|entry| entry.set.clear());
    }

    /// Records that a call has changed the disk and its file. A reload may have read the file
    /// before that.
    pub fn note_kept(&self) {
        self.with(|entry| entry.kept += 1);
    }

    /// Returns the disk so that dropping it removes it, unless it was kept. No image is open.
    pub fn leaving(mut self) -> Self {
        self.is_leaving = true;
        self
    }

    /// Changes keys with the image among them. No other disk has the image, because it is locked.
    pub fn set_image(&self, args: DiskArgs, keys: Table) {
        // The file system may be slow, so this is done without the lock.
        let image = ImageId::within(&args, looks::LIMIT).unwrap_or_else(|e| {
            tracing::error!("{e}: another disk may get the same image");
            None
        });
        let mut entries = self.book.entries();
        let Entries { all, claims, .. } = &mut *entries;
        let entry = all.get_mut(&self.name).expect("a held disk stays in the book");
        claims.remove(&entry.args, entry.image.take());
        if let Err(e) = claims.add(&args, image.clone()) {
            tracing::error!("{e}");
        }
        (entry.args, entry.keys, entry.image) = (args, keys, image);
    }

    /// Notes the image of a disk that was entered without one. Returns an error if another disk has
    /// it.
    pub fn found(&self, image: Option<ImageId>) -> Result<(), String> {
        let mut entries = self.book.entries();
        let Entries { all, claims, .. } = &mut *entries;
        let entry = all.get_mut(&self.name).expect("a held disk stays in the book");
        claims.remove(&entry.args, entry.image.take());
        if let Err(e) = claims.add(&entry.args, image.clone()) {
            let _ = claims.add(&entry.args, None);
            return Err(e);
        }
        entry.image = image;
        Ok(())
    }

    /// Keeps the disk held after the end of this borrow, until [`Book::lent`] takes it.
    pub fn lend(self) -> String {
        let name = self.name.clone();
        std::mem::forget(self);
        name
    }

    /// Notes that the disk is being opened again.
    pub fn opens(&self) {
        self.with(|entry| entry.is_opening = true);
    }

    /// Keeps a disk that is served now.
    pub fn keep(mut self) {
        self.is_leaving = false;
    }

    /// Removes a disk that is no longer served.
    pub fn remove(mut self) {
        self.is_leaving = true;
    }

    fn with<T>(&self, work: impl FnOnce(&mut Entry) -> T) -> T {
        let mut entries = self.book.entries();
        work(entries.all.get_mut(&self.name).expect("a held disk stays in the book"))
    }
}

impl Drop for HeldDisk<'_> {
    fn drop(&mut self) {
        let mut entries = self.book.entries();
        if !self.is_leaving {
            if let Some(entry) = entries.all.get_mut(&self.name) {
                (entry.is_held, entry.is_opening) = (false, false);
            }
        } else if let Some(entry) = entries.all.remove(&self.name) {
            entries.claims.remove(&entry.args, entry.image);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(keys: &str) -> (DiskArgs, Table) {
        let keys: Table = format!("image = \"ram:1M\"\n{keys}").parse().unwrap();
        (keys.clone().try_into().unwrap(), keys)
    }

    #[test]
    fn a_disk_that_is_not_kept_leaves_and_frees_what_it_had() {
        let book = Book::default();
        let (args, keys) = disk("name = \"a\"\nvhost-user = \"/s\"\n");
        let held = book.reserve(args.clone(), keys.clone(), true, None).unwrap();
        let (other, other_keys) = disk("name = \"b\"\nvhost-user = \"/s\"\n");
        let error = book.reserve(other.clone(), other_keys.clone(), true, None).err().unwrap();
        assert!(error.contains("another disk has the socket /s"), "{error}");
        assert!(matches!(book.hold("a"), Err(HoldError::Busy(_))));
        drop(held);
        assert!(book.all().is_empty());
        book.reserve(other, other_keys, true, None).unwrap().keep();
        assert!(matches!(book.hold("a"), Err(HoldError::NotFound(_))));
        book.hold("b").unwrap().remove();
        book.reserve(args, keys, false, None).unwrap().keep();
        assert_eq!(book.all().len(), 1);
    }

    #[test]
    fn a_disk_with_another_image_has_that_one_only() {
        let folder = std::env::temp_dir().join(format!("blockyard-book-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let disk = |name: &str, image: &str| {
            let image = folder.join(image);
            std::fs::write(&image, "").unwrap();
            let keys = format!("name = {name:?}\nimage = {image:?}\nvhost-user = \"/{name}\"\n");
            let keys: Table = keys.parse().unwrap();
            (keys.clone().try_into::<DiskArgs>().unwrap(), keys)
        };
        let book = Book::default();
        let reserve = |name: &str, image: &str| {
            let (args, keys) = disk(name, image);
            let image = ImageId::of(&args);
            book.reserve(args, keys, false, image).map(HeldDisk::keep)
        };
        reserve("a", "base").unwrap();
        let (args, keys) = disk("a", "top");
        book.hold("a").unwrap().set_image(args, keys);
        assert!(reserve("b", "top").unwrap_err().contains("\"a\" has the same image"));
        reserve("b", "base").unwrap();
        book.hold("a").unwrap().remove();
        reserve("c", "top").unwrap();
        // The image of a disk becomes known later.
        let (args, keys) = disk("d", "top");
        let image = ImageId::of(&args);
        let held = book.reserve(args, keys, false, None).unwrap();
        assert!(held.found(image.clone()).unwrap_err().contains("\"c\" has the same image"));
        book.hold("c").unwrap().remove();
        held.found(image).unwrap();
        held.keep();
        assert!(reserve("c", "top").unwrap_err().contains("\"d\" has the same image"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_disk_that_the_file_has_is_adopted() {
        let book = Book::default();
        let (args, keys) = disk("name = \"a\"\nvhost-user = \"/s\"\n");
        book.reserve(args.clone(), keys, true, None).unwrap().keep();
        book.adopt(&[args]);
        assert!(!book.find("a").unwrap().by_api);
    }

    #[test]
    fn the_book_knows_what_calls_have_set_until_a_reload() {
        let book = Book::default();
        let (args, keys) = disk("name = \"a\"\nvhost-user = \"/s\"\nweight = 200\n");
        book.reserve(args.clone(), keys.clone(), false, None).unwrap().keep();
        let held = book.hold("a").unwrap();
        for weight in [300, 400] {
            let names = ["weight".to_string(), "iops".to_string()];
            held.note_set(&held.entry().keys, names.iter());
            let mut now = keys.clone();
            now.insert("weight".into(), weight.into());
            now.insert("iops".into(), 5.into());
            held.set(DiskArgs { weight: weight as u32, ..args.clone() }, now);
        }
        let entry = held.entry();
        assert_eq!(
            (entry.set["weight"].as_ref(), entry.set["iops"].as_ref()),
            (Some(&200.into()), None)
        );
        assert_eq!(entry.file_keys(), keys);
        held.keep();
        book.note_removed("b", Table::new());
        // The reload could not change the disk.
        book.follow(std::slice::from_ref(&args));
        assert_eq!((book.find("a").unwrap().set.len(), book.removed().len()), (2, 0));
        let held = book.hold("a").unwrap();
        held.set(args.clone(), keys);
        held.keep();
        book.follow(&[args]);
        assert!(book.find("a").unwrap().set.is_empty());
    }
}
