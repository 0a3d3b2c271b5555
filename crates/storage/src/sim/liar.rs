//! A defective disk. Tests use it to test their own checks, which must detect each defect.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::Poll;

use blockyard_ring::Segments;

use super::{SECTOR, SimDisk};
use crate::storage::Storage;

/// How a defective disk breaks its promises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lie {
    /// No sync has an effect.
    NoSync,
    /// Every other sync has no effect, the first one included. A flush of an image makes two: one
    /// before it writes what refers to the data, and one after.
    HalfTheSyncs,
    /// The answer to a sync comes when the sync has only begun.
    EarlySync,
    /// A durable write is an ordinary one.
    NotDurable,
    /// A write of more than two sectors loses its last one.
    LosesPieces,
    /// Writes at this offset have no effect.
    LosesWrites(u64),
    /// A discard affects the sector behind its range, too.
    DiscardsMore,
    /// The first sector of a read at this offset is zeroes.
    ReadsZeroes(u64),
}

/// A [`SimDisk`] with a defect.
#[derive(Clone)]
pub struct Liar {
    disk: SimDisk,
    lie: Lie,
    syncs: Rc<Cell<u64>>,
}

impl Liar {
    /// Returns `disk` with the defect `lie`.
    pub fn new(disk: SimDisk, lie: Lie) -> Self {
        Liar { disk, lie, syncs: Rc::default() }
    }
}

impl Storage for Liar {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let (segments, n) = self.disk.read(segments, offset).await;
        if self.lie == Lie::ReadsZeroes(offset) && !segments.is_empty() {
            segments.zero(0, SECTOR.min(segments.len()));
        }
        (segments, n)
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        match self.lie {
            Lie::LosesPieces if len > 2 * SECTOR => {
                let (_, n) =
                    self.disk.write(segments.slice(0, len - SECTOR), offset, durable).await;
                (segments, n.map(|_| len))
            }
            Lie::LosesWrites(at) if at == offset => (segments, Ok(len)),
            lie => self.disk.write(segments, offset, durable && lie != Lie::NotDurable).await,
        }
    }

    async fn sync(&self) -> io::Result<()> {
        self.syncs.set(self.syncs.get() + 1);
        match self.lie {
            Lie::NoSync => Ok(()),
            Lie::HalfTheSyncs if self.syncs.get() % 2 == 1 => Ok(()),
            Lie::EarlySync => {
                let mut sync = Box::pin(self.disk.sync());
                poll_fn(|cx| match sync.as_mut().poll(cx) {
                    Poll::Ready(answer) => Poll::Ready(answer),
                    Poll::Pending => Poll::Ready(Ok(())),
                })
                .await
            }
            _ => self.disk.sync().await,
        }
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let more = if self.lie == Lie::DiscardsMore { SECTOR as u64 } else { 0 };
        self.disk.discard(offset, len + more).await
    }

    forward! { { Liar { disk, .. } => inline disk } zero set_len len }
}
