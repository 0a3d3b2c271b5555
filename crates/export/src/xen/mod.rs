//! Xen: a disk of a guest (domU), over blkif.
//!
//! ```text
//!   thread of the device ─► xenstore: nodes, states 1 to 6, watches        reactors: queues ─► ring, pages, event channel
//! ```
//! In: a disk, and the domain and name of the device. Out: `/dev/xvda` in that domain, by its own driver.
//! What must hold
//! - The nodes are this program's own: it makes them, and removes them when the device is detached or its domain has ended.
//! - At the end of this program every request that was taken is answered, and the nodes stay. The next server of the same device
//!   goes on with the rings as they are, and the guest only waits. If the program was killed, records (`record`) have what was taken.
//! - Whatever a front end writes, its device is closed at worst, with one line in the log.

mod abi;
mod device;
mod nodes;
mod queue;
mod record;
mod ring;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use blockyard_disk::Disk;
use blockyard_ring::xen::{Host, Node};
use rustix::event::EventfdFlags;

use crate::Reactors;
use device::Device;
pub use device::{Listed, detach, list};
use nodes::{NodeError, Paths};

#[derive(Debug, thiserror::Error)]
pub enum XenError {
    #[error(
        "{0}: is this a domain of Xen, with its kernel's drivers (xen-evtchn, xen-gntdev) and a running xenstored?"
    )]
    Host(std::io::Error),
    #[error("domain {domain}, device {device}: {source}")]
    Nodes { domain: u16, device: Name, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("domain {domain} has no device {device} of this program")]
    Missing { domain: u16, device: Name },
}

/// What a device is called in its domain: `xvda`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    disk: u32,
}

impl Name {
    /// The number by which xenstore knows it.
    pub fn number(self) -> u32 {
        // The first 16 have numbers of the time when numbers were those of Linux's devices.
        if self.disk < 16 { 202 << 8 | self.disk << 4 } else { 1 << 28 | self.disk << 8 }
    }

    fn of_number(number: u32) -> Option<Self> {
        let disk = if number >> 28 == 1 { number >> 8 & 0xf_ffff } else { number >> 4 & 0xf };
        Some(Name { disk }).filter(|name| name.number() == number)
    }
}

impl FromStr for Name {
    type Err = String;

    /// `xvda` to `xvdzz`.
    fn from_str(s: &str) -> Result<Self, String> {
        let letters = s.strip_prefix("xvd").filter(|l| (1..=2).contains(&l.len()));
        let letters = letters.filter(|l| l.bytes().all(|b| b.is_ascii_lowercase()));
        let letters = letters.ok_or_else(|| format!("\"{s}\": the name of a device is xvda to xvdzz"))?;
        let disk = letters.bytes().fold(0, |disk, letter| disk * 26 + u32::from(letter - b'a') + 1) - 1;
        Ok(Name { disk })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |number: u32| char::from(b'a' + (number % 26) as u8);
        match self.disk / 26 {
            0 => write!(f, "xvd{}", letter(self.disk)),
            first => write!(f, "xvd{}{}", letter(first - 1), letter(self.disk)),
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
    /// The folder, on tmpfs, for records of what was taken; `None`: a server that is killed leaves requests without an answer.
    pub records: Option<PathBuf>,
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
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(XenData::Auto),
            "map" => Ok(XenData::Map),
            "copy" => Ok(XenData::Copy),
            _ => Err("it is auto, map or copy".into()),
        }
    }
}

/// A device that is served. `stop` (or drop) ends the service, and leaves the device to the next server.
pub struct Xen {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// Requests to the thread of the device: stop, or announce a new size.
struct Control {
    wake: OwnedFd,
    stop: AtomicBool,
    resized: AtomicBool,
}

impl Control {
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Xen {
    /// Makes a device of `disk`, or takes over the one that a server of it has left. Another thread calls `ended` when the device
    /// is detached, or when its domain has ended.
    pub fn start(
        disk: Arc<Disk>,
        options: &XenOptions,
        host: &Host,
        reactors: Arc<Reactors>,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, XenError> {
        let mut store = host.store().map_err(XenError::Host)?;
        let (domain, device) = (options.domain, options.device);
        let nodes = |source: NodeError| XenError::Nodes { domain, device, source: Box::new(source) };
        let own = own_domain(&mut store).map_err(nodes)?;
        let paths = Paths::new(own, options);
        let new = paths.make(&mut store, own, options, disk.options().read_only).map_err(nodes)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|e| XenError::Host(e.into()))?;
        let control = Arc::new(Control { wake, stop: AtomicBool::new(false), resized: AtomicBool::new(false) });
        let what = if new { "made" } else { "taken over" };
        tracing::info!(disk = disk.name(), "device {device} of domain {domain} {what}");
        let mut device = Device::new(disk, options.clone(), host.clone(), reactors, store, paths, control.clone());
        device.begin().map_err(nodes)?;
        let body = move || {
            if device.run() {
                ended();
            }
        };
        let thread = std::thread::Builder::new().name("xen".into()).stack_size(512 << 10).spawn(body);
        Ok(Xen { control, thread: Some(thread.map_err(XenError::Host)?) })
    }

    /// The disk has a new size.
    pub fn config_changed(&self) {
        self.control.resized.store(true, Ordering::SeqCst);
        self.control.ring();
    }

    pub fn stop(&mut self) {
        self.control.stop.store(true, Ordering::SeqCst);
        self.control.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Xen {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The number of the domain that this program runs in.
fn own_domain(store: &mut blockyard_ring::xen::Store) -> Result<u16, NodeError> {
    // A path that does not begin with / is one of the own domain's.
    let text = store.read("domid")?.ok_or_else(|| NodeError::Missing("domid".into()))?;
    let wrong = || NodeError::Value { key: "domid".into(), value: text.clone(), wanted: "a number is wanted".into() };
    text.parse().map_err(|_| wrong())
}

#[cfg(test)]
mod tests;
