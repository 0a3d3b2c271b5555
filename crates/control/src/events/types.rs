//! What an event says.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::json::types::{Job, KeyChange};

/// An event of the server.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
pub struct Event {
    /// A client that connects again sends the id of its last event as `Last-Event-ID`.
    pub id: String,
    /// When it happened, in microseconds since 1970.
    pub time_us: u64,
    #[serde(flatten)]
    pub what: What,
}

/// What has happened. The key `event` has its name.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize, ToSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// The server serves its disks.
    ServerReady {
        disks: u64,
    },
    /// The server ends. No event follows.
    ServerEnding,
    /// The image is open, and the exports start.
    DiskAdded {
        disk: String,
        images: String,
        size: u64,
        exports: Vec<String>,
    },
    /// The disk is closed. `error`: an export could not start.
    DiskRemoved {
        disk: String,
        flushed: bool,
        error: Option<String>,
    },
    /// A disk of the configuration could not be opened.
    DiskFailed {
        disk: String,
        image: String,
        error: String,
    },
    /// Keys of the disk have changed while it is served.
    DiskChanged {
        disk: String,
        keys: Vec<KeyChange>,
    },
    /// The disk has a new size, in bytes.
    DiskResized {
        disk: String,
        old: u64,
        new: u64,
    },
    /// A qcow2 image begins to grow to `size` bytes.
    ResizeBegun {
        disk: String,
        size: u64,
    },
    /// Null: the image has grown.
    ResizeEnded {
        disk: String,
        error: Option<String>,
    },
    ClientConnected {
        disk: String,
        /// The kind of export: `vhost-user`, `nbd`, `ublk` or `xen`.
        export: String,
        client: String,
        pid: Option<i32>,
        program: Option<String>,
    },
    ClientDisconnected {
        disk: String,
        export: String,
        client: String,
        pid: Option<i32>,
        program: Option<String>,
        why: String,
    },
    /// Requests wait for space on the host.
    DiskPaused {
        disk: String,
        requests: u64,
    },
    /// No request waits for space any more.
    DiskResumed {
        disk: String,
    },
    /// A drain holds the requests of the disk back.
    DiskDrained {
        disk: String,
    },
    /// The requests go on. `expired`: no call resumed the disk, so they went on after the time of
    /// the drain.
    DrainEnded {
        disk: String,
        expired: bool,
    },
    /// The disk accepts no more writes.
    DiskPoisoned {
        disk: String,
        why: String,
    },
    /// A snapshot, commit, stream or backup begins.
    JobBegun {
        job: Job,
    },
    /// At most once a second, if the job has made progress.
    JobProgressed {
        job: Job,
    },
    JobEnded {
        job: Job,
    },
    /// The configuration was read again. Numbers of disks, or an error.
    Reloaded {
        added: u64,
        changed: u64,
        removed: u64,
        failed: u64,
        /// Number of groups with changed keys.
        #[serde(default)]
        groups: u64,
        error: Option<String>,
    },
    /// Another server begins to take the disks over.
    HandOverBegun,
    /// `pid`: the other server, which serves the disks now. `error`: why this one still serves
    /// them.
    HandOverEnded {
        pid: Option<u32>,
        error: Option<String>,
    },
    /// The client has missed `count` events. Null: the number is unknown.
    Lost {
        count: Option<u64>,
    },
}

/// Parameters of a stream of events.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct EventsQuery {
    /// Id of the last event that the client has; 0 for all that the server still has. The header
    /// `Last-Event-ID` has precedence. Without both, the stream begins with the next event.
    pub since: Option<String>,
}
