//! Xen: a disk of a guest (domU), over blkif.
//!
//! ```text
//!   device thread ─► xenstore: nodes, states 1 to 6, watches
//!   reactors      ─► queues: ring, pages, event channel
//! ```
//! In: a disk, and the domain and name of the device. Out: `/dev/xvda` in that domain, by the
//! guest's own driver.
//!
//! What must hold
//! - This program removes the nodes that it created, when the device is detached or its domain has
//!   ended. The toolstack removes the nodes that it created (`watch`).
//! - When this program ends, it completes every request that it has taken, and the nodes stay. The
//!   next server of the same device continues with the same rings. The guest notices only a delay.
//!   If the program was killed, records (`record`) contain the requests in flight.
//! - A front end that writes anything invalid loses at most its device, and causes one line in the
//!   log.

mod abi;
mod claim;
mod device;
mod folder;
mod nodes;
mod queue;
mod record;
mod reopen;
mod ring;
mod toolstack;
mod watch;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use blockyard_disk::{ConnectedClient, Disk};
use blockyard_ring::xen::{Host, Node, Store};
use rustix::event::EventfdFlags;

/// Internal parts, for fuzzing. They are no stable interface.
#[doc(hidden)]
pub mod parts {
    pub use super::abi::Abi;
    pub use super::queue::{Counts, Data, QueueHandle, QueueSetup, Shared};
    pub use crate::log::Log;
}

use crate::export::{GRACE, STOP_TIME};
use crate::{Client, Export, Reactors};
use claim::{Claim, images};
use device::Device;
pub use device::{Listed, detach, list};
pub use folder::records;
use nodes::{NodeError, Paths};
pub use toolstack::{ToolstackDevice, Wanted};
pub use watch::{Watch, WatchOptions};

/// Reasons why a device or a watch cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum XenError {
    #[error(
        "{0}; this must be a Xen domain with the drivers xen-evtchn and xen-gntdev, and a running \
         xenstored"
    )]
    Host(std::io::Error),
    #[error("domain {domain}, device {device}: {source}")]
    Nodes { domain: u16, device: Name, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot watch backend/{kind} in xenstore: {source}")]
    Watch { kind: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("domain {domain} has no device {device} of this program")]
    Missing { domain: u16, device: Name },
}

/// Name of a device in its domain, such as `xvda`, or its number if the toolstack chose another
/// naming scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    number: u32,
}

impl Name {
    /// Returns the device number in xenstore.
    pub fn number(self) -> u32 {
        self.number
    }

    fn of_disk(disk: u32) -> Self {
        // Disks 0 to 15 use the number of the Linux device (major 202).
        Name { number: if disk < 16 { 202 << 8 | disk << 4 } else { 1 << 28 | disk << 8 } }
    }

    /// Returns N of `xvd`N, or `None` if the number is not that of a whole disk `xvd`N.
    fn disk(self) -> Option<u32> {
        let Name { number } = self;
        let disk = if number >> 28 == 1 { number >> 8 & 0xf_ffff } else { number >> 4 & 0xf };
        Some(disk).filter(|disk| *disk < 27 * 26 && Self::of_disk(*disk) == self)
    }

    /// Parses the name of a node.
    fn of_node(text: &str) -> Option<Self> {
        let number = text.parse::<u32>().ok()?;
        // Another spelling of the same number would be another node.
        (number.to_string() == text).then_some(Name { number })
    }
}

/// An invalid name or value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XenNameError {
    #[error("\"{0}\" is not a device name: use xvda to xvdzz")]
    Device(String),
    #[error("use auto, map or copy")]
    Data,
}

impl FromStr for Name {
    type Err = XenNameError;

    /// Parses `xvda` to `xvdzz`.
    fn from_str(s: &str) -> Result<Self, XenNameError> {
        let letters = s.strip_prefix("xvd").filter(|l| (1..=2).contains(&l.len()));
        let letters = letters.filter(|l| l.bytes().all(|b| b.is_ascii_lowercase()));
        let letters = letters.ok_or_else(|| XenNameError::Device(s.into()))?;
        let disk =
            letters.bytes().fold(0, |disk, letter| disk * 26 + u32::from(letter - b'a') + 1) - 1;
        Ok(Self::of_disk(disk))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |number: u32| char::from(b'a' + (number % 26) as u8);
        match self.disk() {
            None => write!(f, "{}", self.number),
            Some(disk @ 0..26) => write!(f, "xvd{}", letter(disk)),
            Some(disk) => write!(f, "xvd{}{}", letter(disk / 26 - 1), letter(disk)),
        }
    }
}

/// Parameters of a device.
#[derive(Clone, Debug)]
pub struct XenOptions {
    /// Number of the guest's domain.
    pub domain: u16,
    pub device: Name,
    /// Number of queues to offer, at most 8.
    pub queues: u16,
    pub data: XenData,
    /// Folder on tmpfs for records of requests in flight. `None`: if the server is killed, the
    /// requests in flight never complete.
    pub records: Option<PathBuf>,
}

impl XenOptions {
    fn failed(&self, source: NodeError) -> XenError {
        XenError::Nodes { domain: self.domain, device: self.device, source: Box::new(source) }
    }
}

/// How the data of requests is transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XenData {
    /// Maps the pages if grants are persistent, because the guest reuses the pages. Copies the data
    /// if they are not.
    #[default]
    Auto,
    /// The guest's pages are mapped.
    Map,
    /// The hypervisor copies the data.
    Copy,
}

impl FromStr for XenData {
    type Err = XenNameError;

    fn from_str(s: &str) -> Result<Self, XenNameError> {
        match s {
            "auto" => Ok(XenData::Auto),
            "map" => Ok(XenData::Map),
            "copy" => Ok(XenData::Copy),
            _ => Err(XenNameError::Data),
        }
    }
}

/// A device that is served. `stop` (or drop) ends the service, and leaves the device to the next
/// server.
pub struct Xen {
    domain: u16,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// Name of the export in counts.
const COUNTED: &str = "xen";

/// Commands to the device's thread (stop, or announce a new size), and the state of the connection
/// to the front end.
struct Control {
    wake: OwnedFd,
    stop: AtomicBool,
    /// The time until which a thread that stops may wait for xenstore.
    deadline: Arc<Mutex<Option<Instant>>>,
    resized: AtomicBool,
    connected: Mutex<Option<ConnectedClient>>,
}

impl Control {
    fn new() -> std::io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (stop, deadline, resized, connected) = Default::default();
        Ok(Control { wake, stop, deadline, resized, connected })
    }

    fn connected(&self) -> MutexGuard<'_, Option<ConnectedClient>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline(&self) -> MutexGuard<'_, Option<Instant>> {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Xen {
    /// Creates a device for `disk`, or takes over the device that an earlier server of the disk has
    /// left. Another thread calls `ended` when the device is detached, or its domain has ended.
    pub fn start(
        disk: Arc<Disk>,
        options: &XenOptions,
        host: &Host,
        reactors: Arc<Reactors>,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, XenError> {
        let (mut store, own) = open_store(host, options)?;
        let failed = |source| options.failed(source);
        let claim = Claim::take(options).map_err(failed)?;
        let mut paths = Paths::new(own, options);
        let new = paths
            .make(&mut store, own, options, &images(&disk), disk.options().read_only)
            .map_err(failed)?;
        let what = if new { "is created" } else { "is taken over" };
        Self::follow(disk, options, host, reactors, (store, paths, claim), what, ended)
    }

    /// Serves `disk` as the device that a toolstack requests. Another thread calls `ended` when the
    /// toolstack takes the device back, or has removed it. Then [`Watch::release`] reports to the
    /// toolstack that the image is closed.
    pub fn take(
        disk: Arc<Disk>,
        options: &XenOptions,
        wanted: &Wanted,
        host: &Host,
        reactors: Arc<Reactors>,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, XenError> {
        let (mut store, own) = open_store(host, options)?;
        let failed = |source| options.failed(source);
        let claim = Claim::take(options).map_err(failed)?;
        let paths = Paths::of_toolstack(own, wanted);
        if !paths.accept(&mut store, wanted).map_err(|e| failed(e.into()))? {
            return Err(failed(NodeError::Changed));
        }
        Self::follow(
            disk,
            options,
            host,
            reactors,
            (store, paths, claim),
            "is taken from the toolstack",
            ended,
        )
    }

    fn follow(
        disk: Arc<Disk>,
        options: &XenOptions,
        host: &Host,
        reactors: Arc<Reactors>,
        (store, paths, claim): (Store, Paths, Claim),
        what: &str,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, XenError> {
        let control = Arc::new(Control::new().map_err(XenError::Host)?);
        let XenOptions { domain, device, .. } = options;
        tracing::info!(disk = disk.name(), "device {device} of domain {domain} {what}");
        let mut device = Device::new(
            disk,
            options.clone(),
            host.clone(),
            reactors,
            store,
            paths,
            control.clone(),
        );
        device.begin().map_err(|source| options.failed(source))?;
        let body = move || {
            if device.run() {
                claim.remove();
                ended();
            }
        };
        let thread =
            std::thread::Builder::new().name("xen".into()).stack_size(512 << 10).spawn(body);
        Ok(Xen { domain: *domain, control, thread: Some(thread.map_err(XenError::Host)?) })
    }
}

impl Export for Xen {
    fn resize(&mut self) {
        self.control.resized.store(true, Ordering::SeqCst);
        self.control.ring();
    }

    fn stop(&mut self, deadline: Instant) {
        *self.control.deadline() = Some(deadline.max(Instant::now() + GRACE));
        self.control.stop.store(true, Ordering::SeqCst);
        self.control.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    fn clients(&self) -> Vec<Client> {
        if self.control.connected().is_some() {
            vec![Client::described(format!("domain {}", self.domain))]
        } else {
            Vec::new()
        }
    }
}

impl Drop for Xen {
    fn drop(&mut self) {
        self.stop(Instant::now() + STOP_TIME);
    }
}

/// Connects to xenstore. Also returns the number of this program's domain.
fn open_store(host: &Host, options: &XenOptions) -> Result<(Store, u16), XenError> {
    let mut store = host.store().map_err(XenError::Host)?;
    let own = own_domain(&mut store).map_err(|source| options.failed(source))?;
    Ok((store, own))
}

/// Returns the number of the domain that this program runs in.
fn own_domain(store: &mut Store) -> Result<u16, NodeError> {
    // A relative path in xenstore refers to the domain of the caller.
    let text = store.read("domid")?.ok_or_else(|| NodeError::Missing("domid".into()))?;
    let invalid = || NodeError::Value {
        key: "domid".into(),
        value: text.clone(),
        wanted: "a number is expected".into(),
    };
    text.parse().map_err(|_| invalid())
}

#[cfg(test)]
mod tests;
