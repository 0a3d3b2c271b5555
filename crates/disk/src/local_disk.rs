//! A disk as one reactor serves it: its view of the image, its statistics, and the way of a request
//! through it.
//!
//! In: requests, from the queues of this reactor. Out: their answers.
//! What must hold: a request uses one view of the image from its admission to its answer.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_image::{BlockStatus, Store};
use blockyard_ring::{Handle, Meter, Segments, WriteFigures};
use blockyard_storage::Storage;

use crate::backend::{Backend, Source};
use crate::dirty::DirtyMap;
use crate::disk::Disk;
use crate::filter::Dice;
use crate::quiesce::{InFlightGuard, Quiesce};
use crate::request::{Failure, Finished, Op, Request, Status, Token};
use crate::statistics::{OpKind, Statistics};
use crate::throttle::{self, Throttle};

mod merge;

pub use merge::Run;

/// A disk on one reactor. `S` is [`Store`], or the simulated disk in tests.
pub struct LocalDisk<S> {
    disk: Arc<Disk>,
    pub(crate) quiesce: Quiesce,
    pub(crate) image: RefCell<Rc<CurrentImage<S>>>,
    /// The view to come, while the gate is closed.
    pub(crate) next_image: RefCell<Option<Rc<CurrentImage<S>>>>,
    /// None in simulations, which have no clock.
    handle: Option<Handle>,
    throttle: Throttle,
    statistics: RefCell<Statistics>,
    dice: Dice,
}

/// The image as this reactor has it open, until it is exchanged for another.
pub(crate) struct CurrentImage<S> {
    pub(crate) backend: Backend<S>,
    /// Where it is noted what is written.
    dirty: Option<Arc<DirtyMap>>,
    /// Of images: what their files do, and what of it their requests have been charged for.
    metered: Option<Metered>,
}

/// FileIo of an image's files: operations, and bytes of those that move any.
#[derive(Clone, Copy, Default)]
struct FileIo {
    operations: u64,
    bytes: u64,
}

struct Metered {
    did: Rc<Meter>,
    /// FileIo that has a request of its own, or was charged. The rest is done by the image's own
    /// tasks.
    known: Cell<FileIo>,
}

impl Metered {
    fn did(&self) -> FileIo {
        let (operations, bytes) = self.did.counted();
        FileIo { operations, bytes }
    }
}

impl FileIo {
    fn since(self, before: FileIo) -> FileIo {
        FileIo {
            operations: self.operations.saturating_sub(before.operations),
            bytes: self.bytes.saturating_sub(before.bytes),
        }
    }

    fn and(self, other: FileIo) -> FileIo {
        FileIo { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

impl CurrentImage<Store> {
    pub(crate) fn open(
        handle: &Handle,
        source: &Source,
        dirty: Option<Arc<DirtyMap>>,
    ) -> io::Result<Self> {
        if source.chain().is_none() && source.file().is_none() {
            return Ok(CurrentImage {
                backend: Backend::open(handle, source)?,
                dirty,
                metered: None,
            });
        }
        let meter = Rc::new(Meter::default());
        let backend = Backend::open(&handle.metered(&meter), source)?;
        let metered = Metered { did: meter, known: Cell::default() };
        metered.known.set(metered.did());
        Ok(CurrentImage { backend, dirty, metered: Some(metered) })
    }
}

impl<S> CurrentImage<S> {
    /// Does something for a request. Returns also the work of the image's files that its polls
    /// began.
    #[inline]
    async fn measured<T>(&self, request: impl Future<Output = T>) -> (T, FileIo) {
        let Some(metered) = &self.metered else { return (request.await, FileIo::default()) };
        let mut request = pin!(request);
        let mut work = FileIo::default();
        let done = poll_fn(|cx| {
            let before = metered.did();
            let polled = request.as_mut().poll(cx);
            let new = metered.did().since(before);
            metered.known.set(metered.known.get().and(new));
            work = work.and(new);
            polled
        });
        (done.await, work)
    }

    /// Returns the work that a request does not pay for. It was charged for one operation of
    /// `charged` bytes, for which it did `work`. What it was charged too much is no credit for
    /// others.
    #[inline]
    fn uncharged(&self, work: FileIo, charged: u64) -> Option<FileIo> {
        let Metered { known, .. } = self.metered.as_ref()?;
        let own = work.since(FileIo { operations: 1, bytes: charged });
        let all = self.metered.as_ref()?.did();
        let more = own.and(all.since(known.replace(all)));
        (more.operations > 0 || more.bytes > 0).then_some(more)
    }

    /// What the policies of writes chose for the files of this view.
    fn writes(&self) -> WriteFigures {
        self.metered.as_ref().map_or_else(WriteFigures::default, |metered| metered.did.writes())
    }

    pub(crate) fn gone(why: &io::Error) -> Self {
        CurrentImage { backend: Backend::Gone(why.to_string()), dirty: None, metered: None }
    }
}

/// A request that was let in.
pub(crate) struct Admitted<'a, S> {
    image: Rc<CurrentImage<S>>,
    /// Bytes that it was charged for.
    charged: u64,
    _in_flight: InFlightGuard<'a>,
    _admission: throttle::Admission<'a>,
}

/// The disks of a reactor: all its queues of a disk share image and statistics.
#[derive(Default)]
struct Disks(RefCell<Vec<Rc<LocalDisk<Store>>>>);

impl LocalDisk<Store> {
    /// The disk on a reactor; opened there at first use.
    pub fn local(handle: &Handle, disk: &Arc<Disk>) -> io::Result<Rc<Self>> {
        if let Some(local_disk) = Self::known(handle, disk) {
            return Ok(local_disk);
        }
        let local_disk = {
            let mut serving = disk.serving_state();
            let image = CurrentImage::open(handle, &serving.source, serving.dirty.clone())?;
            let local_disk = LocalDisk::with_image(disk.clone(), image, Some(handle.clone()));
            let remote = handle.remote();
            if !serving.reactors.iter().any(|r| r.is(&remote)) {
                serving.reactors.push(remote);
            }
            if serving.closed {
                local_disk.quiesce.start_without_reply();
            }
            Rc::new(local_disk)
        };
        handle.local::<Disks>().0.borrow_mut().push(local_disk.clone());
        Ok(local_disk)
    }

    /// The disk on a reactor that serves none of its requests: for work on its image.
    pub(crate) fn apart(handle: &Handle, disk: &Arc<Disk>, source: &Source) -> io::Result<Self> {
        let image = CurrentImage::open(handle, source, None)?;
        Ok(LocalDisk::with_image(disk.clone(), image, Some(handle.clone())))
    }

    /// Whether a sync of the image's own has failed: see [`Backend::lost`].
    pub(crate) fn look_for_losses(&self) {
        self.note_lost(&self.image.borrow());
    }

    /// The disk on a reactor, if it has been used there.
    pub fn known(handle: &Handle, disk: &Arc<Disk>) -> Option<Rc<Self>> {
        handle.local::<Disks>().0.borrow().iter().find(|s| Arc::ptr_eq(&s.disk, disk)).cloned()
    }

    /// The reactor serves the disk no more.
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

impl<S: Storage> LocalDisk<S> {
    pub fn new(disk: Arc<Disk>, backend: Backend<S>, handle: Option<Handle>) -> Self {
        LocalDisk::with_image(disk, CurrentImage { backend, dirty: None, metered: None }, handle)
    }

    fn with_image(disk: Arc<Disk>, image: CurrentImage<S>, handle: Option<Handle>) -> Self {
        let (image, next_image) = (RefCell::new(Rc::new(image)), RefCell::new(None));
        let dice = Dice::new(0x9e37_79b9_7f4a_7c15);
        let throttle = Throttle::new(disk.share().clone(), handle.clone(), disk.on_device);
        LocalDisk {
            disk,
            quiesce: Quiesce::default(),
            image,
            next_image,
            handle,
            throttle,
            statistics: RefCell::default(),
            dice,
        }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Counts a request that its export refused before it came here.
    pub fn count_refused(&self, op: Op) {
        self.statistics.borrow_mut().record_refused(op);
    }

    pub fn statistics(&self) -> Statistics {
        let mut statistics = self.statistics.borrow().clone();
        statistics.writes.merge(&self.image.borrow().writes());
        statistics
    }

    /// Goes on with another view of the image. What was counted for the old one stays in the
    /// statistics.
    pub(crate) fn exchange(&self, image: Rc<CurrentImage<S>>) {
        let old = self.image.replace(image);
        self.statistics.borrow_mut().writes.merge(&old.writes());
    }

    /// Lets something in that is nobody's request: at once, but while the image is exchanged.
    #[inline]
    async fn enter(&self) -> Admitted<'_, S> {
        let in_flight = self.quiesce.enter().await;
        Admitted {
            image: self.image.borrow().clone(),
            charged: 0,
            _in_flight: in_flight,
            _admission: throttle::Admission::default(),
        }
    }

    /// Lets requests in that are one operation: when the limits and the disk's share let them, and
    /// the image is not being exchanged.
    #[inline]
    async fn enter_for(&self, op: Op, offset: u64, len: u64, requests: u32) -> Admitted<'_, S> {
        if self.throttle.is_open() {
            return self.enter().await;
        }
        let operation = self.throttle.operation(op, offset, len, requests);
        let number = self.throttle.arrive();
        loop {
            let admission = self.throttle.enter(&operation, number).await;
            if let Some(in_flight) = self.quiesce.try_enter() {
                let image = self.image.borrow().clone();
                return Admitted {
                    image,
                    charged: operation.moves(),
                    _in_flight: in_flight,
                    _admission: admission,
                };
            }
            // Nothing is held while the gate is closed that others wait for.
            admission.give_back(&operation);
            Box::pin(self.quiesce.wait_for_resume()).await;
        }
    }

    /// Does what the request asks. The answer is for the caller to deliver.
    #[inline]
    pub async fn serve<T: Token>(&self, request: Request<T>) -> Finished<T> {
        // What will be refused costs nothing.
        let len = if self.admit(&request).is_ok() { request.len } else { 0 };
        let admitted = self.enter_for(request.op, request.offset, len, 1).await;
        let (finished, work) =
            admitted.image.measured(self.serve_in(&admitted.image, request)).await;
        self.settle_costs(&admitted, work);
        finished
    }

    /// Charges the disk for what its image has done beyond its requests.
    #[inline]
    fn settle_costs(&self, admitted: &Admitted<'_, S>, work: FileIo) {
        if let Some(more) = admitted.image.uncharged(work, admitted.charged) {
            self.throttle.share().charge_more(more.operations, more.bytes);
        }
    }

    /// Where the bytes from `offset` on are, as far as they are alike.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        self.enter().await.image.backend.status(offset, len).await
    }

    /// Whether fast zeroes ([`Op::WriteZeroes`]) would be refused, as far as that is known before
    /// they are made.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> Status {
        let looked = self.enter().await.image.backend.may_zero_fast(offset, len, unmap).await;
        looked.map_err(|e| Failure::of(&e))
    }

    /// For a queue that is drained: requests that wait on this reactor for limits or shares pass at
    /// once. The disk owes for them, see [`LocalDisk::held_back`].
    pub fn drain(&self) {
        self.throttle.drain();
    }

    /// For an export that ends: until [`LocalDisk::resume`], no request of the disk waits on this
    /// reactor for limits or shares.
    pub fn suspend(&self) {
        self.throttle.suspend();
    }

    pub fn resume(&self) {
        self.throttle.resume();
    }

    /// Returns how long a queue must wait before it looks again whether it may take requests: the
    /// disk owes for those that drained queues let pass. None: it may.
    #[inline]
    pub fn held_back(&self) -> Option<Duration> {
        self.throttle.held_back()
    }

    #[inline]
    async fn serve_in<T: Token>(
        &self,
        image: &CurrentImage<S>,
        mut request: Request<T>,
    ) -> Finished<T> {
        let admitted = self.now();
        let (op, len) = (request.op, request.len);
        let status = match self.admit(&request) {
            Ok(()) => {
                let segments = std::mem::take(&mut request.segments);
                let (segments, result) =
                    self.perform(image, op, request.offset, len, segments).await;
                request.segments = segments;
                result
                    .map_err(|e| self.failure(op, request.offset, &e))
                    .and_then(|()| self.still_good(op))
            }
            Err(failure) => Err(failure),
        };
        self.conclude(request, admitted, status)
    }

    /// Counts a request whose fate is known.
    #[inline]
    fn conclude<T: Token>(
        &self,
        request: Request<T>,
        admitted: Instant,
        status: Status,
    ) -> Finished<T> {
        let (queue, service) =
            (admitted.saturating_duration_since(request.arrived), self.now() - admitted);
        self.statistics.borrow_mut().record(
            request.op,
            request.len,
            queue,
            service,
            status.is_ok(),
        );
        request.finish(status)
    }

    /// Syncs what a guest that is gone may have left unsynced: on disconnect and at the end.
    pub async fn settle(&self) -> Status {
        let admitted = self.enter().await;
        let (_, result) = self.perform(&admitted.image, Op::Flush, 0, 0, Segments::default()).await;
        result.map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    /// For the end of the disk: see [`Backend::close`].
    pub async fn close(&self) -> Status {
        if self.disk.options().read_only || self.disk.poisoned().is_some() {
            return self.still_good(Op::Flush);
        }
        let closed = self.enter().await.image.backend.close().await;
        closed
            .inspect_err(|e| self.disk.poison("closing the image", e))
            .map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    #[inline]
    fn now(&self) -> Instant {
        self.handle.as_ref().map_or_else(Instant::now, |h| h.now())
    }

    #[inline]
    fn admit<T: Token>(&self, request: &Request<T>) -> Status {
        let end = request.offset.checked_add(request.len).ok_or(Failure::OutOfRange)?;
        if end > self.disk.capacity() {
            return Err(Failure::OutOfRange);
        }
        if request.op == Op::Read {
            return Ok(());
        }
        if self.disk.options().read_only && request.op != Op::Flush {
            return Err(Failure::ReadOnly);
        }
        self.still_good(request.op)
    }

    /// On a poisoned disk only reads are answered Ok, also when they were on their way before.
    #[inline]
    fn still_good(&self, op: Op) -> Status {
        if op != Op::Read && self.disk.poisoned().is_some() {
            Err(Failure::Poisoned)
        } else {
            Ok(())
        }
    }

    #[inline]
    async fn perform(
        &self,
        image: &CurrentImage<S>,
        op: Op,
        offset: u64,
        len: u64,
        segments: Segments,
    ) -> (Segments, io::Result<()>) {
        if len == 0 && op != Op::Flush {
            return (segments, Ok(()));
        }
        if !self.disk.options().filters.is_empty()
            && let Err(e) = self.filter(op, offset, len).await
        {
            return (segments, Err(e));
        }
        let keeps = !self.disk.options().cache.ignores_flush();
        let _changing = match (&image.dirty, op) {
            (None, _) | (_, Op::Read | Op::Flush) => None,
            (Some(dirty), _) => Some(dirty.changing(offset, len)),
        };
        match op {
            Op::Read => image.backend.read(segments, offset).await,
            Op::Write { fua } => self.write(image, segments, offset, fua && keeps).await,
            Op::Flush if !keeps || self.disk.options().read_only => (segments, Ok(())),
            Op::Flush => (segments, self.flush(image).await),
            Op::Discard => (
                segments,
                image.backend.discard(offset, len).await.inspect_err(|_| self.note_lost(image)),
            ),
            Op::WriteZeroes { unmap, fua, fast } => {
                let zeroed = image.backend.write_zeroes(offset, len, unmap, fast).await;
                (segments, self.conclude_zeroes(image, zeroed, fua && keeps).await)
            }
        }
    }

    #[inline]
    async fn write(
        &self,
        image: &CurrentImage<S>,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        // In the page cache many durable writes share a sync. They must: the kernel tells a lost
        // page to one sync of an open file and forgets it, so that of two at a time one would
        // answer Ok for data that is gone. Images have metadata besides, which a flush puts in
        // order.
        let shares = durable && (self.disk.cached || image.backend.flushes_whole());
        let durable = durable && !shares;
        let len = segments.len() as u64;
        let (segments, mut result) = image.backend.write(segments, offset, durable).await;
        match &result {
            Ok(()) if !durable => {
                self.disk.note_unsynced();
                if self.disk.dirties(len) && !shares {
                    result = self.flush(image).await;
                }
            }
            Err(e) if durable && self.disk.taken_along(e) => self.disk.poison("a durable write", e),
            Err(_) => self.note_lost(image),
            Ok(()) => {}
        }
        if shares && result.is_ok() {
            result = self.flush(image).await;
        }
        (segments, result)
    }

    /// An image syncs for itself now and then. What such a sync was told, no flush will hear again.
    fn note_lost(&self, image: &CurrentImage<S>) {
        if let Some(e) = image.backend.lost() {
            let what = if image.backend.flushes_whole() {
                "writing metadata"
            } else {
                "keeping what was written"
            };
            self.disk.poison(what, &e);
        }
    }

    async fn conclude_zeroes(
        &self,
        image: &CurrentImage<S>,
        zeroed: io::Result<()>,
        durable: bool,
    ) -> io::Result<()> {
        zeroed.inspect_err(|_| self.note_lost(image))?;
        self.disk.note_unsynced();
        // Zeroed ranges are metadata, which only a sync makes durable: the group's, for a sync
        // beside it could take its error away.
        if durable { self.flush(image).await } else { Ok(()) }
    }

    async fn flush(&self, image: &CurrentImage<S>) -> io::Result<()> {
        self.disk
            .flushes
            .flush(async || {
                // Those who waited for a sync that failed come here next: they must not find a
                // second one that lies.
                if self.disk.poisoned().is_some() {
                    return Err(io::Error::other("the disk is poisoned"));
                }
                // Before the sync begins: what is acknowledged from here on it may not cover.
                self.disk.unsynced.swap(false, Ordering::SeqCst);
                self.disk.dirty.store(0, Ordering::Relaxed);
                let _held = self.throttle.sync();
                let result = image.backend.flush().await;
                if let Err(e) = &result {
                    self.disk.poison("a flush", e);
                }
                result
            })
            .await
    }

    async fn filter(&self, op: Op, offset: u64, len: u64) -> io::Result<()> {
        let kind = OpKind::of(op);
        for filter in &self.disk.options().filters {
            if let (Some(time), Some(handle)) = (filter.delay(kind), &self.handle) {
                handle.sleep(time).await;
            }
            if filter.fails(kind, offset, len, &self.dice) {
                return Err(io::Error::other("the error filter says so"));
            }
        }
        Ok(())
    }

    fn failure(&self, op: Op, offset: u64, error: &io::Error) -> Failure {
        let failure = Failure::of(error);
        if failure == Failure::Unsupported && matches!(op, Op::WriteZeroes { fast: true, .. }) {
            // An answer that the client asked for, and no fault of the disk.
            return failure;
        }
        // A failing device fails every request: one line a second is enough to know it.
        if self.disk.failures_told.admits(Instant::now()) {
            tracing::warn!(
                disk = self.disk.name(),
                offset,
                "{} failed: {error}",
                OpKind::of(op).name()
            );
        }
        if self.disk.poisoned().is_some() && op != Op::Read { Failure::Poisoned } else { failure }
    }
}

#[cfg(test)]
mod tests;
