//! The figures of a server at one moment: what metrics, `blockyard top` and the web page show.
//!
//! Counts and times are totals since the disk was opened, or the server was started. A reader makes
//! rates from two samples. Times are in seconds. A reader may be newer than the server: a figure
//! that was added later has a default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::json::types::{LimitSetting, State};

/// The figures of a server at one moment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Figures {
    pub version: String,
    /// Time of the sample: seconds since the server was started.
    pub uptime: f64,
    pub process: ProcessFigures,
    /// Inclusive upper bounds of the buckets of all histograms, in microseconds. A histogram has
    /// one bucket more, without an upper bound.
    pub bounds_us: Vec<u64>,
    /// Bytes a second that the kernel writes back from the page cache, as the policy of dirty pages
    /// last saw it. 0: no write to the page cache needed it yet.
    #[serde(default)]
    pub write_back: f64,
    pub reactors: Vec<ReactorFigures>,
    /// The devices that disks share.
    pub devices: Vec<DeviceFigures>,
    /// The groups of the configuration. The disks of a group share a weight, limits and a
    /// reservation.
    pub groups: Vec<GroupFigures>,
    /// In the order in which the disks were added. Disks that are being opened or closed are
    /// absent.
    pub disks: Vec<DiskFigures>,
    /// Number of disks of the configuration that could not be opened.
    #[serde(default)]
    pub disks_failed: u64,
}

/// The server's process.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct ProcessFigures {
    pub pid: u32,
    /// Start of the server, in seconds since 1970.
    pub started: f64,
    pub cpu: f64,
    pub resident_bytes: u64,
    pub threads: u64,
    pub open_descriptors: u64,
    pub max_descriptors: Option<u64>,
}

/// A reactor: a thread that serves requests.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct ReactorFigures {
    /// CPU time of the thread. Its rate is the utilisation of the reactor.
    pub busy: f64,
    /// Time that the thread was ready to run while others had the processor. Null: the kernel does
    /// not count it.
    pub waited: Option<f64>,
    /// Number of iterations of the event loop.
    pub iterations: u64,
}

/// A device that disks share.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct DeviceFigures {
    pub name: String,
    /// Part of its known capacity that the device shows now.
    pub capacity: f64,
    /// Work that may be in flight at the device, in seconds.
    pub window: f64,
}

/// A group of disks.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct GroupFigures {
    pub name: String,
    pub weight: u64,
    /// Limits and reservations of all its disks together.
    pub limits: LimitFigures,
}

/// A disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct DiskFigures {
    pub name: String,
    pub state: State,
    /// The image that was given when the disk was added.
    pub image: String,
    pub device: Option<String>,
    pub group: Option<String>,
    /// Size in bytes.
    pub size: u64,
    pub read_only: bool,
    /// Whether writes fail because of a failed flush, until the image is opened again.
    pub poisoned: bool,
    /// Number of requests that wait for space on the host, until the disk is resumed.
    pub paused: u64,
    /// Whether an operator holds the requests back.
    pub drained: bool,
    /// Number of connected clients, for each kind of export.
    pub clients: BTreeMap<String, u64>,
    /// Longest time for which work on the disk, such as a snapshot, has held requests back.
    pub held_back: f64,
    /// For each kind of operation that has occurred.
    pub operations: BTreeMap<String, OperationFigures>,
    /// Number of requests that have no answer yet.
    pub in_flight: u64,
    /// Age of the oldest of them. Null: none.
    pub oldest: Option<f64>,
    pub flushes: FlushFigures,
    pub metadata: MetadataFigures,
    pub share: DiskShareFigures,
    pub limits: LimitFigures,
    pub policies: PolicyFigures,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct OperationFigures {
    pub requests: u64,
    pub errors: u64,
    /// Number of requests that were merged into the operation of another.
    pub merged: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Time from arrival to admission: limits, shares and quiesces.
    pub queue: HistogramFigures,
    /// Time in the image and below.
    pub service: HistogramFigures,
}

/// Latencies of requests.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct HistogramFigures {
    /// Sum of all latencies.
    pub sum: f64,
    /// Number of latencies in each bucket of `bounds_us`. Absent ones at the end are 0.
    pub buckets: Vec<u64>,
}

/// Flushes, and the syncs that they shared.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct FlushFigures {
    /// Number of flushes that clients or durable writes needed.
    pub requested: u64,
    /// Number of syncs that were begun for them.
    pub syncs: u64,
}

/// Lookups of where data lie: in the L2 tables of a qcow2 image, or among the answers of a target.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct MetadataFigures {
    /// Number of lookups that found the place in memory. For images also those that loaded the
    /// table first.
    pub hits: u64,
    /// Number of lookups that loaded a table, or asked the target.
    pub misses: u64,
}

/// What a disk has used of its device and of its limits.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct DiskShareFigures {
    /// Effective weight: the disk's own weight, or its part of its group's weight.
    pub weight: f64,
    /// Device time that the share allowed while the disk was busy.
    pub entitled: f64,
    /// Device time that the disk used while it was busy.
    pub used: f64,
    /// Device time that the disk left to others while it was busy.
    pub donated: f64,
    /// Time that operations waited for the disk's limits.
    pub limited: f64,
    /// Time that operations waited for other disks.
    pub waited: f64,
    /// Number of operations that wait now.
    pub queued: u64,
}

/// Limits and reservations of a disk, without those of its group. Null: none.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct LimitFigures {
    pub iops: Option<LimitSetting>,
    pub iops_read: Option<LimitSetting>,
    pub iops_write: Option<LimitSetting>,
    pub bps: Option<LimitSetting>,
    pub bps_read: Option<LimitSetting>,
    pub bps_write: Option<LimitSetting>,
    pub reserve_iops: Option<u64>,
    pub reserve_bps: Option<u64>,
    pub latency_target: Option<f64>,
}

/// Decisions of the policies, and the rates and times that they last saw, by name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct PolicyFigures {
    /// Number of trials that chose each polling strategy.
    pub polling: BTreeMap<String, u64>,
    /// Requests a second in the last time slice of a trial with each strategy. 0: no trial has
    /// measured the strategy.
    #[serde(default)]
    pub polling_rates: BTreeMap<String, f64>,
    /// Number of trials that began `early` because the rate had changed, and that were `given-up`
    /// because the guest paused; and how often gathering ended because it was in `vain`.
    #[serde(default)]
    pub trials: BTreeMap<String, u64>,
    /// Number of moves of reactors: to the `guest`'s processors, and back `home`.
    pub placement: BTreeMap<String, u64>,
    /// Decisions about writes through the host's page cache.
    pub writes: BTreeMap<String, u64>,
    /// Number of completions for which the guest wanted a signal.
    pub completions: u64,
    /// Number of signals to the guest.
    #[serde(default)]
    pub signals_sent: u64,
    /// Looks at the rings of queues without kicks, by the time between two of them: `quick`,
    /// `slower`, or `idle`.
    #[serde(default)]
    pub looks: BTreeMap<String, u64>,
    /// Number of `slow` signals to the guest and calls on NBD connections; how often the next ones
    /// are `measured`, and how often others than the reactor make them (`elsewhere`).
    #[serde(default)]
    pub slow_calls: BTreeMap<String, u64>,
    /// In seconds, 0 before the first one: the last time between two looks (`look`), the last slow
    /// call (`slow-call`), the last time that a write blocked a reactor (`blocked`), and the last
    /// wait of a write because of dirty pages (`paced`).
    #[serde(default)]
    pub last: BTreeMap<String, f64>,
}
