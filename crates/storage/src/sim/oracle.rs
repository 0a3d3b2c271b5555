//! The oracle: what a disk may hold, now and after a power cut. It judges any disk, by its answers
//! alone.
//!
//! In: when writes, flushes and reads started and were answered. Out: whether what was read is one
//! of the contents allowed. What must hold: it is told of a start before the disk is, and of an
//! answer after the disk gave it; so what it takes to be in order surely was.
//!
//! The rules, sector by sector. A write is *surely before* another when it was answered before the
//! other started.
//! - A read may see any write, except those surely before a write that was answered before the read
//!   started.
//! - A cut may leave any write, except those surely before a durable write.
//! - A write is durable when it was answered as such, or answered before a flush started that was
//!   answered Ok.
//! - A failed write, a discard, and all that was written and not durable when a flush failed, are
//!   *doubtful*: they may be there or not, and neither hide what was before them nor become
//!   durable.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use super::{Rng, SECTOR};

/// A content that is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} (offset {}) {when}: {report}", sector * SECTOR as u64)]
pub struct Mismatch {
    pub sector: u64,
    when: &'static str,
    report: String,
}

/// A write that has started; given back when it is answered, kept (or dropped) when it never is.
#[must_use = "an answered write is told to the oracle with its token"]
pub struct WriteToken(Rc<Write>);

#[must_use = "an answered flush is told to the oracle with its token"]
pub struct FlushToken(u64);

#[must_use = "an answered read is checked with its token"]
pub struct ReadToken(u64);

struct Write {
    /// Its number and when it started, in one: the oracle's clock ticks at every call.
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

/// One write's content of one sector.
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
    /// What may still be found.
    versions: Vec<Version>,
    /// What may not: only to say what was found instead.
    gone: Vec<Version>,
}

/// See the module's page. All offsets and lengths are whole sectors; what was never written is
/// zeroes.
#[derive(Default)]
pub struct Oracle {
    clock: u64,
    sectors: BTreeMap<u64, Sector>,
    in_flight: Vec<Rc<Write>>,
    /// Answered, not doubtful, not durable.
    volatile: Vec<Rc<Write>>,
    /// When the reads not yet answered started, and the flushes.
    reads: Vec<u64>,
    flushes: Vec<u64>,
    flushes_may_fail: bool,
}

impl Oracle {
    pub fn new() -> Self {
        Oracle::default()
    }

    pub fn write_started(&mut self, offset: u64, data: &[u8]) -> WriteToken {
        self.started("write", offset, Rc::new(data.to_vec()), false)
    }

    /// A request to zero is a write of zeroes.
    pub fn zero_started(&mut self, offset: u64, len: u64) -> WriteToken {
        self.started("zero", offset, Rc::new(vec![0; len as usize]), false)
    }

    /// A discarded sector holds zeroes, or what it held.
    pub fn discard_started(&mut self, offset: u64, len: u64) -> WriteToken {
        self.started("discard", offset, Rc::new(vec![0; len as usize]), true)
    }

    /// A write, zero or discard was answered; `durable`: the answer promised so (FUA).
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

    /// Flushes will be made to fail. One in flight may have failed already, and a read have seen
    /// what it lost, before anybody was told: so while one is in flight, reads are judged as if it
    /// had.
    pub fn expect_failing_flushes(&mut self) {
        self.flushes_may_fail = true;
    }

    pub fn flush_started(&mut self) -> FlushToken {
        let now = self.tick();
        self.flushes.push(now);
        FlushToken(now)
    }

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

    pub fn read_started(&mut self) -> ReadToken {
        let now = self.tick();
        self.reads.push(now);
        ReadToken(now)
    }

    /// A read that started with `token` was answered with `content`.
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

    /// As [`Oracle::check_read`], for a read that began and ended while nothing else went on.
    pub fn check_now(&mut self, offset: u64, content: &[u8]) -> Result<(), Mismatch> {
        let token = self.read_started();
        self.check_read(token, offset, content)
    }

    /// The power was cut, and now the disk holds `content` at `offset`. Told of all of a disk, it
    /// can go on from there.
    pub fn check_after_cut(&mut self, offset: u64, content: &[u8]) -> Result<(), Mismatch> {
        self.allows_after_cut(offset, content)?;
        // What was found is what there is: nothing from before the cut lands any more.
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

    /// As [`Oracle::check_after_cut`], for one of the many images a cut may leave: nothing is made
    /// of it.
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

    /// Takes out what neither a cut nor any read, not even one already started, may still find.
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

    /// Every sector must hold a version that no write for which `hides` is true hides.
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
    /// Zeroes since ever.
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
            known.map_or("which nobody wrote".to_string(), |v| format!("stale: {}", v.write));
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

/// Data that tells which write it is of and which place: no two tags and no two sectors share a
/// content.
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
