//! The interface between the API and the server that it controls.

use std::path::PathBuf;
use std::sync::Arc;

use crate::events::EventLog;
use crate::figures::Figures;
use crate::json::keys::Object;
use crate::json::problem::Answer;
use crate::json::types::{
    ChangeQuery, Disconnect, Disconnected, Disk, DiskRow, Drain, Drained, Flushed, Fork, Job,
    JobRequest, Reload, Removed, Resize, Resized, Resumed, ServerInfo, Upgraded,
};

/// A wait for clients that leave a disk. Each call returns whether they have left or the wait has
/// failed, and None while they are still connected. Does not block for long.
pub type Departure = Box<dyn FnMut() -> Option<Answer<Disconnected>> + Send>;

/// A server, as the API sees it. Calls run on threads of the API, which may block.
pub trait Operator: Send + Sync + 'static {
    /// Does not block.
    fn server(&self) -> ServerInfo;

    /// Returns the events of the server. Does not block.
    fn events(&self) -> &Arc<EventLog>;

    /// Returns the figures of the server at this moment. Waits for no command of a disk.
    fn figures(&self) -> Answer<Figures>;

    /// Returns all disks in the order of their arrival. Does not block.
    fn disks(&self) -> Vec<DiskRow>;

    /// Returns a disk in detail. Waits for no command of a disk.
    fn disk(&self, name: &str) -> Answer<Disk>;

    /// Opens a disk and starts its exports. `keys`: those of a `[[disk]]` table. `persist`: writes
    /// them into the configuration.
    fn add(&self, keys: Object, persist: bool) -> Answer<Disk>;

    /// Takes a snapshot of a disk, and adds a second disk that begins with the same content.
    fn fork(&self, name: &str, fork: Fork) -> Answer<Disk>;

    /// Closes a disk. Without `force`, refuses while a client is connected. `persist`: removes it
    /// from the configuration.
    fn remove(&self, name: &str, force: bool, persist: bool) -> Answer<Removed>;

    /// Changes keys of a disk that need no reconnection. A null restores the default of its key.
    /// `persist`: writes them into the configuration.
    fn set(&self, name: &str, keys: Object, query: ChangeQuery) -> Answer<Disk>;

    /// Adopts the present size of the image.
    fn refresh(&self, name: &str) -> Answer<Resized>;

    /// Grows the image.
    fn resize(&self, name: &str, size: Resize) -> Answer<Resized>;

    /// Makes all answered writes durable.
    fn flush(&self, name: &str) -> Answer<Flushed>;

    /// Waits until no request is in flight and all answered writes are durable. Holds requests from
    /// then on, for a limited time.
    fn drain(&self, name: &str, drain: Drain) -> Answer<Drained>;

    /// Begins to disconnect clients, which may connect again. Does not wait until they have left.
    fn disconnect(&self, name: &str, clients: Disconnect) -> Answer<Departure>;

    /// Ends a drain, and lets the requests that wait for space on the host try again. Does not
    /// block.
    fn resume(&self, name: &str) -> Answer<Resumed>;

    /// Starts a job.
    fn start(&self, name: &str, job: JobRequest) -> Answer<Job>;

    /// Returns the running jobs and the latest ones that have ended. Does not block.
    fn jobs(&self) -> Vec<Job>;

    /// Cancels a job. Does not block.
    fn cancel(&self, number: u64) -> Answer<Job>;

    /// Reads the configuration file again and applies it, or returns what it would change.
    fn reload(&self, dry_run: bool) -> Answer<Reload>;

    /// Starts another server, and hands the disks over to it. `binary`: its program, else the
    /// program of this server.
    fn upgrade(&self, binary: Option<PathBuf>) -> Answer<Upgraded>;
}
