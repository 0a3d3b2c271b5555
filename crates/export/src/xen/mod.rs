//! Xen: a disk of a guest (domU), over blkif.
//!
//! ```text
//!   thread of the device ─► xenstore: nodes, states 1 to 6, watches        reactors: queues ─► ring, pages, event channel
//! ```
//! In: a disk, and the domain and name of the device. Out: `/dev/xvda` in that domain, by its own
//! driver. What must hold
//! - This program removes the nodes that it made, when the device is detached or its domain has
//!   ended. The toolstack removes those that it made (`watch`).
//! - At the end of this program every request that was taken is answered, and the nodes stay. The
//!   next server of the same device goes on with the rings as they are, and the guest only waits.
//!   If the program was killed, records (`record`) have what was taken.
//! - Whatever a front end writes, its device is closed at worst, with one line in the log.

mod abi;
mod claim;
mod device;
mod nodes;
mod queue;
mod record;
mod reopen;
mod ring;
mod watch;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use blockyard_disk::Disk;
use blockyard_ring::xen::{Host, Node, Store};
use rustix::event::EventfdFlags;

/// The parts by themselves, for fuzzing: not an interface to build on.
#[doc(hidden)]
pub mod parts {
    pub use super::abi::Abi;
    pub use super::queue::{Counts, Data, QueueHandle, QueueSetup, Shared};
    pub use crate::log::Log;
}

use crate::{Export, Reactors};
use claim::{Claim, images};
use device::Device;
pub use device::{Listed, detach, list};
use nodes::{NodeError, Paths};
pub use watch::{ToolstackDevice, Wanted, Watch, WatchOptions};

#[derive(Debug, thiserror::Error)]
pub enum XenError {
    #[error(
        "{0}: is this a domain of Xen, with its kernel's drivers (xen-evtchn, xen-gntdev) and a running xenstored?"
    )]
    Host(std::io::Error),
    #[error("domain {domain}, device {device}: {source}")]
    Nodes { domain: u16, device: Name, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("watching backend/{kind}: {source}")]
    Watch { kind: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("domain {domain} has no device {device} of this program")]
    Missing { domain: u16, device: Name },
}

/// What a device is called in its domain: `xvda`; or its number, if the toolstack chose another
/// kind of name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    number: u32,
}

impl Name {
    /// The number by which xenstore knows it.
    pub fn number(self) -> u32 {
        self.number
    }

    fn of_disk(disk: u32) -> Self {
        // The first 16 have numbers of the time when numbers were those of Linux's devices.
        Name { number: if disk < 16 { 202 << 8 | disk << 4 } else { 1 << 28 | disk << 8 } }
    }

    /// The N of `xvd`N; `None`: it is no whole disk of that kind.
    fn disk(self) -> Option<u32> {
        let Name { number } = self;
        let disk = if number >> 28 == 1 { number >> 8 & 0xf_ffff } else { number >> 4 & 0xf };
        Some(disk).filter(|disk| *disk < 27 * 26 && Self::of_disk(*disk) == self)
    }

    /// By the name of a node.
    fn of_node(text: &str) -> Option<Self> {
        let number = text.parse::<u32>().ok()?;
        // Other spellings are other nodes.
        (number.to_string() == text).then_some(Name { number })
    }
}

/// A name that means nothing here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XenNameError {
    #[error("\"{0}\": the name of a device is xvda to xvdzz")]
    Device(String),
    #[error("it is auto, map or copy")]
    Data,
}

impl FromStr for Name {
    type Err = XenNameError;

    /// `xvda` to `xvdzz`.
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

/// How a device is made.
#[derive(Clone, Debug)]
pub struct XenOptions {
    /// The guest.
    pub domain: u16,
    pub device: Name,
    /// Queues that are offered, 8 at most.
    pub queues: u16,
    pub data: XenData,
    /// The folder, on tmpfs, for records of what was taken; `None`: a server that is killed leaves
    /// requests without an answer.
    pub records: Option<PathBuf>,
}

impl XenOptions {
    fn failed(&self, source: NodeError) -> XenError {
        XenError::Nodes { domain: self.domain, device: self.device, source: Box::new(source) }
    }
}

/// How the data of requests come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XenData {
    /// Mapped where pages stay mapped, because the guest uses the same ones again; else copied.
    #[default]
    Auto,
    /// The guest's pages are mapped.
    Map,
    /// The hypervisor copies them.
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

/// Requests to the thread of the device: stop, or announce a new size. And what it says of its
/// front end.
struct Control {
    wake: OwnedFd,
    stop: AtomicBool,
    resized: AtomicBool,
    connected: AtomicBool,
}

impl Control {
    fn new() -> std::io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (stop, resized, connected) = Default::default();
        Ok(Control { wake, stop, resized, connected })
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Xen {
    /// Makes a device of `disk`, or takes over the one that a server of it has left. Another thread
    /// calls `ended` when the device is detached, or when its domain has ended.
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
        let what = if new { "made" } else { "taken over" };
        Self::follow(disk, options, host, reactors, (store, paths, claim), what, ended)
    }

    /// Serves `disk` as the device that a toolstack asks for. `ended` is called, by another thread,
    /// when the toolstack wants the device back, or has removed it: then [`Watch::release`] tells
    /// the toolstack that the image is closed.
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
            "taken from the toolstack",
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

    fn stop(&mut self) {
        self.control.stop.store(true, Ordering::SeqCst);
        self.control.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    fn clients(&self) -> Vec<String> {
        if self.control.connected.load(Ordering::SeqCst) {
            vec![format!("domain {}", self.domain)]
        } else {
            Vec::new()
        }
    }
}

impl Drop for Xen {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Opens xenstore. Also returns the number of the own domain.
fn open_store(host: &Host, options: &XenOptions) -> Result<(Store, u16), XenError> {
    let mut store = host.store().map_err(XenError::Host)?;
    let own = own_domain(&mut store).map_err(|source| options.failed(source))?;
    Ok((store, own))
}

/// The number of the domain that this program runs in.
fn own_domain(store: &mut Store) -> Result<u16, NodeError> {
    // A path that does not begin with / is one of the own domain's.
    let text = store.read("domid")?.ok_or_else(|| NodeError::Missing("domid".into()))?;
    let wrong = || NodeError::Value {
        key: "domid".into(),
        value: text.clone(),
        wanted: "a number is wanted".into(),
    };
    text.parse().map_err(|_| wrong())
}

#[cfg(test)]
mod tests;
