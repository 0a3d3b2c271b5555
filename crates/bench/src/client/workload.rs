//! Chooses the next operation: patterns, mixes, flushes, and the rate.
//!
//! In: a seed, a range of blocks. Out: operations, the same for the same seed. Each queue has
//! its own workload. Block numbers count from the start of the disk (byte offset / block size).

use clap::ValueEnum;
use serde::Serialize;

/// A random number generator (splitmix64). It is not a library's, because the sequence must not
/// change with a library's version.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = Random(seed ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03));
        random.word();
        random
    }

    #[inline]
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number of 0..bound, evenly distributed.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(bound)) >> 64) as u64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Reads, one block after the other.
    Read,
    /// Writes, one block after the other.
    Write,
    /// Random reads and writes, mixed.
    Randrw,
    /// Reads and writes, mixed, one block after the other.
    Rw,
    /// Random discards.
    Randtrim,
}

impl Pattern {
    pub fn is_random(self) -> bool {
        !matches!(self, Pattern::Read | Pattern::Write | Pattern::Rw)
    }

    /// Returns whether the operations change the disk.
    pub fn writes(self) -> bool {
        !matches!(self, Pattern::Randread | Pattern::Read)
    }

    /// Returns the percentage of reads. `mix`: the percentage for the mixed patterns.
    pub fn read_share(self, mix: u8) -> u8 {
        match self {
            Pattern::Randread | Pattern::Read => 100,
            Pattern::Randwrite | Pattern::Write | Pattern::Randtrim => 0,
            Pattern::Randrw | Pattern::Rw => mix,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Read,
    Write,
    Flush,
    Discard,
}

impl RequestKind {
    /// Returns whether the operation transfers data.
    #[inline]
    pub fn moves(self) -> bool {
        matches!(self, RequestKind::Read | RequestKind::Write)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub kind: RequestKind,
    pub block: u64,
    /// Number of blocks.
    pub count: u32,
}

impl Operation {
    pub fn one(kind: RequestKind, block: u64) -> Self {
        Operation { kind, block, count: 1 }
    }
}

/// Operations of several sizes: number of blocks, and percentage of operations.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Split(pub Vec<(u32, u8)>);

impl Split {
    #[inline]
    fn draw(&self, random: &mut Random) -> u32 {
        if self.0.is_empty() {
            return 1;
        }
        let mut left = random.below(100) as u8;
        for (count, share) in &self.0 {
            match left.checked_sub(*share) {
                Some(rest) => left = rest,
                None => return *count,
            }
        }
        1
    }
}

/// The operations of a queue.
#[derive(Clone, Debug)]
pub struct Mix {
    pub pattern: Pattern,
    /// Reads in a hundred operations.
    pub read_share: u8,
    /// Number of writes between flushes. 0: no flushes.
    pub flush_every: u64,
    /// First block of the queue's range, and the number of blocks.
    pub first: u64,
    pub blocks: u64,
    /// Sizes of the operations. Empty: each operation has one block.
    pub split: Split,
}

pub struct Generator {
    mix: Mix,
    random: Random,
    cursor: u64,
    unflushed: u64,
}

impl Generator {
    pub fn new(mix: Mix, seed: u64, queue: u16) -> Self {
        Generator { mix, random: Random::new(seed, queue.into()), cursor: 0, unflushed: 0 }
    }

    #[inline]
    pub fn draw(&mut self) -> Operation {
        let mix = &self.mix;
        if mix.flush_every > 0 && self.unflushed >= mix.flush_every {
            self.unflushed = 0;
            return Operation::one(RequestKind::Flush, mix.first);
        }
        let kind = match mix.read_share {
            _ if mix.pattern == Pattern::Randtrim => RequestKind::Discard,
            100 => RequestKind::Read,
            0 => RequestKind::Write,
            share if self.random.below(100) < u64::from(share) => RequestKind::Read,
            _ => RequestKind::Write,
        };
        self.unflushed += u64::from(kind == RequestKind::Write);
        let count = mix.split.draw(&mut self.random);
        let len = u64::from(count);
        let at = if mix.pattern.is_random() {
            self.random.below(mix.blocks / len) * len
        } else {
            let at = if self.cursor + len > mix.blocks { 0 } else { self.cursor };
            self.cursor = at + len;
            at
        };
        Operation { kind, block: mix.first + at, count }
    }
}

/// Spreads operations evenly over time. Times are in nanoseconds.
pub struct Pacer {
    interval: f64,
    due: f64,
}

impl Pacer {
    /// Maximum delay in nanoseconds that the pacer makes up for after a stall.
    const BACKLOG: f64 = 100e6;

    pub fn new(per_second: f64) -> Self {
        Pacer { interval: 1e9 / per_second, due: 0.0 }
    }

    /// Returns the time of the next operation. None: it starts now, and counts as started.
    pub fn wait(&mut self, now: u64) -> Option<u64> {
        let now = now as f64;
        if self.due > now {
            return Some(self.due as u64);
        }
        self.due = self.due.max(now - Self::BACKLOG) + self.interval;
        None
    }
}

/// Work and pauses of a load, in turn. Times are in nanoseconds since the load began, with work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    pub work: u64,
    pub pause: u64,
}

impl Pauses {
    fn period(&self) -> u64 {
        self.work + self.pause
    }

    /// Returns the time until `now` without the pauses.
    pub fn worked(&self, now: u64) -> u64 {
        now / self.period() * self.work + (now % self.period()).min(self.work)
    }

    /// Returns when the pause ends. `None`: the load works at `now`.
    pub fn resumes(&self, now: u64) -> Option<u64> {
        (now % self.period() >= self.work).then(|| (now / self.period() + 1) * self.period())
    }

    /// Returns the part of the time in which the load works.
    pub fn part(&self) -> f64 {
        self.work as f64 / self.period() as f64
    }

    /// Returns when the n-th work ends.
    pub fn end_of(&self, n: u64) -> u64 {
        n * self.period() - self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix(pattern: Pattern) -> Mix {
        Mix {
            pattern,
            read_share: pattern.read_share(70),
            flush_every: 0,
            first: 100,
            blocks: 50,
            split: Split::default(),
        }
    }

    fn some(mix: &Mix, seed: u64, queue: u16) -> Vec<Operation> {
        let mut workload = Generator::new(mix.clone(), seed, queue);
        (0..1000).map(|_| workload.draw()).collect()
    }

    #[test]
    fn the_seed_decides_and_queues_differ() {
        let mix = mix(Pattern::Randrw);
        assert_eq!(some(&mix, 7, 0), some(&mix, 7, 0));
        assert_ne!(some(&mix, 7, 0), some(&mix, 8, 0));
        assert_ne!(some(&mix, 7, 0), some(&mix, 7, 1));
    }

    #[test]
    fn blocks_stay_in_range_and_the_mix_is_kept() {
        let operations = some(&mix(Pattern::Randrw), 1, 0);
        assert!(operations.iter().all(|o| (100..150).contains(&o.block)));
        let reads = operations.iter().filter(|o| o.kind == RequestKind::Read).count();
        assert!((640..760).contains(&reads), "{reads} of 1000 are reads");
        assert!(some(&mix(Pattern::Randwrite), 1, 0).iter().all(|o| o.kind == RequestKind::Write));
        let discards = some(&mix(Pattern::Randtrim), 1, 0);
        assert!(discards.iter().all(|o| o.kind == RequestKind::Discard && !o.kind.moves()));
        assert!(discards.iter().any(|o| o.block != discards[0].block), "at random places");
    }

    #[test]
    fn sequential_goes_round() {
        let blocks: Vec<_> = some(&mix(Pattern::Read), 1, 0).iter().map(|o| o.block).collect();
        assert_eq!(&blocks[48..52], &[148, 149, 100, 101]);
    }

    #[test]
    fn sizes_are_mixed_and_stay_in_range() {
        let split = Split(vec![(1, 10), (8, 60), (16, 30)]);
        for pattern in [Pattern::Randread, Pattern::Write] {
            let operations = some(&Mix { split: split.clone(), ..mix(pattern) }, 1, 0);
            assert!(
                operations.iter().all(|o| o.block >= 100 && o.block + u64::from(o.count) <= 150)
            );
            for (count, share) in [(1, 10), (8, 60), (16, 30)] {
                let found = operations.iter().filter(|o| o.count == count).count();
                assert!(found.abs_diff(share * 10) < 60, "{found} of 1000 have {count} blocks");
            }
        }
    }

    #[test]
    fn flushes_come_after_their_writes() {
        let operations = some(&Mix { flush_every: 3, ..mix(Pattern::Write) }, 1, 0);
        let kinds: Vec<_> = operations[..8].iter().map(|o| o.kind == RequestKind::Flush).collect();
        assert_eq!(kinds, [false, false, false, true, false, false, false, true]);
    }

    #[test]
    fn pauses_do_not_count_as_work() {
        let pauses = Pauses { work: 5, pause: 20 };
        let worked = [0, 4, 5, 24, 25, 29, 30, 51].map(|now| pauses.worked(now));
        assert_eq!(worked, [0, 4, 5, 5, 5, 9, 10, 11]);
        let resumes = [0, 4, 5, 24, 25, 30].map(|now| pauses.resumes(now));
        assert_eq!(resumes, [None, None, Some(25), Some(25), None, Some(50)]);
        assert_eq!((pauses.end_of(1), pauses.end_of(3)), (5, 55));
        assert_eq!((pauses.worked(pauses.end_of(3)), pauses.part()), (15, 0.2));
    }

    #[test]
    fn the_pace_is_even_and_a_backlog_is_bounded() {
        let mut pacer = Pacer::new(1000.0);
        let mut started = 0;
        for now in (0..1_000_000_000u64).step_by(100_000) {
            started += u64::from(pacer.wait(now).is_none());
        }
        assert_eq!(started, 1000);
        let late = 60_000_000_000;
        let burst = (0..).take_while(|_| pacer.wait(late).is_none()).count();
        assert_eq!(burst, 101);
    }
}
