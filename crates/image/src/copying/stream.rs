//! Stream: copies the contents of the backing images into the topmost image, until the topmost
//! image no longer needs them.
//!
//! In: a chain, which may be in use. Out: a topmost image that holds the whole disk; then
//! ([`Chain::alone`]) a chain of that image only. Invariant, also at each power cut: the chain
//! shows the same data. A copy-up changes nothing that a guest sees. The image names its backing
//! file until the copies are durable.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Handle;

use crate::chain::{Chain, ChainError};
use crate::copying::sweep::{Progress, Sweep};
use crate::error::ImageError;
use crate::layers::image::Image;
use crate::layers::layer::Layer;
use blockyard_ring::join;

/// Size of one copy, in bytes.
const PIECE: u64 = 1 << 20;
/// Number of copies in flight.
const AT_A_TIME: usize = 4;
/// A shorter run of zeroes between data is copied with them, in bytes.
const LEAST_LEFT: u64 = 64 << 10;

const TOP: &str = "image to stand alone";

/// What happens to a range of the disk.
#[derive(Clone, Copy, PartialEq)]
enum Piece {
    Copy,
    /// It reads as zeroes, also without the backing images.
    Leave,
}

/// Copies up all ranges that the topmost image lacks, without those that are known to read as
/// zeroes, such as holes of a raw backing image. `before` runs with each range before it is
/// copied; if it fails, the copy ends with its error. Durable after a flush.
pub async fn copy_up(
    image: &Image,
    progress: &Progress,
    before: impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let cluster = top(image)?.shared().shape().cluster_size();
    progress.expect(image.size());
    let sweep = Sweep::new(0..image.size());
    let known = Known { image, cluster, last: Cell::new((0..0, false)) };
    let judge = async |offset, rest| Ok::<_, ImageError>(known.piece(offset, rest).await);
    let workers = (0..AT_A_TIME).map(|_| async {
        while let Some(next) = sweep.next(judge).await? {
            if next.what == Piece::Leave {
                progress.add(next.len);
                continue;
            }
            let copy = async {
                before(next.offset..next.offset + next.len).await?;
                let copied = image.populate(next.offset, next.len).await;
                copied.map_err(|e| {
                    ImageError::io(TOP, next.offset, "copying from the backing images", e)
                })
            };
            copy.await.inspect_err(|_: &ImageError| sweep.stop())?;
            progress.add(next.len);
        }
        Ok(())
    });
    join::all(AT_A_TIME, workers).await
}

/// What was last learned of the disk. To ask a file for the end of a long run of data is expensive:
/// once for each run is enough.
struct Known<'a> {
    image: &'a Image,
    cluster: u64,
    /// A range, and whether it reads as zeroes.
    last: Cell<(Range<u64>, bool)>,
}

impl Known<'_> {
    /// Returns the length of the next piece, and what happens to it. A piece to copy goes on over
    /// short runs of zeroes, so that a fragmented image is not copied cluster by cluster. Guests
    /// may write to it meanwhile. What they write is in the topmost image then, and the bytes
    /// around it stay as they are.
    async fn piece(&self, offset: u64, rest: u64) -> (u64, Piece) {
        let end = offset + rest;
        let (limit, mut at) = (end.min(offset + PIECE), offset);
        while at < limit {
            let (until, zero) = self.status(at, end - at).await;
            // A cluster with data and zeroes is copied.
            let from = if at == offset { at } else { at.next_multiple_of(self.cluster) };
            let to = if until >= end { end } else { until - until % self.cluster };
            if zero && at == offset && to > from {
                return (to - from, Piece::Leave);
            }
            if zero && from < limit && to >= from + LEAST_LEFT {
                return (from - offset, Piece::Copy);
            }
            at = until;
        }
        (at.next_multiple_of(self.cluster).min(limit) - offset, Piece::Copy)
    }

    /// Returns the end of the bytes at `offset` that are alike, and whether they read as zeroes.
    /// Bytes without a status are copied; a fault of the image fails the copy.
    async fn status(&self, offset: u64, len: u64) -> (u64, bool) {
        let (range, zero) = self.last.take();
        let (range, zero) = if range.contains(&offset) {
            (range, zero)
        } else {
            let found = self.image.status(offset, len).await;
            let (known, zero) = found.map_or((len.min(PIECE), false), |s| (s.len, s.zero));
            (offset..offset + known, zero)
        };
        self.last.set((range.clone(), zero));
        (range.end, zero)
    }
}

fn top(image: &Image) -> Result<&crate::qcow2::Qcow2, ImageError> {
    match image.layers() {
        [Layer::Qcow2(top), _, ..] => Ok(top),
        [_] => Err(ImageError::refused(TOP, "it has no backing file")),
        _ => Err(ImageError::refused(
            TOP,
            "only a qcow2 image can do without its backing file: convert it",
        )),
    }
}

/// Removes the backing file's name from the topmost image, durably. The image must hold the whole
/// disk durably, and no request may be in flight.
pub async fn stand_alone(image: &Image) -> Result<(), ImageError> {
    top(image)?.forget_backing().await
}

impl Chain {
    /// Returns the chain of the topmost image only, and calls [`stand_alone`].
    pub async fn alone(&self, handle: &Handle) -> Result<Arc<Chain>, ChainError> {
        let wrong = |error| ChainError::Image { path: self.options.path.clone(), error };
        let image = self
            .image(handle)
            .map_err(|e| wrong(ImageError::io(TOP, None, "opening it for io_uring", e)))?;
        stand_alone(&image).await.map_err(wrong)?;
        Ok(Arc::new(Chain {
            layers: vec![self.layers[0].clone()],
            options: self.options.clone(),
            cut: None,
        }))
    }
}
