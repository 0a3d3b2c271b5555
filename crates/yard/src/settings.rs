//! What a disk is, apart from how a person says it (command line, configuration file, API).

use std::error::Error;
use std::sync::Arc;

use blockyard_disk::{Disk, Filter};
use blockyard_export::{Export, Reactors};
use blockyard_image::ChainOptions;
use blockyard_sched::Knobs;

/// Why an export could not be started, or settings could not be made.
pub type WayError = Box<dyn Error + Send + Sync>;

/// Starts one export of a disk. An implementation holds the options of its protocol.
pub trait Way: Send + Sync {
    /// Describes where the disk is offered, for people: `/run/vm1.sock`, `unix:/run/nbd.sock`.
    fn describe(&self) -> String;

    /// Starts the export. After an error nothing of it is left.
    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn Export>, WayError>;
}

#[derive(Clone)]
pub struct DiskSettings {
    /// Tells the disk from the others of the yard; also its name in messages.
    pub name: String,
    /// The serial number that a guest reads. Bytes from the 21st are cut off.
    pub serial: String,
    /// The image, with its format and cache mode.
    pub image: ChainOptions,
    pub filters: Vec<Filter>,
    /// The name of the device that the disk shares with others. None: the device on which its image
    /// lies.
    pub device: Option<String>,
    /// The name of its group of disks, which share one weight, limits and reservation.
    pub group: Option<String>,
    pub knobs: Knobs,
    /// Exports start in this order.
    pub ways: Vec<Arc<dyn Way>>,
}
