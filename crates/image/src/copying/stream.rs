//! Stream: what the images below hold goes up into the topmost one, until that needs them no more.
//!
//! In: a chain, which may be in use. Out: a topmost image that has all that the images below have
//! of the disk; and then ([`Chain::alone`]) a chain of that one image. What must hold, also at each
//! power cut: the chain shows what it has shown. Copying up changes nothing that is seen; the image
//! names its backing file until what was copied is durable.

use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::Handle;

use blockyard_storage::Storage;

use crate::chain::{Chain, ChainError};
use crate::copying::sweep::{Progress, Sweep};
use crate::error::ImageError;
use crate::image::Image;
use crate::layer::Layer;
use blockyard_ring::join;

/// Bytes copied at a time, and how many such pieces are in flight.
const PIECE: u64 = 1 << 20;
const AT_A_TIME: usize = 4;

const TOP: &str = "image to stand alone";

/// Copies up all that the topmost image has not. `before` is called with each range before that is
/// copied; what it says ends the work. Durable after a flush.
pub async fn copy_up<S: Storage>(
    image: &Image<S>,
    progress: &Progress,
    before: impl AsyncFn(Range<u64>) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    top(image)?;
    progress.expect(image.size());
    let sweep = Sweep::new(0..image.size());
    let workers = (0..AT_A_TIME).map(|_| async {
        while let Some(next) = sweep.next(async |_, rest| Ok((PIECE.min(rest), ()))).await? {
            let copy = async {
                before(next.offset..next.offset + next.len).await?;
                let copied = image.populate(next.offset, next.len).await;
                copied.map_err(|e| {
                    ImageError::io(TOP, next.offset, "copying from the images below", e)
                })
            };
            copy.await.inspect_err(|_: &ImageError| sweep.stop())?;
            progress.add(next.len);
        }
        Ok(())
    });
    join::all(AT_A_TIME, workers).await
}

fn top<S: Storage>(image: &Image<S>) -> Result<&crate::qcow2::Qcow2<S>, ImageError> {
    match image.layers() {
        [Layer::Qcow2(top), _, ..] => Ok(top),
        [_] => Err(ImageError::refused(TOP, "it has no backing file")),
        _ => Err(ImageError::refused(
            TOP,
            "only a qcow2 image can do without its backing file: convert it",
        )),
    }
}

/// The topmost image names no backing file any more: durable when it answers. It has all of the
/// disk, and that is durable; nothing is in flight.
pub async fn stand_alone<S: Storage>(image: &Image<S>) -> Result<(), ImageError> {
    top(image)?.forget_backing().await
}

impl Chain {
    /// The topmost image without those below, after [`stand_alone`].
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
