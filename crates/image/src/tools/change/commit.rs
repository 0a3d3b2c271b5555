//! Commits the upper images of a chain into an image below them; then the topmost image may be
//! emptied.
//!
//! Power cut: before the backing image is durable, the chain shows the same data, and the commit
//! can be run again. After that the topmost image has its contents or is empty; in both cases the
//! chain shows the same data.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockyard_ring::Handle;

use crate::chain::{Chain, ChainError};
use crate::copying::commit::CopyDown;
use crate::copying::sweep::Progress;
use crate::error::ImageError;
use crate::layers::format::Format;
use crate::layers::image::Image;
use crate::{cow, qcow2};

use crate::tools::file::{of_file, raw_of};
use crate::tools::reactors::{on_reactor, on_reactors};

const BELOW: &str = "backing image";

/// Commits into the image that the chain was opened to commit into, at most `rate` bytes a second.
/// Durable on return.
pub fn commit(
    chain: &Arc<Chain>,
    rate: Option<u64>,
    threads: usize,
    progress: &Arc<Progress>,
) -> Result<(), ChainError> {
    let Some(depth) =
        chain.options().commit_into.filter(|&depth| depth > 0 && depth < chain.layers().len())
    else {
        return Err(failed(chain, ImageError::refused(BELOW, "the chain has none")));
    };
    let work = Arc::new(CopyDown::new(0..chain.size(), depth, progress.clone()));
    let pace = Arc::new(RateLimit { rate, next: Mutex::new(Instant::now()) });
    let copied = on_reactors(threads, |handle| {
        let (chain, work, pace) = (chain.clone(), work.clone(), pace.clone());
        async move {
            let (from, into) = (
                part(&chain, &handle, 0..depth)?,
                part(&chain, &handle, depth..chain.layers().len())?,
            );
            let wait = async |range: Range<u64>| {
                pace.wait(&handle, range.end - range.start).await;
                Ok(())
            };
            work.run(&from, &into, wait).await.map_err(|error| failed(&chain, error))
        }
    });
    // Close the image after an error too, because the close releases reserved clusters.
    let owned = chain.clone();
    let closed = on_reactor(|handle| async move {
        let into = part(&owned, &handle, depth..owned.layers().len())?;
        into.close().await.map_err(|e| failed(&owned, ImageError::io(BELOW, None, "closing it", e)))
    });
    copied.and(closed)?;
    // The target image holds all data of the overlays above, so it may be opened for writing again.
    let file = &chain.layers()[depth].file;
    let removed = file.remove_overlay_record();
    removed.map_err(|e| {
        of_file(file, ImageError::io(BELOW, None, "removing the record of its overlay", e))
    })
}

fn failed(chain: &Chain, error: ImageError) -> ChainError {
    ChainError::Image { path: chain.options().path.clone(), error }
}

fn part(chain: &Chain, handle: &Handle, part: Range<usize>) -> Result<Image, ChainError> {
    let image = chain.part(handle, part);
    image.map_err(|e| failed(chain, ImageError::io("file", None, "opening it for io_uring", e)))
}

/// Limits the rate at which copies start, in bytes a second.
struct RateLimit {
    rate: Option<u64>,
    next: Mutex<Instant>,
}

impl RateLimit {
    async fn wait(&self, handle: &Handle, bytes: u64) {
        let Some(rate) = self.rate else { return };
        let at = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let at = (*next).max(Instant::now());
            *next = at + Duration::from_secs_f64(bytes as f64 / rate as f64);
            at
        };
        handle.sleep_until(at).await;
    }
}

/// Empties the topmost image after its commit. It was opened with `only_locked`.
pub fn make_empty(chain: &Arc<Chain>) -> Result<(), ChainError> {
    let chain = chain.clone();
    on_reactor(|handle| async move {
        let top = chain.top();
        let file = raw_of(&handle, &top.file)?;
        let emptied = match top.format {
            Format::Raw => Err(ImageError::refused("raw image", "it has no backing image")),
            Format::Qcow2 => qcow2::empty::make_empty(&file).await,
            Format::Cow => cow::make_empty(&file).await,
        };
        emptied.map_err(|error| of_file(&top.file, error))
    })
}
