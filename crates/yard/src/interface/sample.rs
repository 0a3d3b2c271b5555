//! The figures of all disks and reactors at one moment, for programs that collect them often.
//!
//! In: the disks of the table, and the counts of each reactor. Out: their sums, without
//! percentiles.
//!
//! What must hold: a sample waits for no command and for no client. A reactor copies the counts of
//! a few disks at a time, so that a sample of many disks delays no request for long. A reactor that
//! does not answer in time fails the sample.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskCounts, LocalDisk, Statistics};
use blockyard_export::{PolicyFigures, Reactors};
use blockyard_ring::{Clock, NoReply};
use blockyard_sched::Knobs;

use super::state::DiskState;

/// Number of disks in one job of a reactor, which copies their counts between two batches of
/// requests.
const AT_ONCE: usize = 32;

/// How long a reactor may take for all jobs of a sample.
const LIMIT: Duration = Duration::from_secs(2);

/// A disk of the table, as it is known without a command.
#[derive(Clone)]
pub(crate) struct KnownDisk {
    pub state: DiskState,
    pub disk: Arc<Disk>,
    pub image: String,
    pub group: Option<String>,
    pub knobs: Knobs,
}

/// A disk in a sample.
pub struct DiskSample {
    pub state: DiskState,
    /// The open disk, with its name, share, flushes and capacity.
    pub disk: Arc<Disk>,
    /// The image that was given when the disk was added.
    pub image: String,
    pub group: Option<String>,
    pub knobs: Knobs,
    /// Sum of the counts of all reactors, and of earlier servers.
    pub counts: DiskCounts,
    pub policies: PolicyFigures,
}

/// A reactor in a sample.
#[derive(Clone, Copy, Debug)]
pub struct ReactorSample {
    /// CPU time of the reactor's thread.
    pub cpu: Duration,
    /// Number of iterations of the reactor's event loop.
    pub iterations: u64,
    /// Thread number of the reactor in the server's PID namespace.
    pub thread: i32,
}

/// The figures of all disks and reactors.
pub struct Sample {
    /// In the order in which the disks were added.
    pub disks: Vec<DiskSample>,
    pub reactors: Vec<ReactorSample>,
    /// The knobs of all groups, by name.
    pub groups: BTreeMap<String, Knobs>,
}

/// Error of a sample: this reactor has not answered.
#[derive(Debug, thiserror::Error)]
#[error("reactor-{reactor}: {source}")]
pub struct SampleError {
    reactor: usize,
    source: NoReply,
}

/// Collects the figures of `disks`.
pub(crate) fn collect(
    disks: Vec<KnownDisk>,
    reactors: &Reactors,
    groups: BTreeMap<String, Knobs>,
) -> Result<Sample, SampleError> {
    let deadline = Instant::now() + LIMIT;
    let mut all: Vec<_> = disks.into_iter().map(DiskSample::new).collect();
    let mut threads = Vec::new();
    for (reactor, remote) in reactors.all().enumerate() {
        let failed = |source| SampleError { reactor, source };
        let about = remote.ask_later(|handle, reply| {
            let cpu = Clock::Thread.read();
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            reply.send(ReactorSample { cpu, iterations: handle.iteration(), thread });
        });
        for some in all.chunks_mut(AT_ONCE) {
            let disks: Vec<_> = some.iter().map(|sample| sample.disk.clone()).collect();
            let parts = remote.ask_later(move |handle, reply| {
                let counts = |disk| Some(LocalDisk::known(handle, disk)?.counts());
                let part = |disk| (counts(disk), PolicyFigures::known(handle, disk));
                reply.send(disks.iter().map(part).collect::<Vec<_>>());
            });
            let parts = parts.until(deadline).map_err(failed)?;
            for (sample, (counts, policies)) in some.iter_mut().zip(parts) {
                sample.counts.merge(counts.unwrap_or_default());
                sample.policies.merge(&policies);
            }
        }
        threads.push(about.until(deadline).map_err(failed)?);
    }
    Ok(Sample { disks: all, reactors: threads, groups })
}

impl DiskSample {
    fn new(known: KnownDisk) -> Self {
        let KnownDisk { state, disk, image, group, knobs } = known;
        let counts = disk.counted_before().map(Statistics::counts).unwrap_or_default();
        let policies = PolicyFigures::default();
        DiskSample { state, disk, image, group, knobs, counts, policies }
    }
}
