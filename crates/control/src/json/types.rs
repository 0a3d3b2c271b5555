//! What calls receive and return. Sizes are in bytes, times in microseconds where the name says so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::keys::{self, unique_keys};

/// The server.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct ServerInfo {
    pub version: String,
    pub pid: u32,
    /// Start of the server, in seconds since 1970.
    pub since: u64,
    /// Number of disks.
    pub disks: usize,
    /// The configuration file that a reload reads.
    pub config: Option<String>,
    /// Disks of the configuration that could not be opened, and are not served.
    #[serde(default)]
    pub failed: Vec<UnopenedDisk>,
}

/// A disk of the configuration that could not be opened.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct UnopenedDisk {
    pub name: String,
    pub image: String,
    /// Why the last attempt failed.
    pub error: String,
    /// The first failed attempt, in seconds since 1970.
    pub since: u64,
}

/// State of a disk.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The image is being opened, or the exports start.
    Opening,
    Serving,
    /// A command works on the disk. Clients do not notice.
    Busy,
    /// The exports end, and the image is flushed and closed.
    Closing,
}

/// A row of the list of disks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct DiskRow {
    pub name: String,
    pub state: State,
    /// The image that was given when the disk was added. Null while it is being opened.
    pub image: Option<String>,
    /// The images that the disk consists of now.
    pub images: String,
    /// Size in bytes; 0 while the image is being opened.
    pub size: u64,
    pub read_only: bool,
    /// Addresses of the exports.
    pub exports: Vec<String>,
    /// Number of requests that wait for space on the host, until the disk is resumed.
    pub paused: u64,
    /// Whether a drain holds the requests back, until the disk is resumed.
    #[serde(default)]
    pub drained: bool,
    /// Why the disk is poisoned: it accepts no more writes until its image is opened again. Null:
    /// it is not poisoned.
    #[serde(default)]
    pub poisoned: Option<String>,
    /// Whether the image is closed, because no guest uses the disk (`activation = "rings"`).
    #[serde(default)]
    pub inactive: bool,
}

/// The list of disks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Disks {
    pub disks: Vec<DiskRow>,
}

/// A disk in detail.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Disk {
    #[serde(flatten)]
    pub row: DiskRow,
    /// Seconds after which the requests of a drained disk go on without a call.
    #[serde(default)]
    pub drain_seconds_left: Option<u64>,
    /// The block device of this host that an export has made.
    pub device: Option<String>,
    /// Who uses the disk. Empty while it is being opened or closed.
    pub clients: Vec<Client>,
    /// Null while the disk is being opened or closed.
    pub share: Option<ShareFigures>,
    /// Null for a disk of a Xen toolstack.
    pub settings: Option<Settings>,
    /// Requests since the disk was opened, for each kind of operation.
    pub requests: BTreeMap<String, Requests>,
}

/// A client of a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Client {
    /// The client, for people: `pid 4711`, `192.0.2.7:40312`, `domain 3`.
    pub description: String,
    /// Process number of a client on a Unix socket, in the server's PID namespace.
    pub pid: Option<i32>,
    pub uid: Option<u32>,
    /// The program that the process ran when it connected, at most 15 bytes.
    pub program: Option<String>,
    /// Address of a client on a TCP socket.
    pub address: Option<String>,
    /// The features of virtio that a vhost-user driver has accepted, in hexadecimal.
    pub features: Option<String>,
    /// When the client connected, in seconds since 1970.
    pub since: Option<u64>,
}

/// What a disk has used of its device and of its limits.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct ShareFigures {
    /// The device that the disk shares with others. Null: none.
    pub device: Option<String>,
    /// Effective weight: the disk's own weight, or its part of its group's weight.
    pub weight: f64,
    /// Device time that the share allowed while the disk was busy, in microseconds.
    pub entitled_us: u64,
    /// Device time that the disk used, in microseconds.
    pub used_us: u64,
    /// Device time that the disk left to others while it was busy, in microseconds.
    pub donated_us: u64,
    /// Time that operations waited for the disk's limits, in microseconds.
    pub limited_us: u64,
    /// Time that operations waited for other disks, in microseconds.
    pub waited_us: u64,
    /// Number of operations that wait now.
    pub queued: u64,
}

/// Settings of a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Settings {
    pub format: Option<String>,
    pub cache: String,
    /// What happens to a request without space on the host: `error` or `pause`.
    pub on_enospc: String,
    /// When the image is opened: at the `start`, or when the guest's `rings` run.
    #[serde(default)]
    pub activation: String,
    pub queues: u16,
    pub group: Option<String>,
    pub weight: u32,
    pub reserve_iops: Option<u64>,
    pub reserve_bps: Option<u64>,
    pub iops: Option<LimitSetting>,
    pub iops_read: Option<LimitSetting>,
    pub iops_write: Option<LimitSetting>,
    pub bps: Option<LimitSetting>,
    pub bps_read: Option<LimitSetting>,
    pub bps_write: Option<LimitSetting>,
    pub latency_target_us: Option<u64>,
    /// Names of certificates that admit NBD clients. An empty list admits no client. Null: all
    /// clients.
    pub tls_allow: Option<Vec<String>>,
    /// Whether a call added the disk. A reload keeps such a disk, although the file lacks it.
    pub added_by_api: bool,
}

/// A limit in operations or bytes a second.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct LimitSetting {
    pub rate: u64,
    /// Rate of a burst. Null: no burst.
    pub max: Option<u64>,
    /// Length of a burst in seconds.
    pub length: f64,
}

/// Requests of one kind.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Requests {
    pub requests: u64,
    /// Number of requests that were merged into the operation of another.
    pub merged: u64,
    pub errors: u64,
    pub bytes: u64,
    /// Time in the queue: median, 99th percentile and maximum, in microseconds.
    pub queue_us: [f64; 3],
    /// Service time: median, 99th percentile and maximum, in microseconds.
    pub service_us: [f64; 3],
}

/// A disk that was removed.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Removed {
    pub name: String,
    /// Whether all answered writes are durable. If not, the log has the reason.
    pub flushed: bool,
}

/// A disk whose writes were made durable.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Flushed {
    pub name: String,
}

/// A resumed disk. Requests that a drain held back or that waited for space go on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Resumed {
    pub name: String,
    /// Number of requests that waited for space on the host.
    pub requests: u64,
    /// Whether a drain held the requests back.
    #[serde(default)]
    pub drained: bool,
    /// Whether the disk is not open yet. If it waits for space, it tries again.
    #[serde(default)]
    pub opening: bool,
}

/// How long a drain lasts.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Longest time in seconds, 1 to 600. Then requests go on without a call. Null: 60.
    #[serde(default)]
    pub seconds: Option<u64>,
}

/// A disk that is drained: no request is in flight, and all answered writes are durable.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Drained {
    pub name: String,
    /// Seconds after which requests go on without a call.
    pub seconds: u64,
}

/// The clients to disconnect.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Disconnect {
    /// The `description` of a client of the disk. Null: all clients.
    #[serde(default)]
    pub client: Option<String>,
}

/// Clients that were disconnected.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Disconnected {
    pub name: String,
    /// Their descriptions.
    pub clients: Vec<String>,
}

/// The size to grow to.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// New size in bytes, a multiple of 512.
    pub size: u64,
}

/// Size in bytes, before and after.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Resized {
    pub old: u64,
    pub new: u64,
}

/// Where a snapshot's later writes go.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Path of the overlay to create. The file must not exist.
    pub overlay: String,
    /// Continue although the old image cannot record that it has an overlay.
    #[serde(default)]
    pub unrecorded: bool,
    /// Name the overlay as the disk's image in the configuration too.
    #[serde(default)]
    pub persist: bool,
}

/// Where the copy of a disk goes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    /// Path of the image to create. The file must not exist.
    pub target: String,
    /// Format of the image: `raw` or `qcow2`. Null: by the name of the target, else raw.
    #[serde(default)]
    pub format: Option<String>,
}

/// A second disk that begins with the present content of a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// Path of the overlay to create for the old disk, which goes on in it. The file must not
    /// exist.
    pub overlay: String,
    /// Continue although the old image cannot record that it has an overlay.
    #[serde(default)]
    pub unrecorded: bool,
    /// Write both disks into the configuration too.
    #[serde(default)]
    pub persist: bool,
    /// Keys of the new disk: those of a `[[disk]]` table. `image` is the path of the image to
    /// create, which is qcow2.
    #[serde(deserialize_with = "unique_keys")]
    #[schema(value_type = Object)]
    pub disk: keys::Object,
}

/// A job to start.
#[derive(Clone, Debug, PartialEq)]
pub enum JobRequest {
    Snapshot(Snapshot),
    Backup(Backup),
    Commit,
    Stream,
}

/// State of a job.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    Running,
    Done,
    /// The disk is as it was before the job.
    Failed,
}

/// A snapshot, commit, stream or backup of a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Job {
    pub number: u64,
    pub disk: String,
    /// What the job does, for people: `snapshot into top.qcow2`, `commit`, `stream`,
    /// `backup into copy.qcow2`.
    pub kind: String,
    pub state: JobState,
    /// Number of bytes done.
    pub done: u64,
    /// Total number of bytes. It grows while the job finds more data to copy.
    pub total: u64,
    /// Why the job failed.
    pub error: Option<String>,
}

/// The list of jobs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Jobs {
    pub jobs: Vec<Job>,
}

/// A key with its old and its new value, as text.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct KeyChange {
    pub key: String,
    pub old: String,
    pub new: String,
}

/// A disk that a reload changes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct DiskChange {
    pub disk: String,
    pub keys: Vec<KeyChange>,
    /// Whether the disk is closed and opened again, which disconnects its clients.
    pub disconnects: bool,
}

/// A group of disks that a reload changes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct GroupChange {
    pub group: String,
    pub keys: Vec<KeyChange>,
}

/// A change that a reload does not apply.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Ignored {
    #[serde(flatten)]
    pub change: KeyChange,
    pub reason: String,
}

/// A disk that could not be served as the file says.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct FailedDisk {
    pub disk: String,
    pub error: String,
}

/// What a reload changed, or would change.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Reload {
    /// Whether nothing was applied.
    pub dry_run: bool,
    pub added: Vec<String>,
    pub changed: Vec<DiskChange>,
    /// Removed disks. Their clients are disconnected.
    pub removed: Vec<String>,
    #[serde(default)]
    pub groups: Vec<GroupChange>,
    /// Changed keys of the section `[nbd]`.
    #[serde(default)]
    pub nbd: Vec<KeyChange>,
    pub ignored: Vec<Ignored>,
    pub failed: Vec<FailedDisk>,
}

/// Parameters of a removal.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct RemoveQuery {
    /// Disconnect clients.
    #[serde(default)]
    pub force: bool,
    /// Remove the disk from the configuration too.
    #[serde(default)]
    pub persist: bool,
}

/// Parameters of a change.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ChangeQuery {
    /// Change `cache` also if clients are connected: they are disconnected, and must connect again.
    #[serde(default)]
    pub force: bool,
    /// Write the change into the configuration too, so that a restart keeps it.
    #[serde(default)]
    pub persist: bool,
}

/// The program of the next server.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// Path of the program. Null: the path of the running one, at which a new one may be.
    #[serde(default)]
    pub binary: Option<String>,
}

/// A hand-over that has succeeded.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Upgraded {
    /// Process number of the server that serves the disks now.
    pub pid: u32,
    pub version: String,
    pub disks: Vec<HandedOver>,
    /// Disks that the new server does not have, because its configuration does not have them.
    #[serde(default)]
    pub ended: Vec<String>,
    /// Number of NBD clients that were disconnected, because they use TLS or had chosen no export
    /// yet. They can connect to the new server.
    #[serde(default)]
    pub disconnected: u64,
}

/// A disk that another server has taken over.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct HandedOver {
    pub name: String,
    /// Time for which no server took requests of the disk, in microseconds.
    pub pause_us: u64,
    /// Keys that have another value than in the old server, because the configuration file has
    /// changed.
    #[serde(default)]
    pub changed: Vec<KeyChange>,
}

/// Parameters of a reload.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReloadQuery {
    /// Return what a reload would change, and change nothing.
    #[serde(default)]
    pub dry_run: bool,
}
