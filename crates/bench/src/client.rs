//! `blockyard bench client`: load on a vhost-user-blk back end, an NBD export or a host file,
//! measured and verified.
//!
//! ```text
//!   options -> LoadSetup -> vhost (connection) ---------> worker (a thread a queue) -+-> load
//!                    |-> xen (front end, blkif) -> crew -> worker -------------------+   workload
//!                    |-> nbd (connections) ------> crew -> worker -------------------+   verify
//!                    \-> host (file, io_uring; a thread a queue) --------------------/
//!                                                          tallies -> report
//! ```
//!
//! In: options. Out: a table or JSON on standard output. What must hold: a run with a failed
//! request, or with a read of wrong data, is an error; the client never limits a back end (see
//! `worker`).

pub mod cpu;
mod crew;
#[cfg(test)]
mod fake;
mod host;
pub mod load;
mod nbd;
pub mod quota;
pub mod report;
mod tally;
pub mod verify;
mod vhost;
mod watchdog;
mod worker;
pub mod workload;
pub mod xen;

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use blockyard_nbd::Uri;
use blockyard_program::output;
use serde::Serialize;

use cpu::BackEnd;
use load::{Limit, Load};
use quota::Quota;
use report::Report;
use verify::Verifier;
use workload::{Generator, Mix, Pacer, Pattern, Pauses, Split};

use crate::process::Stop;
use crate::targets;

/// Maximum size of the buffers of all operations in flight, in bytes.
const MOST_BUFFERS: u64 = 16 << 30;

/// Load on a vhost-user-blk back end, with no virtual machine.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct LoadOptions {
    /// The back end's vhost-user-blk socket
    #[arg(value_name = "SOCKET", required_unless_present_any = ["file", "nbd"],
          conflicts_with_all = ["file", "nbd"])]
    pub socket: Option<PathBuf>,
    /// Put the same load on a host file or block device instead (io_uring, O_DIRECT)
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Put the same load on an NBD export instead: nbd://HOST[:PORT][/EXPORT] or
    /// nbd+unix:///[EXPORT]?socket=PATH; a connection for each queue
    #[arg(long, value_name = "URI", conflicts_with = "file", value_parser = targets::nbd::parse)]
    #[serde(serialize_with = "as_text")]
    pub nbd: Option<Uri>,
    /// Through the host's page cache, without O_DIRECT
    #[arg(long, requires = "file")]
    pub buffered: bool,
    /// What to do: one pattern of reads and writes, or discards
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pub rw: Pattern,
    /// Reads in a hundred operations, for randrw and rw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes of one operation, a multiple of 512 (suffixes k, m, g)
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = parse_size)]
    pub bs: u64,
    /// Operations of several sizes: SIZE/PERCENT:..., as fio's option of this name (not with
    /// --verify)
    #[arg(long, value_name = "LIST", conflicts_with_all = ["bs", "verify"], value_parser = parse_split)]
    pub bssplit: Option<Sizes>,
    /// Operations in flight, each queue
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub depth: u16,
    /// Queues, one thread each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: u16,
    /// Descriptors of a ring; a request takes 3 of them, or 1 with --indirect [default: what the
    /// depth needs, at least 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub queue_size: Option<u16>,
    /// Seconds to measure
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub runtime: f64,
    /// Seconds of load before the measuring begins (not with --ops)
    #[arg(long, value_name = "SECONDS", default_value_t = 0.2, value_parser = parse_seconds)]
    pub warmup: f64,
    /// Operations to do in all, all of them measured, instead of a runtime
    #[arg(long, value_name = "N", conflicts_with_all = ["runtime", "warmup"], value_parser = clap::value_parser!(u64).range(1..))]
    pub ops: Option<u64>,
    /// Operations to start per second, in all [default: as fast as they finish]
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: Option<u64>,
    /// Bytes of the disk to leave alone at its start (suffixes k, m, g)
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub offset: u64,
    /// Bytes of the disk to use (suffixes k, m, g) [default: to its end]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<u64>,
    /// A flush after every N writes of a queue; 0: none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub flush_every: u64,
    /// Each queue ends with a flush after its last operation, inside the measured time: what a
    /// server has put off until a flush counts too
    #[arg(long, requires = "ops")]
    pub end_flush: bool,
    /// Packed virtqueues
    #[arg(long, conflicts_with_all = ["file", "nbd"])]
    pub packed: bool,
    /// Do not take VIRTIO_F_EVENT_IDX: notifications are switched on and off as a whole
    #[arg(long, conflicts_with_all = ["file", "nbd"])]
    pub no_event_idx: bool,
    /// Indirect descriptors
    #[arg(long, conflicts_with_all = ["file", "nbd"])]
    pub indirect: bool,
    /// Watch the used ring without sleeping (takes a core)
    #[arg(long, conflicts_with = "file")]
    pub poll: bool,
    /// Decides the order of operations and the contents written [default: another one each time,
    /// reported]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Give every block a header and a CRC32C, check what is read, and read back all that was
    /// written or read at the end
    #[arg(long)]
    pub verify: bool,
    /// One JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Process of the back end: measures its CPU time
    #[arg(long, value_name = "PID", conflicts_with = "file")]
    pub backend_pid: Option<u32>,
    /// When the back end goes away: connect again for up to 60 seconds, and go on
    #[arg(long, conflicts_with_all = ["file", "nbd"])]
    pub reconnect: bool,
    /// Seconds without a completion, or without an answer from the back end (at most 10), after
    /// which the run fails
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub timeout: f64,
    /// Ends the measured time once it is set. For callers that cannot state the time before.
    #[arg(skip)]
    #[serde(skip)]
    pub over: Arc<AtomicBool>,
    /// Ends the measured time of all loads that share it.
    #[arg(skip)]
    #[serde(skip)]
    pub quota: Option<Arc<Quota>>,
    /// Ends the run when the user interrupts it.
    #[arg(skip)]
    #[serde(skip)]
    pub stop: Stop,
    /// Pauses of the load. The warm-up is 0 then, and the runtime includes the pauses.
    #[arg(skip)]
    #[serde(skip)]
    pub pauses: Option<Pauses>,
    /// Counts completions in steps (see [`Tally::steps`](load::Tally::steps)).
    #[arg(skip)]
    #[serde(skip)]
    pub steps: bool,
    /// The front end has no in-flight region, as that of User Mode Linux.
    #[arg(skip)]
    #[serde(skip)]
    pub no_inflight: bool,
    /// The back end is in this process.
    #[arg(skip)]
    #[serde(skip)]
    pub back_end_is_here: bool,
}

fn as_text<S: serde::Serializer>(uri: &Option<Uri>, serializer: S) -> Result<S::Ok, S::Error> {
    match uri {
        Some(uri) => serializer.collect_str(uri),
        None => serializer.serialize_none(),
    }
}

/// Sizes in bytes with their percentage of operations. The smallest size divides all others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sizes(pub Vec<(u64, u8)>);

pub(crate) fn parse_split(text: &str) -> Result<Sizes> {
    let part = |part: &str| {
        let (size, share) = part
            .split_once('/')
            .context("say SIZE/PERCENT:SIZE/PERCENT:..., such as 4k/60:64k/40")?;
        Ok((parse_size(size)?, share.parse()?))
    };
    let sizes = text.split(':').map(part).collect::<Result<Vec<(u64, u8)>>>()?;
    let all: u32 = sizes.iter().map(|s| u32::from(s.1)).sum();
    anyhow::ensure!(all == 100, "the shares are {all} in a hundred");
    let least = sizes.iter().map(|s| s.0).min().unwrap_or(0);
    anyhow::ensure!(
        least > 0 && sizes.iter().all(|s| s.0.is_multiple_of(least)),
        "every size must be a multiple of the smallest"
    );
    Ok(Sizes(sizes))
}

impl LoadOptions {
    /// Returns the size of the largest operation in bytes.
    fn largest(&self) -> u64 {
        self.bssplit.iter().flat_map(|s| &s.0).map(|s| s.0).max().unwrap_or(self.bs)
    }

    /// Returns whether the load needs a target with flushes.
    fn flushes(&self) -> bool {
        self.flush_every > 0 || self.end_flush
    }

    fn back_end(&self) -> BackEnd {
        match self.backend_pid {
            _ if self.back_end_is_here => BackEnd::Here,
            Some(pid) => BackEnd::Process(pid),
            None => BackEnd::Unknown,
        }
    }

    /// Returns these options with `bs` set to the smallest size of `bssplit`, or `None` if `bs`
    /// needs no change.
    fn in_smallest_blocks(&self) -> Option<LoadOptions> {
        let bs = self.bssplit.as_ref()?.0.iter().map(|s| s.0).min()?;
        (bs != self.bs).then(|| LoadOptions { bs, ..self.clone() })
    }

    /// Returns an error if the options cannot be used on any target.
    pub fn check(&self) -> Result<()> {
        let bs = match &self.bssplit {
            Some(sizes) => sizes.0.iter().map(|size| size.0).min().unwrap_or(self.bs),
            None => self.bs,
        };
        anyhow::ensure!(bs > 0 && bs.is_multiple_of(512), "--bs {bs}: a multiple of 512 is needed");
        anyhow::ensure!(self.largest() <= 1 << 30, "--bs {}: 1g is the most", self.largest());
        let (depth, queues) = (self.depth, self.queues);
        let buffers = u64::from(depth) * u64::from(queues) * self.largest();
        anyhow::ensure!(
            buffers <= MOST_BUFFERS,
            "--depth {depth} --queues {queues} --bs {}: the buffers need {buffers} bytes, and \
             {MOST_BUFFERS} are the most",
            self.largest()
        );
        anyhow::ensure!(
            !(self.verify && self.rw == Pattern::Randtrim),
            "--verify: discarded blocks have no known contents (--rw randtrim)"
        );
        Ok(())
    }

    /// Returns the default options of a load on a host file or block device.
    pub fn for_file(file: PathBuf) -> Self {
        LoadOptions { socket: None, file: Some(file), ..LoadOptions::for_socket("unused".into()) }
    }

    /// Returns the default options of a load on a vhost-user-blk socket.
    pub fn for_socket(socket: PathBuf) -> Self {
        #[derive(clap::Parser)]
        struct Defaults {
            #[command(flatten)]
            options: LoadOptions,
        }
        let arguments = [std::ffi::OsString::from("client"), "--".into(), socket.into()];
        <Defaults as clap::Parser>::parse_from(arguments).options
    }
}

/// Runs the load and prints its report.
pub fn run(options: &LoadOptions) -> Result<()> {
    let report = measure(options)?;
    if options.json {
        output::print(format_args!("{}\n", serde_json::to_string(&report)?))?;
    } else {
        output::print(&report)?;
    }
    match &report.first_error {
        Some(first) => anyhow::bail!("{} operations failed, the first: {first}", report.errors),
        None => Ok(()),
    }
}

/// Runs the load. The report counts the operations that the target answered with an error. All
/// other failures are returned as errors.
pub fn measure(options: &LoadOptions) -> Result<Report> {
    if let Some(options) = options.in_smallest_blocks() {
        return measure(&options);
    }
    options.check()?;
    let report = match (&options.nbd, &options.file, &options.socket) {
        (Some(uri), ..) => nbd::run(options, uri),
        (None, Some(file), _) => host::run(options, file),
        (None, None, Some(path))
            if std::fs::metadata(path).is_ok_and(|m| !m.file_type().is_socket()) =>
        {
            let path = path.display();
            anyhow::bail!(
                "{path} is no socket of a back end: --file {path} puts the load on a file or block device"
            )
        }
        (None, None, Some(socket)) => vhost::run(options, socket),
        (None, None, None) => anyhow::bail!("neither a socket nor a file to put load on"),
    };
    report?.compared()
}

/// The options, resolved for a disk of known size. They determine the work of each queue.
pub(crate) struct LoadSetup<'a> {
    options: &'a LoadOptions,
    seed: u64,
    first: u64,
    blocks: u64,
}

impl<'a> LoadSetup<'a> {
    pub(crate) fn new(options: &'a LoadOptions, capacity: u64) -> Result<Self> {
        let (bs, offset) = (options.bs, options.offset);
        anyhow::ensure!(
            offset.is_multiple_of(bs),
            "--offset {offset} is not a multiple of --bs {bs}"
        );
        let left = capacity.saturating_sub(offset);
        let size = options.size.unwrap_or(left);
        anyhow::ensure!(
            size <= left,
            "--offset {offset} and --size {size} reach beyond the disk's {capacity} bytes"
        );
        // A new seed for each run, so that verification does not accept data of an earlier run.
        let clock =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
        let setup = LoadSetup {
            options,
            seed: options.seed.unwrap_or_else(clock),
            first: offset / bs,
            blocks: size / bs,
        };
        let least =
            if options.verify { 2 * u64::from(options.depth) } else { options.largest() / bs };
        let here = setup.part(0).1;
        anyhow::ensure!(
            here >= least,
            "{size} bytes are {here} blocks a queue, at least {least} are needed"
        );
        Ok(setup)
    }

    /// Returns the first block and the number of blocks that a queue uses. Queues with random
    /// offsets share the whole disk. Each sequential or verifying queue has its own part.
    fn part(&self, queue: u16) -> (u64, u64) {
        if self.options.rw.is_random() && !self.options.verify {
            return (self.first, self.blocks);
        }
        let each = self.blocks / u64::from(self.options.queues);
        (self.first + each * u64::from(queue), each)
    }

    pub(crate) fn load(&self, queue: u16) -> Result<Load> {
        let options = self.options;
        let (first, blocks) = self.part(queue);
        let mix = Mix {
            pattern: options.rw,
            read_share: options.rw.read_share(options.rwmixread),
            flush_every: options.flush_every,
            first,
            blocks,
            split: self.split(),
        };
        let queues = u64::from(options.queues);
        let nanos = |seconds: f64| (seconds * 1e9) as u64;
        let limit = match options.ops {
            Some(n) => Limit::Operations(n / queues + u64::from(u64::from(queue) < n % queues)),
            None => Limit::Time {
                from: nanos(options.warmup),
                until: nanos(options.warmup + options.runtime),
                pauses: options.pauses,
            },
        };
        let over = options.over.clone();
        let verifier =
            options.verify.then(|| Verifier::new(self.seed, options.bs as usize, first, blocks));
        let pacer = options.rate.map(|rate| Pacer::new(rate as f64 / queues as f64));
        let generator = Generator::new(mix, self.seed, queue);
        let load = Load::new(generator, verifier, pacer, limit, over, options.bs)?;
        let load = load.with_stop(options.stop.clone());
        let load = if options.end_flush { load.with_end_flush() } else { load };
        let load = match &options.quota {
            Some(quota) => load.with_quota(quota.clone()),
            None => load,
        };
        Ok(if options.steps { load.with_steps() } else { load })
    }

    /// Returns the operation sizes of `bssplit` in blocks, with their percentages.
    fn split(&self) -> Split {
        let sizes = self.options.bssplit.iter().flat_map(|s| &s.0);
        Split(sizes.map(|(size, share)| ((size / self.options.bs) as u32, *share)).collect())
    }

    /// Returns contents for blocks that are written without `--verify`. The contents are random, so
    /// they are not zeroes.
    fn filler(&self) -> Vec<u8> {
        let mut random = workload::Random::new(self.seed, u64::MAX);
        (0..self.options.largest() / 8).flat_map(|_| random.word().to_le_bytes()).collect()
    }
}

/// Parses a number of bytes with an optional suffix (powers of 1024).
pub(crate) fn parse_size(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        other => anyhow::bail!("'{other}' is no suffix of a size: k, m, g or t"),
    };
    let number: u64 =
        digits.parse().context("a size is a whole number and a suffix, such as 64k")?;
    number.checked_mul(1 << shift).context("the size does not fit 64 bits")
}

pub(crate) fn parse_seconds(text: &str) -> Result<f64> {
    let seconds: f64 = text.parse()?;
    anyhow::ensure!((0.0..=1e9).contains(&seconds), "a number of seconds from 0 on");
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(change: impl FnOnce(&mut LoadOptions)) -> LoadOptions {
        let mut options = LoadOptions::for_socket("socket".into());
        change(&mut options);
        options
    }

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("4k").unwrap(), 4096);
        assert_eq!(parse_size("1G").unwrap(), 1 << 30);
        assert_eq!(parse_size("512").unwrap(), 512);
        for bad in ["", "k", "1x", "1.5k", "99999999t", "-1"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn queues_share_a_random_disk_and_divide_a_sequential_one() {
        let random = options(|o| o.queues = 4);
        assert_eq!(LoadSetup::new(&random, 1 << 20).unwrap().part(3), (0, 256));
        let sequential = options(|o| (o.queues, o.rw, o.offset) = (4, Pattern::Write, 8192));
        let setup = LoadSetup::new(&sequential, 1 << 20).unwrap();
        assert_eq!((setup.part(0), setup.part(3)), ((2, 63), (191, 63)));
    }

    #[test]
    fn options_that_fit_no_target_are_refused() {
        let refused = |change: fn(&mut LoadOptions)| {
            options(change).check().err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert!(refused(|o| o.bs = 100).contains("--bs 100: a multiple of 512"));
        assert!(refused(|o| o.bssplit = parse_split("100/50:1000/50").ok()).contains("--bs 100"));
        assert!(refused(|o| o.bs = 2 << 30).contains("1g is the most"));
        let large = refused(|o| (o.depth, o.bs) = (32768, 1 << 30));
        assert!(
            large.contains("--depth 32768 --queues 1") && large.contains("the most"),
            "{large}"
        );
        assert_eq!(refused(|o| (o.depth, o.bs) = (16, 1 << 30)), "");
        assert!(refused(|o| (o.depth, o.queues, o.bs) = (16, 2, 1 << 30)).contains("--queues 2"));
    }

    #[test]
    fn ranges_that_do_not_fit_are_refused() {
        let refused = |change: fn(&mut LoadOptions)| {
            LoadSetup::new(&options(change), 1 << 20).err().unwrap().to_string()
        };
        assert!(refused(|o| o.offset = 100).contains("multiple of --bs"));
        assert!(refused(|o| o.size = Some(2 << 20)).contains("beyond the disk's 1048576 bytes"));
        assert!(refused(|o| o.offset = 2 << 20).contains("at least 1"));
        assert!(refused(|o| (o.verify, o.depth) = (true, 200)).contains("at least 400"));
    }

    #[test]
    fn operations_are_divided_without_a_rest() {
        let options = options(|o| (o.queues, o.ops) = (3, Some(10)));
        let setup = LoadSetup::new(&options, 1 << 20).unwrap();
        let count = |queue| {
            let mut load = setup.load(queue).unwrap();
            (0..).take_while(|_| matches!(load.next(0), load::Next::Do(_))).count()
        };
        assert_eq!((count(0), count(1), count(2)), (4, 3, 3));
    }
}
