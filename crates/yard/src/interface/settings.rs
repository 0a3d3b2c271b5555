//! Settings of a disk, independent of their source (command line, configuration file, API).

use std::error::Error;
use std::io;
use std::sync::Arc;

use blockyard_disk::{Carried, Disk, Filter, OnEnospc};
use blockyard_export::{Export, Reactors, SocketError};
use blockyard_image::ChainOptions;
use blockyard_sched::Knobs;

/// Why an export could not be started, or settings could not be made. [`YardError`] adds the disk.
///
/// [`YardError`]: crate::YardError
#[derive(Debug, thiserror::Error)]
pub enum WayError {
    /// The export cannot listen on its socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The reactors or the threads of a vhost-user or NBD export.
    #[error(transparent)]
    Start(#[from] io::Error),
    #[error("the server shuts down")]
    Closing,
    /// The error of one kind of export, or of the caller's own code.
    #[error(transparent)]
    Caller(Box<dyn Error + Send + Sync>),
}

impl WayError {
    /// Returns an error of one kind of export, or of the caller's own code.
    pub fn caller(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        WayError::Caller(source.into())
    }
}

/// Starts one export of a disk. An implementation holds the options of its protocol.
pub trait Way: Send + Sync {
    /// Returns where the disk is offered, for people: `/run/vm1.sock`, `unix:/run/nbd.sock`.
    fn describe(&self) -> String;

    /// Starts the export. After an error nothing of it remains.
    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn Export>, WayError>;

    /// Returns whether the export continues rings of an earlier server, which need the image of the
    /// disk as soon as the export starts.
    fn continues_rings(&self, _disk: &str) -> bool {
        false
    }
}

/// When the image of a disk is open, and locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// From the start to the end of the disk.
    #[default]
    Start,
    /// While queues of a guest run. For live migration.
    Rings,
}

/// Settings of a disk.
#[derive(Clone)]
pub struct DiskSettings {
    /// Name of the disk, unique in the yard, also used in messages.
    pub name: String,
    /// Serial number that a guest reads. It is truncated to 20 bytes.
    pub serial: String,
    /// The image, with its format and cache mode.
    pub image: ChainOptions,
    /// When the image is open.
    pub activation: Activation,
    pub filters: Vec<Filter>,
    pub on_enospc: OnEnospc,
    /// Name of the device that the disk shares with others. None: the device that holds its image.
    pub device: Option<String>,
    /// Name of the disk's group. The disks of a group share one weight, limits and reservation.
    pub group: Option<String>,
    pub knobs: Knobs,
    /// What an earlier server has counted, and the state of its limits.
    pub carried: Option<Arc<Carried>>,
    /// Exports start in this order. If one fails, those before it end. So an export with a client
    /// that must not be lost comes last.
    pub ways: Vec<Arc<dyn Way>>,
}
