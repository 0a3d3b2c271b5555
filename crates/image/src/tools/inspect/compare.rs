//! Compares two disks, whatever their formats.
//!
//! Ranges that both images know to be zeroes are not read. If one disk is shorter, the rest of the
//! other must be zeroes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ring::Segments;

use crate::SECTOR;
use crate::chain::{Chain, ChainError};
use crate::copying::sweep::{Piece, Progress, Sweep};
use blockyard_ring::join;

use crate::tools::disk::Disk;
use crate::tools::reactors::on_reactors;

/// Number of bytes that are compared at a time.
const PIECE: u64 = 1 << 20;
/// Number of pieces in flight on each reactor.
const AT_A_TIME: usize = 8;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Offset in bytes of the first sector that differs.
    pub differs_at: Option<u64>,
    /// Offset at which one disk has data and the other knows of zeroes, if that comes first. Only
    /// with `strict`.
    pub status_differs_at: Option<u64>,
    pub sizes: (u64, u64),
}

/// Which of the two disks must be read for a piece. A disk that is known to be zeroes, or that has
/// ended, need not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadNeeded {
    Same,
    /// Read only the first disk.
    OnlyFirst,
    OnlySecond,
    Both,
    /// One has data where the other knows of zeroes, with `strict`.
    StatusDiffers,
}

struct CompareJob {
    sweep: Sweep,
    strict: bool,
    differs_at: AtomicU64,
    status_differs_at: AtomicU64,
    progress: Arc<Progress>,
}

/// Compares on `threads` reactors. With `strict`, data and known zeroes differ.
pub fn compare(
    a: &Arc<Chain>,
    b: &Arc<Chain>,
    strict: bool,
    threads: usize,
    progress: &Arc<Progress>,
) -> Result<Comparison, ChainError> {
    let sizes = (a.size(), b.size());
    let end = sizes.0.max(sizes.1);
    progress.expect(end);
    let never = || AtomicU64::new(u64::MAX);
    let work = Arc::new(CompareJob {
        sweep: Sweep::new(0..end),
        strict,
        differs_at: never(),
        status_differs_at: never(),
        progress: progress.clone(),
    });
    on_reactors(threads, |handle| {
        let (work, a, b) = (work.clone(), a.clone(), b.clone());
        async move { work.run(&Disk::of(&a, &handle).await?, &Disk::of(&b, &handle).await?).await }
    })?;
    let (content, status) =
        (work.differs_at.load(Ordering::Relaxed), work.status_differs_at.load(Ordering::Relaxed));
    Ok(Comparison {
        differs_at: (content < status).then_some(content),
        status_differs_at: (status < content).then_some(status),
        sizes,
    })
}

impl CompareJob {
    async fn run(&self, a: &Disk, b: &Disk) -> Result<(), ChainError> {
        let workers = (0..AT_A_TIME)
            .map(|_| async { self.worker(a, b).await.inspect_err(|_| self.sweep.stop()) });
        join::all(AT_A_TIME, workers).await
    }

    async fn worker(&self, a: &Disk, b: &Disk) -> Result<(), ChainError> {
        let mut buffers = (Segments::buffer(PIECE as usize), Segments::buffer(PIECE as usize));
        while let Some(piece) =
            self.sweep.next(async |at, len| judge(a, b, at, len, self.strict).await).await?
        {
            let (at, found) = match piece.what {
                ReadNeeded::StatusDiffers => (Some(piece.offset), &self.status_differs_at),
                _ => (differs(a, b, &piece, &mut buffers).await?, &self.differs_at),
            };
            if let Some(at) = at {
                // Pieces are handed out in order: no earlier piece starts after this.
                self.sweep.stop();
                found.fetch_min(at, Ordering::Relaxed);
            }
            self.progress.add(piece.len);
        }
        Ok(())
    }
}

/// Returns which disk must be read at `offset`, and for how many bytes.
async fn judge(
    a: &Disk,
    b: &Disk,
    offset: u64,
    rest: u64,
    strict: bool,
) -> Result<(u64, ReadNeeded), ChainError> {
    // Nothing is read behind the end of either disk.
    let (first, second) = (a.size().min(b.size()), a.size().max(b.size()));
    let rest = rest.min(if offset < first { first - offset } else { second - offset });
    let of_a = a.known(offset, rest).await?;
    let of_b = b.known(offset, of_a.len).await?;
    let len = of_b.len;
    if strict && (of_a.zero, of_a.data) != (of_b.zero, of_b.data) {
        return Ok((len, ReadNeeded::StatusDiffers));
    }
    Ok(match (of_a.zero, of_b.zero) {
        (true, true) => (len, ReadNeeded::Same),
        // Read many short extents together.
        _ if len < PIECE && offset < first && !strict => (rest.min(PIECE), ReadNeeded::Both),
        (true, false) => (len.min(PIECE), ReadNeeded::OnlySecond),
        (false, true) => (len.min(PIECE), ReadNeeded::OnlyFirst),
        (false, false) => (len.min(PIECE), ReadNeeded::Both),
    })
}

/// Returns the offset of the first sector in the piece that differs between the two images.
async fn differs(
    a: &Disk,
    b: &Disk,
    piece: &Piece<ReadNeeded>,
    buffers: &mut (Segments, Segments),
) -> Result<Option<u64>, ChainError> {
    let len = piece.len as usize;
    let of_a = &buffers.0.slice(0, len.min(PIECE as usize));
    let of_b = &buffers.1.slice(0, len.min(PIECE as usize));
    let read =
        async |disk: &Disk, into: &Segments| disk.read(into.slice(0, len), piece.offset).await;
    let found = match piece.what {
        ReadNeeded::Same | ReadNeeded::StatusDiffers => None,
        ReadNeeded::OnlyFirst => read(a, of_a).await?.find_nonzero(0, len),
        ReadNeeded::OnlySecond => read(b, of_b).await?.find_nonzero(0, len),
        ReadNeeded::Both => {
            read(a, of_a).await?;
            read(b, of_b).await?;
            of_a.find_difference(0, of_b, 0, len)
        }
    };
    Ok(found.map(|at| (piece.offset + at as u64) / SECTOR * SECTOR))
}
