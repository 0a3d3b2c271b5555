//! One image of a chain on one reactor, and the layers below it.

use std::io;

use blockyard_ring::Segments;

use super::lookup_cache::LookupCache;
use crate::cow::Cow;
use crate::extent::{BackingLayers, Extent, LookupResult, Place};
use crate::qcow2::Qcow2;
use crate::raw::Raw;
use crate::sync::pace::{Pace, Zeroing};
use blockyard_ring::join;

/// Number of clusters of a piece of a long request: a fraction of a millisecond of work.
const PIECE_CLUSTERS: u64 = 256;
/// Size of such a piece of a COW file in bytes: what a page of its bitmap describes. At worst each
/// second sector is an operation of the host.
const COW_PIECE: u64 = 16 << 20;

/// An image of a chain.
pub enum Layer {
    /// `size`: the file's length, rounded up to whole sectors.
    Raw {
        raw: Raw,
        size: u64,
    },
    Qcow2(Qcow2),
    Cow(Cow),
}

impl Layer {
    /// Returns the size of the image's disk in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Layer::Raw { size, .. } => *size,
            Layer::Qcow2(image) => image.size(),
            Layer::Cow(image) => image.size(),
        }
    }

    /// Looks up the bytes at `offset`, which must be inside the image's disk. None: call
    /// [`Layer::load`] first.
    #[inline]
    fn try_lookup(&self, offset: u64, len: u64) -> Option<Extent> {
        match self {
            Layer::Raw { .. } => Some(Extent { len, place: Place::Data(offset) }),
            Layer::Qcow2(image) => image.try_lookup(offset, len),
            Layer::Cow(image) => image.try_lookup(offset, len),
        }
    }

    /// Returns the granularity of the image's mapping in bytes.
    pub fn granule(&self) -> u64 {
        match self {
            Layer::Raw { .. } => 1 << 16,
            Layer::Qcow2(image) => image.shared().shape().unit,
            Layer::Cow(_) => crate::SECTOR,
        }
    }

    /// Returns the granularity in bytes in which writes need no read.
    pub(crate) fn cluster_size(&self) -> u64 {
        match self {
            Layer::Qcow2(image) => image.shared().shape().cluster_size(),
            Layer::Raw { .. } | Layer::Cow(_) => crate::SECTOR,
        }
    }

    /// Returns the size in bytes of the pieces of a long discard or zero request. None: the host
    /// does the request by one operation.
    pub(crate) fn piece(&self) -> Option<u64> {
        match self {
            Layer::Raw { .. } => None,
            Layer::Qcow2(_) => Some(PIECE_CLUSTERS * self.cluster_size()),
            Layer::Cow(_) => Some(COW_PIECE),
        }
    }

    /// Like [`Layer::try_lookup`], but loads the metadata that it needs. For ranges without L2
    /// tables it loads nothing.
    pub(crate) async fn lookup(&self, offset: u64, len: u64) -> io::Result<Extent> {
        if let Layer::Qcow2(image) = self
            && let Some(len) = image.without_tables(offset, len)
        {
            return Ok(Extent { len, place: Place::Absent });
        }
        loop {
            match self.try_lookup(offset, len) {
                Some(extent) => return Ok(extent),
                None => self.load(offset).await?,
            }
        }
    }

    async fn load(&self, offset: u64) -> io::Result<()> {
        match self {
            Layer::Raw { .. } => Ok(()),
            Layer::Qcow2(image) => image.load(offset).await,
            Layer::Cow(image) => image.load(offset).await,
        }
    }

    /// Reads the bytes that a lookup found. `offset` is their offset in the guest's disk.
    #[inline]
    async fn read_place(
        &self,
        segments: Segments,
        offset: u64,
        place: Place,
    ) -> (Segments, io::Result<()>) {
        match (self, place) {
            (Layer::Raw { raw, .. }, Place::Data(host)) => raw.read(segments, host).await,
            (Layer::Qcow2(image), Place::Data(host)) => image.read_data(segments, host).await,
            (Layer::Cow(image), Place::Data(host)) => image.read(segments, host).await,
            (Layer::Qcow2(image), Place::Compressed(word)) => {
                let inside = offset & (image.shared().shape().cluster_size() - 1);
                Box::pin(image.read_compressed(segments, word, inside)).await
            }
            _ => {
                Zeroing::default().zero(&segments).await;
                (segments, Ok(()))
            }
        }
    }
}

/// Layers of a chain, topmost first.
pub struct Layers<'a> {
    layers: &'a [Layer],
    /// Caches lookups in all layers but the first.
    lookup_cache: Option<&'a LookupCache>,
}

impl<'a> Layers<'a> {
    /// Makes a chain of layers without a lookup cache.
    pub fn new(layers: &'a [Layer]) -> Self {
        Layers { layers, lookup_cache: None }
    }

    /// Makes a chain of layers. `lookup_cache` is for all layers but the first.
    pub fn with(layers: &'a [Layer], lookup_cache: Option<&'a LookupCache>) -> Self {
        Layers { layers, lookup_cache }
    }
}

impl Layers<'_> {
    /// Looks up the bytes at `offset`. `Err`: load the metadata of this layer for this offset
    /// first.
    #[inline]
    pub fn try_find(&self, offset: u64, len: u64) -> Result<LookupResult, usize> {
        let Some(lookup_cache) = self.lookup_cache else { return self.lookup_from(0, offset, len) };
        let size = self.layers[0].size();
        if offset >= size {
            return Ok(LookupResult {
                layer: self.layers.len(),
                extent: Extent { len, place: Place::Zero },
            });
        }
        let extent = self.layers[0].try_lookup(offset, len.min(size - offset)).ok_or(0usize)?;
        if extent.place != Place::Absent {
            return Ok(LookupResult { layer: 0, extent });
        }
        if let Some(found) = lookup_cache.find(offset, extent.len) {
            return Ok(found);
        }
        let (start, granule) = lookup_cache.granule(offset);
        // Cache the whole granule, but only if its metadata are loaded: this request does not need
        // all of it.
        if let Ok(all) = self.lookup_from(1, start, granule) {
            lookup_cache.keep(start, all);
        }
        self.lookup_from(1, offset, extent.len)
    }

    /// Looks up layer after layer, from `first` on.
    fn lookup_from(&self, first: usize, offset: u64, mut len: u64) -> Result<LookupResult, usize> {
        for (layer, image) in self.layers.iter().enumerate().skip(first) {
            let size = image.size();
            // An image may be smaller than its overlay. Bytes behind its end read as zeroes,
            // whatever the layers below have.
            if offset >= size {
                break;
            }
            let extent = image.try_lookup(offset, len.min(size - offset)).ok_or(layer)?;
            if extent.place != Place::Absent {
                return Ok(LookupResult { layer, extent });
            }
            len = extent.len;
        }
        Ok(LookupResult { layer: self.layers.len(), extent: Extent { len, place: Place::Zero } })
    }

    /// Looks up the bytes at `offset`, and loads the metadata that this needs.
    pub async fn find(&self, offset: u64, len: u64) -> io::Result<LookupResult> {
        loop {
            match self.try_find(offset, len) {
                Ok(found) => return Ok(found),
                Err(layer) => self.layers[layer].load(offset).await?,
            }
        }
    }

    #[inline]
    async fn read_found(
        &self,
        segments: Segments,
        offset: u64,
        found: LookupResult,
    ) -> (Segments, io::Result<()>) {
        match self.layers.get(found.layer) {
            Some(layer) => layer.read_place(segments, offset, found.extent.place).await,
            None => {
                Zeroing::default().zero(&segments).await;
                (segments, Ok(()))
            }
        }
    }

    /// Reads `segments.len()` bytes at `offset`.
    #[inline]
    pub async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let len = segments.len() as u64;
        match self.try_find(offset, len) {
            Ok(found) if found.extent.len == len => self.read_found(segments, offset, found).await,
            _ => {
                let result = Box::pin(self.read_pieces(&segments, offset)).await;
                (segments, result)
            }
        }
    }

    /// Reads each extent with its own operation, several in flight. Looks up all of them first: an
    /// operation in progress may hold a lock for which loading metadata waits, and it finishes only
    /// if it is polled.
    async fn read_pieces(&self, segments: &Segments, offset: u64) -> io::Result<()> {
        /// Number of operations in flight for one request.
        const AT_A_TIME: usize = 16;
        let len = segments.len() as u64;
        let (mut pieces, mut done) = (Vec::<(u64, LookupResult)>::new(), 0);
        let mut pace = Pace::default();
        while done < len {
            pace.step().await;
            let found = self.find(offset + done, len - done).await?;
            // Consecutive results may be contiguous in the file: read these with one operation.
            if !pieces.last_mut().is_some_and(|(_, last)| last.take_in(&found)) {
                pieces.push((done, found));
            }
            done += found.extent.len;
        }
        // Zero before the reads begin, because each yield would let several operations go on.
        let (mut cursor, mut zeroing) = (segments.cursor(), Zeroing::default());
        let mut reads = Vec::new();
        for (at, found) in pieces {
            pace.step().await;
            let piece = cursor.take(found.extent.len as usize);
            if found.layer >= self.layers.len() || found.extent.place == Place::Zero {
                zeroing.zero(&piece).await;
            } else {
                reads.push((piece, offset + at, found));
            }
        }
        let reads = reads
            .into_iter()
            .map(async |(piece, at, found)| self.read_found(piece, at, found).await.1);
        join::all(AT_A_TIME, reads).await
    }
}

impl BackingLayers for Layers<'_> {
    async fn read_backing(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        self.read(segments, offset).await
    }

    async fn backing_is_zero(&self, offset: u64, len: u64) -> io::Result<bool> {
        let mut done = 0;
        while done < len {
            let found = self.find(offset + done, len - done).await?;
            if found.extent.place != Place::Zero {
                return Ok(false);
            }
            done += found.extent.len;
        }
        Ok(true)
    }

    fn exists(&self) -> bool {
        !self.layers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use blockyard_ring::Executor;
    use blockyard_storage::sim::{SimConfig, SimDisk, SimImage};

    use super::*;
    use crate::Alignment;
    use crate::extent::NoBacking;

    const PIECE: usize = 1 << 20;
    const PIECES: usize = 6;

    /// Returns how often another task runs while `read` fills a buffer with zeroes.
    fn runs_meanwhile(read: impl AsyncFnOnce(Segments) -> Segments + 'static) -> usize {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let runs = executor.block_on(async move {
            let (runs, done) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
            let (count, ended, tasks) = (runs.clone(), done.clone(), handle.clone());
            handle.spawn(async move {
                while !ended.get() {
                    count.set(count.get() + 1);
                    tasks.yield_now().await;
                }
            });
            let segments = Segments::buffer(PIECES * PIECE);
            segments.copy_in(segments.len() - 1, &[7]);
            let segments = read(segments).await;
            done.set(true);
            assert_eq!(segments.find_nonzero(0, segments.len()), None);
            runs.get()
        });
        runs.unwrap()
    }

    #[test]
    fn other_tasks_run_while_a_large_read_is_zeroed() {
        let unallocated =
            runs_meanwhile(async |segments| Layers::new(&[]).read(segments, 0).await.0);
        assert!(unallocated >= PIECES - 2, "{unallocated} runs");
        let below = runs_meanwhile(async |segments| NoBacking.read_backing(segments, 0).await.0);
        assert!(below >= PIECES - 2, "{below} runs");
    }

    /// The pieces of a read behind the end of an image, after bytes of the image.
    #[test]
    fn other_tasks_run_while_a_piece_of_a_large_read_is_zeroed() {
        let runs = runs_meanwhile(async |segments| {
            let sim = SimDisk::new(SimImage::zeroed(4096), SimConfig::new(1));
            let raw = Raw::on(sim.clone(), Alignment { memory_align: 1, offset_align: 1 });
            let layers = [Layer::Raw { raw, size: 4096 }];
            let (segments, read) = Layers::new(&layers).read(segments, 0).await;
            read.unwrap();
            segments
        });
        assert!(runs >= PIECES - 2, "{runs} runs");
    }
}
