//! `SimDisk`: operations in flight on a simulated disk, their latency and faults, and the power
//! cut.
//!
//! In: calls of `Storage`. Out: answers after a seeded number of steps.
//!
//! What must hold: polling a pending operation advances the disk by one step and requests another
//! poll, so the disk advances while a task waits. Without power nothing more reaches the disk, and
//! nothing is answered.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use blockyard_ring::Segments;

use super::media::Media;
use super::trace::{OpKind, Phase, Trace};
use super::{Fault, Power, Rng, SimImage};
use crate::Storage;

/// How a simulated disk behaves.
#[derive(Clone, Debug)]
pub struct SimConfig {
    pub seed: u64,
    pub latency: Latency,
    /// Whether discarded sectors read as zeroes. If not, some of them keep their data.
    pub discard_zeroes: bool,
    /// Whether space can be allocated.
    pub allocates: bool,
    /// The power supply. Disks with clones of the same one lose power together.
    pub power: Power,
}

impl SimConfig {
    pub fn new(seed: u64) -> Self {
        SimConfig {
            seed,
            latency: Latency::default(),
            discard_zeroes: true,
            allocates: false,
            power: Power::on(),
        }
    }

    /// Cuts the power after `events` events; see [`Power`].
    pub fn cut_after(self, events: u64) -> Self {
        SimConfig { power: Power::cut_after(events), ..self }
    }
}

/// Longest latency of each kind of operation, in steps. An operation takes from one step up to
/// this, and one in sixteen takes eight times as long.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub read: u64,
    pub write: u64,
    pub sync: u64,
    /// Discard, zero, allocate and set_len.
    pub other: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Latency { read: 4, write: 6, sync: 10, other: 6 }
    }
}

/// A simulated disk. Clones are the same disk. See the module documentation of [`crate::sim`].
#[derive(Clone)]
pub struct SimDisk(Rc<RefCell<Inner>>);

impl SimDisk {
    /// Returns a disk with power that holds `image`.
    pub fn new(image: SimImage, config: SimConfig) -> Self {
        SimDisk(Rc::new(RefCell::new(Inner {
            media: Media::new(image),
            rng: Rng::new(config.seed),
            config,
            step: 0,
            next_op: 0,
            in_flight: Vec::new(),
            answered: BTreeMap::new(),
            faults: Vec::new(),
            failures: 0,
            trace: Vec::new(),
            stranded: Vec::new(),
            given_up: false,
        })))
    }

    /// Cuts the power if it is on, and returns one of the images that the power cut may leave.
    /// Another call returns another possible image.
    pub fn power_cut(&self) -> SimImage {
        let mut inner = self.0.borrow_mut();
        inner.config.power.cut();
        inner.crash()
    }

    /// Ends the process that uses the disk, and returns an image that the death may leave: all that
    /// has reached the disk, and of each operation in flight all, nothing or some sectors. For the
    /// dead process the power is off. Another call returns another possible image.
    pub fn process_death(&self) -> SimImage {
        let mut inner = self.0.borrow_mut();
        inner.config.power.cut();
        inner.die()
    }

    /// Fails all operations that the power cut left unanswered, so that tasks that must not be
    /// dropped can end. The oracle must not see these answers.
    pub fn give_up(&self) {
        let mut inner = self.0.borrow_mut();
        assert!(inner.config.power.is_off(), "the power is on");
        inner.given_up = true;
        let stranded = std::mem::take(&mut inner.stranded);
        drop(inner);
        stranded.into_iter().for_each(Waker::wake);
    }

    pub fn is_off(&self) -> bool {
        self.0.borrow().config.power.is_off()
    }

    /// Returns the number of events so far, of all disks on this power supply.
    pub fn events(&self) -> u64 {
        self.0.borrow().config.power.events()
    }

    /// Adds a fault. If several match, the first added one applies.
    pub fn fail(&self, fault: Fault) {
        self.0.borrow_mut().faults.push(fault);
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.0.borrow_mut().faults.clear();
    }

    /// Returns the number of operations that faults have failed so far.
    pub fn failures(&self) -> u64 {
        self.0.borrow().failures
    }

    /// Returns the history of the disk.
    pub fn trace(&self) -> Vec<Trace> {
        self.0.borrow().trace.clone()
    }

    /// Returns what a read of the whole disk would return now.
    pub fn contents(&self) -> Vec<u8> {
        let inner = self.0.borrow();
        let mut bytes = vec![0; inner.media.len() as usize];
        inner.media.read(0, &mut bytes);
        bytes
    }

    async fn run(&self, effect: Effect, segments: Segments) -> (Segments, io::Result<usize>) {
        let started = self.0.borrow_mut().start(effect, segments);
        match started {
            Ok(op) => Answer { disk: self.0.clone(), op }.await,
            Err((segments, e)) => (segments, Err(e)),
        }
    }
}

impl Storage for SimDisk {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let len = segments.len() as u64;
        self.run(Effect::Read { offset, len }, segments).await
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        // The disk copies the caller's memory here, once.
        let mut data = vec![0; segments.len()];
        segments.copy_out(0, &mut data);
        self.run(Effect::Write { offset, data: Rc::new(data), durable }, segments).await
    }

    async fn sync(&self) -> io::Result<()> {
        // `start` sets the fields.
        let effect = Effect::Sync { uncovered: Vec::new(), journal_end: 0 };
        self.run(effect, Segments::default()).await.1.map(|_| ())
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.run(Effect::Discard { offset, len }, Segments::default()).await.1.map(|_| ())
    }

    async fn zero(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.run(Effect::Zero { offset, len }, Segments::default()).await.1.map(|_| ())
    }

    async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.0.borrow().config.allocates {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let end = offset + len;
        self.run(Effect::Reach { end }, Segments::default()).await.1.map(|_| ())
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.run(Effect::SetLen { len }, Segments::default()).await.1.map(|_| ())
    }

    async fn len(&self) -> io::Result<u64> {
        let inner = self.0.borrow();
        if inner.config.power.is_off() { Err(no_power()) } else { Ok(inner.media.len()) }
    }
}

fn no_power() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the simulated disk has no power")
}

/// The effect of an operation on the disk.
enum Effect {
    Read {
        offset: u64,
        len: u64,
    },
    Write {
        offset: u64,
        data: Rc<Vec<u8>>,
        durable: bool,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    Discard {
        offset: u64,
        len: u64,
    },
    SetLen {
        len: u64,
    },
    /// Extends the file to `end` if it is shorter.
    Reach {
        end: u64,
    },
    /// `uncovered`: the operations in flight when it began.
    Sync {
        uncovered: Vec<u64>,
        journal_end: u64,
    },
}

impl Effect {
    fn describe(&self) -> (OpKind, u64, u64) {
        match self {
            Effect::Read { offset, len } => (OpKind::Read, *offset, *len),
            Effect::Write { offset, data, .. } => (OpKind::Write, *offset, data.len() as u64),
            Effect::Zero { offset, len } => (OpKind::Zero, *offset, *len),
            Effect::Discard { offset, len } => (OpKind::Discard, *offset, *len),
            Effect::SetLen { len: end } | Effect::Reach { end } => (OpKind::SetLen, 0, *end),
            Effect::Sync { .. } => (OpKind::Sync, 0, 0),
        }
    }
}

struct InFlight {
    op: u64,
    effect: Effect,
    segments: Segments,
    /// Sectors that have not reached the disk yet.
    sectors: Vec<u64>,
    /// Step at which some of the sectors reach the disk before the answer.
    early: Option<u64>,
    /// Step at which the operation is answered. The second number breaks ties.
    due: (u64, u64),
    fault: Option<io::Error>,
    /// Whether the caller has stopped waiting.
    abandoned: bool,
}

struct Inner {
    media: Media,
    rng: Rng,
    config: SimConfig,
    step: u64,
    next_op: u64,
    in_flight: Vec<InFlight>,
    answered: BTreeMap<u64, (Segments, io::Result<usize>)>,
    faults: Vec<Fault>,
    failures: u64,
    trace: Vec<Trace>,
    /// Tasks that wait for an answer that the power cut prevents, and whether they get errors
    /// instead of waiting for ever.
    stranded: Vec<Waker>,
    given_up: bool,
}

impl Inner {
    /// Starts an operation and returns its number. If the power is cut at this event, the operation
    /// has a number but is never answered.
    fn start(
        &mut self,
        mut effect: Effect,
        segments: Segments,
    ) -> Result<u64, (Segments, io::Error)> {
        let (kind, offset, len) = effect.describe();
        if self.config.power.is_off() {
            return Err((segments, no_power()));
        }
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err((segments, io::ErrorKind::InvalidInput.into()));
        }
        let op = self.next_op;
        self.next_op += 1;
        if kind != OpKind::Read && !self.config.power.event() {
            return Ok(op);
        }
        let sectors = self.sectors_of(&effect);
        if let Effect::Sync { uncovered, journal_end } = &mut effect {
            uncovered.extend(self.in_flight.iter().map(|o| o.op));
            *journal_end = self.media.journal_end();
        }
        let time = self.latency(kind);
        let early = self.rng.one_in(2).then(|| self.step + self.rng.between(1, time));
        // The poll that starts an operation takes one step, so that every task waits at least once.
        let due = (self.step + 1 + time, self.rng.next_u64());
        let fault = self.faults.iter_mut().find_map(|f| f.strikes(kind, offset, len));
        self.trace.push(Trace { step: self.step, op, kind, phase: Phase::Started, offset, len });
        self.in_flight.push(InFlight {
            op,
            effect,
            segments,
            sectors,
            early,
            due,
            fault,
            abandoned: false,
        });
        Ok(op)
    }

    /// Returns the sectors that an operation changes.
    fn sectors_of(&mut self, effect: &Effect) -> Vec<u64> {
        match effect {
            Effect::Write { offset, data, .. } if !data.is_empty() => {
                self.media.sectors(*offset, data.len() as u64).collect()
            }
            Effect::Zero { offset, len } if *len > 0 => self.media.sectors_in_use(*offset, *len),
            Effect::Discard { offset, len } if *len > 0 => {
                let mut sectors = self.media.sectors_in_use(*offset, *len);
                sectors.retain(|_| self.config.discard_zeroes || self.rng.one_in(2));
                sectors
            }
            _ => Vec::new(),
        }
    }

    fn latency(&mut self, kind: OpKind) -> u64 {
        let longest = match kind {
            OpKind::Read => self.config.latency.read,
            OpKind::Write => self.config.latency.write,
            OpKind::Sync => self.config.latency.sync,
            OpKind::Discard | OpKind::Zero | OpKind::SetLen => self.config.latency.other,
        };
        let time = self.rng.between(1, longest.max(1));
        if self.rng.one_in(16) { time * 8 } else { time }
    }

    /// Advances the disk by one step: early sectors reach the disk, and operations that are due are
    /// answered.
    fn advance(&mut self) {
        if self.config.power.is_off() {
            return;
        }
        self.step += 1;
        let (media, rng, step) = (&mut self.media, &mut self.rng, self.step);
        for op in self
            .in_flight
            .iter_mut()
            .filter(|o| o.fault.is_none() && o.early.is_some_and(|at| at <= step))
        {
            op.early = None;
            op.land_some(media, rng);
        }
        while let Some(next) = self.next_due() {
            // The power cut comes before the answer, so the operation is still in flight.
            if self.in_flight[next].kind() != OpKind::Read && !self.config.power.event() {
                return;
            }
            let op = self.in_flight.swap_remove(next);
            self.answer(op);
        }
    }

    fn next_due(&self) -> Option<usize> {
        let due = (0..self.in_flight.len()).filter(|&i| self.in_flight[i].due.0 <= self.step);
        due.min_by_key(|&i| self.in_flight[i].due)
    }

    fn answer(&mut self, mut op: InFlight) {
        let result = match op.fault.take() {
            None => Ok(op.finish(&mut self.media, &mut self.rng)),
            Some(e) => {
                self.failures += 1;
                op.finish_badly(&e, &mut self.media, &mut self.rng);
                Err(e)
            }
        };
        let (kind, offset, len) = op.effect.describe();
        let phase = if result.is_ok() { Phase::Answered } else { Phase::Failed };
        self.trace.push(Trace { step: self.step, op: op.op, kind, phase, offset, len });
        if !op.abandoned {
            self.answered.insert(op.op, (op.segments, result));
        }
    }

    fn abandon(&mut self, op: u64) {
        self.answered.remove(&op);
        if let Some(op) = self.in_flight.iter_mut().find(|o| o.op == op) {
            op.abandoned = true;
        }
    }

    /// Returns a possible image after a power cut now. All operations in flight are applied to a
    /// copy in random order, and the crash keeps a random part.
    fn crash(&mut self) -> SimImage {
        let mut media = self.media.clone();
        let mut order: Vec<&InFlight> = self.in_flight.iter().collect();
        self.rng.shuffle(&mut order);
        for op in order {
            op.sectors.iter().for_each(|&sector| op.land(&mut media, sector));
            op.set_len(&mut media);
        }
        media.crash(&mut self.rng)
    }
}

impl Inner {
    /// Returns a possible image after the death of the process now.
    fn die(&mut self) -> SimImage {
        let mut media = self.media.clone();
        let mut order: Vec<&InFlight> = self.in_flight.iter().collect();
        self.rng.shuffle(&mut order);
        for op in order {
            let fate = self.rng.below(3);
            for &sector in &op.sectors {
                if fate == 0 || fate == 1 && self.rng.one_in(2) {
                    op.land(&mut media, sector);
                }
            }
            if fate == 0 {
                op.set_len(&mut media);
            }
        }
        media.visible_image()
    }
}

impl InFlight {
    fn kind(&self) -> OpKind {
        self.effect.describe().0
    }

    fn land(&self, media: &mut Media, sector: u64) {
        match &self.effect {
            Effect::Write { offset, data, .. } => media.write(self.op, sector, *offset, data),
            Effect::Zero { offset, len } | Effect::Discard { offset, len } => {
                media.zero(self.op, sector, *offset, *len)
            }
            Effect::Read { .. }
            | Effect::SetLen { .. }
            | Effect::Reach { .. }
            | Effect::Sync { .. } => {}
        }
    }

    /// Changes the length of the file, if the operation does that.
    fn set_len(&self, media: &mut Media) {
        match self.effect {
            Effect::SetLen { len } => media.set_len(self.op, len),
            Effect::Reach { end } if end > media.len() => media.set_len(self.op, end),
            _ => {}
        }
    }

    fn land_some(&mut self, media: &mut Media, rng: &mut Rng) {
        let sectors = std::mem::take(&mut self.sectors);
        let (now, later): (Vec<_>, Vec<_>) = sectors.into_iter().partition(|_| rng.one_in(2));
        self.sectors = later;
        now.into_iter().for_each(|sector| self.land(media, sector));
    }

    /// Applies the rest of the operation. Returns the number of bytes transferred.
    fn finish(&mut self, media: &mut Media, rng: &mut Rng) -> usize {
        for sector in std::mem::take(&mut self.sectors) {
            self.land(media, sector);
        }
        let op = self.op;
        match &self.effect {
            Effect::Read { offset, len } => {
                let mut bytes = vec![0; media.len().saturating_sub(*offset).min(*len) as usize];
                media.read(*offset, &mut bytes);
                self.segments.copy_in(0, &bytes);
                return bytes.len();
            }
            Effect::Write { offset, data, durable } => {
                if *durable && !data.is_empty() {
                    media.write_through(op, *offset, data.len() as u64);
                }
                return data.len();
            }
            Effect::SetLen { .. } | Effect::Reach { .. } => self.set_len(media),
            Effect::Sync { uncovered, journal_end } => {
                media.sync(|other| other < op && !uncovered.contains(&other), *journal_end, rng)
            }
            Effect::Zero { .. } | Effect::Discard { .. } => {}
        }
        0
    }

    /// Applies the part of a failed operation that reaches the disk although the operation fails.
    fn finish_badly(&mut self, error: &io::Error, media: &mut Media, rng: &mut Rng) {
        if error.kind() != io::ErrorKind::Unsupported {
            self.land_some(media, rng);
        }
        if let Effect::Sync { uncovered, journal_end } = &self.effect {
            let op = self.op;
            media.sync_failed(|other| other < op && !uncovered.contains(&other), *journal_end, rng);
        }
    }
}

/// Waits for the answer of an operation. If this is dropped, the operation continues.
struct Answer {
    disk: Rc<RefCell<Inner>>,
    op: u64,
}

impl Future for Answer {
    type Output = (Segments, io::Result<usize>);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut inner = self.disk.borrow_mut();
        if !inner.answered.contains_key(&self.op) {
            inner.advance();
        }
        if let Some(answer) = inner.answered.remove(&self.op) {
            return Poll::Ready(answer);
        }
        if inner.given_up {
            let left = inner.in_flight.iter_mut().find(|o| o.op == self.op);
            let segments = left.map(|o| std::mem::take(&mut o.segments)).unwrap_or_default();
            return Poll::Ready((segments, Err(no_power())));
        }
        if inner.config.power.is_off() {
            inner.stranded.push(cx.waker().clone());
            return Poll::Pending;
        }
        drop(inner);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.disk.borrow_mut().abandon(self.op);
    }
}
