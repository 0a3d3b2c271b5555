//! The identities of the images of many disks, for one command.
//!
//! In: disks, and the disks that are served. Out: what tells whether two images are the same. What
//! must hold: a file system that does not answer delays the other disks only once, and all such
//! file systems together do not delay them for long.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::book::Entry;
use crate::claims::ImageId;
use crate::options::disk::DiskArgs;
use crate::process::looks;

/// What is known of images; see the module documentation.
#[derive(Clone, Default)]
pub struct Images {
    waited: Cell<Duration>,
    /// The images of served disks, by path.
    served: HashMap<PathBuf, Option<ImageId>>,
    seen: RefCell<HashMap<PathBuf, Result<Option<ImageId>, String>>>,
}

impl Images {
    /// `served`: disks with open images. Their file systems are not asked.
    pub fn of(served: &[Entry]) -> Self {
        let known = served.iter().map(|entry| (entry.args.image.clone(), entry.image.clone()));
        Images { served: known.collect(), ..Images::default() }
    }

    /// Returns the identity of a disk's image, or `None` if its file system does not answer.
    /// [`Images::look`] has the error.
    pub fn known(&self, disk: &DiskArgs) -> Option<ImageId> {
        match self.served.get(&disk.image) {
            Some(image) => image.clone(),
            None => self.look(disk).unwrap_or_default(),
        }
    }

    /// Like `known`, but looks at the image of a served disk too.
    pub fn look(&self, disk: &DiskArgs) -> Result<Option<ImageId>, String> {
        if let Some(seen) = self.seen.borrow().get(&disk.image) {
            return seen.clone();
        }
        let began = Instant::now();
        let limit = looks::LIMIT.saturating_sub(self.waited.get()).max(looks::SHORT_LIMIT);
        let image = ImageId::within(disk, limit).map_err(|e| e.to_string());
        self.waited.set(self.waited.get() + began.elapsed());
        self.seen.borrow_mut().insert(disk.image.clone(), image.clone());
        image
    }
}
