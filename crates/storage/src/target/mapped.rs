//! `Storage` over a map: the data path.
//!
//! In: requests of the disk. Out: operations on data files, and questions to the map for what the
//! table does not know.
//!
//! What must hold
//! - Of two requests that need the same granule and do not find it in the table, one asks and the
//!   other waits. So no old answer replaces a newer one.
//! - A write to a new place holds its granules until its data and the rest of the granules are
//!   there. Until then reads find the old place.
//! - `sync` syncs the data files before the map makes new places durable; see [`Map`].
//!
//! [`Map`]: super::Map

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::{Segments, join};

use super::answer::{Bounds, check};
use super::cache::{Known, REGION};
use super::map::{AnyMap, Extent, Fill, Map, Place, Question};
use super::target::{Core, Fault};
use crate::Geometry;
use crate::storage::{Capabilities, Storage};

/// Number of operations of one request that are in flight.
const AT_A_TIME: usize = 16;
/// Number of parts that wait for a flush before Blockyard flushes by itself.
const MOST_MOVED: usize = 16384;

/// Asks a map, on whichever thread it runs.
pub trait Ask: 'static {
    /// See [`Map::locate`].
    fn locate(&self, question: Question) -> impl Future<Output = io::Result<Vec<Extent>>>;
    /// See [`Map::flush`].
    fn flush(&self, moved: Vec<Range<u64>>) -> impl Future<Output = io::Result<()>>;
}

/// Asks a map on the calling thread, for tests on simulated disks.
pub struct Direct(Rc<dyn AnyMap>);

impl Direct {
    /// Returns the map for [`Mapped`].
    pub fn new(map: impl Map) -> Self {
        Direct(Rc::new(map))
    }
}

impl Ask for Direct {
    async fn locate(&self, question: Question) -> io::Result<Vec<Extent>> {
        self.0.locate(question).await
    }

    async fn flush(&self, moved: Vec<Range<u64>>) -> io::Result<()> {
        self.0.flush(&moved).await
    }
}

/// A disk of a map on one reactor.
pub struct Mapped<S, A> {
    pub(super) core: Arc<Core>,
    /// The data files.
    files: Vec<S>,
    ask: A,
    /// Lengths of the data files, as last seen.
    lens: RefCell<Vec<(u64, bool)>>,
}

/// A part of a request, and where it lies.
struct Piece {
    /// Offset in the disk.
    offset: u64,
    len: u64,
    place: Place,
}

impl<S: Storage, A: Ask> Mapped<S, A> {
    /// Makes the disk on one reactor. `writable`: which data files may be written.
    pub(super) fn new(core: &Arc<Core>, files: Vec<S>, writable: &[bool], ask: A) -> Self {
        let lens = RefCell::new(writable.iter().map(|writable| (0, *writable)).collect());
        Mapped { core: core.clone(), files, ask, lens }
    }

    fn granules(&self, range: Range<u64>) -> Range<u64> {
        let granule = self.core.granule;
        range.start & !(granule - 1)..range.end.next_multiple_of(granule)
    }

    /// Asks the map for `range`, and checks the answer.
    async fn locate(&self, range: Range<u64>, write: bool) -> io::Result<Vec<Extent>> {
        self.core.misses();
        let question = Question { offset: range.start, len: range.end - range.start, write };
        let extents = self.ask.locate(question).await.inspect_err(|e| self.core.note_error(e))?;
        let checked = {
            let files = self.lens.borrow();
            self.checked(&question, &extents, &files)
        };
        if checked.is_err() {
            // The files may have grown.
            for (at, file) in self.files.iter().enumerate() {
                let len = file.len().await?;
                self.lens.borrow_mut()[at].0 = len;
            }
            self.checked(&question, &extents, &self.lens.borrow()).map_err(|e| {
                let what = format!(
                    "its answer for {} bytes at {} is refused: {e}",
                    question.len, question.offset
                );
                self.core.note(Fault::Answer, &what);
                io::Error::other(what)
            })?;
        }
        Ok(extents)
    }

    fn checked(
        &self,
        question: &Question,
        extents: &[Extent],
        files: &[(u64, bool)],
    ) -> Result<(), super::answer::Refused> {
        let bounds = Bounds { granule: self.core.granule, size: self.core.size(), files };
        check(question, extents, &bounds, self.core.unit)
    }

    /// Returns where the bytes at `offset` lie, for at most `len` bytes. Asks the map if the table
    /// does not know.
    async fn find_for_read(&self, offset: u64, len: u64) -> io::Result<Known> {
        if let Some(known) = self.core.cache.find(offset, len, false) {
            return Ok(known);
        }
        let held = self.granules(offset..offset + len);
        let _held = self.core.misses_lock.hold(held.clone()).await;
        // Another request may have asked meanwhile.
        if let Some(known) = self.core.cache.find(offset, len, false) {
            return Ok(known);
        }
        let stamp = self.core.cache.stamp();
        let start = held.start.max(offset & !(self.core.granule - 1));
        let asked = start..self.core.cache.next_moved(&(start..held.end));
        let extents = self.locate(asked.clone(), false).await?;
        let (mut at, mut first) = (asked.start, None);
        for Extent { len: extent_len, place } in extents {
            let known = Known { len: extent_len, place };
            self.core.cache.keep(at, known, false, &asked, stamp);
            if first.is_none() && at + extent_len > offset {
                let inside = offset - at;
                let end = (at + extent_len).min(asked.end);
                first = Some(Known { len: len.min(end - offset), place: place.skip(inside) });
            }
            at += extent_len;
        }
        first.ok_or_else(|| io::Error::other("the map's answer ends before the request"))
    }

    async fn read_piece(&self, segments: Segments, place: Place) -> (Segments, io::Result<()>) {
        match place {
            Place::At { file, offset } => {
                let (segments, read) = self.files[file].read(segments, offset).await;
                let result = read.map(|n| segments.zero(n, segments.len() - n));
                (segments, result)
            }
            Place::Zero | Place::New { .. } => {
                segments.zero(0, segments.len());
                (segments, Ok(()))
            }
        }
    }

    async fn read_pieces(&self, segments: &Segments, offset: u64, len: u64) -> io::Result<()> {
        let (mut pieces, mut at) = (Vec::new(), offset);
        while at < offset + len {
            let Known { len, place } = self.find_for_read(at, offset + len - at).await?;
            pieces.push(Piece { offset: at, len, place });
            at += len;
        }
        let reads = pieces.into_iter().map(async |piece| {
            let part = segments.slice((piece.offset - offset) as usize, piece.len as usize);
            self.read_piece(part, piece.place).await.1
        });
        join::all(AT_A_TIME, reads).await
    }

    async fn write_all(
        &self,
        segments: Segments,
        file: usize,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        let (segments, written) = self.files[file].write(segments, offset, durable).await;
        let result = written.and_then(|n| match n < segments.len() {
            true => Err(io::ErrorKind::WriteZero.into()),
            false => Ok(()),
        });
        (segments, result)
    }

    /// Writes what the table does not know how to write.
    async fn write_pieces(&self, segments: &Segments, offset: u64) -> io::Result<()> {
        if self.core.moved().list.len() >= MOST_MOVED {
            self.sync().await?;
        }
        let end = offset + segments.len() as u64;
        let held = self.granules(offset..end);
        let _held = self.core.misses_lock.hold(held.clone()).await;
        let (mut pieces, mut at) = (Vec::new(), held.start);
        while at < held.end {
            if let Some(Known { len, place }) = self.core.cache.find(at, held.end - at, true) {
                pieces.push(Piece { offset: at, len, place });
                at += len;
                continue;
            }
            let stamp = self.core.cache.stamp();
            let asked = at..self.core.cache.next_moved(&(at..held.end));
            for Extent { len, place } in self.locate(asked.clone(), true).await? {
                if at >= asked.end {
                    break;
                }
                if let Place::At { .. } = place {
                    self.core.cache.keep(at, Known { len, place }, true, &asked, stamp);
                }
                let len = len.min(asked.end - at);
                pieces.push(Piece { offset: at, len, place });
                at += len;
            }
        }
        let writes = pieces.into_iter().map(async |piece| {
            let (start, stop) = (piece.offset.max(offset), (piece.offset + piece.len).min(end));
            match piece.place {
                Place::New { file, offset: to, fill } => {
                    let part = segments.slice((start - offset) as usize, (stop - start) as usize);
                    self.write_new(&piece, part, start, (file, to), fill).await
                }
                // What is outside the request needs no write.
                Place::At { .. } if start >= stop => Ok(()),
                Place::At { file, offset: to } => {
                    let part = segments.slice((start - offset) as usize, (stop - start) as usize);
                    let to = to + (start - piece.offset);
                    self.write_all(part, file, to, false).await.1
                }
                Place::Zero => Err(io::Error::other("the map has no place for a write")),
            }
        });
        join::all(AT_A_TIME, writes).await
    }

    /// Writes `part`, which begins at `start`, to a new place, and the rest of the piece from
    /// `fill`.
    async fn write_new(
        &self,
        piece: &Piece,
        part: Segments,
        start: u64,
        (file, to): (usize, u64),
        fill: Fill,
    ) -> io::Result<()> {
        let head = start - piece.offset;
        let tail_at = head + part.len() as u64;
        let mut whole = part;
        let mut _permit = None;
        if head > 0 || tail_at < piece.len {
            _permit = Some(self.core.copies.acquire_many(piece.len).await);
            let mut all = self.filled(fill, head).await?;
            all.gather(&whole, 0, whole.len());
            let tail = self.filled(fill.skip(tail_at), piece.len - tail_at).await?;
            all.gather(&tail, 0, tail.len());
            whole = all;
        }
        self.write_all(whole, file, to, false).await.1?;
        // A flush takes both or neither.
        let mut moved = self.core.moved();
        // An entry of the table is in one region.
        let mut at = 0;
        while at < piece.len {
            let offset = piece.offset + at;
            let len = (piece.len - at).min(REGION - offset % REGION);
            let place = Place::At { file, offset: to + at };
            self.core.cache.moved(offset, Known { len, place });
            at += len;
        }
        moved.list.push(piece.offset..piece.offset + piece.len);
        Ok(())
    }

    /// Returns a buffer with the contents of `len` bytes.
    async fn filled(&self, fill: Fill, len: u64) -> io::Result<Segments> {
        let buffer = Segments::buffer(len as usize);
        match fill {
            Fill::From { file, offset } if len > 0 => {
                self.read_piece(buffer, Place::At { file, offset }).await
            }
            Fill::From { .. } | Fill::Zero => (buffer, Ok(())),
        }
        .into_result()
    }

    /// Syncs the data files that may be written.
    async fn sync_files(&self) -> io::Result<()> {
        let writable: Vec<bool> =
            self.lens.borrow().iter().map(|(_, writable)| *writable).collect();
        let files = self.files.iter().zip(writable).filter(|(_, writable)| *writable);
        join::all(AT_A_TIME, files.map(|(file, _)| file.sync())).await
    }
}

trait IntoResult {
    fn into_result(self) -> io::Result<Segments>;
}

impl IntoResult for (Segments, io::Result<()>) {
    fn into_result(self) -> io::Result<Segments> {
        self.1.map(|()| self.0)
    }
}

impl<S: Storage, A: Ask> Storage for Mapped<S, A> {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let len = (segments.len() as u64).min(self.core.size().saturating_sub(offset));
        let _in_use = self.core.in_use.enter();
        if len == segments.len() as u64
            && let Some(known) = self.core.cache.find(offset, len, false)
            && known.len == len
        {
            self.core.hits();
            let (segments, result) = self.read_piece(segments, known.place).await;
            return (segments, result.map(|()| len as usize));
        }
        let result = Box::pin(self.read_pieces(&segments, offset, len)).await;
        (segments, result.map(|()| len as usize))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let len = segments.len();
        if offset.checked_add(len as u64).is_none_or(|end| end > self.core.size()) {
            return (segments, Err(io::ErrorKind::InvalidInput.into()));
        }
        let (segments, result, needs_sync) = {
            let _in_use = self.core.in_use.enter();
            match self.core.cache.find(offset, len as u64, true) {
                Some(Known { len: known, place: Place::At { file, offset } })
                    if known == len as u64 =>
                {
                    self.core.hits();
                    // What was placed anew needs the map, too, so that the write is durable.
                    let needs_sync = durable && self.core.moved().is_pending();
                    let now = durable && !needs_sync;
                    let (segments, result) = self.write_all(segments, file, offset, now).await;
                    (segments, result, needs_sync)
                }
                _ => {
                    let result = Box::pin(self.write_pieces(&segments, offset)).await;
                    (segments, result, durable)
                }
            }
        };
        let result = match needs_sync && result.is_ok() {
            true => Box::pin(self.sync()).await,
            false => result,
        };
        (segments, result.map(|()| len))
    }

    async fn sync(&self) -> io::Result<()> {
        let _one = self.core.flushing.acquire().await;
        if let Some(why) = self.core.lost() {
            return Err(io::Error::other(why));
        }
        let moved = merged(self.core.moved().take());
        let result = async || {
            self.sync_files().await?;
            if moved.is_empty() {
                return Ok(());
            }
            self.ask.flush(moved.clone()).await.inspect_err(|e| self.core.note_error(e))
        };
        match result().await {
            Ok(()) => {
                moved.iter().for_each(|range| self.core.cache.durable(range));
                self.core.moved().is_flushing = false;
                Ok(())
            }
            Err(e) => {
                // The list stays pending: no write is durable any more.
                self.core.set_lost(&e);
                Err(e)
            }
        }
    }

    async fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.core.size())
    }

    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn capabilities(&self) -> Capabilities {
        self.core.capabilities
    }
}

/// Joins ranges that touch.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut all: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}
