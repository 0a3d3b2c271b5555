//! Rebase: gives an image another backing file.
//!
//! ```text
//!   pieces of the disk, in order
//!   ─► in the image itself, zeroes in both, or in an image of both chains: skip
//!   ─► else: read through the old and the new backing file; write what differs into the image
//! ```
//!
//! Invariant: the disk's contents stay the same. What differs is written while the old backing file
//! is still in place, because it completes partly written clusters. Only when that is durable does
//! the image name the new backing file. Power cut: the image has the old backing file, and perhaps
//! more data of its own; or it has the new backing file.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use blockyard_ring::Segments;

use crate::chain::{Chain, ChainError, ChainLayer, shared_layers};
use crate::copying::sweep::{Piece, Progress, Sweep};
use crate::cow;
use crate::error::ImageError;
use crate::extent::Place;
use crate::layers::format::Format;
use crate::layers::layer::Layer;
use crate::qcow2::{self, Header};
use crate::raw::Raw;
use blockyard_ring::join;
use blockyard_storage::ImageFile;

use crate::tools::copy::compress;
use crate::tools::disk::Disk;
use crate::tools::file::{of_file, raw_of};
use crate::tools::reactors::{on_reactor, on_reactors};

/// Number of bytes that are compared at a time.
const PIECE: u64 = 1 << 20;
/// Number of pieces in flight on each reactor.
const AT_A_TIME: usize = 8;
/// Granularity in bytes in which a COW file stores what differs.
const BLOCK: u64 = 4096;

#[derive(Clone, Copy, Debug)]
pub struct RebaseOptions {
    pub threads: usize,
    /// Whether to compress clusters that are written whole.
    pub compress: bool,
}

struct RebaseJob {
    compress: bool,
    sweep: Sweep,
    progress: Arc<Progress>,
    /// Layer numbers in the old and the new chain from which on both consist of the same files.
    shared_from: (usize, usize),
}

/// Whether a piece must be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceDecision {
    Same,
    Compare,
}

/// What to do with a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Leave,
    Zero,
    Write,
}

/// Writes into the topmost image of `chain`, open for writing, whatever would differ with `new` as
/// backing chain (None: no backing file). Durable on return.
pub fn rebase(
    chain: &Arc<Chain>,
    new: Option<&Arc<Chain>>,
    options: RebaseOptions,
    progress: &Arc<Progress>,
) -> Result<(), ChainError> {
    progress.expect(chain.size());
    let work = Arc::new(RebaseJob {
        compress: options.compress,
        sweep: Sweep::new(0..chain.size()),
        progress: progress.clone(),
        shared_from: shared_from(chain.layers(), new.map_or(&[], |new| new.layers())),
    });
    let done = on_reactors(options.threads, |handle| {
        let (work, chain, new) = (work.clone(), chain.clone(), new.cloned());
        async move {
            let new = match &new {
                Some(new) => Some(Disk::of(new, &handle).await?),
                None => None,
            };
            work.run(&Disk::of(&chain, &handle).await?, new.as_ref()).await
        }
    });
    done.and(crate::tools::close(chain))
}

/// Returns the layer numbers from which on both chains have the same images. Ignores the topmost
/// image of `old`.
fn shared_from(old: &[Arc<ChainLayer>], new: &[Arc<ChainLayer>]) -> (usize, usize) {
    let count = shared_layers(&old[1..], new);
    (old.len() - count, new.len() - count)
}

impl RebaseJob {
    async fn run(&self, disk: &Disk, new: Option<&Disk>) -> Result<(), ChainError> {
        let piece =
            disk.image.layers().first().map_or(PIECE, |layer| PIECE.max(layer.cluster_size()));
        let workers = (0..AT_A_TIME).map(|_| async {
            self.worker(disk, new, piece).await.inspect_err(|_| self.sweep.stop())
        });
        join::all(AT_A_TIME, workers).await
    }

    async fn worker(&self, disk: &Disk, new: Option<&Disk>, piece: u64) -> Result<(), ChainError> {
        let mut buffers = (Segments::default(), Segments::default());
        while let Some(next) =
            self.sweep.next(async |at, rest| self.judge(disk, new, piece, at, rest).await).await?
        {
            if next.what == PieceDecision::Compare {
                if buffers.0.is_empty() {
                    buffers = (Segments::buffer(piece as usize), Segments::buffer(piece as usize));
                }
                self.take_up(disk, new, &next, &buffers).await?;
            }
            self.progress.add(next.len);
        }
        Ok(())
    }

    async fn judge(
        &self,
        disk: &Disk,
        new: Option<&Disk>,
        piece: u64,
        at: u64,
        rest: u64,
    ) -> Result<(u64, PieceDecision), ChainError> {
        let own = own(disk, at, rest).await?;
        if own.1 {
            return Ok((own.0, PieceDecision::Same));
        }
        let backing = disk.known(at, own.0).await?;
        let (zero, shared, len) = match new {
            Some(new) => {
                let found = new.known(at, backing.len).await?;
                // Behind the end of the new chain nothing shows, also of an image in both chains.
                let shared = at < new.size()
                    && backing.depth >= self.shared_from.0
                    && found.depth >= self.shared_from.1;
                (found.zero, shared, found.len)
            }
            None => (true, false, backing.len),
        };
        if backing.zero && zero || shared {
            return Ok((len, PieceDecision::Same));
        }
        // Read many short ranges together.
        Ok((rest.min(piece - at % piece), PieceDecision::Compare))
    }

    /// Writes what differs in a piece into the image, unless the image has data there.
    async fn take_up(
        &self,
        disk: &Disk,
        new: Option<&Disk>,
        piece: &Piece<PieceDecision>,
        buffers: &(Segments, Segments),
    ) -> Result<(), ChainError> {
        let len = piece.len as usize;
        let bytes = disk.read(buffers.0.slice(0, len), piece.offset).await?;
        let other = buffers.1.slice(0, len);
        let other = match new {
            Some(new) => new.read(other, piece.offset).await?,
            None => {
                other.zero(0, len);
                other
            }
        };
        let grain = match &disk.image.layers()[0] {
            Layer::Qcow2(image) if self.compress => image.shared().shape().cluster_size(),
            Layer::Qcow2(image) => image.shared().shape().unit,
            Layer::Raw { .. } | Layer::Cow(_) => BLOCK,
        };
        // Find all runs of the piece before the first write, because a write changes which bytes
        // the image itself has (`own`).
        let (mut runs, mut at) = (Vec::new(), 0);
        while at < len {
            let (here, own) = own(disk, piece.offset + at as u64, (len - at) as u64).await?;
            if !own {
                runs.extend(differing(&bytes, &other, piece.offset, at..at + here as usize, grain));
            }
            at += here as usize;
        }
        for (at, len, action) in runs {
            let offset = piece.offset + at as u64;
            match action {
                Action::Leave => {}
                Action::Zero => {
                    let held = disk.image.hold_zeroes(offset, len as u64).await;
                    held.map_err(disk.wrong(offset, "writing zeroes"))?;
                }
                Action::Write => self.write(disk, bytes.slice(at, len), offset).await?,
            }
        }
        Ok(())
    }

    /// Writes the differing bytes. A cluster that they cover only partly joins data of the image,
    /// so it is not compressed.
    async fn write(&self, disk: &Disk, bytes: Segments, offset: u64) -> Result<(), ChainError> {
        let end = offset + bytes.len() as u64;
        match &disk.image.layers()[0] {
            Layer::Qcow2(image) if self.compress => {
                let cluster = image.shared().shape().cluster_size();
                let last = if end == disk.size() { end } else { end / cluster * cluster };
                let whole = offset.next_multiple_of(cluster).min(end)..last;
                if whole.is_empty() {
                    return disk.write(bytes, offset).await;
                }
                let part = |from: u64, to: u64| {
                    bytes.slice((from - offset) as usize, (to - from) as usize)
                };
                if offset < whole.start {
                    disk.write(part(offset, whole.start), offset).await?;
                }
                compress::write(disk, image, &part(whole.start, whole.end), whole.start).await?;
                if whole.end < end {
                    disk.write(part(whole.end, end), whole.end).await?;
                }
                Ok(())
            }
            _ => disk.write(bytes, offset).await,
        }
    }
}

/// Returns whether the topmost image has the bytes at `at`, and for how many bytes that holds.
async fn own(disk: &Disk, at: u64, len: u64) -> Result<(u64, bool), ChainError> {
    let found = disk.image.find_above(1, at, len).await.map_err(disk.wrong(at, "finding"))?;
    Ok((found.len, found.place != Place::Absent))
}

/// Splits bytes read at `offset` into runs, each with one action.
fn differing(
    bytes: &Segments,
    other: &Segments,
    offset: u64,
    part: std::ops::Range<usize>,
    grain: u64,
) -> Vec<(usize, usize, Action)> {
    let mut runs: Vec<(usize, usize, Action)> = Vec::new();
    let mut at = part.start;
    while at < part.end {
        let to_grain = (grain - (offset + at as u64) % grain) as usize;
        let len = to_grain.min(part.end - at);
        let action = match () {
            () if bytes.find_difference(at, other, at, len).is_none() => Action::Leave,
            () if bytes.find_nonzero(at, len).is_none() => Action::Zero,
            () => Action::Write,
        };
        match runs.last_mut() {
            Some((_, before, same)) if *same == action => *before += len,
            _ => runs.push((at, len, action)),
        }
        at += len;
    }
    runs
}

/// A backing file, as an image's header stores it.
#[derive(Clone, Debug)]
pub enum NewBacking {
    /// No backing file; qcow2 only.
    None,
    Qcow2 {
        name: String,
        format: Format,
    },
    /// `size`: in bytes; `mtime`: in seconds since 1970.
    Cow {
        name: String,
        size: u64,
        mtime: i64,
    },
}

/// Stores another backing file's name in a closed image of that format, and removes the mark of an
/// abandoned overlay. Durable on return.
pub fn set_backing(file: &Arc<ImageFile>, backing: NewBacking) -> Result<(), ChainError> {
    let file = file.clone();
    on_reactor(|handle| async move {
        let raw = raw_of(&handle, &file)?;
        let named = match &backing {
            NewBacking::Cow { name, size, mtime } => {
                let backing = cow::Backing { name, size: *size, mtime: *mtime };
                cow::set_backing(&raw, &backing).await.map(|_| ())
            }
            NewBacking::None => of_qcow2(&raw, None).await,
            NewBacking::Qcow2 { name, format } => {
                of_qcow2(&raw, Some((name, &format.to_string()))).await
            }
        };
        named.map_err(|error| of_file(&file, error))?;
        file.remove_abandoned_mark().map_err(|e| {
            let what = "removing the mark of an abandoned overlay";
            of_file(&file, ImageError::io("overlay", None, what, e))
        })
    })
}

async fn of_qcow2(file: &Raw, backing: Option<(&str, &str)>) -> Result<(), ImageError> {
    let mut header = Header::read(file).await?;
    qcow2::backing::set_backing(file, &mut header, backing).await
}
