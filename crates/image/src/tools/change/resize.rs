//! Resizes an image.
//!
//! Invariant: the new part reads as zeroes. Power cut: the old or the new size, perhaps without the
//! space that should be preallocated.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::{Handle, Segments};

use blockyard_storage::Storage;

use crate::SECTOR;
use crate::chain::{Chain, ChainError};
use crate::error::ImageError;
use crate::extent::Place;
use crate::layers::format::Format;
use crate::layers::image::Image;
use crate::layers::layer::Layer;
use crate::qcow2::resize::{self, Resize};
use crate::qcow2::{Header, Preallocation, Qcow2, Qcow2Options};
use crate::raw::Raw;
use blockyard_ring::join;
use blockyard_storage::ImageFile;

use crate::tools::create::take_space;
use crate::tools::file::{of_file, raw_of};
use crate::tools::reactors::on_reactor;

/// Number of bytes that are allocated between two checks of progress.
const WINDOW: u64 = 64 << 20;
/// Size of one write, in bytes.
const PIECE: u64 = 1 << 20;
/// Number of writes in flight.
const AT_A_TIME: usize = 8;

/// Returns the options for a resize: its writes do not change the disk's contents.
fn keeping() -> Qcow2Options {
    Qcow2Options { keeps_disk: true, ..Qcow2Options::default() }
}

/// Parameters of a resize.
#[derive(Clone, Copy, Debug)]
pub struct NewSize {
    /// New size of the disk, in bytes.
    pub size: u64,
    /// Whether to permit a smaller size. A smaller disk loses the data that lie beyond it.
    pub shrink: bool,
    /// Preallocation of the new part.
    pub preallocation: Preallocation,
}

/// Resizes the topmost image, which was opened with `only_locked`. Durable on return.
pub fn resize(chain: &Arc<Chain>, wanted: NewSize) -> Result<(), ChainError> {
    let top = chain.top();
    let refuse = |what: &str| {
        Err(of_file(&top.file, ImageError::refused(format!("{} image", top.format), what)))
    };
    let old = chain.size();
    if wanted.size < old && !wanted.shrink {
        return refuse(
            "a smaller disk loses what lies beyond its end: pass --shrink to permit that",
        );
    }
    if wanted.size < old && wanted.preallocation != Preallocation::Off {
        return refuse("--preallocation does not apply to a smaller disk");
    }
    match top.format {
        Format::Raw if top.file.is_device() => refuse("the size of a device cannot be changed"),
        Format::Raw => of_raw(&top.file, wanted),
        Format::Qcow2 => of_qcow2(chain, wanted),
        Format::Cow => refuse("a cow file has the size of its backing file"),
    }
}

fn of_raw(file: &Arc<ImageFile>, wanted: NewSize) -> Result<(), ChainError> {
    let file = file.clone();
    on_reactor(|handle| async move {
        let raw = raw_of(&handle, &file)?;
        let io = |operation| {
            let file = file.clone();
            move |e| of_file(&file, ImageError::io("raw image", None, operation, e))
        };
        let old = file.size();
        raw.storage().set_len(wanted.size).await.map_err(io("setting its length"))?;
        if wanted.size > old {
            let taken = take_space(&raw, old, wanted.size, wanted.preallocation).await;
            if let Err(error) = taken {
                // Undo the resize, because the space of the new part could not be allocated.
                raw.storage().set_len(old).await.map_err(io("setting its length back"))?;
                return Err(of_file(&file, error));
            }
        }
        raw.flush().await.map_err(io("syncing"))
    })
}

fn of_qcow2(chain: &Arc<Chain>, wanted: NewSize) -> Result<(), ChainError> {
    let chain = chain.clone();
    on_reactor(|handle| async move { on_closed(&chain, &handle, wanted).await })
}

impl Chain {
    /// Returns an error if the topmost image cannot grow to `size` while it is in use.
    pub fn may_grow(&self, size: u64) -> Result<(), ChainError> {
        let top = self.top();
        let refuse =
            |what: &str| Err(of_file(&top.file, ImageError::refused("disk to be resized", what)));
        match top.format {
            _ if size < self.size() => refuse("it can only grow"),
            Format::Qcow2 => Ok(()),
            Format::Raw => refuse("grow its file or device, and refresh the disk"),
            Format::Cow => refuse("a cow file has the size of its backing file"),
        }
    }

    /// Returns the size of the topmost image's backing image in bytes; 0: it has none.
    fn below(&self) -> u64 {
        match self.layers().get(1) {
            Some(layer) => layer.size(),
            // The backing file is not open, and may be longer: the new part must hide it.
            None if self.cut().is_some() => u64::MAX,
            None => 0,
        }
    }

    /// Grows the topmost image, durably. It must be closed, with no request in flight.
    pub async fn grow_top(self: &Arc<Self>, handle: &Handle, size: u64) -> Result<(), ChainError> {
        self.may_grow(size)?;
        let top = &self.top().file;
        let in_place = Resize { size, shrink: false, below: self.below() };
        if resize::grow_in_place(&raw_of(handle, top)?, in_place)
            .await
            .map_err(|error| of_file(top, error))?
        {
            return Ok(());
        }
        let wanted = NewSize { size, shrink: false, preallocation: Preallocation::Off };
        on_closed(self, handle, wanted).await
    }
}

/// Resizes a qcow2 image that is closed.
async fn on_closed(chain: &Arc<Chain>, handle: &Handle, wanted: NewSize) -> Result<(), ChainError> {
    let top = chain.top();
    let wrong = |error| of_file(&top.file, error);
    let file = raw_of(handle, &top.file)?;
    let data = top.data.as_ref().map(|data| raw_of(handle, data)).transpose()?;
    let below = chain.below();
    if wanted.size > chain.size() && below > chain.size() {
        hold_the_end(chain, handle, file.clone(), data.clone()).await?;
    }
    let resize = Resize { size: wanted.size, shrink: wanted.shrink, below };
    resize::resize(&file, data.as_ref(), resize).await.map_err(wrong)?;
    if wanted.size > chain.size() && wanted.preallocation != Preallocation::Off {
        let header = Header::read(&file).await.map_err(wrong)?;
        let image = Qcow2::open(header, file, data, &keeping()).await.map_err(wrong)?;
        // The cluster with the old end may need the chain's data; the following ones only the
        // image's.
        let start = chain.size().next_multiple_of(image.shared().shape().cluster_size());
        let image = Image::new(vec![Layer::Qcow2(image)], false);
        let taken = allocate(&image, start..wanted.size, wanted.preallocation).await;
        let closed = image.close().await;
        taken.and(closed).map_err(|e| {
            wrong(ImageError::io("qcow2 image", None, "allocating space for the new part", e))
        })?;
    }
    Ok(())
}

/// Copies the cluster in which the disk ends to the image, if only a backing image holds it. The
/// backing image is longer than the disk, and its data must not show behind the old end when the
/// disk grows.
async fn hold_the_end(
    chain: &Chain,
    handle: &Handle,
    file: Raw,
    data: Option<Raw>,
) -> Result<(), ChainError> {
    let wrong = |error| of_file(&chain.top().file, error);
    let io =
        |what: &'static str| move |e| wrong(ImageError::io("qcow2 last cluster", None, what, e));
    let header = Header::read(&file).await.map_err(wrong)?;
    let end = chain.size();
    if end.is_multiple_of(header.cluster_size()) {
        return Ok(());
    }
    if let Some(why) = chain.cut() {
        // The rest of the last cluster may have to be copied from the backing file.
        return Err(wrong(ImageError::refused(
            "qcow2 last cluster",
            format!("the backing file is needed: {why}"),
        )));
    }
    let mut layers = chain
        .part(handle, 0..chain.layers().len())
        .map_err(io("opening the backing images"))?
        .into_layers();
    let last = layers[0].lookup(end - SECTOR, SECTOR).await.map_err(io("finding"))?;
    if last.place != Place::Absent {
        return Ok(());
    }
    let top = Qcow2::open(header, file, data, &keeping()).await.map_err(wrong)?;
    layers[0] = Layer::Qcow2(top);
    let image = Image::new(layers, false);
    let (bytes, read) = image.read(Segments::buffer(SECTOR as usize), end - SECTOR).await;
    read.map_err(io("reading"))?;
    let written = image.write(bytes, end - SECTOR).await.1;
    let closed = image.close().await;
    written.and(closed).map_err(io("copying up the last cluster"))
}

/// Allocates the clusters of a range that has none, by a small write to each. The rest of a new
/// cluster reads as zeroes.
async fn allocate(
    image: &Image,
    range: Range<u64>,
    preallocation: Preallocation,
) -> io::Result<()> {
    if let Layer::Qcow2(top) = &image.layers()[0]
        && preallocation != Preallocation::Full
        && !top.shared().shape().layout.data_file
    {
        return top.preallocate(range, preallocation == Preallocation::Falloc).await;
    }
    let cluster = image.layers()[0].cluster_size();
    let (step, len) = match preallocation {
        Preallocation::Full => (PIECE.max(cluster), PIECE.max(cluster)),
        _ => (cluster, SECTOR),
    };
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + WINDOW);
        let write = async |at: u64| {
            let zeroes = Segments::buffer(len.min(end - at) as usize);
            image.write(zeroes, at).await.1
        };
        join::all(AT_A_TIME, (at..end).step_by(step as usize).map(write)).await?;
        if preallocation == Preallocation::Metadata {
            give_back(image, at..end, cluster).await?;
        }
        at = end;
    }
    Ok(())
}

/// Deallocates the host's space of clusters that hold only zeroes.
async fn give_back(image: &Image, range: Range<u64>, cluster: u64) -> io::Result<()> {
    let Layer::Qcow2(top) = &image.layers()[0] else { return Ok(()) };
    let mut at = range.start;
    while at < range.end {
        let extent = image.find(at, range.end - at).await?.extent;
        // A cluster may be reported in several extents; the first extent gives the cluster's
        // offset.
        let len = extent.len.next_multiple_of(cluster);
        if let Place::Data(host) = extent.place {
            top.data_file().discard(host, len).await?;
        }
        at += len;
    }
    Ok(())
}
