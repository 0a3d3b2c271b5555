//! A chain of images on one reactor: the disk that a guest sees.
//!
//! In: reads, writes, discards, zeroes and flushes of the guest's disk. Out: operations on the
//! files of the chain. Invariant: only the topmost image is written to.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use blockyard_ring::Segments;

use blockyard_storage::{LookupFigures, Storage};

use super::layer::{Layer, Layers};
use super::layout_scan;
use super::long::{Duty, LongRequests, is_long};
use super::lookup_cache::LookupCache;
use crate::SECTOR;
use crate::extent::{BackingLayers, BlockStatus, Extent, LookupResult, Place};
use crate::qcow2::IncompleteCluster;
use crate::sync::epoch::{Epoch, EpochGuard, Participant};

/// Smallest and largest granule of the lookup cache, in bytes.
const SMALLEST_GRANULE: u64 = 2 << 10;
const LARGEST_GRANULE: u64 = 64 << 10;

/// A chain of images on one reactor.
pub struct Image {
    layers: Vec<Layer>,
    epoch: Arc<Epoch>,
    participant: Arc<Participant>,
    /// Whether data that are read from backing images are copied to the topmost image.
    copy_on_read: bool,
    /// Caches lookups in the backing images. None: the chain has at most one backing image, or its
    /// granules are too small.
    lookup_cache: Option<LookupCache>,
    long: Box<LongRequests>,
}

impl Image {
    /// Creates the chain. `layers`: topmost first, at least one. Uses the epoch of a topmost qcow2
    /// image, or a new epoch if the topmost image has another format.
    pub fn new(layers: Vec<Layer>, copy_on_read: bool) -> Self {
        let epoch = match layers.first() {
            Some(Layer::Qcow2(image)) => image.epoch(),
            _ => Arc::default(),
        };
        let participant = epoch.register();
        let granule = layers.iter().skip(1).map(Layer::granule).min().unwrap_or(0);
        let worth = layers.len() > 2 && granule >= SMALLEST_GRANULE;
        let lookup_cache =
            worth.then(|| LookupCache::new(layers[0].size(), granule.min(LARGEST_GRANULE)));
        Image { layers, epoch, participant, copy_on_read, lookup_cache, long: Box::default() }
    }

    /// Returns the size of the guest's disk in bytes.
    pub fn size(&self) -> u64 {
        self.top().size()
    }

    /// Returns the images, topmost first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Returns the images, topmost first, and consumes the chain.
    pub(crate) fn into_layers(self) -> Vec<Layer> {
        self.layers
    }

    #[inline]
    fn top(&self) -> &Layer {
        &self.layers[0]
    }

    #[inline]
    fn backing(&self) -> Layers<'_> {
        Layers::new(&self.layers[1..])
    }

    #[inline]
    fn all(&self) -> Layers<'_> {
        Layers::with(&self.layers, self.lookup_cache.as_ref())
    }

    /// Reads `segments.len()` bytes at `offset`.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let _guard = self.epoch.enter(&self.participant);
        if self.copy_on_read
            && let Err(e) = Box::pin(self.populate_held(offset, segments.len() as u64)).await
        {
            // A failed copy-up must not fail the guest's read.
            tracing::debug!("copy-on-read at offset {offset} failed: {e}");
        }
        self.all().read(segments, offset).await
    }

    /// Writes all of `segments` at `offset`. Durable after a flush.
    #[inline]
    pub async fn write(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let _guard = self.epoch.enter(&self.participant);
        match self.top() {
            Layer::Raw { raw, .. } => raw.write(segments, offset, false).await,
            Layer::Qcow2(image) => image.write(&self.backing(), segments, offset).await,
            Layer::Cow(image) => image.write(segments, offset).await,
        }
    }

    /// Deallocates a range where that is cheap. Afterwards the range reads as zeroes or is
    /// unchanged.
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.in_pieces(offset, len, Duty::Hint, async |offset, len| {
            {
                let _guard = self.epoch.enter(&self.participant);
                match self.top() {
                    Layer::Raw { raw, .. } => raw.discard(offset, len).await?,
                    Layer::Qcow2(image) => image.discard(&self.backing(), offset, len).await?,
                    Layer::Cow(image) => image.discard(offset, len).await?,
                }
            }
            self.bound_freed().await
        })
        .await?;
        self.give_space_back().await
    }

    /// Runs `work` with the pieces of a request that changes many entries of the topmost image.
    async fn in_pieces(
        &self,
        offset: u64,
        len: u64,
        duty: Duty,
        work: impl AsyncFn(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.top().piece() {
            Some(size) => self.long.in_pieces(offset, len, size, duty, work).await,
            None => work(offset, len).await,
        }
    }

    /// Returns whether a discard or zeroes of `len` bytes are done in pieces.
    pub fn is_long(&self, len: u64) -> bool {
        self.top().piece().is_some_and(|size| is_long(len, size))
    }

    /// Stops the discards in progress, because something waits for all requests. They free no more
    /// space.
    pub fn stop_discards(&self) {
        self.long.stop_hints();
    }

    /// Some: stops all discards until the next call, and lets long zeroes fail from this time on.
    /// An export that ends waits for them. None: requests run to their end again.
    pub fn end_long_requests(&self, at: Option<Instant>) {
        self.long.end_at(at);
    }

    /// Zeroes a range. With `unmap` its space may be deallocated. Durable after a flush.
    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.zeroes(offset, len, unmap, false).await
    }

    /// Like [`Image::write_zeroes`], but returns Unsupported, and changes nothing, if zeroes would
    /// have to be written as data.
    pub async fn write_zeroes_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.zeroes(offset, len, unmap, true).await
    }

    /// Returns Unsupported if [`Image::write_zeroes_fast`] would, as far as that is known without
    /// the write itself.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.in_pieces(offset, len, Duty::Must, async |offset, len| {
            let _guard = self.epoch.enter(&self.participant);
            match self.top() {
                Layer::Raw { raw, .. } => raw.may_zero_fast(offset, len),
                Layer::Qcow2(image) => {
                    image.may_zero_fast(&self.backing(), offset, len, unmap).await
                }
                Layer::Cow(_) => Ok(()),
            }
        })
        .await
    }

    async fn zeroes(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        if fast && self.is_long(len) {
            // Checks all pieces before the first one is changed.
            self.may_zero_fast(offset, len, unmap).await?;
        }
        let backing = || self.backing();
        let zeroes = async |offset: u64, len: u64| {
            {
                let _guard = self.epoch.enter(&self.participant);
                match self.top() {
                    Layer::Raw { raw, .. } if fast => {
                        raw.write_zeroes_fast(offset, len, unmap).await?
                    }
                    Layer::Raw { raw, .. } => raw.write_zeroes(offset, len, unmap).await?,
                    Layer::Qcow2(image) if fast => {
                        image.write_zeroes_fast(&backing(), offset, len, unmap).await?
                    }
                    Layer::Qcow2(image) => {
                        image.write_zeroes(&backing(), offset, len, unmap).await?
                    }
                    Layer::Cow(image) if fast => {
                        image.write_zeroes_fast(offset, len, unmap).await?
                    }
                    Layer::Cow(image) => image.write_zeroes(offset, len, unmap).await?,
                }
            }
            self.bound_freed().await
        };
        match self.top() {
            // The host zeroes the range by one operation, and the bits of a page are few words.
            Layer::Cow(_) => zeroes(offset, len).await?,
            _ => self.in_pieces(offset, len, Duty::Must, zeroes).await?,
        }
        self.give_space_back().await
    }

    /// Flushes between two pieces of a request, if the freed clusters are so many that they take
    /// much memory, or that the flush at the request's end would take long.
    async fn bound_freed(&self) -> io::Result<()> {
        match self.top() {
            Layer::Qcow2(image) if image.has_many_freed() => self.flush_for_space().await,
            _ => Ok(()),
        }
    }

    /// Flushes if much freed space waits for a flush: a guest that never flushes must not fill the
    /// host. The caller must have left its epoch, because clusters that a request may use are not
    /// released.
    async fn give_space_back(&self) -> io::Result<()> {
        match self.top() {
            Layer::Qcow2(image) if image.owes_space() => self.flush_for_space().await,
            _ => Ok(()),
        }
    }

    /// Flushes for a request that asked for no flush. A partial cluster of another request does not
    /// fail it: the guest's next flush reports that cluster.
    async fn flush_for_space(&self) -> io::Result<()> {
        match self.flush().await {
            Err(e) if IncompleteCluster::is_in(&e) => Ok(()),
            flushed => flushed,
        }
    }

    /// Zeroes a range in the topmost image itself, even if the backing images read as zeroes there,
    /// because the backing images may change.
    pub async fn hold_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.top() {
            Layer::Raw { .. } | Layer::Cow(_) => self.write_zeroes(offset, len, true).await,
            Layer::Qcow2(image) => {
                let _guard = self.epoch.enter(&self.participant);
                image.write_zeroes(&UnknownBacking(self.backing()), offset, len, true).await
            }
        }
    }

    /// Waits until all writes that completed before the call are durable. One flush at a time,
    /// across all reactors.
    pub async fn flush(&self) -> io::Result<()> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.flush().await,
            Layer::Qcow2(image) => image.flush(&self.backing()).await,
            Layer::Cow(image) => image.flush().await,
        }
    }

    /// Returns the error if a sync has failed: earlier writes may be lost.
    pub fn lost(&self) -> Option<io::Error> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.storage().lost(),
            Layer::Qcow2(image) => image.shared().lost(),
            Layer::Cow(image) => image.shared().lost(),
        }
    }

    /// Returns whether the topmost image still has all metadata that a failed flush could not
    /// write, and no sync of it has failed.
    pub fn keeps_metadata(&self) -> bool {
        !matches!(self.top(), Layer::Raw { .. }) && self.lost().is_none()
    }

    /// Returns how lookups of L2 entries ended, in all images of the chain.
    pub fn lookups(&self) -> LookupFigures {
        let mut all = LookupFigures::default();
        for layer in &self.layers {
            if let Layer::Qcow2(image) = layer {
                all.merge(&image.lookups());
            }
        }
        all
    }

    /// Returns a guard. While it exists, clusters freed in the topmost image are not reused. It is
    /// for readers that opened the image's file separately and may still use entries that they
    /// cached.
    pub fn hold_freed(&self) -> EpochGuard<'_> {
        self.epoch.enter(&self.participant)
    }

    /// Flushes and closes the files. Call it at the end, with no request in flight.
    pub async fn close(&self) -> io::Result<()> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.flush().await,
            Layer::Qcow2(image) => image.close(&self.backing()).await,
            Layer::Cow(image) => image.close().await,
        }
    }

    /// Leaves the image to another process of this host. All answered writes are in the files. What
    /// was not flushed may be lost at a power cut. Call it with no request in flight.
    pub async fn leave(&self) -> io::Result<()> {
        match self.top() {
            Layer::Raw { .. } => Ok(()),
            Layer::Qcow2(image) => image.leave(&self.backing()).await,
            Layer::Cow(image) => image.leave().await,
        }
    }

    /// Copies up the parts of a range that only the backing images have.
    pub async fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let _guard = self.epoch.enter(&self.participant);
        self.populate_held(offset, len).await
    }

    async fn populate_held(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.top() {
            // Raw: has no backing image. COW: a copied sector could overwrite a concurrent write of
            // the guest, and a read of the backing file costs no more.
            Layer::Raw { .. } | Layer::Cow(_) => Ok(()),
            Layer::Qcow2(image) => image.populate(&self.backing(), offset, len).await,
        }
    }

    /// Returns the layer that has the bytes at `offset`, and for how many bytes. A layer number
    /// behind the last one: no layer has them, and they read as zeroes.
    pub async fn find(&self, offset: u64, len: u64) -> io::Result<LookupResult> {
        let _guard = self.epoch.enter(&self.participant);
        Layers::new(&self.layers).find(offset, len).await
    }

    /// Returns the status of the bytes at `offset`, without reading data.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        let _guard = self.epoch.enter(&self.participant);
        layout_scan::status(&self.layers, &[], offset, len).await
    }

    /// Returns where the `upper` topmost images have the bytes at `offset`; `Absent` if none of
    /// them has them.
    pub async fn find_above(&self, upper: usize, offset: u64, mut len: u64) -> io::Result<Extent> {
        let _guard = self.epoch.enter(&self.participant);
        for layer in &self.layers[..upper] {
            // Bytes behind the end of an image read as zeroes, whatever its backing image has. A
            // disk may end inside its last sector.
            let size = layer.size().next_multiple_of(SECTOR);
            if offset >= size {
                return Ok(Extent { len, place: Place::Zero });
            }
            let extent = layer.lookup(offset, len.min(size - offset)).await?;
            if extent.place != Place::Absent {
                return Ok(extent);
            }
            len = extent.len;
        }
        Ok(Extent { len, place: Place::Absent })
    }

    /// Loads metadata in advance, as far as they fit into the caches.
    pub async fn prime(&self) -> io::Result<()> {
        for layer in &self.layers {
            match layer {
                Layer::Raw { .. } => {}
                Layer::Qcow2(image) => image.prime().await?,
                Layer::Cow(image) => image.prime().await?,
            }
        }
        Ok(())
    }
}

/// Backing layers of which no range is assumed to read as zeroes.
struct UnknownBacking<B>(B);

impl<B: BackingLayers> BackingLayers for UnknownBacking<B> {
    async fn read_backing(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        self.0.read_backing(segments, offset).await
    }

    async fn backing_is_zero(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn exists(&self) -> bool {
        true
    }

    /// The image may have no backing image when it is closed.
    fn may_defer(&self) -> bool {
        false
    }
}
