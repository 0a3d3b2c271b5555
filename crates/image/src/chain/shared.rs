//! Backing images that several chains have in common: opened once, with one lock and one cache.
//!
//! In: chains that are opened with the same [`SharedImages`]. Out: the open image, if another chain
//! of these has it already.
//!
//! What must hold:
//! - A shared image is a raw or qcow2 file of this host that nothing writes to. Its path, format
//!   and cache mode are the same in all chains. A file that has changed since it was opened is
//!   opened again.
//! - Each chain checks by itself whether it may open the file.
//! - A commit takes the image out ([`Sharing::take_out`]) before it writes to it, and fails if
//!   another chain has the image. A chain that is opened later opens the file itself, and meets the
//!   commit's lock.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_storage::{CacheMode, FileId, ImageFile};
use rustix::fs::{FileType, Stat};

use crate::layers::format::Format;
use crate::layers::meta::Meta;

/// The images that chains share. Clones are the same set.
#[derive(Clone, Debug, Default)]
pub struct SharedImages(Arc<Mutex<HashMap<Key, Weak<Opened>>>>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    id: FileId,
    path: PathBuf,
    format: Format,
    cache: CacheMode,
}

/// Length in bytes and time of change of a file. They stay until a program writes to it.
#[derive(Debug, PartialEq, Eq)]
struct Stamp(i64, i64, u64);

impl Stamp {
    fn of(stat: &Stat) -> Self {
        Stamp(stat.st_size, stat.st_mtime, stat.st_mtime_nsec)
    }
}

#[derive(Debug)]
struct Opened {
    images: SharedImages,
    key: Key,
    stamp: Stamp,
    file: Arc<ImageFile>,
    meta: Meta,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut images = self.images.lock();
        // Another chain may have opened the file again meanwhile.
        if images.get(&self.key).is_some_and(|known| known.strong_count() == 0) {
            images.remove(&self.key);
        }
    }
}

/// One chain's use of a shared image. The number of these is the number of chains.
#[derive(Debug)]
pub(crate) struct Sharing(Arc<Opened>);

/// A file that may be shared, before it is opened.
pub(super) struct Candidate {
    images: SharedImages,
    key: Key,
    stamp: Stamp,
}

impl SharedImages {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Weak<Opened>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the opened image of a key. The caller drops it without the lock.
    fn known(&self, key: &Key) -> Option<Arc<Opened>> {
        self.lock().get(key).and_then(Weak::upgrade)
    }
}

impl Candidate {
    /// Returns the file `found`, if chains can share it. They open it for reading, by `path`.
    pub fn of(
        images: SharedImages,
        found: impl AsFd,
        path: PathBuf,
        format: Format,
        cache: CacheMode,
    ) -> Option<Candidate> {
        let stat = rustix::fs::fstat(found).ok()?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || format == Format::Cow {
            return None;
        }
        let key = Key { id: FileId::of(&stat), path, format, cache };
        Some(Candidate { images, key, stamp: Stamp::of(&stat) })
    }

    /// Returns the image, if another chain has it open.
    pub fn find(&self) -> Option<Sharing> {
        let known = self.images.known(&self.key)?;
        (known.stamp == self.stamp).then_some(Sharing(known))
    }

    /// Lets other chains share an image that was just opened. Returns the image of another chain,
    /// if that chain has opened the file at the same time. None: the file has changed meanwhile.
    pub fn share(self, file: &Arc<ImageFile>, meta: &Meta) -> Option<Sharing> {
        let Candidate { images, key, stamp } = self;
        let unchanged = file.fd().is_some_and(|fd| {
            rustix::fs::fstat(fd)
                .is_ok_and(|stat| FileId::of(&stat) == key.id && Stamp::of(&stat) == stamp)
        });
        if !unchanged {
            return None;
        }
        if let Some(known) = images.known(&key).filter(|known| known.stamp == stamp) {
            return Some(Sharing(known));
        }
        let (file, meta) = (file.clone(), meta.clone());
        let new = Arc::new(Opened { images: images.clone(), key: key.clone(), stamp, file, meta });
        images.lock().insert(key, Arc::downgrade(&new));
        Some(Sharing(new))
    }
}

impl Sharing {
    /// Returns the image's format, file and state.
    pub fn image(&self) -> (Format, Arc<ImageFile>, Meta) {
        (self.0.key.format, self.0.file.clone(), self.0.meta.clone())
    }

    /// Takes the image out of the set, so that this chain can write to the file. Returns false if
    /// another chain has the image.
    pub fn take_out(&self) -> bool {
        let Opened { images, key, .. } = &*self.0;
        let mut images = images.lock();
        // Under the lock, no other chain begins to share it.
        let alone = Arc::strong_count(&self.0) == 1;
        if alone && images.get(key).is_some_and(|known| known.as_ptr() == Arc::as_ptr(&self.0)) {
            images.remove(key);
        }
        alone
    }
}
