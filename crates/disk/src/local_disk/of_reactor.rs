//! The disks that a reactor has open: a disk is opened there when its first queue starts.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::Handle;

use super::LocalDisk;
use crate::backend::Source;
use crate::current_image::CurrentImage;
use crate::disk::Disk;

/// The disks of a reactor. All queues of a disk on the reactor share its image and statistics.
#[derive(Default)]
struct Disks(RefCell<Vec<Rc<LocalDisk>>>);

impl LocalDisk {
    /// Returns the disk on a reactor. Opens it there at the first call.
    pub fn local(handle: &Handle, disk: &Arc<Disk>) -> io::Result<Rc<Self>> {
        if let Some(local_disk) = Self::known(handle, disk) {
            return Ok(local_disk);
        }
        let local_disk = {
            let mut serving = disk.serving_state();
            disk.note_use();
            let image = CurrentImage::open(handle, &serving.source, serving.tracker.clone())?;
            let local_disk = LocalDisk::with_image(disk.clone(), image, Some(handle.clone()));
            let remote = handle.remote();
            if !serving.reactors.iter().any(|r| r.is(&remote)) {
                serving.reactors.push(remote);
            }
            if serving.quiesced {
                local_disk.quiesce.start_without_reply();
            }
            Rc::new(local_disk)
        };
        handle.local::<Disks>().0.borrow_mut().push(local_disk.clone());
        Ok(local_disk)
    }

    /// Opens the disk on a reactor that serves none of its requests, for work on its image.
    pub(crate) fn apart(handle: &Handle, disk: &Arc<Disk>, source: &Source) -> io::Result<Self> {
        let image = CurrentImage::open(handle, source, None)?;
        Ok(LocalDisk::with_image(disk.clone(), image, Some(handle.clone())))
    }

    /// Poisons the disk if a sync that the image made on its own has failed; see [`Backend::lost`].
    pub(crate) fn poison_if_writes_lost(&self) {
        self.poison_if_lost(&self.image.borrow());
    }

    /// Returns the disk on a reactor, if the reactor has it open.
    pub fn known(handle: &Handle, disk: &Arc<Disk>) -> Option<Rc<Self>> {
        handle.local::<Disks>().0.borrow().iter().find(|s| Arc::ptr_eq(&s.disk, disk)).cloned()
    }

    /// Closes the disk on a reactor.
    pub fn forget(handle: &Handle, disk: &Arc<Disk>) {
        let disks = handle.local::<Disks>();
        let gone: Vec<_> =
            disks.0.borrow_mut().extract_if(.., |s| Arc::ptr_eq(&s.disk, disk)).collect();
        for remote in
            gone.iter().filter_map(|local_disk| Some(local_disk.handle.as_ref()?.remote()))
        {
            disk.serving_state().reactors.retain(|r| !r.is(&remote));
        }
    }
}
