//! The trait `Map`: where each range of a disk lies.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;

/// A question to a map: where does a range of the disk lie?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Start of the range in bytes, a multiple of the granule.
    pub offset: u64,
    /// Length of the range in bytes, a multiple of the granule.
    pub len: u64,
    /// Whether the range is about to be written.
    pub write: bool,
}

/// A question to a map: what becomes of a range that a guest no longer needs?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Start of the range in bytes, a multiple of the granule.
    pub offset: u64,
    /// Length of the range in bytes, a multiple of the granule.
    pub len: u64,
    /// Whether the range must read as zeroes from now on. Else its contents do not matter.
    pub zero: bool,
}

/// A part of the disk that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, a multiple of the granule.
    pub len: u64,
    /// Where the part lies.
    pub place: Place,
}

impl Extent {
    /// Collects extents, and joins those that follow one another in their file. Few long extents
    /// cost a map and Blockyard less than many short ones.
    pub fn joined<E>(
        extents: impl IntoIterator<Item = Result<Extent, E>>,
    ) -> Result<Vec<Extent>, E> {
        let mut all: Vec<Extent> = Vec::new();
        for extent in extents {
            let extent = extent?;
            match all.last_mut() {
                Some(last) if last.place.skip(last.len) == extent.place => last.len += extent.len,
                _ => all.push(extent),
            }
        }
        Ok(all)
    }
}

/// Where a part of the disk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It reads as zeroes. Not an answer for a write.
    Zero,
    /// At an offset of a data file.
    At {
        /// Number of the data file, in the order in which the target names them.
        file: usize,
        /// Offset in the file in bytes.
        offset: u64,
    },
    /// At a new place that no earlier answer for other parts of the disk named. Only an answer for
    /// a write. What the write leaves of its granules is filled from `fill`. The map counts the
    /// part as not yet moved, until [`Map::flush`] names it.
    New {
        /// Number of the data file.
        file: usize,
        /// Offset in the file in bytes.
        offset: u64,
        /// The present contents of the part.
        fill: Fill,
    },
}

/// The present contents of a part that moves to a new place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeroes.
    Zero,
    /// Bytes of a data file.
    From {
        /// Number of the data file.
        file: usize,
        /// Offset in the file in bytes.
        offset: u64,
    },
}

/// A target that decides where the disk's data lie. The data themselves never reach it.
///
/// Blockyard asks for ranges of whole granules and remembers the answers. It asks again if it has
/// forgotten an answer, at any time. All methods run on the target's own thread, several at a time
/// if they wait.
///
/// # The order of a flush
///
/// 1. Blockyard notes which [`Place::New`] parts were written completely.
/// 2. It syncs all data files.
/// 3. It calls [`Map::flush`] with the parts of step 1. The map makes their new places durable.
/// 4. It answers the flush of the disk.
///
/// So a map that changes its table for a part only in [`Map::flush`] never has a durable entry
/// without durable data. Until then it answers questions about the part as before: the old
/// place for a read, and **the same new place** for a write.
///
/// A discard is simpler: the map changes its table at once, and makes that durable in its next
/// flush. [`Map::discard`] and [`Map::flush`] never run at the same time.
pub trait Map: 'static {
    /// Answers where a range lies. The extents follow one another from the start of the range. They
    /// may end before it, after at least one granule; Blockyard asks again for the rest. They may
    /// go on behind it, except [`Place::New`]. An answer may take as long as [`Limits`] allows:
    /// allocate first.
    ///
    /// An error fails the request that needs the range. ENOSPC is reported as no space.
    ///
    /// [`Limits`]: super::Limits
    fn locate(&self, question: Question) -> impl Future<Output = io::Result<Vec<Extent>>>;

    /// Makes the new places of these parts durable, in whole granules. The data of the parts are
    /// durable already. Returns after its own sync. After an error the disk accepts no more writes.
    ///
    /// Not called if since the last flush no part was placed anew or freed, and the map has
    /// invalidated nothing ([`Handle::invalidate`]). The list is empty if parts were only freed or
    /// invalidated. So a map that changes its table for another reason invalidates the part after
    /// the change, or makes the change durable itself.
    ///
    /// [`Handle::invalidate`]: super::Handle::invalidate
    fn flush(&self, moved: &[Range<u64>]) -> impl Future<Output = io::Result<()>>;

    /// Answers where a range lies that a guest discards or zeroes. The extents follow one another
    /// from the start of the range, not beyond its end. They may end before it; Blockyard asks
    /// again for the rest.
    ///
    /// - [`Place::Zero`]: the part is free, and reads as zeroes. The map may give the old place to
    ///   another part **after its next flush**: until then a power cut brings back the old table.
    ///   No request uses the old place any more. A later write of the part needs a new place.
    /// - [`Place::At`]: the part stays there. Blockyard frees or zeroes it in the data file.
    ///
    /// An error of kind `Unsupported`, the default, means that the map frees nothing. Blockyard
    /// asks no more: discards have no effect, and zeroes are written as data.
    fn discard(&self, _asked: Discard) -> impl Future<Output = io::Result<Vec<Extent>>> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// [`Map`] as an object.
pub(crate) trait AnyMap {
    fn locate(&self, question: Question) -> Boxed<'_, io::Result<Vec<Extent>>>;
    fn flush<'a>(&'a self, moved: &'a [Range<u64>]) -> Boxed<'a, io::Result<()>>;
    /// None: the map frees nothing.
    fn discard(&self, asked: Discard) -> Boxed<'_, io::Result<Option<Vec<Extent>>>>;
}

impl<M: Map> AnyMap for M {
    fn locate(&self, question: Question) -> Boxed<'_, io::Result<Vec<Extent>>> {
        Box::pin(Map::locate(self, question))
    }

    fn flush<'a>(&'a self, moved: &'a [Range<u64>]) -> Boxed<'a, io::Result<()>> {
        Box::pin(Map::flush(self, moved))
    }

    fn discard(&self, asked: Discard) -> Boxed<'_, io::Result<Option<Vec<Extent>>>> {
        Box::pin(async move {
            match Map::discard(self, asked).await {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => Ok(None),
                answer => answer.map(Some),
            }
        })
    }
}
