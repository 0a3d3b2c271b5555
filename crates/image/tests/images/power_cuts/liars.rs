//! Defective storage: the tests must detect it.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

/// A defect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lie {
    /// No sync has an effect.
    NoSync,
    /// Every other sync has no effect. A flush makes two: one before it writes L2 entries, and one
    /// after.
    HalfTheSyncs,
    /// The end of a long write is not written.
    LosesPieces,
    /// Discards and zeroes affect neighbouring bytes too.
    DiscardsMore,
}

#[derive(Clone)]
pub struct Liar<S> {
    disk: S,
    lie: Lie,
    syncs: Rc<Cell<u64>>,
}

impl<S> Liar<S> {
    pub fn new(disk: S, lie: Lie) -> Self {
        Liar { disk, lie, syncs: Rc::default() }
    }
}

impl<S: Storage> Storage for Liar<S> {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        self.disk.read(segments, offset).await
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        if self.lie == Lie::LosesPieces && len > 1024 {
            let (_, n) = self.disk.write(segments.slice(0, len - 512), offset, durable).await;
            return (segments, n.map(|_| len));
        }
        self.disk.write(segments, offset, durable).await
    }

    async fn sync(&self) -> io::Result<()> {
        self.syncs.set(self.syncs.get() + 1);
        match self.lie {
            Lie::NoSync => Ok(()),
            Lie::HalfTheSyncs if self.syncs.get() % 2 == 1 => Ok(()),
            _ => self.disk.sync().await,
        }
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let more = if self.lie == Lie::DiscardsMore { 512 } else { 0 };
        self.disk.discard(offset, len + more).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.disk.zero(offset, len, unmap).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.set_len(len).await
    }

    async fn len(&self) -> io::Result<u64> {
        self.disk.len().await
    }
}
