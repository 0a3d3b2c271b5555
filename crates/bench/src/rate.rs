//! `blockyard bench rate`: random seeks and operations of random sizes, one after the other, each
//! timed.
//!
//! In: a target and what to do. Out: two columns on standard output as the operations end, size in
//! bytes and duration in seconds. What must hold: the seed decides sizes and offsets; without an
//! option nothing is written to a target that is in use or holds a file system; each printed line
//! is whole, even if the run is interrupted.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use blockyard_program::output::{self, OutputError};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use crate::client::workload::Random;
use crate::client::{parse_seconds, parse_size};
use crate::targets::{Access, Target, TargetAddress, guard};

/// Random seeks and operations of random sizes, one at a time: prints size in bytes and duration in
/// seconds of each.
#[derive(Clone, Debug, clap::Args)]
pub struct RateOptions {
    /// What each operation is
    #[arg(value_enum, value_name = "OPERATION")]
    pub operation: Operation,
    /// A file, a block device, a vhost-user-blk socket, or nbd://HOST[:PORT][/EXPORT],
    /// nbd+unix:///[EXPORT]?socket=PATH
    #[allow(rustdoc::broken_intra_doc_links)] // the brackets are text of --help
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// Operations to do [default: no limit, for --seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub ops: Option<u64>,
    /// Seconds to go on for [default: 10, or without a limit where --ops is given]
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    pub seconds: Option<f64>,
    /// Bytes of the smallest operation, a multiple of 512 (suffixes k, m)
    #[arg(long, value_name = "SIZE", default_value = "512", value_parser = parse_size)]
    pub min_size: u64,
    /// Bytes of the largest operation, at most 1g
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    pub max_size: u64,
    /// Decides sizes and offsets [default: another one each time, printed on standard error]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// O_DIRECT: past the host's page cache (files and devices; a vhost-user or NBD server decides
    /// for itself)
    #[arg(long)]
    pub direct: bool,
    /// Write also to a device that is in use, or to what holds a file system
    #[arg(long)]
    pub destroy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Operation {
    Read,
    /// Writes that a cache may hold: the page cache, or the cache of the disk
    Write,
    /// Writes that are durable when they end: O_DSYNC, or a flush after each write
    Writesync,
}

impl RateOptions {
    /// Returns an error if the options cannot be used on any target.
    pub fn check(&self) -> Result<()> {
        let (min, max) = (self.min_size, self.max_size);
        anyhow::ensure!(max <= LARGEST, "--max-size {max}: at most {LARGEST} bytes");
        anyhow::ensure!(
            min <= max && min > 0,
            "--min-size {min} is not from 1 to --max-size {max}"
        );
        Ok(())
    }
}

/// Maximum size of an operation in bytes.
const LARGEST: u64 = 1 << 30;
const SECONDS: f64 = 10.0;

/// Does the run, and prints each operation.
pub fn run(options: &RateOptions) -> Result<()> {
    let mut run = Run::open(options)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let bar = bar(options);
    let mut shown = Instant::now();
    let end = run.each(|bytes, took, done, elapsed| {
        writeln!(out, "{bytes} {:.9}", took.as_secs_f64()).map_err(OutputError::from)?;
        // Readers see the lines within 100 ms. Flushing each line would slow down a fast target.
        if shown.elapsed() > Duration::from_millis(100) {
            out.flush().map_err(OutputError::from)?;
            bar.set_position(if options.ops.is_some() { done } else { elapsed.as_millis() as u64 });
            shown = Instant::now();
        }
        Ok(())
    });
    bar.finish_and_clear();
    let end = end.and_then(|()| Ok(out.flush().map_err(OutputError::from)?));
    // Discards what the buffer still holds. After an error, writing it would fail, too.
    drop(out.into_parts());
    end
}

fn bar(options: &RateOptions) -> ProgressBar {
    if !std::io::stderr().is_terminal() || std::io::stdout().is_terminal() {
        return ProgressBar::hidden();
    }
    let seconds = options.seconds.unwrap_or(SECONDS);
    let bar = ProgressBar::new(options.ops.unwrap_or((seconds * 1000.0) as u64));
    bar.set_style(
        ProgressStyle::with_template("{wide_bar} {percent:>3}% {eta:>4}")
            .expect("a template of ours"),
    );
    bar
}

/// A run that is prepared and has not begun.
pub struct Run {
    target: Box<dyn Target>,
    operation: Operation,
    sizes: Sizes,
    random: Random,
    buffer: Buffer,
    ops: u64,
    limit: Option<Duration>,
}

impl Run {
    pub fn open(options: &RateOptions) -> Result<Self> {
        options.check()?;
        let (min, max) = (options.min_size, options.max_size);
        let writes = options.operation != Operation::Read;
        let durable = options.operation == Operation::Writesync;
        let largest = max.max(guard::LOOKED_AT as u64);
        let place = TargetAddress::parse(&options.target)?;
        let mut target = place.open(Access { writes, durable, direct: options.direct, largest })?;
        let (size, block) = (target.size(), target.block());
        let whole = min.is_multiple_of(block) && max.is_multiple_of(block);
        anyhow::ensure!(
            whole,
            "--min-size {min} and --max-size {max} are to be multiples of {block} bytes here"
        );
        anyhow::ensure!(
            size / block * block >= max,
            "{}: {size} bytes are less than --max-size {max}",
            options.target
        );
        let seed = options.seed.unwrap_or_else(|| {
            let seed =
                SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64);
            output::note(format_args!("seed {seed}"));
            seed
        });
        let mut buffer = Buffer::new(largest as usize);
        if writes {
            if !options.destroy {
                let path = if let TargetAddress::File(path) = &place {
                    Some(path.as_path())
                } else {
                    None
                };
                let seen = guard::check(&mut *target, path, buffer.bytes(guard::LOOKED_AT));
                seen.with_context(|| options.target.clone())?;
            }
            buffer.fill(seed);
        }
        let limit = options.seconds.or((options.ops.is_none()).then_some(SECONDS));
        Ok(Run {
            target,
            operation: options.operation,
            sizes: Sizes { min, max, block },
            random: Random::new(seed, 0),
            buffer,
            ops: options.ops.unwrap_or(u64::MAX),
            limit: limit.map(Duration::from_secs_f64),
        })
    }

    /// Does all operations. Calls `tell` after each with its bytes, its duration, the number of
    /// operations so far, and the time since the run began.
    pub fn each(
        &mut self,
        mut tell: impl FnMut(u64, Duration, u64, Duration) -> Result<()>,
    ) -> Result<()> {
        let begin = Instant::now();
        let places = self.target.size() / self.sizes.block;
        for done in 1..=self.ops {
            let bytes = self.sizes.draw(&mut self.random);
            let last = places - bytes / self.sizes.block;
            let offset = self.random.below(last + 1) * self.sizes.block;
            let data = self.buffer.bytes(bytes as usize);
            let start = Instant::now();
            match self.operation {
                Operation::Read => self.target.read(offset, data)?,
                Operation::Write => self.target.write(offset, data, false)?,
                Operation::Writesync => self.target.write(offset, data, true)?,
            }
            let end = Instant::now();
            tell(bytes, end - start, done, end - begin)?;
            if self.limit.is_some_and(|limit| end - begin >= limit) {
                break;
            }
        }
        Ok(())
    }
}

/// Random sizes whose logarithms are evenly distributed.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    min: u64,
    max: u64,
    block: u64,
}

impl Sizes {
    /// Draws a size: a whole number of blocks, from `min` to `max` bytes.
    fn draw(&self, random: &mut Random) -> u64 {
        if self.min == self.max {
            return self.min;
        }
        let even = random.word() as f64 / u64::MAX as f64;
        // The range ends one block behind `max`, because sizes are rounded down. So `max` is as
        // likely as it should be.
        let (low, high) = ((self.min as f64).ln(), ((self.max + self.block) as f64).ln());
        let size = (low + even * (high - low)).exp() as u64;
        (size / self.block * self.block).clamp(self.min, self.max)
    }
}

/// A buffer that is aligned for O_DIRECT.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    const ALIGN: usize = 4096;

    fn new(len: usize) -> Self {
        let memory = vec![0; len + Self::ALIGN];
        let start = memory.as_ptr().align_offset(Self::ALIGN);
        Buffer { memory, start }
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len]
    }

    /// Fills the buffer with data that does not compress.
    fn fill(&mut self, seed: u64) {
        let mut random = Random::new(seed, 1);
        // The data must not depend on the address of the buffer.
        for word in self.memory[self.start..].chunks_exact_mut(8) {
            word.copy_from_slice(&random.word().to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_log_uniform_and_whole_blocks() {
        let sizes = Sizes { min: 512, max: 1 << 20, block: 512 };
        let mut random = Random::new(1, 0);
        let mut octaves = [0u32; 12];
        for _ in 0..110_000 {
            let size = sizes.draw(&mut random);
            assert!(size.is_multiple_of(512) && (512..=1 << 20).contains(&size), "{size}");
            octaves[(size / 512).ilog2() as usize] += 1;
        }
        // 512 B to 1 MiB are 11 octaves, each with an eleventh of all sizes.
        assert!(octaves[..11].iter().all(|n| (9_500..10_500).contains(n)), "{octaves:?}");
        assert_eq!(Sizes { min: 4096, max: 4096, block: 512 }.draw(&mut random), 4096);
    }

    fn options(target: &str, operation: Operation) -> RateOptions {
        RateOptions {
            operation,
            target: target.into(),
            ops: Some(200),
            seconds: None,
            min_size: 512,
            max_size: 8192,
            seed: Some(7),
            direct: false,
            destroy: false,
        }
    }

    #[test]
    fn the_seed_decides_and_a_file_system_is_left_alone() {
        let path = std::env::temp_dir().join(format!("blockyard-rate-{}", std::process::id()));
        let name = path.to_str().unwrap();
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let sizes = |options: &RateOptions| {
            let mut sizes = Vec::new();
            let mut run = Run::open(options)?;
            run.each(|bytes, _, _, _| {
                sizes.push(bytes);
                Ok(())
            })?;
            anyhow::Ok((sizes, std::fs::read(&options.target)?))
        };
        let (first, written) = sizes(&options(name, Operation::Write)).unwrap();
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let second = sizes(&options(name, Operation::Writesync)).unwrap();
        assert!((&first, &written) == (&second.0, &second.1), "the same seed wrote something else");
        assert_ne!(
            first,
            sizes(&RateOptions { seed: Some(8), ..options(name, Operation::Read) }).unwrap().0
        );
        let mut ext4 = vec![0; 1 << 20];
        ext4[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
        std::fs::write(&path, &ext4).unwrap();
        let refused = sizes(&options(name, Operation::Write)).unwrap_err();
        assert!(format!("{refused:#}").contains("ext4"), "{refused:#}");
        assert!(sizes(&options(name, Operation::Read)).unwrap().1 == ext4);
        let destroyed =
            sizes(&RateOptions { destroy: true, ..options(name, Operation::Write) }).unwrap().1;
        std::fs::remove_file(&path).unwrap();
        assert!(destroyed != ext4);
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        let refused = |change: fn(&mut RateOptions)| {
            let mut options = options("/proc/self/exe", Operation::Read);
            change(&mut options);
            format!("{:#}", Run::open(&options).map(|_| ()).unwrap_err())
        };
        assert!(refused(|o| o.min_size = 16384).contains("--min-size 16384"));
        assert!(refused(|o| o.min_size = 100).contains("multiples of 512"));
        assert!(refused(|o| o.max_size = 1 << 31).contains("at most"));
        assert!(refused(|o| o.max_size = 1 << 30).contains("less than --max-size"));
        assert!(refused(|o| o.target = "/nonexistent".into()).contains("/nonexistent"));
    }
}
