//! Converts a disk: copies it to another image, and writes only what is necessary.
//!
//! ```text
//!   pieces, in order ─► known to be zeroes, or equal in both: not read
//!   └► read ─► runs that are zeroes, equal, or data
//!   ─► zeroed, left, written or compressed
//! ```
//!
//! A target with a backing file gets only what differs from that file. Each reactor has several
//! pieces in flight. Invariant: no piece ends inside a cluster of the target, so no cluster must be
//! read to be completed. Power cut: the target is incomplete; the caller gives it its name only
//! when it is durable.

use std::sync::Arc;

use blockyard_ring::Segments;

use crate::chain::{Chain, ChainError, shared_layers};
use crate::copying::sweep::{Piece, Progress, Sweep};
use crate::layers::layer::Layer;
use blockyard_ring::join;

use super::compress;
use super::source::{self, Part, Source};
use crate::tools::disk::Disk;
use crate::tools::reactors::on_reactors;

/// Size of one read in bytes. It is larger if the target's clusters are larger.
const PIECE: u64 = 1 << 20;
/// Size of one read in bytes if the target is a raw file that is written through the page cache.
/// Smaller pieces are still in the processor's cache when this thread copies them. For qcow2 the
/// pieces are larger, because small pieces interleave clusters.
const CACHED_RAW: u64 = 256 << 10;
const CACHED_QCOW2: u64 = 512 << 10;
/// Zeroes written at a time, in bytes.
const ZEROES: u64 = 64 << 20;
/// Granularity in which zeroes are left out of raw files, in bytes.
const HOLE: u64 = 4096;

/// Options of a conversion.
#[derive(Clone, Copy, Debug)]
pub struct ConvertOptions {
    /// Number of threads, and pieces in flight on each.
    pub threads: usize,
    pub at_a_time: usize,
    /// Minimum length in bytes of a run of zeroes that is left out; 0: write all zeroes.
    pub sparse: u64,
    /// Whether to compress the clusters of a qcow2 target.
    pub compress: bool,
    /// Whether the target is new: unwritten parts read as zeroes, or as its backing file.
    pub fresh: bool,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        ConvertOptions { threads: 1, at_a_time: 8, sparse: HOLE, compress: false, fresh: true }
    }
}

/// What is known of a piece before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceContent {
    /// The target has the same data already.
    Same,
    Zero,
    Data,
}

/// What to do with a run of bytes that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Leave,
    Zero,
    Write,
}

struct ConvertJob {
    sweep: Sweep,
    options: ConvertOptions,
    progress: Arc<Progress>,
    /// Layer numbers in source and target from which on both consist of the same images.
    shared_from: (usize, usize),
    /// Whether writes of the target bypass the page cache.
    direct: bool,
}

/// Copies the concatenated parts of `source` to `target`, which must be large enough. Nothing is
/// durable until the target is closed.
pub fn convert(
    source: &[Part],
    target: &Arc<Chain>,
    options: &ConvertOptions,
    progress: &Arc<Progress>,
) -> Result<(), ChainError> {
    let end = source::size_of(source).min(target.size());
    progress.expect(end);
    let to = target.layers();
    let shared_from = match source {
        [one] if one.range.start == 0 && one.chain.options().snapshot.is_none() => {
            let from = one.chain.layers();
            let shared = shared_layers(from, &to[1..]);
            (from.len() - shared, to.len() - shared)
        }
        // The parts are moved, so shared images show other bytes at the same offset.
        _ => (usize::MAX, usize::MAX),
    };
    let work = Arc::new(ConvertJob {
        sweep: Sweep::new(0..end),
        options: *options,
        progress: progress.clone(),
        shared_from,
        direct: target.options().cache.direct(),
    });
    on_reactors(options.threads, |handle| {
        let (work, source, target) = (work.clone(), source.to_vec(), target.clone());
        async move {
            work.run(&Source::of(&source, &handle).await?, &Disk::of(&target, &handle).await?).await
        }
    })
}

impl ConvertJob {
    async fn run(&self, source: &Source, target: &Disk) -> Result<(), ChainError> {
        let worker = ConvertWorker {
            work: self,
            source,
            target,
            grain: grain(target, &self.options),
            piece: self.piece(target),
        };
        let workers = (0..self.options.at_a_time)
            .map(|_| async { worker.run().await.inspect_err(|_| self.sweep.stop()) });
        join::all(self.options.at_a_time, workers).await
    }

    fn piece(&self, target: &Disk) -> u64 {
        let top = &target.image.layers()[0];
        let piece = match top {
            _ if self.direct => PIECE,
            Layer::Qcow2(_) => CACHED_QCOW2,
            Layer::Raw { .. } | Layer::Cow(_) => CACHED_RAW,
        };
        piece.max(top.cluster_size())
    }
}

/// Granularity in bytes in which parts of the target are written or left out.
fn grain(target: &Disk, options: &ConvertOptions) -> u64 {
    match &target.image.layers()[0] {
        Layer::Qcow2(image) if options.compress => image.shared().shape().cluster_size(),
        Layer::Qcow2(image) => image.shared().shape().unit,
        Layer::Raw { .. } | Layer::Cow(_) => HOLE,
    }
}

/// One reactor's share of a conversion.
struct ConvertWorker<'a> {
    work: &'a ConvertJob,
    source: &'a Source,
    target: &'a Disk,
    grain: u64,
    piece: u64,
}

impl ConvertWorker<'_> {
    async fn run(&self) -> Result<(), ChainError> {
        let len = self.piece as usize;
        let mut buffer = Segments::buffer(len);
        let mut backing = Segments::buffer(if self.has_backing() { len } else { 0 });
        while let Some(piece) =
            self.work.sweep.next(async |offset, rest| self.judge(offset, rest).await).await?
        {
            match piece.what {
                PieceContent::Same => {}
                PieceContent::Zero => self.target.write_zeroes(piece.offset, piece.len).await?,
                PieceContent::Data => self.copy(&piece, &mut buffer, &mut backing).await?,
            }
            self.work.progress.add(piece.len);
        }
        Ok(())
    }

    fn has_backing(&self) -> bool {
        self.target.image.layers().len() > 1
    }

    /// Returns what to do at `offset`, and for how many bytes.
    async fn judge(&self, offset: u64, rest: u64) -> Result<(u64, PieceContent), ChainError> {
        let data = (rest.min(self.piece - offset % self.piece), PieceContent::Data);
        let options = &self.work.options;
        if options.sparse == 0 {
            return Ok(data);
        }
        let found = self.source.status(offset, rest).await?;
        let shared_from = self.work.shared_from;
        let shared = found.depth >= shared_from.0;
        if !shared && !found.zero {
            return Ok(data);
        }
        let (mut len, mut what) = (
            found.len,
            if found.zero && options.fresh { PieceContent::Same } else { PieceContent::Zero },
        );
        if self.has_backing() {
            let there = self.target.status(offset, len).await?;
            len = there.len;
            what = match found.zero {
                // Compare the target's depth too: the target may have data of its own, which hide
                // the shared layers.
                _ if shared && there.depth >= shared_from.1 => PieceContent::Same,
                true if there.zero => PieceContent::Same,
                true => PieceContent::Zero,
                false => PieceContent::Data,
            };
        }
        if what == PieceContent::Zero {
            len = len.min(ZEROES);
        }
        if what == PieceContent::Data {
            return Ok(data);
        }
        // End at a multiple of the piece size, so that the next pieces begin at one.
        let end = if len == rest { offset + len } else { (offset + len) / self.piece * self.piece };
        Ok(if end > offset { (end - offset, what) } else { data })
    }

    async fn copy(
        &self,
        piece: &Piece<PieceContent>,
        buffer: &mut Segments,
        backing: &mut Segments,
    ) -> Result<(), ChainError> {
        let len = piece.len as usize;
        let bytes = self.source.read(buffer.slice(0, len), piece.offset).await?;
        let base = match self.has_backing() {
            true => Some(self.target.read(backing.slice(0, len), piece.offset).await?),
            false => None,
        };
        for (at, len, action) in self.runs(&bytes, base.as_ref()) {
            let offset = piece.offset + at as u64;
            match action {
                Action::Leave => {}
                Action::Zero => self.target.write_zeroes(offset, len as u64).await?,
                Action::Write => self.write(bytes.slice(at, len), offset).await?,
            }
        }
        Ok(())
    }

    /// Splits the data that were read into runs, each with one action. `base`: what the target
    /// shows now.
    fn runs(&self, bytes: &Segments, base: Option<&Segments>) -> Vec<(usize, usize, Action)> {
        let options = &self.work.options;
        let mut runs: Vec<(usize, usize, Action)> = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let len = (bytes.len() - at).min(self.grain as usize);
            let zero = || bytes.find_nonzero(at, len).is_none();
            let action = match base {
                _ if options.sparse == 0 => Action::Write,
                Some(base) if bytes.find_difference(at, base, at, len).is_none() => Action::Leave,
                None if options.fresh && zero() => Action::Leave,
                _ if zero() => Action::Zero,
                _ => Action::Write,
            };
            match runs.last_mut() {
                Some((_, before, same)) if *same == action => *before += len,
                _ => runs.push((at, len, action)),
            }
            at += len;
        }
        // Short runs of zeroes are written together with the data around them.
        for run in
            runs.iter_mut().filter(|(_, len, _)| base.is_none() && (*len as u64) < options.sparse)
        {
            run.2 = Action::Write;
        }
        runs.dedup_by(|next, last| {
            let same = next.2 == last.2;
            if same {
                last.1 += next.1;
            }
            same
        });
        runs
    }

    async fn write(&self, bytes: Segments, offset: u64) -> Result<(), ChainError> {
        match &self.target.image.layers()[0] {
            Layer::Qcow2(image) if self.work.options.compress => {
                compress::write(self.target, image, &bytes, offset).await
            }
            _ => self.target.write(bytes, offset).await,
        }
    }
}
