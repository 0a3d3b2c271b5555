//! A disk, and the disk as one reactor serves it.
//!
//! `Disk` is what all reactors share: it is read on the way of a request, and written only when something goes wrong or
//! a person changes it, and at flushes. `Served` is one reactor's own: image, statistics.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use blockyard_image::{CacheMode, Raw};
use blockyard_ring::{Handle, Segments, Storage, UringFile};

use crate::backend::{Backend, Ram, Source};
use crate::filter::{Dice, Filter};
use crate::flush::FlushGroup;
use crate::request::{Failure, Finished, Op, Request, Status, Token};
use crate::statistics::{OpKind, Statistics};

mod merge;

pub use merge::Run;

/// What a disk is set up with.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    pub name: String,
    /// What the guest reads as the disk's serial number: at most 20 bytes.
    pub serial: String,
    pub read_only: bool,
    pub cache: CacheMode,
    pub filters: Vec<Filter>,
}

/// One opened disk.
#[derive(Debug)]
pub struct Disk {
    options: DiskOptions,
    source: Source,
    capacity: AtomicU64,
    flushes: FlushGroup,
    /// Writes go through the host's page cache, which may lose them later.
    cached: bool,
    /// A write was acknowledged that no sync has covered yet.
    unsynced: AtomicBool,
    /// Why nothing is written any more: see [`Failure::Poisoned`].
    poisoned: OnceLock<String>,
}

impl Disk {
    pub fn new(options: DiskOptions, source: Source) -> Self {
        let capacity = AtomicU64::new(source.capacity());
        let cached = matches!(&source, Source::File(file) if !file.direct());
        let (flushes, unsynced, poisoned) = Default::default();
        Disk { options, source, capacity, flushes, cached, unsynced, poisoned }
    }

    pub fn options(&self) -> &DiskOptions {
        &self.options
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Bytes a guest may address.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Looks at the image's size again; answers the new capacity if it changed.
    pub fn refresh_capacity(&self) -> io::Result<Option<u64>> {
        if let Source::File(file) = &self.source {
            file.refresh_size()?;
        }
        let new = self.source.capacity();
        Ok((self.capacity.swap(new, Ordering::Relaxed) != new).then_some(new))
    }

    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.get().map(String::as_str)
    }

    /// Notes an acknowledged write. Read far more often than written: reactors do not fight over it.
    #[inline]
    fn note_unsynced(&self) {
        if !self.unsynced.load(Ordering::SeqCst) {
            self.unsynced.store(true, Ordering::SeqCst);
        }
    }

    /// Whether a durable write past the page cache that failed may have taken other writes with it, unseen by the next
    /// sync: it ends in a flush of the device's cache, and the device tells of a lost one only once.
    fn taken_along(&self, error: &io::Error) -> bool {
        match Failure::of(error) {
            // Refused before anything was done.
            _ if error.kind() == io::ErrorKind::InvalidInput => false,
            Failure::Unsupported | Failure::NoSpace => false,
            _ => self.unsynced.load(Ordering::SeqCst),
        }
    }

    fn poison(&self, what: &str, error: &io::Error) {
        let reason = format!(
            "{what} failed ({error}): writes acknowledged since the last good flush may be lost, so this disk takes no more \
             writes until its image is opened anew"
        );
        if self.poisoned.set(reason).is_ok() {
            tracing::error!(disk = self.name(), "{}", self.poisoned().unwrap_or_default());
        }
    }
}

/// A disk on one reactor. `S` is [`UringFile`], or the simulated disk in tests.
pub struct Served<S> {
    disk: Arc<Disk>,
    backend: Backend<S>,
    /// None in simulations, which have no clock.
    handle: Option<Handle>,
    statistics: RefCell<Statistics>,
    dice: Dice,
}

thread_local! {
    /// The disks of this reactor: all its queues of a disk share image and statistics.
    static LOCAL: RefCell<Vec<Rc<Served<UringFile>>>> = RefCell::default();
}

/// Lets go of this reactor's disks, at its end.
pub fn forget_local() {
    LOCAL.with_borrow_mut(Vec::clear);
}

impl Served<UringFile> {
    /// The disk on this thread's reactor; opened there at first use.
    pub fn local(handle: &Handle, disk: &Arc<Disk>) -> io::Result<Rc<Self>> {
        if let Some(served) = Self::known(disk) {
            return Ok(served);
        }
        let served = Rc::new(Served::open(handle, disk)?);
        LOCAL.with_borrow_mut(|l| l.push(served.clone()));
        Ok(served)
    }

    /// The disk on this thread's reactor, if it has been used there.
    pub fn known(disk: &Arc<Disk>) -> Option<Rc<Self>> {
        LOCAL.with_borrow(|l| l.iter().find(|s| Arc::ptr_eq(&s.disk, disk)).cloned())
    }

    /// This thread's reactor serves the disk no more.
    pub fn forget(disk: &Arc<Disk>) {
        LOCAL.with_borrow_mut(|l| l.retain(|s| !Arc::ptr_eq(&s.disk, disk)));
    }

    fn open(handle: &Handle, disk: &Arc<Disk>) -> io::Result<Self> {
        let backend = match &disk.source {
            Source::File(file) => Backend::Raw(Raw::new(UringFile::new(handle, file.fd().clone())?, file)),
            Source::Chain(chain) => Backend::Image(chain.image(handle)?),
            Source::Null { .. } => Backend::Null,
            Source::Ram(memory) => Backend::Ram(Ram::new(memory)),
        };
        Ok(Served::new(disk.clone(), backend, Some(handle.clone())))
    }
}

impl<S: Storage> Served<S> {
    pub fn new(disk: Arc<Disk>, backend: Backend<S>, handle: Option<Handle>) -> Self {
        let dice = Dice::new(0x9e37_79b9_7f4a_7c15);
        Served { disk, backend, handle, statistics: RefCell::default(), dice }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    pub fn statistics(&self) -> Statistics {
        self.statistics.borrow().clone()
    }

    /// Does what the request asks. The answer is for the caller to deliver.
    #[inline]
    pub async fn serve<T: Token>(&self, mut request: Request<T>) -> Finished<T> {
        let admitted = self.now();
        let (op, len) = (request.op, request.len);
        let status = match self.admit(&request) {
            Ok(()) => {
                let segments = std::mem::take(&mut request.segments);
                let (segments, result) = self.perform(op, request.offset, len, segments).await;
                request.segments = segments;
                result.map_err(|e| self.failure(op, request.offset, &e)).and_then(|()| self.still_good(op))
            }
            Err(failure) => Err(failure),
        };
        self.conclude(request, admitted, status)
    }

    /// Counts a request whose fate is known.
    #[inline]
    fn conclude<T: Token>(&self, request: Request<T>, admitted: Instant, status: Status) -> Finished<T> {
        let (queue, service) = (admitted.saturating_duration_since(request.arrived), self.now() - admitted);
        self.statistics.borrow_mut().record(request.op, request.len, queue, service, status.is_ok());
        request.finish(status)
    }

    /// Syncs what a guest that is gone may have left unsynced: on disconnect and at the end.
    pub async fn settle(&self) -> Status {
        let (_, result) = self.perform(Op::Flush, 0, 0, Segments::default()).await;
        result.map_err(|e| self.failure(Op::Flush, 0, &e))
    }

    /// For the end of the disk: see [`Backend::close`].
    pub async fn close(&self) -> Status {
        if self.disk.options.read_only || self.disk.poisoned().is_some() {
            return self.still_good(Op::Flush);
        }
        let closed = self.backend.close().await;
        closed.inspect_err(|e| self.disk.poison("closing the image", e)).map_err(|e| self.failure(Op::Flush, 0, &e))
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
        if self.disk.options.read_only && request.op != Op::Flush {
            return Err(Failure::ReadOnly);
        }
        self.still_good(request.op)
    }

    /// On a poisoned disk only reads are answered Ok, also when they were on their way before.
    #[inline]
    fn still_good(&self, op: Op) -> Status {
        if op != Op::Read && self.disk.poisoned().is_some() { Err(Failure::Poisoned) } else { Ok(()) }
    }

    #[inline]
    async fn perform(&self, op: Op, offset: u64, len: u64, segments: Segments) -> (Segments, io::Result<()>) {
        if len == 0 && op != Op::Flush {
            return (segments, Ok(()));
        }
        if !self.disk.options.filters.is_empty()
            && let Err(e) = self.filter(op, offset, len).await
        {
            return (segments, Err(e));
        }
        let keeps = !self.disk.options.cache.ignores_flush();
        match op {
            Op::Read => self.backend.read(segments, offset).await,
            Op::Write { fua } => self.write(segments, offset, fua && keeps).await,
            Op::Flush if !keeps || self.disk.options.read_only => (segments, Ok(())),
            Op::Flush => (segments, self.flush().await),
            Op::Discard => (segments, self.backend.discard(offset, len).await.inspect_err(|_| self.note_lost())),
            Op::WriteZeroes { unmap, fua } => (segments, self.write_zeroes((offset, len), unmap, fua && keeps).await),
        }
    }

    #[inline]
    async fn write(&self, segments: Segments, offset: u64, durable: bool) -> (Segments, io::Result<()>) {
        // In the page cache many durable writes share a sync. They must: the kernel tells a lost page to one sync of an open
        // file and forgets it, so that of two at a time one would answer Ok for data that is gone.
        // Images have metadata besides, which a flush puts in order.
        let shares = durable && (self.disk.cached || self.backend.flushes_whole());
        let durable = durable && !shares;
        let (segments, mut result) = self.backend.write(segments, offset, durable).await;
        match &result {
            Ok(()) if !durable => self.disk.note_unsynced(),
            Err(e) if durable && self.disk.taken_along(e) => self.disk.poison("a durable write", e),
            Err(_) => self.note_lost(),
            Ok(()) => {}
        }
        if shares && result.is_ok() {
            result = self.flush().await;
        }
        (segments, result)
    }

    /// An image syncs for itself now and then. What such a sync was told, no flush will hear again.
    fn note_lost(&self) {
        if let Some(e) = self.backend.lost() {
            self.disk.poison("writing metadata", &e);
        }
    }

    async fn write_zeroes(&self, (offset, len): (u64, u64), unmap: bool, durable: bool) -> io::Result<()> {
        self.backend.write_zeroes(offset, len, unmap).await.inspect_err(|_| self.note_lost())?;
        self.disk.note_unsynced();
        // Zeroed ranges are metadata, which only a sync makes durable: the group's, for a sync beside it could take its
        // error away.
        if durable { self.flush().await } else { Ok(()) }
    }

    async fn flush(&self) -> io::Result<()> {
        self.disk
            .flushes
            .flush(async || {
                // Those who waited for a sync that failed come here next: they must not find a second one that lies.
                if self.disk.poisoned().is_some() {
                    return Err(io::Error::other("the disk is poisoned"));
                }
                // Before the sync begins: what is acknowledged from here on it may not cover.
                self.disk.unsynced.swap(false, Ordering::SeqCst);
                let result = self.backend.flush().await;
                if let Err(e) = &result {
                    self.disk.poison("a flush", e);
                }
                result
            })
            .await
    }

    async fn filter(&self, op: Op, offset: u64, len: u64) -> io::Result<()> {
        let kind = OpKind::of(op);
        for filter in &self.disk.options.filters {
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
        // A failing device fails every request: one line a second is enough to know it.
        if once_a_second() {
            tracing::warn!(disk = self.disk.name(), offset, "{} failed: {error}", OpKind::of(op).name());
        }
        if self.disk.poisoned().is_some() && op != Op::Read { Failure::Poisoned } else { Failure::of(error) }
    }
}

/// True at most once a second, whichever thread asks.
fn once_a_second() -> bool {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static START: OnceLock<Instant> = OnceLock::new();
    let now = START.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1000;
    let last = LAST.load(Ordering::Relaxed);
    now >= last + 1000 && LAST.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

#[cfg(test)]
mod tests;
