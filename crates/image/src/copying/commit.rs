//! Commit: copies the contents of the upper images of a chain into the backing image below them.
//!
//! ```text
//!   pieces, in order ─► the upper images have nothing: skip
//!   ├► they have zeroes: zero the backing image
//!   └► they have data: read through the chain, write to the backing image
//! ```
//!
//! In: the chain, and the backing image, opened for writing together with the images below it. Out:
//! the backing image shows what the chain shows, wherever the upper images have contents. Nothing
//! is durable before a flush ([`Image::flush`], [`Image::close`]). Only after that flush may the
//! upper images be emptied or removed. The backing image must be at least as large as the disk.
//!
//! Invariant, also at each power cut: the chain shows the same data. The upper images keep their
//! contents, and these hide what is written to the backing image. Nothing else is written.

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Segments;

use crate::SECTOR;
use crate::copying::sweep::{Piece, Progress, Sweep};
use crate::error::ImageError;
use crate::extent::Place;
use crate::layers::image::Image;
use blockyard_ring::join;

/// Size of one copy in bytes. It is larger if the backing image's clusters are larger.
const PIECE: u64 = 1 << 20;
/// Number of copies in flight.
const AT_A_TIME: usize = 8;
/// Maximum number of bytes that are zeroed at a time.
const ZEROES: u64 = 64 << 20;
/// Maximum number of bytes that are skipped at a time.
const PASSED: u64 = 1 << 30;

const ABOVE: &str = "overlay";
const BELOW: &str = "backing image";

/// Copy of a range, which one or several reactors run together.
pub struct CopyDown {
    sweep: Sweep,
    upper: usize,
    progress: Arc<Progress>,
}

/// What the upper images hold of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpperContent {
    Nothing,
    Zeroes,
    Data,
}

impl UpperContent {
    fn of(place: Place) -> Self {
        match place {
            Place::Absent => UpperContent::Nothing,
            Place::Zero => UpperContent::Zeroes,
            Place::Data(_) | Place::Compressed(_) => UpperContent::Data,
        }
    }
}

impl CopyDown {
    /// Copies what the `upper` topmost images hold of `range` (bytes of the disk, whole sectors).
    /// Adds the finished bytes to `progress`.
    pub fn new(range: Range<u64>, upper: usize, progress: Arc<Progress>) -> Self {
        progress.expect(range.end.saturating_sub(range.start));
        CopyDown { sweep: Sweep::new(range), upper, progress }
    }

    /// Copies until no piece is left. `from`: the chain, or only its upper images. `into`: the
    /// backing image with the images below it. `before` runs with each range before it is read; if
    /// it fails, the copy ends with its error.
    pub async fn run(
        &self,
        from: &Image,
        into: &Image,
        before: impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let end = self.sweep.end();
        if end > into.size().next_multiple_of(SECTOR) {
            let what =
                format!("it has {} bytes, but needs at least {end}: enlarge it first", into.size());
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

    /// Returns what the upper images have at `at`, and the length of the range for which that
    /// holds. A piece of data ends at a multiple of `piece` at the latest.
    async fn judge(
        &self,
        from: &Image,
        piece: u64,
        at: u64,
        rest: u64,
    ) -> Result<(u64, UpperContent), ImageError> {
        let find = async |at: u64, len: u64| {
            let found = from.find_above(self.upper, at, len).await;
            found
                .map(|e| (e.len, UpperContent::of(e.place)))
                .map_err(|e| ImageError::io(ABOVE, at, "looking it up", e))
        };
        let (mut len, what) = find(at, rest).await?;
        let most = match what {
            UpperContent::Nothing => PASSED,
            UpperContent::Zeroes => ZEROES - at % ZEROES,
            UpperContent::Data => piece - at % piece,
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

    async fn copy(
        &self,
        piece: &Piece<UpperContent>,
        from: &Image,
        into: &Image,
        buffer: &mut Segments,
        before: &impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let (at, len) = (piece.offset, piece.len);
        if piece.what == UpperContent::Nothing {
            return Ok(());
        }
        before(at..at + len).await?;
        if piece.what == UpperContent::Zeroes {
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
