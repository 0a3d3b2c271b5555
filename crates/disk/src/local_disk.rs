//! A disk on one reactor: its image, its statistics, and the path of a request through it.
//!
//! In: requests from the queues of this reactor. Out: their answers.
//!
//! What must hold: a request uses the same image from its admission to its answer.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_image::{BlockStatus, IncompleteCluster, is_full};
use blockyard_ring::probe::{self, Probed};
use blockyard_ring::{Handle, Segments};

use crate::backend::Backend;
use crate::current_image::CurrentImage;
use crate::disk::Disk;
use crate::filter::Dice;
use crate::in_flight::{self, InFlight};
use crate::pause::Pause;
use crate::quiesce::Quiesce;
use crate::request::{Failure, Finished, Op, Request, Status, Token};
use crate::statistics::{DiskCounts, OpKind, Statistics};
use crate::throttle::Throttle;

mod admitting;
mod ending;
mod merge;
mod of_reactor;
mod paused;

use admitting::Wanted;
pub use merge::Run;

/// A disk on one reactor.
pub struct LocalDisk {
    disk: Arc<Disk>,
    pub(crate) quiesce: Quiesce,
    pub(crate) pause: Pause,
    pub(crate) image: RefCell<Rc<CurrentImage>>,
    /// The image to exchange for, while the disk is quiesced.
    pub(crate) next_image: RefCell<Option<Rc<CurrentImage>>>,
    /// Time from which long requests fail, while an export ends.
    long_until: Cell<Option<Instant>>,
    /// None in simulations without a clock.
    handle: Option<Handle>,
    throttle: Throttle,
    statistics: RefCell<Statistics>,
    in_flight: InFlight,
    dice: Dice,
}

/// A request after an attempt to serve it.
enum Attempt<T: Token> {
    Finished(Finished<T>),
    /// The host has no space for the request, and the request may wait; see [`crate::pause`].
    Paused(Request<T>),
}

impl LocalDisk {
    pub fn new(disk: Arc<Disk>, backend: Backend, handle: Option<Handle>) -> Self {
        LocalDisk::with_image(disk, CurrentImage::unmetered(backend), handle)
    }

    fn with_image(disk: Arc<Disk>, image: CurrentImage, handle: Option<Handle>) -> Self {
        let (image, next_image) = (RefCell::new(Rc::new(image)), RefCell::new(None));
        let dice = Dice::new(0x9e37_79b9_7f4a_7c15);
        let throttle = Throttle::new(disk.share().clone(), handle.clone(), disk.on_device);
        LocalDisk {
            disk,
            quiesce: Quiesce::default(),
            pause: Pause::default(),
            image,
            next_image,
            long_until: Cell::new(None),
            handle,
            throttle,
            statistics: RefCell::default(),
            in_flight: InFlight::default(),
            dice,
        }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Counts a request that its export refused before it reached the disk.
    pub fn count_refused(&self, op: Op) {
        self.statistics.borrow_mut().record_refused(op);
    }

    /// Returns what this reactor has counted for the disk.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = self.statistics.borrow().clone();
        let image = self.image.borrow();
        statistics.writes.merge(&image.writes());
        statistics.lookups.merge(&image.backend.lookups());
        statistics
    }

    /// Returns what this reactor has counted for the disk, without percentiles.
    pub fn counts(&self) -> DiskCounts {
        let mut counts = self.statistics.borrow().counts();
        let image = self.image.borrow();
        counts.writes.merge(&image.writes());
        counts.lookups.merge(&image.backend.lookups());
        let (in_flight, oldest) = self.in_flight.counted();
        counts.in_flight = in_flight;
        counts.oldest = oldest.map(|arrived| self.now().saturating_duration_since(arrived));
        counts
    }

    /// Exchanges the image. The counts of the old image stay in the statistics.
    pub(crate) fn exchange(&self, image: Rc<CurrentImage>) {
        image.backend.end_long_requests(self.long_until.get());
        let old = self.image.replace(image);
        let mut statistics = self.statistics.borrow_mut();
        statistics.writes.merge(&old.writes());
        statistics.lookups.merge(&old.backend.lookups());
    }

    /// Serves a request. The caller delivers the answer.
    #[inline]
    pub async fn serve<T: Token>(&self, request: Request<T>) -> Finished<T> {
        let in_flight = self.in_flight.enter(request.arrived, 1);
        let probed = self.probed(&in_flight, request.op, request.offset, request.len);
        probe::request_begin(probed);
        let resumed = self.pause.resumed();
        let finished = match self.attempt(request, probed).await {
            Attempt::Finished(finished) => finished,
            Attempt::Paused(request) => Box::pin(self.serve_paused(request, resumed, probed)).await,
        };
        probe::request_end(probed, finished.status().is_ok());
        finished
    }

    /// Returns a request as the probes show it.
    #[inline]
    fn probed(&self, entry: &in_flight::Entry<'_>, op: Op, offset: u64, len: u64) -> Probed<'_> {
        // The number of the entry is unique on this reactor and disk.
        let id = std::ptr::from_ref(self).addr() as u64 ^ ((entry.number() as u64) << 48);
        Probed { id, disk: self.disk.name(), op: OpKind::of(op) as u8, offset, len }
    }

    /// Admits a request, and tries to serve it.
    #[inline]
    async fn attempt<T: Token>(&self, request: Request<T>, probed: Probed<'_>) -> Attempt<T> {
        // A request that will be refused costs nothing.
        let charged = if self.check(&request).is_ok() { request.len } else { 0 };
        let Request { op, offset, len, .. } = request;
        let wanted = Wanted { op, offset, len, charged, requests: 1 };
        let mut admitted = match self.enter_now(&wanted) {
            Some(admitted) => admitted,
            None => match request.unless_withdrawn(self.enter_for(&wanted)).await {
                Some(admitted) => admitted,
                None => return Attempt::Finished(request.withdraw()),
            },
        };
        if op == Op::Flush {
            // The sync that it shares, or begins, is charged by itself. Until then the device does
            // not work for it.
            admitted.admission.end();
        } else if admitted.image.backend.is_long(op, charged) {
            admitted.admission.leave_room();
        }
        probe::request_admitted(probed);
        let served = self.serve_in(&admitted.image, request, true);
        admitted.image.measured(served, &admitted.file_io).await
    }

    /// Returns the block status from `offset` on: the longest range of one status within `len`
    /// bytes.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        self.enter().await.image.backend.status(offset, len).await
    }

    /// Returns whether fast zeroes ([`Op::WriteZeroes`]) would be refused, as far as this can be
    /// known without writing zeroes.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> Status {
        let result = self.enter().await.image.backend.may_zero_fast(offset, len, unmap).await;
        result.map_err(|e| Failure::of(&e))
    }

    /// Returns how long a queue must wait before it checks again whether it may take requests.
    /// None: it may take requests. `is_idle`: the queue has no request in flight.
    #[inline]
    pub fn queue_pause(&self, is_idle: bool) -> Option<Duration> {
        self.throttle.queue_pause(is_idle)
    }

    #[inline]
    async fn serve_in<T: Token>(
        &self,
        image: &CurrentImage,
        mut request: Request<T>,
        may_pause: bool,
    ) -> Attempt<T> {
        let admitted = self.now();
        let (op, len) = (request.op, request.len);
        let status = match self.check(&request) {
            Ok(()) => {
                let segments = std::mem::take(&mut request.segments);
                let (segments, result) =
                    self.perform(image, op, request.offset, len, segments).await;
                request.segments = segments;
                if let Err(e) = &result
                    && self.has_ended_early(op, e)
                    && request.is_repeated_later()
                {
                    return Attempt::Finished(request.withdraw());
                }
                if let Err(e) = &result
                    && may_pause
                    && self.disk.pauses_at(e)
                {
                    self.disk.note_paused(OpKind::of(op).name(), request.offset, e);
                    return Attempt::Paused(request);
                }
                result
                    .map_err(|e| self.failure(op, request.offset, &e))
                    .and_then(|()| self.check_not_poisoned(op))
            }
            Err(failure) => Err(failure),
        };
        Attempt::Finished(self.conclude(request, admitted, status))
    }

    /// Adds a request that has ended to the statistics.
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

    /// Flushes what a client may have left unsynced. Exports call it at a disconnect and at the
    /// end.
    pub async fn flush_unsynced(&self) -> Status {
        let admitted = self.enter().await;
        let (_, result) = self.perform(&admitted.image, Op::Flush, 0, 0, Segments::default()).await;
        result.map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    /// Like [`LocalDisk::flush_unsynced`], also in a cache mode that ignores flushes, because an
    /// operator asks for durable writes.
    pub async fn flush_always(&self) -> Status {
        if self.disk.options().read_only {
            return Ok(());
        }
        let admitted = self.enter().await;
        let flush = async {
            self.filter(Op::Flush, 0, 0).await?;
            self.flush(&admitted.image).await
        };
        flush.await.map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    /// Closes the image at the end of the disk; see [`Backend::close`].
    pub async fn close(&self) -> Status {
        self.end(async |backend| backend.close().await).await
    }

    /// Leaves the image to another process at the end of the disk; see [`Backend::leave`].
    pub async fn leave(&self) -> Status {
        self.end(async |backend| backend.leave().await).await
    }

    async fn end(&self, end: impl AsyncFnOnce(&Backend) -> io::Result<()>) -> Status {
        if self.disk.options().read_only || self.disk.poisoned().is_some() {
            return self.check_not_poisoned(Op::Flush);
        }
        let admitted = self.enter().await;
        let backend = &admitted.image.backend;
        let ended = end(backend).await;
        // The image keeps what it cannot write now, and its journal has it. Nothing is lost.
        let keeps =
            |e: &io::Error| IncompleteCluster::is_in(e) || (is_full(e) && backend.keeps_metadata());
        ended
            .inspect_err(|e| match keeps(e) {
                true => self.disk.note_unsynced(),
                false => self.disk.poison("closing the image", e),
            })
            .map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    #[inline]
    fn now(&self) -> Instant {
        self.handle.as_ref().map_or_else(Instant::now, |h| h.now())
    }

    #[inline]
    fn check<T: Token>(&self, request: &Request<T>) -> Status {
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
        self.check_not_poisoned(request.op)
    }

    /// Returns Poisoned on a poisoned disk, except for reads. This includes requests that were in
    /// flight when the disk was poisoned.
    #[inline]
    fn check_not_poisoned(&self, op: Op) -> Status {
        if op != Op::Read && self.disk.poisoned().is_some() {
            Err(Failure::Poisoned)
        } else {
            Ok(())
        }
    }

    #[inline]
    async fn perform(
        &self,
        image: &CurrentImage,
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
        let _changing = match (&image.tracker, op) {
            (None, _) | (_, Op::Read | Op::Flush) => None,
            (Some(tracker), _) if tracker.ignores(op, offset, len) => return (segments, Ok(())),
            (Some(tracker), _) => tracker.changing(offset, len),
        };
        match op {
            Op::Read => image.backend.read(segments, offset).await,
            Op::Write { fua } => self.write(image, segments, offset, fua && keeps).await,
            Op::Flush if !keeps || self.disk.options().read_only => (segments, Ok(())),
            Op::Flush => (segments, self.flush(image).await),
            Op::Discard => (
                segments,
                image
                    .backend
                    .discard(offset, len)
                    .await
                    .inspect_err(|_| self.poison_if_lost(image)),
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
        image: &CurrentImage,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        // In the page cache durable writes must share a sync. The kernel reports a lost page to one
        // sync of an open file only. Of two syncs at a time one would return Ok for lost data.
        // Images have metadata, too, which a flush writes in order.
        let shares = durable && (self.disk.cached || image.backend.flushes_whole());
        let durable = durable && !shares;
        let (len, syncs) = (segments.len() as u64, self.disk.syncs());
        let (segments, mut result) = image.backend.write(segments, offset, durable).await;
        match &result {
            Ok(()) if !durable => {
                self.disk.note_unsynced();
                if self.disk.dirties(len) && !shares {
                    result = self.flush(image).await;
                }
            }
            Err(e)
                if durable
                    && self.disk.lost_others_with(e, syncs)
                    && !image.backend.keeps_unsynced() =>
            {
                self.disk.poison("a durable write", e)
            }
            Err(_) => self.poison_if_lost(image),
            Ok(()) => {}
        }
        if shares && result.is_ok() {
            result = self.flush(image).await;
        }
        (segments, result)
    }

    /// Poisons the disk if a sync that the image made on its own has failed. No later flush would
    /// report that failure.
    fn poison_if_lost(&self, image: &CurrentImage) {
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
        image: &CurrentImage,
        zeroed: io::Result<()>,
        durable: bool,
    ) -> io::Result<()> {
        zeroed.inspect_err(|_| self.poison_if_lost(image))?;
        self.disk.note_unsynced();
        // Only a sync makes zeroed ranges durable, because they are metadata. The flush group must
        // make this sync: a separate sync could consume the error that the group must see.
        if durable { self.flush(image).await } else { Ok(()) }
    }

    async fn flush(&self, image: &CurrentImage) -> io::Result<()> {
        self.disk
            .flushes
            .flush(async || {
                // Flushes that waited for the failed sync resume here. They must not sync again:
                // the kernel would report success for lost data.
                if self.disk.poisoned().is_some() {
                    return Err(io::Error::other("the disk is poisoned"));
                }
                let had_unsynced = self.disk.begin_sync();
                self.disk.dirty.store(0, Ordering::Relaxed);
                let _held = self.throttle.sync();
                probe::sync_begin(self.disk.name());
                let mut result = image.backend.flush().await;
                probe::sync_end(self.disk.name(), result.is_ok());
                if result.is_ok() && self.disk.poisoned().is_some() {
                    result = Err(io::Error::other("the disk was poisoned during the flush"));
                }
                self.disk.end_sync();
                match &result {
                    // All other writes are durable, and the next flush tries again.
                    Err(e) if IncompleteCluster::is_in(e) => self.disk.note_unsynced(),
                    // The server cannot be reached, and has lost nothing.
                    Err(_) if image.backend.keeps_unsynced() => self.disk.note_unsynced(),
                    // The host has refused metadata, and the image keeps them. The kernel has lost
                    // nothing, because no sync has failed.
                    Err(e) if is_full(e) && image.backend.keeps_metadata() => {
                        self.disk.note_unsynced()
                    }
                    // No sync has begun, because no image is open.
                    Err(_) if image.backend.is_gone() => {
                        if had_unsynced {
                            self.disk.note_unsynced();
                        }
                    }
                    Err(e) => self.disk.poison("a flush", e),
                    Ok(()) => {}
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
                return Err(io::Error::other("the error filter fails this request"));
            }
        }
        Ok(())
    }

    fn failure(&self, op: Op, offset: u64, error: &io::Error) -> Failure {
        let failure = Failure::of(error);
        if failure == Failure::Unsupported && matches!(op, Op::WriteZeroes { fast: true, .. }) {
            // A client of a fast zero expects this answer. It shows no fault of the disk.
            return failure;
        }
        // A failing device fails every request, so the log has at most one line a second.
        if self.disk.failure_log.admits(Instant::now()) {
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
