//! A chain of images as one reactor has it open: the disk that a guest sees.
//!
//! In: reads, writes, discards, zeroes and flushes of the guest's disk. Out: operations on the
//! files of the chain. What must hold: only the topmost image is written to.

use std::io;
use std::sync::Arc;

use blockyard_ring::Segments;

use blockyard_storage::Storage;

use crate::SECTOR;
use crate::extent::{BackingLayers, BlockStatus, Extent, Place};
use crate::layer::{Layer, Layers, LookupResult};
use crate::layout_scan;
use crate::lookup_cache::LookupCache;
use crate::sync::epoch::{Epoch, EpochGuard, Participant};

/// What layers map alike may be as small and as large as this, in bytes, to be remembered.
const SMALLEST_GRANULE: u64 = 2 << 10;
const LARGEST_GRANULE: u64 = 64 << 10;

/// See the module's page.
pub struct Image<S> {
    layers: Vec<Layer<S>>,
    epoch: Arc<Epoch>,
    participant: Arc<Participant>,
    /// What is read from below is kept in the topmost image.
    copy_on_read: bool,
    /// Of the layers below the topmost, where there are several.
    lookup_cache: Option<LookupCache>,
}

impl<S: Storage> Image<S> {
    /// `layers`: the topmost first, at least one. `epoch` is that of the topmost image, or a new
    /// one for raw images.
    pub fn new(layers: Vec<Layer<S>>, copy_on_read: bool) -> Self {
        let epoch = match layers.first() {
            Some(Layer::Qcow2(image)) => image.epoch(),
            _ => Arc::default(),
        };
        let participant = epoch.register();
        let granule = layers.iter().skip(1).map(Layer::granule).min().unwrap_or(0);
        let worth = layers.len() > 2 && granule >= SMALLEST_GRANULE;
        let lookup_cache =
            worth.then(|| LookupCache::new(layers[0].size(), granule.min(LARGEST_GRANULE)));
        Image { layers, epoch, participant, copy_on_read, lookup_cache }
    }

    /// Bytes of the guest's disk.
    pub fn size(&self) -> u64 {
        self.top().size()
    }

    pub fn layers(&self) -> &[Layer<S>] {
        &self.layers
    }

    pub(crate) fn into_layers(self) -> Vec<Layer<S>> {
        self.layers
    }

    #[inline]
    fn top(&self) -> &Layer<S> {
        &self.layers[0]
    }

    #[inline]
    fn backing(&self) -> Layers<'_, S> {
        Layers::new(&self.layers[1..])
    }

    #[inline]
    fn all(&self) -> Layers<'_, S> {
        Layers::with(&self.layers, self.lookup_cache.as_ref())
    }

    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let _guard = self.epoch.enter(&self.participant);
        if self.copy_on_read
            && let Err(e) = Box::pin(self.populate_held(offset, segments.len() as u64)).await
        {
            // The guest wants to read; that nothing can be kept is no reason to fail.
            tracing::debug!("copy-on-read at offset {offset}: {e}");
        }
        self.all().read(segments, offset).await
    }

    /// Durable after a flush.
    #[inline]
    pub async fn write(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let _guard = self.epoch.enter(&self.participant);
        match self.top() {
            Layer::Raw { raw, .. } => raw.write(segments, offset, false).await,
            Layer::Qcow2(image) => image.write(&self.backing(), segments, offset).await,
            Layer::Cow(image) => image.write(segments, offset).await,
        }
    }

    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        {
            let _guard = self.epoch.enter(&self.participant);
            match self.top() {
                Layer::Raw { raw, .. } => raw.discard(offset, len).await?,
                Layer::Qcow2(image) => image.discard(&self.backing(), offset, len).await?,
                Layer::Cow(image) => image.discard(offset, len).await?,
            }
        }
        self.give_space_back().await
    }

    pub async fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.zeroes(offset, len, unmap, false).await
    }

    /// As [`Image::write_zeroes`]; Unsupported, and nothing done, where they would have to be
    /// written.
    pub async fn write_zeroes_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.zeroes(offset, len, unmap, true).await
    }

    /// Unsupported where [`Image::write_zeroes_fast`] would be, as far as that is known before the
    /// host is asked.
    pub async fn may_zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let _guard = self.epoch.enter(&self.participant);
        match self.top() {
            Layer::Raw { raw, .. } => raw.may_zero_fast(offset, len),
            Layer::Qcow2(image) => image.may_zero_fast(&self.backing(), offset, len, unmap).await,
            Layer::Cow(_) => Ok(()),
        }
    }

    async fn zeroes(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        {
            let _guard = self.epoch.enter(&self.participant);
            match self.top() {
                Layer::Raw { raw, .. } if fast => raw.write_zeroes_fast(offset, len, unmap).await?,
                Layer::Raw { raw, .. } => raw.write_zeroes(offset, len, unmap).await?,
                Layer::Qcow2(image) if fast => {
                    image.write_zeroes_fast(&self.backing(), offset, len, unmap).await?
                }
                Layer::Qcow2(image) => {
                    image.write_zeroes(&self.backing(), offset, len, unmap).await?
                }
                Layer::Cow(image) if fast => image.write_zeroes_fast(offset, len, unmap).await?,
                Layer::Cow(image) => image.write_zeroes(offset, len, unmap).await?,
            }
        }
        self.give_space_back().await
    }

    /// A guest that frees and writes again and never flushes is not to fill the host. The caller
    /// has no pass: space is given back when nobody is on the way to it.
    async fn give_space_back(&self) -> io::Result<()> {
        match self.top() {
            Layer::Qcow2(image) if image.owes_space() => image.flush().await,
            _ => Ok(()),
        }
    }

    /// Zeroes that the topmost image is to know of itself, also where there are zeroes below: what
    /// is below may change.
    pub async fn hold_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.top() {
            Layer::Raw { .. } | Layer::Cow(_) => self.write_zeroes(offset, len, true).await,
            Layer::Qcow2(image) => {
                let _guard = self.epoch.enter(&self.participant);
                image.write_zeroes(&UnknownBacking(self.backing()), offset, len, true).await
            }
        }
    }

    /// All that was written before this call is durable when it answers. One at a time, over all
    /// reactors.
    pub async fn flush(&self) -> io::Result<()> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.flush().await,
            Layer::Qcow2(image) => image.flush().await,
            Layer::Cow(image) => image.flush().await,
        }
    }

    /// A sync that failed, whoever asked for it: what was written before it may be lost.
    pub fn lost(&self) -> Option<io::Error> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.storage().lost(),
            Layer::Qcow2(image) => image.shared().lost(),
            Layer::Cow(image) => image.shared().lost(),
        }
    }

    /// As long as it is kept, what is freed in the topmost image is not used again: for others who
    /// read its file by themselves, and may have looked things up before.
    pub fn hold_freed(&self) -> EpochGuard<'_> {
        self.epoch.enter(&self.participant)
    }

    /// Flushes, and leaves the files as they are to be found: for the end, when no request is on
    /// its way.
    pub async fn close(&self) -> io::Result<()> {
        match self.top() {
            Layer::Raw { raw, .. } => raw.flush().await,
            Layer::Qcow2(image) => image.close().await,
            Layer::Cow(image) => image.close().await,
        }
    }

    /// Copies into the topmost image what only those below have.
    pub async fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let _guard = self.epoch.enter(&self.participant);
        self.populate_held(offset, len).await
    }

    async fn populate_held(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.top() {
            // Their sectors cannot be taken up without a guest's write being overtaken; and a read
            // costs no more below.
            Layer::Raw { .. } | Layer::Cow(_) => Ok(()),
            Layer::Qcow2(image) => image.populate(&self.backing(), offset, len).await,
        }
    }

    /// Which layer holds the bytes from `offset` on, and how many of them alike; a layer beyond the
    /// last: none, zeroes.
    pub async fn find(&self, offset: u64, len: u64) -> io::Result<LookupResult> {
        let _guard = self.epoch.enter(&self.participant);
        Layers::new(&self.layers).find(offset, len).await
    }

    /// Where the bytes from `offset` on are, as far as they are alike; nothing is read.
    pub async fn status(&self, offset: u64, len: u64) -> io::Result<BlockStatus> {
        let _guard = self.epoch.enter(&self.participant);
        layout_scan::status(&self.layers, &[], offset, len).await
    }

    /// What the `upper` topmost images alone say of the bytes from `offset` on: `Absent` where none
    /// of them has any.
    pub async fn find_above(&self, upper: usize, offset: u64, mut len: u64) -> io::Result<Extent> {
        let _guard = self.epoch.enter(&self.participant);
        for layer in &self.layers[..upper] {
            // Behind the end of an image are zeroes, whatever lies below; a disk may end inside its
            // last sector.
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

    /// Loads metadata ahead, as far as the caches take them.
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

/// What is below, of which nothing is taken to be zeroes.
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
}
