//! The image of a disk as one reactor has it open, and the I/O of the image's files.
//!
//! In: the polls of requests. Out: the I/O that no request has been charged for yet, which the disk
//! then pays for.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::{Handle, Meter, WriteFigures};

use crate::backend::{Backend, Source};
use crate::copy_map::CopyMap;
use crate::request::Op;
use crate::tracker::Tracker;

/// The image that this reactor has open, until it is exchanged for another.
pub(crate) struct CurrentImage {
    pub(crate) backend: Backend,
    /// What a job has to know of requests that change the disk.
    pub(crate) tracker: Option<Tracker>,
    /// Counts the I/O of the image's files, and how much of it was charged to requests. None:
    /// nothing is counted.
    metered: Option<Metered>,
}

/// I/O of an image's files: operations, and bytes of those that move data.
#[derive(Clone, Copy, Default)]
pub(crate) struct FileIo {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
}

/// Counts the I/O of an image's files.
struct Metered {
    counter: Counter,
    /// I/O that a request caused, or that the throttle has charged already. All other I/O comes
    /// from the image's own tasks and is not charged yet.
    accounted: Cell<FileIo>,
}

/// What knows the number of operations and of bytes.
enum Counter {
    Files(Rc<Meter>),
    /// Counts the I/O of a simulated disk.
    #[cfg(test)]
    Test(Box<dyn Fn() -> (u64, u64)>),
}

impl Metered {
    /// Returns the I/O that the files have begun so far.
    #[inline]
    fn done(&self) -> FileIo {
        let (operations, bytes) = match &self.counter {
            Counter::Files(meter) => meter.counted(),
            #[cfg(test)]
            Counter::Test(count) => count(),
        };
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

    pub(crate) fn and(self, other: FileIo) -> FileIo {
        FileIo { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

impl CurrentImage {
    /// Opens the image on one reactor.
    pub(crate) fn open(
        handle: &Handle,
        source: &Source,
        tracker: Option<Tracker>,
    ) -> io::Result<Self> {
        if source.chain().is_none() && source.file().is_none() {
            return Ok(CurrentImage {
                backend: Backend::open(handle, source)?,
                tracker,
                metered: None,
            });
        }
        let meter = Rc::new(Meter::default());
        let backend = Backend::open(&handle.metered(&meter), source)?;
        let metered = Metered { counter: Counter::Files(meter), accounted: Cell::default() };
        metered.accounted.set(metered.done());
        Ok(CurrentImage { backend, tracker, metered: Some(metered) })
    }

    /// Returns an image whose I/O is not counted.
    pub(crate) fn unmetered(backend: Backend) -> Self {
        CurrentImage { backend, tracker: None, metered: None }
    }

    /// Returns an image of which `count` returns the operations and bytes so far.
    #[cfg(test)]
    pub(crate) fn counted(backend: Backend, count: impl Fn() -> (u64, u64) + 'static) -> Self {
        let (counter, accounted) = (Counter::Test(Box::new(count)), Cell::default());
        let metered = Some(Metered { counter, accounted });
        CurrentImage { backend, tracker: None, metered }
    }

    /// Returns whether a request may begin. If not, it must wait for [`CurrentImage::must_wait`].
    #[inline]
    pub(crate) fn admits(&self, op: Op, offset: u64, len: u64) -> bool {
        self.tracker.as_ref().is_none_or(|tracker| tracker.must_wait(op, offset, len).is_none())
    }

    /// Returns the map of a backup for which a request must wait before it begins.
    #[inline]
    pub(crate) fn must_wait(&self, op: Op, offset: u64, len: u64) -> Option<Arc<CopyMap>> {
        self.tracker.as_ref()?.must_wait(op, offset, len).cloned()
    }

    /// Runs a request's future. Adds the I/O of the image's files that its polls begin to
    /// `file_io`.
    #[inline]
    pub(crate) async fn measured<T>(
        &self,
        request: impl Future<Output = T>,
        file_io: &Cell<FileIo>,
    ) -> T {
        let Some(metered) = &self.metered else { return request.await };
        let mut request = pin!(request);
        poll_fn(|cx| {
            let before = metered.done();
            let polled = request.as_mut().poll(cx);
            let new = metered.done().since(before);
            metered.accounted.set(metered.accounted.get().and(new));
            file_io.set(file_io.get().and(new));
            polled
        })
        .await
    }

    /// Returns whether a request that began no I/O on the image's files left their device idle.
    /// (The I/O of an NBD client is not counted.)
    #[inline]
    pub(crate) fn is_idle_without_io(&self) -> bool {
        self.metered.as_ref().is_some_and(|metered| metered.done().operations > 0)
    }

    /// Returns the I/O that is not charged yet. The request was charged for one operation of
    /// `charged` bytes, and its polls began `file_io`. If the request was charged for more than it
    /// began, the difference is no credit for other requests.
    #[inline]
    pub(crate) fn uncharged(&self, file_io: FileIo, charged: u64) -> Option<FileIo> {
        let Metered { accounted, .. } = self.metered.as_ref()?;
        let own = file_io.since(FileIo { operations: 1, bytes: charged });
        let all = self.metered.as_ref()?.done();
        let more = own.and(all.since(accounted.replace(all)));
        (more.operations > 0 || more.bytes > 0).then_some(more)
    }

    /// Returns the figures of the write policies for the files of this image.
    pub(crate) fn writes(&self) -> WriteFigures {
        match self.metered.as_ref().map(|metered| &metered.counter) {
            Some(Counter::Files(meter)) => meter.writes(),
            _ => WriteFigures::default(),
        }
    }

    /// Returns an image that fails every request.
    pub(crate) fn gone(why: &io::Error) -> Self {
        CurrentImage { backend: Backend::Gone(why.to_string()), tracker: None, metered: None }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_image::{CacheMode, ChainOptions};
    use blockyard_ring::{Executor, Segments};

    use super::*;

    /// The request paid for its write when it was admitted.
    #[test]
    fn io_of_a_request_is_charged_once() {
        let path = std::env::temp_dir().join(format!("blockyard-measured-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = ChainOptions { cache: CacheMode::Writeback, ..ChainOptions::new(&path) };
        let source = Source::open(&options).unwrap();
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let measured = async move {
            let image = CurrentImage::open(&handle, &source, None).unwrap();
            let writes = async |count: u64| {
                for at in 0..count {
                    let data = Segments::buffer(4096);
                    image.backend.write(data, at * 4096, false).await.1.unwrap();
                }
            };
            let one = Cell::default();
            image.measured(writes(1), &one).await;
            assert_eq!((one.get().operations, one.get().bytes), (1, 4096));
            assert!(image.uncharged(one.get(), 4096).is_none());
            let three = Cell::default();
            image.measured(writes(3), &three).await;
            let more = image.uncharged(three.get(), 4096).unwrap();
            assert_eq!((more.operations, more.bytes), (2, 8192));
        };
        executor.block_on(measured).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
