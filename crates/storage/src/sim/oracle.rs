//! The oracle: what a disk may hold, now and after a power cut. It checks any disk by the disk's
//! answers alone.
//!
//! In: when writes, flushes and reads started and were answered. Out: whether the data that were
//! read are among the allowed ones.
//!
//! What must hold: a start is reported to the oracle before it is reported to the disk, and an
//! answer after the disk gave it. So an order that the oracle sees is the real order.
//!
//! The rules, for each sector. A write is *surely before* another one if it was answered before the
//! other one started.
//! - A read may return any write, except those surely before a write that was answered before the
//!   read started.
//! - A power cut may leave any write, except those surely before a durable write.
//! - A write is durable if it was answered as durable, or answered before the start of a flush that
//!   succeeded.
//! - A failed write, a discard, and all writes that were not durable when a flush failed are
//!   *doubtful*. They may be present or not. They do not hide earlier writes, and do not become
//!   durable.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use super::{Rng, SECTOR};

/// Contents that are not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} (offset {}) {when}: {report}", sector * SECTOR as u64)]
pub struct Mismatch {
    pub sector: u64,
    when: &'static str,
    report: String,
}

/// A write that has started. Return it to the oracle when the write is answered; drop it if it
/// never is.
#[must_use = "an answered write is reported to the oracle with its token"]
pub struct WriteToken(Rc<Write>);

/// A flush that has started.
#[must_use = "an answered flush is reported to the oracle with its token"]
pub struct FlushToken(u64);

/// A read that has started.
#[must_use = "an answered read is checked with its token"]
pub struct ReadToken(u64);

struct Write {
    /// Start time of the write on the oracle's clock. Each call advances the clock, so the time is
    /// also the write's number.
    started: u64,
    what: &'static str,
    sectors: Range<u64>,
    ended: Cell<Option<u64>>,
    doubtful: Cell<bool>,
    durable: Cell<bool>,
}

impl Write {
    fn surely_before(&self, other: &Write) -> bool {
        self.ended.get().is_some_and(|ended| ended < other.started)
    }

    fn hides_for_a_read_from(&self, start: u64) -> bool {
        !self.doubtful.get() && self.ended.get().is_some_and(|ended| ended < start)
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.ended.get(), self.doubtful.get(), self.durable.get()) {
            (None, ..) => "in flight",
            (Some(_), true, _) => "doubtful",
            (Some(_), false, true) => "durable",
            (Some(_), false, false) => "answered, not durable",
        };
        write!(f, "{} #{} ({state})", self.what, self.started)
    }
}

/// The contents of one sector of one write.
struct Version {
    write: Rc<Write>,
    data: Rc<Vec<u8>>,
    at: usize,
}

impl Version {
    fn content(&self) -> &[u8] {
        &self.data[self.at..self.at + SECTOR]
    }
}

#[derive(Default)]
struct Sector {
    /// Contents that may still be found.
    versions: Vec<Version>,
    /// Contents that may not be found any more. They are kept for error reports.
    gone: Vec<Version>,
}

/// See the module documentation. All offsets and lengths are whole sectors. Sectors that were never
/// written hold zeroes.
#[derive(Default)]
pub struct Oracle {
    clock: u64,
    sectors: BTreeMap<u64, Sector>,
    in_flight: Vec<Rc<Write>>,
    /// Answered, not doubtful, not durable.
    volatile: Vec<Rc<Write>>,
    /// Start times of the reads and of the flushes in flight.
    reads: Vec<u64>,
    flushes: Vec<u64>,
    flushes_may_fail: bool,
}

impl Oracle {
    pub fn new() -> Self {
        Oracle::default()
    }

    /// Records that a write starts.
    pub fn write_started(&mut self, offset: u64, data: &[u8]) -> WriteToken {
        self.started("write", offset, Rc::new(data.to_vec()), false)
    }

    /// Records that a request to zero starts. It counts as a write of zeroes.
    pub fn zero_started(&mut self, offset: u64, len: u64) -> WriteToken {
        self.started("zero", offset, Rc::new(vec![0; len as usize]), false)
    }

    /// Records that a discard starts. A discarded sector holds zeroes or its old data.
    pub fn discard_started(&mut self, offset: u64, len: u64) -> WriteToken {
        self.started("discard", offset, Rc::new(vec![0; len as usize]), true)
    }

    /// Records that a write, zero or discard was answered. `durable`: the answer promised
    /// durability (FUA).
    pub fn write_answered(&mut self, token: WriteToken, ok: bool, durable: bool) {
        let write = token.0;
        write.ended.set(Some(self.tick()));
        self.in_flight.retain(|w| !Rc::ptr_eq(w, &write));
        let discard = write.what == "discard";
        if ok && durable && !discard {
            write.doubtful.set(false);
            write.durable.set(true);
            self.forget(write.sectors.clone());
        } else if ok && !write.doubtful.get() {
            self.volatile.push(write);
        } else {
            write.doubtful.set(true);
        }
    }

    /// Expects failing flushes. A flush in flight may have failed already, and reads may see its
    /// losses before its answer. So while a flush is in flight, the oracle checks reads as if that
    /// flush had failed.
    pub fn expect_failing_flushes(&mut self) {
        self.flushes_may_fail = true;
    }

    /// Records that a flush starts.
    pub fn flush_started(&mut self) -> FlushToken {
        let now = self.tick();
        self.flushes.push(now);
        FlushToken(now)
    }

    /// Records that a flush was answered.
    pub fn flush_answered(&mut self, token: FlushToken, ok: bool) {
        self.tick();
        self.flushes.retain(|&start| start != token.0);
        if !ok {
            self.volatile.drain(..).for_each(|w| w.doubtful.set(true));
            self.in_flight.iter().for_each(|w| w.doubtful.set(true));
            return;
        }
        let covered = |w: &Rc<Write>| w.ended.get().is_some_and(|ended| ended < token.0);
        let (durable, volatile): (Vec<_>, Vec<_>) = self.volatile.drain(..).partition(covered);
        self.volatile = volatile;
        for write in durable {
            write.durable.set(true);
            self.forget(write.sectors.clone());
        }
    }

    /// Records that a read starts.
    pub fn read_started(&mut self) -> ReadToken {
        let now = self.tick();
        self.reads.push(now);
        ReadToken(now)
    }

    /// Checks the data of a read that started with `token`.
    pub fn check_read(
        &mut self,
        token: ReadToken,
        offset: u64,
        content: &[u8],
    ) -> Result<(), Mismatch> {
        self.reads.retain(|&start| start != token.0);
        let all_at_risk = self.flushes_may_fail && !self.flushes.is_empty();
        let at_risk = |hider: &Write| all_at_risk && !hider.durable.get();
        self.check("as read", offset, content, |hider| {
            hider.hides_for_a_read_from(token.0) && !at_risk(hider)
        })
    }

    /// Records the end of a read with data that mean nothing.
    pub fn read_withdrawn(&mut self, token: ReadToken) {
        self.reads.retain(|&start| start != token.0);
    }

    /// Like [`Oracle::check_read`], for a read without concurrent operations.
    pub fn check_now(&mut self, offset: u64, content: &[u8]) -> Result<(), Mismatch> {
        let token = self.read_started();
        self.check_read(token, offset, content)
    }

    /// Checks that a power cut may leave `content` at `offset`. From now on the oracle expects this
    /// content. After a check of the whole disk, the oracle can be used for further writes and
    /// power cuts.
    pub fn check_after_cut(&mut self, offset: u64, content: &[u8]) -> Result<(), Mismatch> {
        self.allows_after_cut(offset, content)?;
        // The contents that were found are the only possible ones: no earlier operation can change
        // them.
        let data = Rc::new(content.to_vec());
        self.volatile.clear();
        self.in_flight.clear();
        self.reads.clear();
        self.flushes.clear();
        let found = self.new_write("found after a cut", offset, content.len(), false);
        found.ended.set(Some(self.tick()));
        found.durable.set(true);
        for (i, sector) in found.sectors.clone().enumerate() {
            let version = Version { write: found.clone(), data: data.clone(), at: i * SECTOR };
            let known = self.sectors.entry(sector).or_default();
            known.gone.append(&mut known.versions);
            known.versions.push(version);
        }
        Ok(())
    }

    /// Checks one of many possible images as [`Oracle::check_after_cut`] does, but leaves the
    /// oracle unchanged.
    pub fn allows_after_cut(&self, offset: u64, content: &[u8]) -> Result<(), Mismatch> {
        self.check("after the cut", offset, content, |hider| hider.durable.get())
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn new_write(
        &mut self,
        what: &'static str,
        offset: u64,
        len: usize,
        doubtful: bool,
    ) -> Rc<Write> {
        let whole = offset.is_multiple_of(SECTOR as u64) && len.is_multiple_of(SECTOR);
        assert!(whole, "the oracle knows whole sectors, not {offset}+{len}");
        let first = offset / SECTOR as u64;
        Rc::new(Write {
            started: self.tick(),
            what,
            sectors: first..first + (len / SECTOR) as u64,
            ended: Cell::new(None),
            doubtful: Cell::new(doubtful),
            durable: Cell::new(false),
        })
    }

    fn started(
        &mut self,
        what: &'static str,
        offset: u64,
        data: Rc<Vec<u8>>,
        doubtful: bool,
    ) -> WriteToken {
        let write = self.new_write(what, offset, data.len(), doubtful);
        self.in_flight.push(write.clone());
        for (i, sector) in write.sectors.clone().enumerate() {
            let version = Version { write: write.clone(), data: data.clone(), at: i * SECTOR };
            self.sectors.entry(sector).or_insert_with(Sector::blank).versions.push(version);
        }
        WriteToken(write)
    }

    /// Removes the contents that neither a power cut nor a read, not even one in flight, may still
    /// find.
    fn forget(&mut self, sectors: Range<u64>) {
        let oldest_read = self.reads.iter().min().copied().unwrap_or(u64::MAX);
        let hides = |hider: &Write| hider.durable.get() && hider.hides_for_a_read_from(oldest_read);
        for (_, sector) in self.sectors.range_mut(sectors) {
            let hiders: Vec<_> =
                sector.versions.iter().map(|v| v.write.clone()).filter(|w| hides(w)).collect();
            let hidden = |v: &Version| hiders.iter().any(|hider| v.write.surely_before(hider));
            let (gone, left): (Vec<_>, Vec<_>) = sector.versions.drain(..).partition(hidden);
            sector.versions = left;
            sector.gone.extend(gone);
        }
    }

    /// Checks that every sector holds a version that no write for which `hides` returns true hides.
    fn check(
        &self,
        when: &'static str,
        offset: u64,
        content: &[u8],
        hides: impl Fn(&Write) -> bool,
    ) -> Result<(), Mismatch> {
        let blank = Sector::blank();
        for (i, found) in content.chunks(SECTOR).enumerate() {
            let number = offset / SECTOR as u64 + i as u64;
            let sector = self.sectors.get(&number).unwrap_or(&blank);
            let hider = |v: &Version| {
                let mut others = sector.versions.iter().map(|other| &other.write);
                others.find(|other| hides(other) && v.write.surely_before(other))
            };
            if !sector.versions.iter().any(|v| v.content() == found && hider(v).is_none()) {
                let allowed = sector.versions.iter().filter(|v| hider(v).is_none());
                let report = sector.report(found, allowed);
                return Err(Mismatch { sector: number, when, report });
            }
        }
        Ok(())
    }
}

impl Sector {
    /// Returns a sector that was never written.
    fn blank() -> Self {
        let write = Write {
            started: 0,
            what: "initial zeroes",
            sectors: 0..0,
            ended: Cell::new(Some(0)),
            doubtful: Cell::new(false),
            durable: Cell::new(true),
        };
        let version = Version { write: Rc::new(write), data: Rc::new(vec![0; SECTOR]), at: 0 };
        Sector { versions: vec![version], gone: Vec::new() }
    }

    fn report<'a>(&self, found: &[u8], allowed: impl Iterator<Item = &'a Version>) -> String {
        let known = self.versions.iter().chain(&self.gone).find(|v| v.content() == found);
        let origin =
            known.map_or("which was never written".to_string(), |v| format!("stale: {}", v.write));
        let list: Vec<_> =
            allowed.map(|v| format!("{} [{}]", v.write, excerpt(v.content()))).collect();
        format!("found [{}], {origin}; allowed: {}", excerpt(found), list.join(", "))
    }
}

fn excerpt(bytes: &[u8]) -> String {
    if bytes.iter().all(|&b| b == 0) {
        return "zeroes".into();
    }
    let hex: String = bytes.iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("{hex}...")
}

/// Returns data that identify the write (`tag`) and the sector. No two tags and no two sectors have
/// the same contents.
pub fn pattern(tag: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (i, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        let place = offset + (i * SECTOR) as u64;
        let mut rng = Rng::new(tag ^ place.rotate_left(32));
        for (j, word) in sector.chunks_mut(8).enumerate() {
            let value = match j {
                0 => tag,
                1 => place,
                _ => rng.next_u64(),
            };
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
    }
    bytes
}
