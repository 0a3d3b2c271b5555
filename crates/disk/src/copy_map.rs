//! A map of the parts of a disk that a backup has copied. Requests that change other parts wait
//! for it, except discards, which have no effect then.
//!
//! ```text
//!   request ─► its parts are copied ─► goes on
//!              └► waits: its parts are urgent ─► copied, or too late ─► goes on
//!   backup's thread ─► next part: an urgent one, else in order ─► reads it ─► copied
//! ```
//!
//! In: ranges that requests are about to change, from all reactors. Out: the order in which the
//! backup copies; wake-ups.
//!
//! What must hold:
//! - While the map is on the disk and not over, nothing changes a part before it is copied.
//! - A request that waits goes on after a limited time, whatever the backup's thread does: the
//!   request itself ends the map then. The backup fails.
//! - No wake-up is lost. The backup's thread sets the bits of a part first, and then takes the lock
//!   to find the requests that wait for it. A request checks the bits with the lock held before it
//!   waits.
//! - What waits is bounded: one entry for each request, and as many bits as parts.

use std::future::{pending, poll_fn};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use blockyard_ring::Handle;

use crate::dirty::{no_bits, part_bits};

/// Longest time that a request of a guest waits for a backup.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// Zeroes may cover much of a disk. They may wait a second longer for each `PER_SECOND` bytes, and
/// at most `MOST_SECONDS` longer.
const PER_SECOND: u64 = 96 << 20;
const MOST_SECONDS: u64 = 10;
/// Longest time in seconds that anything may hold a request of a ublk device of a user without
/// privileges (`MAX_HOLD` in crates/export/src/ublk/mod.rs). The driver kills the server of such a
/// device if a request takes 30 s.
const MAX_HOLD: u64 = 20;
const _: () = assert!(LIMIT.as_secs() + MOST_SECONDS < MAX_HOLD);
/// Number of bytes that are copied at a time, and that one request makes urgent at a time. Long
/// zeroes must not keep many small writes waiting.
const RUN: u64 = 1 << 20;
/// A part has at most `RUN` bytes, because a write waits for a whole part. On a disk with more
/// parts than this, parts are larger: 2^26 bits, of which the map has two, are 8 MiB.
const MOST_PARTS: u64 = 1 << 26;

/// A map of copied parts; see the module documentation.
#[derive(Debug)]
pub struct CopyMap {
    /// log2 of a part's size in bytes.
    bits: u32,
    size: u64,
    target: PathBuf,
    limit: Duration,
    /// A bit for each part that was copied.
    copied: Vec<AtomicU64>,
    /// Whether nothing waits for the map any more.
    is_over: AtomicBool,
    plan: Mutex<Plan>,
}

/// What is copied next.
#[derive(Debug)]
struct Plan {
    /// A bit for each part that [`CopyMap::next_run`] has returned.
    begun: Vec<u64>,
    /// All parts before this one have begun.
    next: u64,
    /// In the order of their arrival.
    waiting: Vec<Waiting>,
    tickets: u64,
    late: Option<LateCopy>,
}

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    ticket: u64,
    /// The parts that it waits for first.
    parts: Range<u64>,
    waker: Waker,
}

/// A request had to wait too long for a backup, which has failed therefore.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "a guest's request has waited {} s for the part at offset {offset} to be copied into {}: the \
     backup has ended, and the guest goes on",
    .waited.as_secs_f64(),
    .target.display()
)]
pub struct LateCopy {
    pub target: PathBuf,
    pub offset: u64,
    pub waited: Duration,
}

/// Parts to copy.
#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    parts: Range<u64>,
    /// The same in bytes.
    pub range: Range<u64>,
    /// Whether a request waits for it.
    pub is_urgent: bool,
}

impl Run {
    /// Returns whether to ask the image first which of the range is known to read as zeroes. A
    /// request waits for an urgent run: if the run is short, reading it takes less time.
    pub fn may_skip(&self) -> bool {
        !self.is_urgent || self.range.end - self.range.start >= RUN
    }
}

/// The entry of a request that may wait. Dropping it removes the entry.
struct Ticket<'a>(&'a CopyMap, u64);

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.0.plan().waiting.retain(|waiting| waiting.ticket != self.1);
    }
}

/// Returns log2 of the size in bytes of the parts of a disk's copy.
fn copy_bits(size: u64) -> u32 {
    let least = size.div_ceil(MOST_PARTS).next_power_of_two().trailing_zeros();
    part_bits(size).min(RUN.trailing_zeros()).max(least)
}

/// Returns the first of `parts` without its bit. `word` returns 64 bits by their index.
fn first_without(parts: Range<u64>, word: impl Fn(usize) -> u64) -> Option<u64> {
    let mut part = parts.start;
    while part < parts.end {
        let (index, inside) = (part / 64, part % 64);
        let without = !word(index as usize) & (u64::MAX << inside);
        if without != 0 {
            let found = index * 64 + u64::from(without.trailing_zeros());
            return Some(found).filter(|found| *found < parts.end);
        }
        part = (index + 1) * 64;
    }
    None
}

impl CopyMap {
    /// Returns the map of a disk of `size` bytes. `target` appears in the error of a request that
    /// waits longer than `limit`.
    pub fn new(size: u64, target: &Path, limit: Duration) -> Self {
        let bits = copy_bits(size);
        let parts = size.div_ceil(1 << bits);
        let plan = Plan {
            begun: vec![0; parts.div_ceil(64) as usize],
            next: 0,
            waiting: Vec::new(),
            tickets: 0,
            late: None,
        };
        CopyMap {
            bits,
            size,
            target: target.into(),
            limit,
            copied: no_bits(parts),
            is_over: AtomicBool::new(false),
            plan: Mutex::new(plan),
        }
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of requests that wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.plan().waiting.len()
    }

    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn parts(&self) -> u64 {
        self.size.div_ceil(1 << self.bits)
    }

    /// Returns the parts that a range touches.
    fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return 0..0;
        }
        offset >> self.bits..((end - 1) >> self.bits) + 1
    }

    fn first_missing(&self, parts: Range<u64>) -> Option<u64> {
        if self.is_over.load(Ordering::Acquire) {
            return None;
        }
        first_without(parts, |word| self.copied[word].load(Ordering::Acquire))
    }

    /// Returns whether a request may change the range now.
    pub fn allows(&self, offset: u64, len: u64) -> bool {
        self.first_missing(self.touched(offset, len)).is_none()
    }

    /// Waits until a request may change the range. Ends the map if that takes too long. Without
    /// `handle` there is no clock, and no limit.
    pub async fn wait(&self, handle: Option<&Handle>, offset: u64, len: u64) {
        let (parts, ticket) = (self.touched(offset, len), self.ticket());
        let limit = self.limit + Duration::from_secs((len / PER_SECOND).min(MOST_SECONDS));
        let mut late = pin!(async {
            match handle {
                Some(handle) => handle.sleep(limit).await,
                None => pending().await,
            }
        });
        poll_fn(|cx| {
            if !self.waits(&parts, &ticket, cx.waker()) {
                return Poll::Ready(());
            }
            if late.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.give_up(&parts, limit);
            Poll::Ready(())
        })
        .await
    }

    fn ticket(&self) -> Ticket<'_> {
        let mut plan = self.plan();
        plan.tickets += 1;
        Ticket(self, plan.tickets)
    }

    /// Returns whether a request has to wait. If so, makes its first parts that are not copied
    /// urgent, and lets `waker` be woken when these are.
    fn waits(&self, parts: &Range<u64>, ticket: &Ticket<'_>, waker: &Waker) -> bool {
        let mut plan = self.plan();
        let Some(first) = self.first_missing(parts.clone()) else { return false };
        let parts = first..parts.end.min(first + self.per_run());
        match plan.waiting.iter_mut().find(|waiting| waiting.ticket == ticket.1) {
            Some(waiting) => {
                waiting.parts = parts;
                waiting.waker.clone_from(waker);
            }
            None => {
                plan.waiting.push(Waiting { ticket: ticket.1, parts, waker: waker.clone() });
            }
        }
        true
    }

    /// Ends the map because a request has waited for `parts` too long.
    #[cold]
    fn give_up(&self, parts: &Range<u64>, waited: Duration) {
        let mut plan = self.plan();
        if let Some(part) = self.first_missing(parts.clone()) {
            let (target, offset) = (self.target.clone(), part << self.bits);
            plan.late = Some(LateCopy { target, offset, waited });
            self.end_with(plan);
        }
    }

    /// Ends the map: all requests go on.
    pub fn end(&self) {
        self.end_with(self.plan());
    }

    fn end_with(&self, mut plan: MutexGuard<'_, Plan>) {
        self.is_over.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut plan.waiting);
        drop(plan);
        waiting.into_iter().for_each(|waiting| waiting.waker.wake());
    }

    /// Returns an error if a request has waited too long. Then it may have changed a part before
    /// the part was copied.
    pub fn check(&self) -> Result<(), LateCopy> {
        self.plan().late.clone().map_or(Ok(()), Err)
    }

    fn per_run(&self) -> u64 {
        (RUN >> self.bits).max(1)
    }

    /// Returns what to copy next: parts for which a request waits, or the next ones in order. None:
    /// all parts have begun, or the map is over. Each part is returned once.
    pub fn next_run(&self) -> Option<Run> {
        let mut plan = self.plan();
        if self.is_over.load(Ordering::Acquire) {
            return None;
        }
        let (all, per_run) = (self.parts(), self.per_run());
        let urgent = plan.waiting.iter().find_map(|waiting| {
            let first = plan.first_left(waiting.parts.clone())?;
            Some((first, waiting.parts.end))
        });
        let (first, end) = match urgent {
            Some(urgent) => urgent,
            None => {
                plan.next = plan.first_left(plan.next..all).unwrap_or(all);
                // A run ends at a multiple of its length.
                (plan.next, ((plan.next / per_run + 1) * per_run).min(all))
            }
        };
        let parts = plan.begin(first..end);
        let range = parts.start << self.bits..(parts.end << self.bits).min(self.size);
        (!parts.is_empty()).then_some(Run { parts, range, is_urgent: urgent.is_some() })
    }

    /// Notes that parts are copied: requests may change them.
    pub fn copied(&self, run: &Run) {
        for part in run.parts.clone() {
            self.copied[(part / 64) as usize].fetch_or(1 << (part % 64), Ordering::Release);
        }
        let mut plan = self.plan();
        let is_copied = |waiting: &mut Waiting| self.first_missing(waiting.parts.clone()).is_none();
        let ready: Vec<_> = plan.waiting.extract_if(.., is_copied).collect();
        drop(plan);
        ready.into_iter().for_each(|waiting| waiting.waker.wake());
    }
}

impl Plan {
    fn first_left(&self, parts: Range<u64>) -> Option<u64> {
        first_without(parts, |word| self.begun[word])
    }

    /// Begins the first of `parts`, and those that follow up to the first one that has begun
    /// before. Returns them.
    fn begin(&mut self, parts: Range<u64>) -> Range<u64> {
        let mut end = parts.start;
        while end < parts.end {
            let (word, bit) = (&mut self.begun[(end / 64) as usize], 1 << (end % 64));
            if *word & bit != 0 {
                break;
            }
            *word |= bit;
            end += 1;
        }
        parts.start..end
    }
}

#[cfg(test)]
mod tests;
