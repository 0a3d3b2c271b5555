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
//! - A request counts itself in `in_use` while it uses answers. It waits for no flush meanwhile.
//! - `sync` syncs the data files before the map makes new places durable; see [`Map`].
//!
//! [`Map`]: super::Map

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_ring::{Segments, join};

use super::answer::{Bounds, Refused, Use, check};
use super::ask::Ask;
use super::cache::{Known, REGION};
use super::in_use::Guard;
use super::map::{Extent, Fill, Place, Question};
use super::shared::{Core, Fault};
use crate::Geometry;
use crate::storage::{Capabilities, LookupFigures, Storage};

/// Number of operations of one request that are in flight.
const AT_A_TIME: usize = 16;
/// Number of parts that wait for a flush before Blockyard flushes by itself.
const MOST_MOVED: usize = 16384;

/// What becomes of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Free {
    Discard,
    /// See [`Storage::zero`] and [`Storage::zero_fast`].
    Zero {
        unmap: bool,
        fast: bool,
    },
}

/// A disk of a map on one reactor.
pub struct Mapped<S, A> {
    pub(super) core: Arc<Core>,
    /// The data files.
    pub(super) files: Vec<S>,
    pub(super) ask: A,
    /// Lengths of the data files, as last seen.
    lens: RefCell<Vec<(u64, bool)>>,
    lookups: Cell<LookupFigures>,
}

/// A part of a request, and where it lies.
struct Piece {
    /// Offset in the disk.
    offset: u64,
    len: u64,
    place: Place,
}

/// Adds the next part of a request. Parts that follow one another on the disk and in their file are
/// one operation.
fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last) if last.place.skip(last.len) == piece.place => last.len += piece.len,
        _ => pieces.push(piece),
    }
}

impl<S: Storage, A: Ask> Mapped<S, A> {
    /// Makes the disk on one reactor. `writable`: which data files may be written.
    pub(super) fn new(core: &Arc<Core>, files: Vec<S>, writable: &[bool], ask: A) -> Self {
        let lens = RefCell::new(writable.iter().map(|writable| (0, *writable)).collect());
        Mapped { core: core.clone(), files, ask, lens, lookups: Cell::default() }
    }

    /// Counts a request that needs no question, because all its places are known.
    fn hit(&self) {
        self.core.hits();
        let LookupFigures { hits, misses } = self.lookups.get();
        self.lookups.set(LookupFigures { hits: hits + 1, misses });
    }

    /// Counts a question to the map.
    fn miss(&self) {
        self.core.misses();
        let LookupFigures { hits, misses } = self.lookups.get();
        self.lookups.set(LookupFigures { hits, misses: misses + 1 });
    }

    fn granules(&self, range: Range<u64>) -> Range<u64> {
        let granule = self.core.granule;
        range.start & !(granule - 1)..range.end.next_multiple_of(granule)
    }

    /// Asks the map for `range`, and checks the answer.
    async fn locate(&self, range: Range<u64>, write: bool) -> io::Result<Vec<Extent>> {
        self.miss();
        let question = Question { offset: range.start, len: range.end - range.start, write };
        let extents = self.ask.locate(question).await.inspect_err(|e| self.core.note_error(e))?;
        self.check(&range, if write { Use::Write } else { Use::Read }, &extents).await?;
        Extent::joined(extents.into_iter().map(Ok))
    }

    /// Checks the answer to a question about `range`.
    pub(super) async fn check(
        &self,
        range: &Range<u64>,
        purpose: Use,
        extents: &[Extent],
    ) -> io::Result<()> {
        let checked = {
            let files = self.lens.borrow();
            self.checked(range, purpose, extents, &files)
        };
        if checked.is_err() {
            // The files may have grown.
            for (at, file) in self.files.iter().enumerate() {
                let len = file.len().await?;
                self.lens.borrow_mut()[at].0 = len;
            }
            self.checked(range, purpose, extents, &self.lens.borrow()).map_err(|e| {
                let (offset, len) = (range.start, range.end - range.start);
                let what = format!("its answer for {len} bytes at {offset} is refused: {e}");
                self.core.note(Fault::Answer, &what);
                io::Error::other(what)
            })?;
        }
        Ok(())
    }

    fn checked(
        &self,
        range: &Range<u64>,
        purpose: Use,
        extents: &[Extent],
        files: &[(u64, bool)],
    ) -> Result<(), Refused> {
        let bounds = Bounds { granule: self.core.granule, size: self.core.size(), files };
        check(range, purpose, extents, &bounds, self.core.unit)
    }

    /// Asks the map where the bytes at `offset` lie, for at most `len` bytes. The table does not
    /// know.
    async fn ask_for_read(&self, offset: u64, len: u64) -> io::Result<Known> {
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
        let _in_use = self.enter(offset..offset + len).await;
        let (mut pieces, mut at, mut is_known) = (Vec::new(), offset, true);
        while at < offset + len {
            let left = offset + len - at;
            let known = self.core.cache.find(at, left, false);
            is_known &= known.is_some();
            let Known { len, place } = match known {
                Some(known) => known,
                None => self.ask_for_read(at, left).await?,
            };
            push(&mut pieces, Piece { offset: at, len, place });
            at += len;
        }
        if is_known {
            self.hit();
        }
        let reads = pieces.into_iter().map(async |piece| {
            let part = segments.slice((piece.offset - offset) as usize, piece.len as usize);
            self.read_piece(part, piece.place).await.1
        });
        join::all(AT_A_TIME, reads).await
    }

    pub(super) async fn write_all(
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

    /// Counts a request that has to ask about a range, after a discard of the range has ended.
    async fn enter(&self, range: Range<u64>) -> Guard<'_> {
        let _held = self.core.freeing.hold(self.granules(range)).await;
        self.core.in_use.enter()
    }

    /// Writes what the table does not know how to write.
    async fn write_missed(&self, segments: &Segments, offset: u64) -> io::Result<()> {
        // Before this request counts as one that uses answers: the map may wait in its flush for
        // the end of such requests.
        if self.core.moved().list.len() >= MOST_MOVED {
            self.sync().await?;
        }
        let _in_use = self.enter(offset..offset + segments.len() as u64).await;
        self.write_pieces(segments, offset).await
    }

    async fn write_pieces(&self, segments: &Segments, offset: u64) -> io::Result<()> {
        let end = offset + segments.len() as u64;
        let held = self.granules(offset..end);
        let _held = self.core.misses_lock.hold(held.clone()).await;
        let (mut pieces, mut at, mut is_known) = (Vec::new(), held.start, true);
        while at < held.end {
            if let Some(Known { len, place }) = self.core.cache.find(at, held.end - at, true) {
                push(&mut pieces, Piece { offset: at, len, place });
                at += len;
                continue;
            }
            is_known = false;
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
                push(&mut pieces, Piece { offset: at, len, place });
                at += len;
            }
        }
        if is_known {
            self.hit();
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
        self.core.ahead[file].prepare(&self.files[file], to..to + piece.len).await;
        let head = start - piece.offset;
        let tail_at = head + part.len() as u64;
        if head > 0 || tail_at < piece.len {
            let _permit = self.core.copies.acquire_many(piece.len).await;
            let mut all = self.filled(fill, head).await?;
            let tail = self.filled(fill.skip(tail_at), piece.len - tail_at).await?;
            if part.is_request() {
                // Data in the kernel and memory of this process need operations of their own.
                let parts = [(all, 0), (part, head), (tail, tail_at)].into_iter();
                let parts = parts.filter(|(part, _)| !part.is_empty());
                let write = async |(part, at)| self.write_all(part, file, to + at, false).await.1;
                join::all(AT_A_TIME, parts.map(write)).await?;
            } else {
                all.gather(&part, 0, part.len());
                all.gather(&tail, 0, tail.len());
                self.write_all(all, file, to, false).await.1?;
            }
        } else {
            self.write_all(part, file, to, false).await.1?;
        }
        // A flush takes both or neither.
        let mut moved = self.core.moved();
        if let Some(e) = self.core.lost() {
            return Err(e); // The flush that failed may have lost the data.
        }
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

    /// Returns whether a durable write of a data file needs a sync of the disk, because the file is
    /// in the page cache: the kernel reports a lost page to one sync only. If no data file bypasses
    /// the page cache, the disk asks for no durable writes.
    fn shares_sync(&self, file: usize) -> bool {
        self.core.capabilities.direct && !self.files[file].capabilities().direct
    }

    /// Syncs the data files that may be written.
    async fn sync_files(&self) -> io::Result<()> {
        let writable: Vec<bool> =
            self.lens.borrow().iter().map(|(_, writable)| *writable).collect();
        let files = self.files.iter().zip(writable).filter(|(_, writable)| *writable);
        join::all(AT_A_TIME, files.map(|(file, _)| file.sync())).await
    }
}

impl<S: Storage, A: Ask> Mapped<S, A> {
    /// Syncs; see [`Storage::sync`]. The caller holds `flushing`.
    pub(super) async fn sync_alone(&self) -> io::Result<()> {
        if let Some(e) = self.core.lost() {
            return Err(e);
        }
        let (moved, is_changed) = self.core.moved().take();
        let moved = merged(moved);
        let data = self.sync_files().await;
        let has_data = data.is_ok();
        let result = match data {
            Ok(()) if !moved.is_empty() || is_changed => {
                self.ask.flush(moved.clone()).await.inspect_err(|e| self.core.note_error(e))
            }
            data => data,
        };
        match result {
            Ok(()) => {
                moved.iter().for_each(|range| self.core.cache.durable(range));
                self.core.moved().is_flushing = false;
                Ok(())
            }
            Err(e) => {
                // The list stays pending: no write is durable any more.
                let later = self.core.moved();
                self.core.set_lost("flush", &e);
                if !has_data {
                    // New places may have lost their data, also the rest of a granule, which no
                    // request wrote. Reads find the old places again.
                    let lost = moved.iter().chain(&later.list);
                    lost.for_each(|range| self.core.cache.give_up(range));
                }
                Err(e)
            }
        }
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
    fn lookups(&self) -> LookupFigures {
        self.lookups.get()
    }

    fn lost(&self) -> Option<io::Error> {
        self.core.lost()
    }

    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let len = (segments.len() as u64).min(self.core.size().saturating_sub(offset));
        let in_use = self.core.in_use.enter();
        if len == segments.len() as u64
            && let Some(known) = self.core.cache.find(offset, len, false)
            && known.len == len
        {
            self.hit();
            let (segments, result) = self.read_piece(segments, known.place).await;
            return (segments, result.map(|()| len as usize));
        }
        drop(in_use);
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
            let in_use = self.core.in_use.enter();
            match self.core.cache.find(offset, len as u64, true) {
                Some(Known { len: known, place: Place::At { file, offset } })
                    if known == len as u64 =>
                {
                    self.hit();
                    // What was placed anew needs the map, too, so that the write is durable.
                    let needs_sync =
                        durable && (self.core.moved().is_pending() || self.shares_sync(file));
                    let now = durable && !needs_sync;
                    let (segments, result) = self.write_all(segments, file, offset, now).await;
                    (segments, result, needs_sync)
                }
                _ => {
                    drop(in_use);
                    let result = Box::pin(self.write_missed(&segments, offset)).await;
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
        self.sync_alone().await
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.free(offset, len, Free::Discard).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.free(offset, len, Free::Zero { unmap, fast: false }).await
    }

    async fn zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.free(offset, len, Free::Zero { unmap, fast: true }).await
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

#[cfg(test)]
#[path = "mapped_tests.rs"]
mod tests;
