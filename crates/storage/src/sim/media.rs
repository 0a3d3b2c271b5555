//! The contents of a simulated disk: durable sectors, cached versions of sectors, and the journal
//! of lengths.
//!
//! In: sectors that reach the disk, syncs, failed syncs, a crash. Out: what a read returns, and the
//! image after the crash.
//!
//! What must hold: the versions of a sector are in the order in which they reached the disk. The
//! durable version only advances, except that a failed sync may drop versions. A journal entry that
//! truncates the file, and the loss of the truncated data, survive together or not at all
//! (`Version::cut`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use super::{Rng, SECTOR};

/// Contents of a sector: a piece of a write's data, or zeroes.
#[derive(Clone, Default)]
struct Content(Option<(Rc<Vec<u8>>, usize)>);

impl Content {
    fn copy(&self, from: usize, out: &mut [u8]) {
        match &self.0 {
            None => out.fill(0),
            Some((data, at)) => out.copy_from_slice(&data[at + from..][..out.len()]),
        }
    }

    /// Copies this sector into the part of `out` that it covers. The sector begins at `start` and
    /// has `unit` bytes; `out` begins at `offset`.
    fn overlay(&self, start: u64, unit: u64, offset: u64, out: &mut [u8]) {
        let end = offset.saturating_add(out.len() as u64);
        let (from, to) = (start.max(offset), start.saturating_add(unit).min(end));
        let covered = (from - offset) as usize..(to - offset) as usize;
        self.copy((from - start) as usize, &mut out[covered]);
    }

    /// Compares two sectors of `unit` bytes. Does not compare the bytes of shared contents.
    fn same_as(&self, other: &Content, unit: usize) -> bool {
        match (&self.0, &other.0) {
            (Some((a, i)), Some((b, j))) => {
                Rc::ptr_eq(a, b) && i == j || a[*i..][..unit] == b[*j..][..unit]
            }
            (None, None) => true,
            _ => false,
        }
    }
}

/// Returns the sectors of a range of bytes.
fn sectors_of(unit: u64, offset: u64, len: u64) -> Range<u64> {
    offset / unit..offset.saturating_add(len).div_ceil(unit)
}

/// Contents of a disk without power. Clones share their data.
#[derive(Clone)]
pub struct SimImage {
    len: u64,
    unit: u64,
    /// Sectors with data, by number. All others are zeroes. Clones share the map until one of them
    /// changes.
    sectors: Rc<BTreeMap<u64, Content>>,
}

impl SimImage {
    /// Returns an image of `len` bytes of zeroes.
    pub fn zeroed(len: u64) -> Self {
        SimImage { len, unit: SECTOR as u64, sectors: Rc::default() }
    }

    /// Returns an image with these contents.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut whole = bytes.to_vec();
        whole.resize(bytes.len().next_multiple_of(SECTOR), 0);
        let (whole, count) = (Rc::new(whole), bytes.len().div_ceil(SECTOR));
        let sector = |n: usize| (n as u64, Content(Some((whole.clone(), n * SECTOR))));
        let sectors = Rc::new((0..count).map(sector).collect());
        SimImage { len: bytes.len() as u64, unit: SECTOR as u64, sectors }
    }

    /// Sets the atomic unit of writes to `unit` bytes (512, 4096, ...).
    pub fn atomic(self, unit: usize) -> Self {
        assert!(unit > 0, "a sector of no bytes");
        if self.unit == unit as u64 {
            return self;
        }
        let mut image = SimImage { len: self.len, unit: unit as u64, sectors: Rc::default() };
        let mut bytes = vec![0; self.unit as usize];
        for (&sector, content) in self.sectors.iter() {
            content.copy(0, &mut bytes);
            image.fill(sector * self.unit, &bytes);
        }
        image
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads into `out` from `offset`. Bytes beyond the end are zeroes.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        self.copy_data(offset, out);
    }

    /// Returns the whole image, which must fit into memory.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.copy_data(0, &mut bytes);
        bytes
    }

    /// Returns whether both images have the same length and the same bytes.
    pub fn same_as(&self, other: &SimImage) -> bool {
        self.len == other.len && (self.has_sectors_of(other) || self.bytes() == other.bytes())
    }

    /// Returns whether both images have the same sectors. Sectors with data that are all zeroes
    /// count as others than sectors without data.
    fn has_sectors_of(&self, other: &SimImage) -> bool {
        let (unit, mut pairs) = (self.unit as usize, self.sectors.iter().zip(other.sectors.iter()));
        let same = |((n, ours), (m, theirs)): ((&u64, &Content), (&u64, &Content))| {
            n == m && ours.same_as(theirs, unit)
        };
        self.unit == other.unit
            && (Rc::ptr_eq(&self.sectors, &other.sectors)
                || self.sectors.len() == other.sectors.len() && pairs.all(same))
    }

    /// Copies the sectors with data into `out`, which begins at `offset`. Leaves the rest of `out`
    /// unchanged.
    fn copy_data(&self, offset: u64, out: &mut [u8]) {
        for (&sector, content) in
            self.sectors.range(sectors_of(self.unit, offset, out.len() as u64))
        {
            content.overlay(sector * self.unit, self.unit, offset, out);
        }
    }

    fn fill(&mut self, offset: u64, bytes: &[u8]) {
        for piece in pieces(self.unit, offset, bytes.len()) {
            let mut whole = vec![0; self.unit as usize];
            self.read(piece.sector * self.unit, &mut whole);
            whole[piece.from..][..piece.at.len()].copy_from_slice(&bytes[piece.at]);
            self.put(piece.sector, Content(Some((Rc::new(whole), 0))));
        }
    }

    fn put(&mut self, sector: u64, content: Content) {
        if content.0.is_some() {
            Rc::make_mut(&mut self.sectors).insert(sector, content);
        } else if self.sectors.contains_key(&sector) {
            Rc::make_mut(&mut self.sectors).remove(&sector);
        }
    }

    /// Removes data beyond the length. Without such data the image stays shared.
    fn trim(&mut self) {
        let end = self.len.div_ceil(self.unit);
        if self.sectors.range(end..).next().is_some() {
            Rc::make_mut(&mut self.sectors).split_off(&end);
        }
        let (last, keep) = (self.len / self.unit, (self.len % self.unit) as usize);
        if let Some(content) = self.sectors.get(&last) {
            let mut whole = vec![0; self.unit as usize];
            content.copy(0, &mut whole);
            if whole[keep..].iter().any(|&byte| byte != 0) {
                whole[keep..].fill(0);
                self.put(last, Content(Some((Rc::new(whole), 0))));
            }
        }
    }
}

impl std::fmt::Debug for SimImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimImage({} bytes, {} sectors in use)", self.len, self.sectors.len())
    }
}

/// The part of a range in one sector.
struct Piece {
    sector: u64,
    /// Offset within the sector, and range within the buffer.
    from: usize,
    at: Range<usize>,
}

fn pieces(unit: u64, offset: u64, len: usize) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let (here, rest) = (offset.saturating_add(done as u64), len - done);
        let from = (here % unit) as usize;
        let now = rest.min(unit as usize - from);
        let piece = Piece { sector: here / unit, from, at: done..done + now };
        done += now;
        (now > 0).then_some(piece)
    })
}

/// A version of a sector that is not durable yet.
#[derive(Clone)]
struct Version {
    op: u64,
    content: Content,
    /// Number of the journal entry that truncated the sector.
    cut: Option<u64>,
}

/// Probabilities in percent that a crash keeps an operation as a whole, or loses it as a whole. An
/// operation that is neither kept nor lost is torn at sectors.
const FATES: [(u64, u64); 5] = [(0, 100), (100, 0), (50, 50), (30, 30), (0, 0)];

/// See the module documentation.
#[derive(Clone)]
pub(super) struct Media {
    durable: SimImage,
    cached: BTreeMap<u64, Vec<Version>>,
    /// Versions that a failed sync lost. Reads return them until the sector is written or the power
    /// is cut.
    ghosts: BTreeMap<u64, Content>,
    /// Changes of length that are not durable. The first one has the number `committed`.
    journal: VecDeque<u64>,
    committed: u64,
}

impl Media {
    pub fn new(durable: SimImage) -> Self {
        let (cached, ghosts) = (BTreeMap::new(), BTreeMap::new());
        Media { durable, cached, ghosts, journal: VecDeque::new(), committed: 0 }
    }

    /// Returns what all readers see now, as a disk without power.
    pub fn visible_image(&self) -> SimImage {
        let mut image = self.durable.clone();
        image.len = self.len();
        for &sector in self.ghosts.keys().chain(self.cached.keys()) {
            image.put(sector, self.visible(sector));
        }
        image.trim();
        image
    }

    pub fn len(&self) -> u64 {
        self.journal.back().copied().unwrap_or(self.durable.len)
    }

    /// Reads the visible contents.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        self.durable.read(offset, out);
        let (unit, range) = (self.durable.unit, self.sectors(offset, out.len() as u64));
        for (&sector, content) in self.ghosts.range(range.clone()) {
            content.overlay(sector * unit, unit, offset, out);
        }
        for (&sector, versions) in self.cached.range(range) {
            if let Some(version) = versions.last() {
                version.content.overlay(sector * unit, unit, offset, out);
            }
        }
    }

    fn visible(&self, sector: u64) -> Content {
        let cached =
            self.cached.get(&sector).and_then(|versions| versions.last()).map(|v| &v.content);
        let content = cached
            .or_else(|| self.ghosts.get(&sector))
            .or_else(|| self.durable.sectors.get(&sector));
        content.cloned().unwrap_or_default()
    }

    /// Returns the sectors of a range.
    pub fn sectors(&self, offset: u64, len: u64) -> Range<u64> {
        sectors_of(self.durable.unit, offset, len)
    }

    /// Returns the sectors of a range that were ever written. Zeroing the others changes nothing.
    pub fn sectors_in_use(&self, offset: u64, len: u64) -> Vec<u64> {
        let range = self.sectors(offset, len);
        let mut sectors = BTreeSet::new();
        sectors.extend(self.durable.sectors.range(range.clone()).map(|(&sector, _)| sector));
        sectors.extend(self.ghosts.range(range.clone()).map(|(&sector, _)| sector));
        sectors.extend(self.cached.range(range).map(|(&sector, _)| sector));
        sectors.into_iter().collect()
    }

    /// Writes the part of `data`, which begins at `offset`, that lies in `sector`, for operation
    /// `op`.
    pub fn write(&mut self, op: u64, sector: u64, offset: u64, data: &Rc<Vec<u8>>) {
        let end = self.land(op, sector, offset, data.len() as u64, Some(data), None);
        if end > self.len() {
            self.journal.push_back(end);
        }
    }

    /// Zeroes the part of `offset..offset + len` that lies in `sector`, for operation `op`.
    pub fn zero(&mut self, op: u64, sector: u64, offset: u64, len: u64) {
        self.land(op, sector, offset, len, None, None);
    }

    /// Changes the length, and zeroes the data behind a shorter length, for operation `op`.
    pub fn set_len(&mut self, op: u64, len: u64) {
        if len < self.len() {
            let entry = self.journal_end();
            for sector in self.sectors_in_use(len, u64::MAX - len) {
                self.land(op, sector, len, u64::MAX - len, None, Some(entry));
            }
        }
        if len != self.len() {
            self.journal.push_back(len);
        }
    }

    /// Adds a version of `sector`: its visible contents, overlaid with the part of the range.
    /// Returns the end of that part.
    fn land(
        &mut self,
        op: u64,
        sector: u64,
        offset: u64,
        len: u64,
        data: Option<&Rc<Vec<u8>>>,
        cut: Option<u64>,
    ) -> u64 {
        let unit = self.durable.unit;
        let first = sector * unit;
        let (from, to) =
            (first.max(offset), first.saturating_add(unit).min(offset.saturating_add(len)));
        let at = (from - offset) as usize;
        let content = if to - from == unit {
            Content(data.map(|data| (data.clone(), at)))
        } else {
            let mut whole = vec![0; unit as usize];
            self.visible(sector).copy(0, &mut whole);
            let share = &mut whole[(from - first) as usize..(to - first) as usize];
            match data {
                Some(data) => share.copy_from_slice(&data[at..][..share.len()]),
                None => share.fill(0),
            }
            Content(Some((Rc::new(whole), 0)))
        };
        self.cached.entry(sector).or_default().push(Version { op, content, cut });
        to
    }

    /// Returns the number of the next journal entry.
    pub fn journal_end(&self) -> u64 {
        self.committed + self.journal.len() as u64
    }

    /// Applies a sync. It must cover the versions of operations for which `covered` returns true,
    /// and the journal up to `end`.
    pub fn sync(&mut self, covered: impl Fn(u64) -> bool, end: u64, rng: &mut Rng) {
        let eager = rng.one_in(2);
        self.make_durable(0..u64::MAX, end, covered, |room| {
            if eager { rng.below(room as u64 + 1) as usize } else { 0 }
        });
    }

    /// Makes the sectors of a durable write durable, and the journal up to now.
    pub fn write_through(&mut self, op: u64, offset: u64, len: u64) {
        // Truncated sectors outside the range stay cached. Later operations on them take the
        // committed entry into account.
        let range = self.sectors(offset, len);
        self.make_durable(range, self.journal_end(), |other| other == op, |_| 0);
    }

    /// Applies a failed sync: the journal becomes durable. Each covered sector becomes durable or
    /// is lost.
    pub fn sync_failed(&mut self, covered: impl Fn(u64) -> bool, end: u64, rng: &mut Rng) {
        self.make_durable(0..u64::MAX, end, |_| false, |_| 0);
        let lose_all = rng.one_in(2);
        for (&sector, versions) in &mut self.cached {
            let Some(last) = versions.iter().rposition(|v| covered(v.op)) else { continue };
            self.ghosts.remove(&sector);
            if !lose_all && rng.one_in(2) {
                let content =
                    versions.drain(..=last).next_back().map(|v| v.content).unwrap_or_default();
                self.durable.put(sector, content);
                continue;
            }
            let content = versions[last].content.clone();
            // Keep the versions of operations that the sync does not cover, even versions older
            // than a lost one. They may still become durable.
            versions.retain(|v| !covered(v.op));
            if versions.is_empty() && rng.one_in(2) {
                self.ghosts.insert(sector, content);
            }
        }
        self.cached.retain(|_, versions| !versions.is_empty());
    }

    /// Makes versions durable: in each sector of `range` up to the last `covered` one, and `more`
    /// of the later ones.
    fn make_durable(
        &mut self,
        range: Range<u64>,
        journal_end: u64,
        covered: impl Fn(u64) -> bool,
        mut more: impl FnMut(usize) -> usize,
    ) {
        while self.committed < journal_end {
            let Some(len) = self.journal.pop_front() else { break };
            self.durable.len = len;
            self.committed += 1;
        }
        let mut emptied = Vec::new();
        for (&sector, versions) in self.cached.range_mut(range) {
            let (must, may) = bounds(versions, journal_end, &covered);
            let upto = must + more(may - must);
            if let Some(version) = versions.drain(..upto).next_back() {
                self.durable.put(sector, version.content);
                self.ghosts.remove(&sector);
            }
            if versions.is_empty() {
                emptied.push(sector);
            }
        }
        for sector in emptied {
            self.cached.remove(&sector);
        }
    }

    /// Returns the image after a power cut, when all operations in flight have been applied.
    pub fn crash(&self, rng: &mut Rng) -> SimImage {
        let (kept, lost) = *rng.pick(&FATES);
        let entries = match (kept, lost) {
            (100, _) => self.journal.len(),
            (_, 100) => 0,
            _ => rng.below(self.journal.len() as u64 + 1) as usize,
        };
        let mut image = self.durable.clone();
        if let Some(last) = entries.checked_sub(1) {
            image.len = self.journal[last];
        }
        let mut fates = BTreeMap::new();
        for (&sector, versions) in &self.cached {
            let (must, may) = bounds(versions, self.committed + entries as u64, |_| false);
            let mut survives = |op| {
                let fate = *fates.entry(op).or_insert_with(|| rng.below(100));
                fate < kept || (fate >= kept + lost && rng.one_in(2))
            };
            let found =
                (must..may).rev().find(|&i| survives(versions[i].op)).or(must.checked_sub(1));
            if let Some(i) = found {
                image.put(sector, versions[i].content.clone());
            }
        }
        image.trim();
        image
    }
}

/// Returns how many of a sector's versions must become durable, and how many may, when the journal
/// becomes durable up to `journal_end`.
fn bounds(versions: &[Version], journal_end: u64, covered: impl Fn(u64) -> bool) -> (usize, usize) {
    let may = versions
        .iter()
        .position(|v| v.cut.is_some_and(|entry| entry >= journal_end))
        .unwrap_or(versions.len());
    let must =
        versions[..may].iter().rposition(|v| v.cut.is_some() || covered(v.op)).map_or(0, |i| i + 1);
    (must, may)
}
