//! `Storage` over an NBD export.
//!
//! In: what images request from a file. Out: requests within the server's block sizes and limits.
//!
//! What must hold: a durable write is durable by the server's promise (FUA, or a flush after it).
//! The client sends only commands that the server offers.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::semaphore::Semaphore;
use blockyard_ring::{Handle, Segments, join};

use super::client::Client;
use super::export::EXPORT;
use super::remote::Remote;
use super::slots::{Ask, Piece};
use crate::Geometry;
use crate::storage::{Capabilities, Storage};
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::wire::{cmd, export, flag, state};

/// Largest range of a command without data, in bytes.
const MAX_RANGE: u64 = 1 << 30;
/// Maximum number of requests for block status in a row. A server may answer each one with a hole
/// of a single block.
const MAX_STATUSES: usize = 16;
/// Maximum number of requests that one operation has in flight.
const MAX_IN_FLIGHT: usize = 16;
/// Largest part of a read or write in the hub, in bytes, unless the server's minimum is larger.
const HUB_PART: u64 = 1 << 20;
/// Size in bytes of a copy that counts as a long one, if it is exceeded.
const LONG_COPY: usize = 64 << 10;

/// An export on one reactor.
#[derive(Clone)]
pub struct Nbd {
    remote: Arc<Remote>,
    /// None if requests go through the hub.
    client: Option<Rc<Client>>,
    handle: Handle,
    long_copies: Rc<LongCopies>,
    /// The latest block status.
    known: Rc<RefCell<Known>>,
}

/// The long copies of one reactor to and from hubs: one in each iteration of its event loop.
struct LongCopies {
    one: Semaphore,
    /// Iteration of the latest copy.
    latest: Cell<Option<u64>>,
}

impl Default for LongCopies {
    fn default() -> Self {
        LongCopies { one: Semaphore::new(1), latest: Cell::default() }
    }
}

/// Extents of the disk from `start` on.
#[derive(Default)]
struct Known {
    start: u64,
    /// The end of each extent, in ascending order, and whether it reads as zeroes. Neighbours
    /// differ.
    extents: Vec<(u64, bool)>,
}

impl Nbd {
    /// Opens the export on one reactor.
    pub(super) fn on(remote: &Arc<Remote>, handle: &Handle) -> io::Result<Self> {
        let client = match remote.is_shared_out() {
            true => Some(Rc::new(Client::new(handle, remote.export()))),
            false => {
                remote.start_hub()?;
                None
            }
        };
        let (remote, handle, long_copies) = (remote.clone(), handle.clone(), handle.local());
        Ok(Nbd { remote, client, handle, long_copies, known: Rc::default() })
    }

    fn terms(&self) -> &Terms {
        self.remote.terms()
    }

    /// Returns the error if acknowledged writes may be lost; see [`Storage::lost`].
    fn loss(&self) -> Option<io::Error> {
        self.remote.export().lost().map(|why| io::Error::other(why.to_string()))
    }

    /// Sends one request. Returns the segments, which a read has filled.
    async fn ask(&self, ask: Ask, segments: Segments) -> (Segments, io::Result<Vec<Piece>>) {
        match &self.client {
            Some(client) => client.ask(ask, segments).await,
            None => self.ask_hub(ask, segments).await,
        }
    }

    /// Sends one request by the hub, which needs a copy of its data.
    async fn ask_hub(&self, ask: Ask, segments: Segments) -> (Segments, io::Result<Vec<Piece>>) {
        let Some(hub) = self.remote.hub() else {
            return (segments, Err(io::Error::other("the export has no connection")));
        };
        let (len, reads) = (segments.len(), ask.command == cmd::READ);
        // Requests without data never wait for memory.
        let _permit = match len {
            0 => None,
            len => Some(self.remote.hub_bytes().acquire_many(len as u64).await),
        };
        let mut data = Vec::new();
        if ask.command == cmd::WRITE {
            self.copy(len, || {
                data.resize(len, 0);
                segments.copy_out(0, &mut data);
            })
            .await;
        }
        let answer = hub.run(async move |client| {
            let theirs = if reads { Segments::buffer(len) } else { Segments::from_bytes(&data) };
            drop(data);
            let (theirs, result) = client.ask(ask, theirs).await;
            result.map(|pieces| {
                let mut data = vec![0; if reads { len } else { 0 }];
                theirs.copy_out(0, &mut data);
                (pieces, data)
            })
        });
        match answer.await {
            Ok(Ok((pieces, data))) => {
                self.copy(data.len(), || segments.copy_in(0, &data)).await;
                (segments, Ok(pieces))
            }
            Ok(Err(e)) | Err(e) => (segments, Err(e)),
        }
    }

    /// Runs a copy of `len` bytes. A long one waits for an iteration without another long one.
    async fn copy(&self, len: usize, copy: impl FnOnce()) {
        if len <= LONG_COPY {
            return copy();
        }
        let _permit = self.long_copies.one.acquire().await;
        while self.long_copies.latest.get() == Some(self.handle.iteration()) {
            self.handle.yield_now().await;
        }
        self.long_copies.latest.set(Some(self.handle.iteration()));
        copy();
    }

    /// Returns the largest read or write to send as one request, in bytes.
    fn most_data(&self) -> u64 {
        let (minimum, maximum) = (self.terms().minimum.into(), self.terms().maximum.into());
        match self.client {
            Some(_) => maximum,
            None => HUB_PART.max(minimum).min(maximum),
        }
    }

    /// Sends requests of at most `most` bytes each, which use the segments, if there are any.
    async fn ask_in_parts(&self, ask: Ask, segments: &Segments, most: u64) -> io::Result<()> {
        let moves = !segments.is_empty();
        // The server chooses `most`, so there may be many parts. They are made one by one.
        let parts = (0..ask.len.div_ceil(most)).map(|part| {
            let at = part * most;
            (at, Ask { offset: ask.offset + at, len: most.min(ask.len - at), ..ask })
        });
        let work = parts.map(async |(at, part)| {
            let piece = if moves {
                segments.slice(at as usize, part.len as usize)
            } else {
                Segments::default()
            };
            self.ask(part, piece).await.1.map(|_| ())
        });
        join::all(MAX_IN_FLIGHT, work).await
    }

    fn zeroes(&self, flags: u16, offset: u64, len: u64, unmap: bool) -> io::Result<Ask> {
        self.may_write(export::SEND_WRITE_ZEROES)?;
        let flags = if unmap { flags } else { flags | flag::NO_HOLE };
        Ok(Ask { command: cmd::WRITE_ZEROES, flags, offset, len: self.within_export(offset, len) })
    }

    fn may_write(&self, flag: u16) -> io::Result<()> {
        if self.remote.export().read_only {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the export is open for reading only",
            ));
        }
        if flag != 0 && !self.terms().has(flag) {
            Err(io::ErrorKind::Unsupported.into())
        } else {
            Ok(())
        }
    }

    /// Returns how many of `len` bytes from `offset` on the export has.
    fn within_export(&self, offset: u64, len: u64) -> u64 {
        len.min(self.terms().size.saturating_sub(offset))
    }

    /// Returns the length of the extent from `offset` on, and whether it reads as zeroes. The
    /// caller needs the status up to `end`, and both lie in the export.
    async fn status(&self, offset: u64, end: u64) -> io::Result<(u64, bool)> {
        if let Some(known) = self.known.borrow().find(offset) {
            return Ok(known);
        }
        // The server requires whole blocks.
        let minimum = u64::from(self.terms().minimum);
        let start = offset & !(minimum - 1);
        let len = match self.remote.export().read_only {
            // Later calls can use more of the answer.
            true => MAX_RANGE,
            false => (end - start).min(MAX_RANGE).next_multiple_of(minimum),
        };
        let len = self.within_export(start, len);
        let ask = Ask { command: cmd::BLOCK_STATUS, flags: 0, offset: start, len };
        let pieces = self.ask(ask, Segments::default()).await.1?;
        let known = Known::new(start, &pieces);
        let found = known
            .find(offset)
            .ok_or_else(|| io::Error::other("the server sent the block status of too few bytes"));
        // Do not keep the status of a writable export, because any reactor may write to it.
        if self.remote.export().read_only {
            *self.known.borrow_mut() = known;
        }
        found
    }
}

impl Known {
    fn new(start: u64, pieces: &[Piece]) -> Self {
        let (mut end, mut extents) = (start, Vec::<(u64, bool)>::new());
        for (len, flags) in pieces {
            end += len;
            let zero = flags & state::ZERO != 0;
            match extents.last_mut() {
                Some(last) if last.1 == zero => last.0 = end,
                _ => extents.push((end, zero)),
            }
        }
        Known { start, extents }
    }

    fn find(&self, offset: u64) -> Option<(u64, bool)> {
        let at = self.extents.partition_point(|(end, _)| *end <= offset);
        let (end, zero) = self.extents.get(at).filter(|_| offset >= self.start)?;
        Some((end - offset, *zero))
    }
}

impl Storage for Nbd {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let (len, most) = (segments.len() as u64, self.most_data());
        let here = self.within_export(offset, len);
        let ask = Ask { command: cmd::READ, flags: 0, offset, len: here };
        if here == len && (1..=most).contains(&len) {
            let (segments, result) = self.ask(ask, segments).await;
            return (segments, result.map(|_| here as usize));
        }
        let part = segments.slice(0, here as usize);
        let result = self.ask_in_parts(ask, &part, most).await;
        (segments, result.map(|()| here as usize))
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        let (len, most) = (segments.len() as u64, self.most_data());
        if let Err(e) = self.may_write(0) {
            return (segments, Err(e));
        }
        if self.within_export(offset, len) < len {
            return (
                segments,
                Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "the write is after the end of the export",
                )),
            );
        }
        let fua = durable && self.terms().has(export::SEND_FUA);
        let ask = Ask { command: cmd::WRITE, flags: if fua { flag::FUA } else { 0 }, offset, len };
        let (segments, mut result) = if len <= most {
            let (segments, result) = self.ask(ask, segments).await;
            (segments, result.map(|_| ()))
        } else {
            let result = self.ask_in_parts(ask, &segments, most).await;
            (segments, result)
        };
        if durable && !fua && result.is_ok() {
            result = self.sync().await;
        }
        (segments, result.map(|()| len as usize))
    }

    async fn sync(&self) -> io::Result<()> {
        if let Some(lost) = self.loss() {
            return Err(lost);
        }
        if self.remote.export().read_only || !self.terms().has(export::SEND_FLUSH) {
            return Ok(());
        }
        let ask = Ask { command: cmd::FLUSH, flags: 0, offset: 0, len: 0 };
        self.ask(ask, Segments::default()).await.1.map(|_| ())
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.may_write(export::SEND_TRIM)?;
        let ask =
            Ask { command: cmd::TRIM, flags: 0, offset, len: self.within_export(offset, len) };
        self.ask_in_parts(ask, &Segments::default(), MAX_RANGE).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let ask = self.zeroes(0, offset, len, unmap)?;
        // Some servers apply the limit of data to zeroes as well.
        self.ask_in_parts(ask, &Segments::default(), self.terms().maximum.into()).await
    }

    async fn zero_fast(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.may_write(export::SEND_FAST_ZERO)?;
        let ask = self.zeroes(flag::FAST_ZERO, offset, len, unmap)?;
        // The limit of data does not apply to fast zeroes, so that the range succeeds or fails as a
        // whole.
        let done = self.ask_in_parts(ask, &Segments::default(), MAX_RANGE).await;
        let too_long = ask.len > self.terms().maximum.into();
        done.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput if too_long => io::ErrorKind::Unsupported.into(),
            _ => e,
        })
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        match len == self.terms().size {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the size of an NBD export cannot change",
            )),
        }
    }

    async fn len(&self) -> io::Result<u64> {
        Ok(self.terms().size)
    }

    async fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.next_data_within(offset..u64::MAX).await
    }

    async fn next_data_within(&self, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
        if self.terms().allocation.is_none() {
            return Ok(Some(range.start..u64::MAX));
        }
        let (mut at, end) = (range.start, range.end.min(self.terms().size));
        for _ in 0..MAX_STATUSES {
            if at >= end {
                return Ok(None);
            }
            let (len, zero) = self.status(at, end).await?;
            if !zero {
                return Ok(Some(at..at + len));
            }
            at += len;
        }
        // What was not asked for counts as data.
        Ok((at < end).then_some(at..end))
    }

    fn lost(&self) -> Option<io::Error> {
        self.loss()
    }

    fn keeps_unsynced(&self) -> bool {
        self.loss().is_none()
    }

    fn geometry(&self) -> Geometry {
        self.remote.export().geometry()
    }

    fn capabilities(&self) -> Capabilities {
        EXPORT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_found_and_neighbours_of_one_kind_are_one_extent() {
        let pieces: Vec<Piece> = vec![(1, state::ZERO); 1000];
        let known = Known::new(512, &pieces);
        assert_eq!(known.extents, [(1512, true)]);
        assert_eq!(known.find(600), Some((912, true)));
        let hole = state::HOLE | state::ZERO;
        let known =
            Known::new(512, &[(8, 0), (8, state::HOLE), (16, state::ZERO), (8, hole), (4, 0)]);
        assert_eq!(known.extents, [(528, false), (552, true), (556, false)]);
        let found = [511, 512, 527, 528, 551, 552, 555, 556].map(|at| known.find(at));
        let some = |len, zero| Some((len, zero));
        assert_eq!(
            found,
            [
                None,
                some(16, false),
                some(1, false),
                some(24, true),
                some(1, true),
                some(4, false),
                some(1, false),
                None
            ]
        );
    }
}
