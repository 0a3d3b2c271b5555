//! A file in memory, sparse, that counts what is done to it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use blockyard_ring::Segments;

use blockyard_storage::{Storage, Store};

const PAGE: u64 = 4096;

#[derive(Clone, Default)]
pub struct File {
    pages: Rc<RefCell<BTreeMap<u64, Vec<u8>>>>,
    len: Rc<Cell<u64>>,
    pub writes: Rc<Cell<u64>>,
}

impl File {
    /// `len`: at least that of `bytes`; what is behind them is a hole.
    pub fn new(bytes: &[u8], len: u64) -> Self {
        let file = File::default();
        file.len.set(len);
        file.put(0, bytes);
        file
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        let mut pages = self.pages.borrow_mut();
        for (i, &byte) in bytes.iter().enumerate() {
            let at = offset + i as u64;
            pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize])
                [(at % PAGE) as usize] = byte;
        }
    }

    fn zero_range(&self, offset: u64, len: u64) {
        let mut pages = self.pages.borrow_mut();
        let end = offset.saturating_add(len).min(self.len.get());
        if offset >= end {
            return;
        }
        for (&page, bytes) in pages.range_mut(offset / PAGE..=end / PAGE) {
            let (from, to) = (
                offset.max(page * PAGE) - page * PAGE,
                end.min((page + 1) * PAGE).saturating_sub(page * PAGE),
            );
            if from < to {
                bytes[from as usize..to as usize].fill(0);
            }
        }
    }

    fn changed(&self) {
        self.writes.set(self.writes.get() + 1);
    }
}

impl From<File> for Store {
    fn from(file: File) -> Self {
        Store::other(file)
    }
}

impl Storage for File {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let n = self.len.get().saturating_sub(offset).min(segments.len() as u64) as usize;
        segments.zero(0, n);
        let pages = self.pages.borrow();
        if n > 0 {
            let end = offset + n as u64;
            for (&page, bytes) in pages.range(offset / PAGE..=(end - 1) / PAGE) {
                let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
                let piece = &bytes[(from - page * PAGE) as usize..(to - page * PAGE) as usize];
                segments.copy_in((from - offset) as usize, piece);
            }
        }
        (segments, Ok(n))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        _: bool,
    ) -> (Segments, io::Result<usize>) {
        self.changed();
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        self.len.set(self.len.get().max(offset + bytes.len() as u64));
        self.put(offset, &bytes);
        let n = bytes.len();
        (segments, Ok(n))
    }

    async fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.changed();
        self.zero_range(offset, len);
        Ok(())
    }

    async fn zero(&self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.discard(offset, len).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.changed();
        let old = self.len.get();
        if len < old {
            self.zero_range(len, old - len);
        }
        self.len.set(len);
        Ok(())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.len.get())
    }
}

/// Runs what never waits for anything but itself.
pub fn run<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    for _ in 0..1_000_000 {
        if let Poll::Ready(value) = work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
    }
    panic!("it waits for ever");
}
