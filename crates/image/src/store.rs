//! What an image's bytes lie on: a file of the host, or an export of an NBD server.
//!
//! What must hold: a file costs what it costs by itself. What is remote is done in a future of its own, so that those of
//! files, of which there are many, stay small.

use std::io;
use std::ops::Range;

use blockyard_ring::sim::Recorded;
use blockyard_ring::{Segments, Storage, UringFile};

use crate::nbd::Nbd;

/// The storage of an image on one reactor.
#[derive(Clone)]
pub enum Store {
    File(UringFile),
    Nbd(Nbd),
    /// A file whose operations are in a journal, for simulated power cuts.
    Recorded(Box<Recorded<UringFile>>),
}

impl Storage for Store {
    #[inline]
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        match self {
            Store::File(file) => file.read(segments, offset).await,
            Store::Nbd(nbd) => Box::pin(nbd.read(segments, offset)).await,
            Store::Recorded(recorded) => Box::pin(recorded.read(segments, offset)).await,
        }
    }

    #[inline]
    async fn write(&self, segments: Segments, offset: u64, durable: bool) -> (Segments, io::Result<usize>) {
        match self {
            Store::File(file) => file.write(segments, offset, durable).await,
            Store::Nbd(nbd) => Box::pin(nbd.write(segments, offset, durable)).await,
            Store::Recorded(recorded) => Box::pin(recorded.write(segments, offset, durable)).await,
        }
    }

    async fn sync(&self) -> io::Result<()> {
        match self {
            Store::File(file) => file.sync().await,
            Store::Nbd(nbd) => Box::pin(nbd.sync()).await,
            Store::Recorded(recorded) => Box::pin(recorded.sync()).await,
        }
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Store::File(file) => file.discard(offset, len).await,
            Store::Nbd(nbd) => Box::pin(nbd.discard(offset, len)).await,
            Store::Recorded(recorded) => Box::pin(recorded.discard(offset, len)).await,
        }
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Store::File(file) => file.zero(offset, len, unmap).await,
            Store::Nbd(nbd) => Box::pin(nbd.zero(offset, len, unmap)).await,
            Store::Recorded(recorded) => Box::pin(recorded.zero(offset, len, unmap)).await,
        }
    }

    async fn zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Store::File(file) => file.zero_fast(offset, len, unmap).await,
            Store::Nbd(nbd) => Box::pin(nbd.zero_fast(offset, len, unmap)).await,
            Store::Recorded(recorded) => Box::pin(recorded.zero_fast(offset, len, unmap)).await,
        }
    }

    async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Store::File(file) => file.allocate(offset, len).await,
            Store::Nbd(nbd) => nbd.allocate(offset, len).await,
            Store::Recorded(recorded) => Box::pin(recorded.allocate(offset, len)).await,
        }
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        match self {
            Store::File(file) => file.set_len(len).await,
            Store::Nbd(nbd) => nbd.set_len(len).await,
            Store::Recorded(recorded) => Box::pin(recorded.set_len(len)).await,
        }
    }

    async fn len(&self) -> io::Result<u64> {
        match self {
            Store::File(file) => file.len().await,
            Store::Nbd(nbd) => nbd.len().await,
            Store::Recorded(recorded) => Box::pin(recorded.len()).await,
        }
    }

    async fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        match self {
            Store::File(file) => file.next_data(offset).await,
            Store::Nbd(nbd) => Box::pin(nbd.next_data(offset)).await,
            Store::Recorded(recorded) => Box::pin(recorded.next_data(offset)).await,
        }
    }

    fn allocated(&self) -> io::Result<Option<u64>> {
        match self {
            Store::File(file) => file.allocated(),
            Store::Nbd(nbd) => nbd.allocated(),
            Store::Recorded(recorded) => recorded.allocated(),
        }
    }

    fn lost(&self) -> Option<io::Error> {
        match self {
            Store::File(file) => file.lost(),
            Store::Nbd(nbd) => nbd.lost(),
            Store::Recorded(recorded) => recorded.lost(),
        }
    }
}
