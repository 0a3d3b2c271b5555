//! Commit: what the upper images of a chain hold goes into the image below them.
//!
//! ```text
//!   pieces, in order ─► the upper images have nothing: passed over
//!                    ├► they have zeroes: zeroed below
//!                    └► they have data: read through the chain, written below
//! ```
//! In: the chain, and the image below, opened for writing with what lies under it. Out: an image
//! below that shows what the chain shows, wherever the upper images have anything. Nothing is
//! durable until it is flushed ([`Image::flush`], [`Image::close`]); then, and not before, the
//! upper images may be emptied or taken away. What must hold, also at each power cut: the chain
//! shows what it has shown. What is written below is hidden by what the upper images have there;
//! nothing else is written, and they keep what they have. (An image below that is smaller than the
//! disk has to be made larger first.)

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use crate::SECTOR;
use crate::copying::sweep::{Piece, Progress, Sweep};
use crate::error::ImageError;
use crate::extent::Place;
use crate::image::Image;
use blockyard_ring::join;

/// Bytes copied at a time (more where the clusters below are larger), and how many such pieces a
/// reactor has in flight.
const PIECE: u64 = 1 << 20;
const AT_A_TIME: usize = 8;
/// Bytes zeroed, and passed over, at a time.
const ZEROES: u64 = 64 << 20;
const PASSED: u64 = 1 << 30;

const ABOVE: &str = "overlay";
const BELOW: &str = "backing image";

/// One copying of a range, by one reactor or by several together.
pub struct CopyDown {
    sweep: Sweep,
    upper: usize,
    progress: Arc<Progress>,
}

/// What the upper images have of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Nothing,
    Zeroes,
    Data,
}

impl What {
    fn of(place: Place) -> Self {
        match place {
            Place::Absent => What::Nothing,
            Place::Zero => What::Zeroes,
            Place::Data(_) | Place::Compressed(_) => What::Data,
        }
    }
}

impl CopyDown {
    /// Of what the `upper` topmost images hold of `range`, in bytes of the disk: whole sectors. How
    /// far it has come is added to `progress`.
    pub fn new(range: Range<u64>, upper: usize, progress: Arc<Progress>) -> Self {
        progress.expect(range.end.saturating_sub(range.start));
        CopyDown { sweep: Sweep::new(range), upper, progress }
    }

    /// Copies until nothing is left to begin. `from`: the chain, or its upper images alone. `into`:
    /// the image below them, and what lies under it. `before` is called with each range before that
    /// is read; what it says ends the work.
    pub async fn run<S: Storage, B: Storage>(
        &self,
        from: &Image<S>,
        into: &Image<B>,
        before: impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let end = self.sweep.end();
        if end > into.size().next_multiple_of(SECTOR) {
            let what = format!("it ends at {}, and has to have {end} bytes first", into.size());
            return Err(ImageError::refused(BELOW, what));
        }
        let piece = into.layers().first().map_or(PIECE, |layer| PIECE.max(layer.cluster_size()));
        let workers = (0..AT_A_TIME).map(|_| async {
            let mut buffer = Segments::default();
            while let Some(next) =
                self.sweep.next(async |at, rest| self.judge(from, piece, at, rest).await).await?
            {
                self.copy(&next, from, into, &mut buffer, &before)
                    .await
                    .inspect_err(|_| self.sweep.stop())?;
                self.progress.add(next.len);
            }
            Ok(())
        });
        join::all(AT_A_TIME, workers).await
    }

    /// What the upper images have from `at` on, and for how many bytes the same: no piece of data
    /// goes beyond a multiple of `piece`.
    async fn judge<S: Storage>(
        &self,
        from: &Image<S>,
        piece: u64,
        at: u64,
        rest: u64,
    ) -> Result<(u64, What), ImageError> {
        let find = async |at: u64, len: u64| {
            let found = from.find_above(self.upper, at, len).await;
            found
                .map(|e| (e.len, What::of(e.place)))
                .map_err(|e| ImageError::io(ABOVE, at, "looking it up", e))
        };
        let (mut len, what) = find(at, rest).await?;
        let most = match what {
            What::Nothing => PASSED,
            What::Zeroes => ZEROES - at % ZEROES,
            What::Data => piece - at % piece,
        };
        let most = most.min(rest);
        while len < most {
            match find(at + len, most - len).await? {
                (more, same) if same == what => len += more,
                _ => break,
            }
        }
        Ok((len.min(most), what))
    }

    async fn copy<S: Storage, B: Storage>(
        &self,
        piece: &Piece<What>,
        from: &Image<S>,
        into: &Image<B>,
        buffer: &mut Segments,
        before: &impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let (at, len) = (piece.offset, piece.len);
        if piece.what == What::Nothing {
            return Ok(());
        }
        before(at..at + len).await?;
        if piece.what == What::Zeroes {
            let zeroed = into.write_zeroes(at, len, true).await;
            return zeroed.map_err(|e| ImageError::io(BELOW, at, "writing zeroes", e));
        }
        if (buffer.len() as u64) < len {
            *buffer = Segments::buffer(len as usize);
        }
        let (bytes, read) = from.read(buffer.slice(0, len as usize), at).await;
        read.map_err(|e| ImageError::io(ABOVE, at, "reading", e))?;
        let (_, written) = into.write(bytes, at).await;
        written.map_err(|e| ImageError::io(BELOW, at, "writing", e))
    }
}
