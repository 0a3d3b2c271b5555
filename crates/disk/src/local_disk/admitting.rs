//! Admits requests: they wait here for the limits, for the disk's share, for the end of a quiesce,
//! and for the copies that a backup must make before they change the disk.
//!
//! What must hold: a request that waits holds nothing that another request needs, and is not in
//! flight. An admitted request may change the range for which it was admitted. Without a backup,
//! that costs a request one branch.

use std::cell::Cell;
use std::rc::Rc;

use blockyard_sched::Share;

use super::LocalDisk;
use crate::copy_map::CopyMap;
use crate::current_image::{CurrentImage, FileIo};
use crate::quiesce::InFlightGuard;
use crate::request::Op;
use crate::throttle;

/// A request, or several that form one operation.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub op: Op,
    pub offset: u64,
    pub len: u64,
    /// Number of bytes to charge. 0 if the requests will be refused: then they cost nothing.
    pub charged: u64,
    pub requests: u32,
}

/// A request that was admitted.
pub(super) struct Admitted<'a> {
    pub image: Rc<CurrentImage>,
    share: &'a Share,
    /// Number of bytes that the request was charged for.
    charged: u64,
    /// What the request began on the image's files. When this is dropped, the disk is charged for
    /// the I/O that its image has done beyond its requests.
    pub file_io: Cell<FileIo>,
    _in_flight: InFlightGuard<'a>,
    pub admission: throttle::Admission<'a>,
}

impl Drop for Admitted<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(more) = self.image.uncharged(self.file_io.get(), self.charged) {
            self.share.charge_more(more.operations, more.bytes);
        }
        if self.file_io.get().operations == 0 && self.image.is_idle_without_io() {
            self.admission.set_idle();
        }
    }
}

impl LocalDisk {
    /// Admits work that belongs to no request and changes nothing. It waits only while the disk is
    /// quiesced.
    #[inline]
    pub(super) async fn enter(&self) -> Admitted<'_> {
        let in_flight = self.quiesce.enter().await;
        self.admitted(in_flight)
    }

    /// Admits requests at once, if nothing is limited or shared, the disk is not quiesced, and no
    /// backup has to copy first.
    #[inline]
    pub(super) fn enter_now(&self, wanted: &Wanted) -> Option<Admitted<'_>> {
        if !self.throttle.is_open() {
            return None;
        }
        let admitted = self.admitted(self.quiesce.try_enter()?);
        let is_admitted = admitted.image.admits(wanted.op, wanted.offset, wanted.len);
        is_admitted.then_some(admitted)
    }

    #[inline]
    fn admitted<'a>(&'a self, in_flight: InFlightGuard<'a>) -> Admitted<'a> {
        Admitted {
            image: self.image.borrow().clone(),
            share: self.throttle.share(),
            charged: 0,
            file_io: Cell::default(),
            _in_flight: in_flight,
            admission: throttle::Admission::default(),
        }
    }

    /// Admits requests without limits and share. They wait for the end of a quiesce and for a
    /// backup.
    #[inline]
    pub(super) async fn enter_unlimited(&self, wanted: &Wanted) -> Admitted<'_> {
        loop {
            let admitted = self.enter().await;
            match admitted.image.must_wait(wanted.op, wanted.offset, wanted.len) {
                None => return admitted,
                Some(map) => {
                    drop(admitted);
                    Box::pin(self.wait_for_copy(&map, wanted)).await;
                }
            }
        }
    }

    /// Admits requests that form one operation. Waits for the limits, for the disk's share, for the
    /// end of a quiesce, and for a backup.
    #[inline]
    pub(super) async fn enter_for(&self, wanted: &Wanted) -> Admitted<'_> {
        if self.throttle.is_open() {
            return self.enter_unlimited(wanted).await;
        }
        let Wanted { op, offset, len, charged, requests } = *wanted;
        let operation = self.throttle.operation(op, offset, charged, requests);
        let number = self.throttle.arrive();
        loop {
            let admission = self.throttle.enter(&operation, number).await;
            // During a quiesce, or while a backup copies, a waiting request must hold nothing that
            // other requests need.
            let Some(in_flight) = self.quiesce.try_enter() else {
                admission.give_back(&operation);
                Box::pin(self.quiesce.wait_for_resume()).await;
                continue;
            };
            let image = self.image.borrow().clone();
            let Some(map) = image.must_wait(op, offset, len) else {
                return Admitted {
                    image,
                    share: self.throttle.share(),
                    charged: operation.moves(),
                    file_io: Cell::default(),
                    _in_flight: in_flight,
                    admission,
                };
            };
            drop(in_flight);
            admission.give_back(&operation);
            drop(image);
            Box::pin(self.wait_for_copy(&map, wanted)).await;
        }
    }

    #[cold]
    async fn wait_for_copy(&self, map: &CopyMap, wanted: &Wanted) {
        map.wait(self.handle.as_ref(), wanted.offset, wanted.len).await;
    }
}
