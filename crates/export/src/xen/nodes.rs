//! The nodes of a device in xenstore: the nodes that the back end writes, and the front end's nodes
//! that the back end reads.
//!
//! In: text that a guest wrote. Out: a ring's grant references and ports, each number checked.
//!
//! What must hold
//! - A guest cannot cause more rings, pages or queues than the back end offered.
//! - A write never creates nodes of a device that is gone.
//! - A server changes no node of a later device with the same name. The node `incarnation`
//!   distinguishes the two devices.

use std::fmt::Display;
use std::hash::{BuildHasher, Hasher, RandomState};

use blockyard_disk::{Disk, Source};
use blockyard_image::SECTOR;
use blockyard_ring::xen::{Access, Node, Store, StoreError, Transaction};

use super::abi::{Abi, INDIRECT_SEGMENTS};
use super::toolstack::{ToolstackDevice, Wanted};
use super::{XenData, XenOptions};
use crate::fingerprint;

/// The type of back end for devices that this program creates.
pub const KIND: &str = "blockyard";

/// The node in a toolstack's device that names the program which serves the device.
pub const SERVER: &str = "server";

/// The back end's node with the number of queues that it offers.
const QUEUES: &str = "multi-queue-max-queues";

/// The node that distinguishes a device of this program from others with the same name. It contains
/// a random number.
const INCARNATION: &str = "incarnation";

/// The back end's node that says whether the back end supports flushes.
const FLUSH: &str = "feature-flush-cache";

/// The node in a device of this program that names its image.
const IMAGE: &str = "image";

/// The back end's node that a server writes if it records the requests that it takes. The server
/// removes the node when it has completed all of them.
const RECORDED: &str = "recorded";

/// Largest values that the back end offers: 2^4 pages per ring, and 8 queues.
pub const MAX_PAGE_ORDER: u32 = 4;
pub const MAX_QUEUES: u16 = 8;

/// The state of one side (`enum xenbus_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Initialising = 1,
    InitWait = 2,
    Initialised = 3,
    Connected = 4,
    Closing = 5,
    Closed = 6,
}

impl State {
    /// Parses the value of a node `state`.
    pub fn parse(text: &str) -> Option<Self> {
        use State::*;
        let all = [Initialising, InitWait, Initialised, Connected, Closing, Closed];
        all.into_iter().find(|state| text == (*state as u8).to_string())
    }
}

/// The paths of both sides of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    pub back: String,
    pub front: String,
    /// Whether a toolstack has created the nodes. The toolstack then also removes them.
    pub toolstack: bool,
    pub cdrom: bool,
    /// Distinguishes a device that this program created from earlier and later devices with the
    /// same name. `None`: a toolstack or an older version created the device.
    incarnation: Option<String>,
}

/// Reasons why the nodes of a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the front end has no {0}")]
    Missing(String),
    #[error("the front end's {key} is \"{value}\"; {wanted}")]
    Value { key: String, value: String, wanted: String },
    #[error("queue {number}: {error}")]
    Queue { number: u16, error: crate::start::StartError },
    #[error("there is no such domain: `xl list` shows the numbers of all domains")]
    NoDomain,
    #[error("another server serves the device: {0}")]
    Served(String),
    #[error("cannot lock {path}: {source}")]
    Lock { path: std::path::PathBuf, source: std::io::Error },
    #[error(
        "the guest's device has image {0}; use that image, or remove the device first \
         (blockyard xen detach)"
    )]
    OtherImage(String),
    #[error("the toolstack has removed or changed the nodes since it requested the disk")]
    Changed,
}

impl NodeError {
    /// Returns whether the connection to xenstore is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, NodeError::Store(e) if e.is_lost())
    }
}

/// The setup that the front end requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontSetup {
    pub abi: Abi,
    pub persistent: bool,
    pub queues: Vec<QueueKeys>,
}

/// Grant references of a ring, and the port of its event channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueKeys {
    pub references: Vec<u32>,
    pub port: u32,
}

impl QueueKeys {
    /// Returns a number that identifies the rings.
    pub fn fingerprint(&self) -> u64 {
        let numbers = self.references.iter().chain([&self.port]);
        fingerprint::of(numbers.flat_map(|number| number.to_le_bytes()))
    }
}

impl Paths {
    /// Returns the paths of a device that this program creates. `own`: the back end's domain.
    pub fn new(own: u16, options: &XenOptions) -> Self {
        let (domain, number) = (options.domain, options.device.number());
        Paths {
            back: format!("/local/domain/{own}/backend/{KIND}/{domain}/{number}"),
            front: format!("/local/domain/{domain}/device/vbd/{number}"),
            toolstack: false,
            cdrom: false,
            incarnation: None,
        }
    }

    /// Returns the paths of a device that a toolstack has created.
    pub fn of_toolstack(own: u16, wanted: &Wanted) -> Self {
        let Wanted { frontend, cdrom, .. } = wanted;
        Paths { front: frontend.clone(), cdrom: *cdrom, ..Self::of_device(own, &wanted.device) }
    }

    /// Like `of_toolstack`, but without the front end's nodes.
    pub fn of_device(own: u16, device: &ToolstackDevice) -> Self {
        let (front, incarnation) = Default::default();
        Paths { back: device.path(own), front, toolstack: true, cdrom: false, incarnation }
    }

    /// Takes over the device that has these nodes now. Reads the node `incarnation`, a random
    /// number that distinguishes the device from a later one with the same nodes.
    pub fn adopt(&mut self, store: &mut Store) -> Result<(), StoreError> {
        self.incarnation = store.read(&format!("{}/{INCARNATION}", self.back))?;
        Ok(())
    }

    /// Returns whether the nodes still belong to the same device. A toolstack's device has no node
    /// `incarnation`. State 1 shows that such a device is new.
    pub fn is_same(&self, node: &mut impl Node) -> Result<bool, StoreError> {
        Ok(self.toolstack
            || node.read(&format!("{}/{INCARNATION}", self.back))? == self.incarnation)
    }

    /// Offers the parameters of rings before the disk is open. Returns false if the device is not
    /// new.
    pub fn claim(&self, store: &mut Store, queues: u16) -> Result<bool, StoreError> {
        store.transaction(|t| {
            let is_new = t.read(&format!("{}/state", self.back))?.as_deref() == Some("1");
            if is_new {
                self.offer_rings(t, queues)?;
                self.state_in(t, State::InitWait)?;
            }
            Ok(is_new)
        })
    }

    fn offer_rings(&self, t: &mut Transaction<'_>, queues: u16) -> Result<(), StoreError> {
        t.write(&format!("{}/max-ring-page-order", self.back), MAX_PAGE_ORDER)?;
        t.write(&format!("{}/{QUEUES}", self.back), queues.min(MAX_QUEUES))
    }

    /// Reports to the toolstack's script that the disk is ready. Returns false if the nodes no
    /// longer request this disk.
    pub fn accept(&self, store: &mut Store, wanted: &Wanted) -> Result<bool, StoreError> {
        store.transaction(|t| {
            for (key, value) in
                [("params", &wanted.target), ("frontend", &wanted.frontend), ("mode", &wanted.mode)]
            {
                if t.read(&format!("{}/{key}", self.back))?.as_ref() != Some(value) {
                    return Ok(false);
                }
            }
            t.write(&format!("{}/{SERVER}", self.back), KIND)?;
            t.write(&format!("{}/hotplug-status", self.back), "connected")?;
            Ok(true)
        })
    }

    /// Creates the nodes of both sides, and lets each domain read the other side's nodes. Returns
    /// false if this program has created the nodes before, for one of the same images.
    pub fn make(
        &mut self,
        store: &mut Store,
        own: u16,
        options: &XenOptions,
        images: &[String],
        read_only: bool,
    ) -> Result<bool, NodeError> {
        let (domain, number) = (options.domain, options.device.number());
        // `RandomState` is seeded from the kernel's random numbers.
        let incarnation = format!("{:016x}", RandomState::new().build_hasher().finish());
        let made = store.transaction(|t| {
            if t.read(&format!("/local/domain/{domain}"))?.is_none() {
                return Ok(Err(NodeError::NoDomain));
            }
            if let Some(back) = t.read(&format!("{}/backend", self.front))? {
                return Ok(Ok(Some(back)));
            }
            for (path, owner, reader) in [(&self.back, own, domain), (&self.front, domain, own)] {
                t.make(path)?;
                t.set_access(path, owner, Access::None, &[(reader, Access::Read)])?;
            }
            let mut back =
                |key: &str, value: &dyn Display| t.write(&format!("{}/{key}", self.back), value);
            back("frontend", &self.front)?;
            back("frontend-id", &domain)?;
            back(INCARNATION, &incarnation)?;
            back("online", &1)?;
            back("removable", &0)?;
            images.first().map_or(Ok(()), |image| back(IMAGE, image))?;
            back("dev", &options.device)?;
            back("mode", &if read_only { "r" } else { "w" })?;
            back("device-type", &"disk")?;
            back("state", &(State::Initialising as u8))?;
            let mut front =
                |key: &str, value: &dyn Display| t.write(&format!("{}/{key}", self.front), value);
            front("backend", &self.back)?;
            front("backend-id", &own)?;
            front("virtual-device", &number)?;
            front("device-type", &"disk")?;
            front("state", &(State::Initialising as u8))?;
            Ok(Ok(None))
        })?;
        match made? {
            None => {
                self.incarnation = Some(incarnation);
                Ok(true)
            }
            Some(back) if back == self.back => {
                match store.read(&format!("{}/{IMAGE}", self.back))? {
                    Some(image) if !images.contains(&image) => Err(NodeError::OtherImage(image)),
                    _ => {
                        self.adopt(store)?;
                        self.note_image(store, images)?;
                        Ok(false)
                    }
                }
            }
            Some(back) => Err(NodeError::Value {
                key: "backend".into(),
                value: back,
                wanted: format!("domain {domain} already has a device {}", options.device),
            }),
        }
    }

    /// Writes the name of the disk's topmost image into the device's nodes, so that the next server
    /// can compare it. A snapshot or a commit may change that image while the disk is served.
    pub fn note_image(&self, store: &mut Store, images: &[String]) -> Result<(), StoreError> {
        let Some(image) = images.first() else { return Ok(()) };
        self.change(store, |t| t.write(&format!("{}/{IMAGE}", self.back), image))
    }

    /// Notes that the requests that are taken from now on are in records.
    pub fn note_recorded(&self, store: &mut Store) -> Result<(), StoreError> {
        self.change(store, |t| t.write(&format!("{}/{RECORDED}", self.back), 1))
    }

    /// Removes that note: all requests that were taken are completed.
    pub fn note_settled(&self, store: &mut Store) -> Result<(), StoreError> {
        self.change(store, |t| t.remove(&format!("{}/{RECORDED}", self.back)))
    }

    /// Returns whether a server recorded the requests that it took, and did not complete all.
    pub fn is_recorded(&self, store: &mut Store) -> Result<bool, StoreError> {
        Ok(store.read(&format!("{}/{RECORDED}", self.back))?.is_some())
    }

    /// Removes the nodes of both sides. Returns false, and removes nothing, if a later device has
    /// this name.
    pub fn remove(&self, store: &mut Store) -> Result<bool, StoreError> {
        store.transaction(|t| {
            if !self.is_same(t)? && t.read(&format!("{}/online", self.back))?.is_some() {
                return Ok(false);
            }
            t.remove(&self.front)?;
            t.remove(&self.back)?;
            // Remove the parent nodes that were created for the device.
            let mut path = self.back.as_str();
            for _ in 0..2 {
                path = path.rsplit_once('/').map_or("", |(above, _)| above);
                if !t.list(path)?.is_empty() {
                    break;
                }
                t.remove(path)?;
            }
            Ok(true)
        })
    }

    /// Reads the state of the front end. Returns `None` if the node is missing or invalid.
    pub fn front_state(&self, store: &mut Store) -> Result<Option<State>, StoreError> {
        Ok(store.read(&format!("{}/state", self.front))?.and_then(|text| State::parse(&text)))
    }

    /// Reads the state of the back end. Returns `None` if the node is missing or invalid.
    pub fn back_state(&self, store: &mut Store) -> Result<Option<State>, StoreError> {
        Ok(store.read(&format!("{}/state", self.back))?.and_then(|text| State::parse(&text)))
    }

    /// Reads the node `online`, which is false if the toolstack is removing the device. Returns
    /// `None` if the device's nodes are gone.
    pub fn online(&self, store: &mut Store) -> Result<Option<bool>, StoreError> {
        Ok(store.read(&format!("{}/online", self.back))?.map(|text| text != "0"))
    }

    /// Writes the state of the back end.
    pub fn set_state(&self, store: &mut Store, state: State) -> Result<(), StoreError> {
        self.change(store, |t| self.state_in(t, state))
    }

    /// Requests that the guest closes the device, which is being removed.
    pub fn request_close(&self, store: &mut Store) -> Result<(), StoreError> {
        self.change(store, |t| {
            t.write(&format!("{}/online", self.back), 0)?;
            self.state_in(t, State::Closing)
        })
    }

    /// Writes nodes of the back end, unless the device is gone or a later device has the same name.
    fn change(
        &self,
        store: &mut Store,
        mut changes: impl FnMut(&mut Transaction<'_>) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        store.transaction(|t| {
            let is_there = t.read(&format!("{}/online", self.back))?.is_some();
            if is_there && self.is_same(t)? { changes(t) } else { Ok(()) }
        })
    }

    /// Writes the features of this back end for the front end.
    pub fn offer(
        &self,
        store: &mut Store,
        disk: &Disk,
        options: &XenOptions,
    ) -> Result<(), StoreError> {
        let source = disk.source();
        // If the back end copies all data, persistent grants would make the guest copy it a second
        // time.
        let persistent = u32::from(options.data != XenData::Copy);
        let flushes = u8::from(disk.options().cache.write_back());
        let discards = u8::from(!disk.options().read_only);
        let granularity = source.discard_unit().max(source.logical_block());
        self.change(store, |t| {
            self.offer_rings(t, options.queues)?;
            let mut offer = |key: &str, value: u32| t.write(&format!("{}/{key}", self.back), value);
            offer(FLUSH, flushes.into())?;
            offer("feature-barrier", flushes.into())?;
            offer("feature-persistent", persistent)?;
            offer("feature-max-indirect-segments", INDIRECT_SEGMENTS as u32)?;
            offer("feature-discard", discards.into())?;
            if discards > 0 {
                offer("discard-granularity", granularity)?;
                offer("discard-alignment", 0)?;
                offer("discard-secure", 0)?;
            }
            self.state_in(t, State::InitWait)
        })
    }

    /// Describes the disk to the front end, and sets state Connected. A resize calls this too.
    pub fn connect(&self, store: &mut Store, disk: &Disk) -> Result<(), StoreError> {
        let Shape { sectors, logical, physical, info } = Shape::of(disk, self.cdrom);
        self.change(store, |t| {
            let mut set = |key: &str, value: u64| t.write(&format!("{}/{key}", self.back), value);
            set("sectors", sectors)?;
            set("sector-size", logical.into())?;
            set("physical-sector-size", physical.into())?;
            set("info", info.into())?;
            self.state_in(t, State::Connected)
        })
    }

    fn state_in(&self, node: &mut impl Node, state: State) -> Result<(), StoreError> {
        node.write(&format!("{}/state", self.back), state as u8)
    }

    /// Writes the node `error`, which tools show.
    pub fn write_error(&self, store: &mut Store, what: &str) -> Result<(), StoreError> {
        self.change(store, |t| t.write(&format!("{}/error", self.back), what))
    }

    /// Writes why a device has no disk, and closes the device unless a guest uses it. Returns
    /// whether a guest uses it. `hotplug-error` is for the toolstack's script.
    pub fn refuse(&self, store: &mut Store, what: &str) -> Result<bool, StoreError> {
        let mut in_use = false;
        self.change(store, |t| {
            in_use = self.in_use(t)?;
            t.write(&format!("{}/error", self.back), what)?;
            t.write(&format!("{}/hotplug-error", self.back), what)?;
            if in_use {
                return Ok(());
            }
            t.write(&format!("{}/hotplug-status", self.back), "error")?;
            self.state_in(t, State::Closed)
        })?;
        Ok(in_use)
    }

    /// Returns whether a guest uses the device. The last server may have left requests in its
    /// rings.
    pub fn in_use(&self, node: &mut impl Node) -> Result<bool, StoreError> {
        let back = node.read(&format!("{}/state", self.back))?;
        if !matches!(back.as_deref(), Some("4" | "5")) {
            return Ok(false);
        }
        let Some(frontend) = node.read(&format!("{}/frontend", self.back))? else {
            return Ok(false);
        };
        // The value of `frontend` may be an invalid path. If xenstore is lost, the next call
        // reports that.
        let front = node.read(&format!("{frontend}/state")).unwrap_or_default();
        Ok(front.is_some_and(|state| state != "6"))
    }

    /// Sets state 6 after the end of a device. Returns false, and writes nothing, if the toolstack
    /// has created a new device with the same name.
    pub fn close(&self, store: &mut Store) -> Result<bool, StoreError> {
        let mut is_old = true;
        self.change(store, |t| {
            let state = t.read(&format!("{}/state", self.back))?;
            is_old = state.as_deref() != Some("1");
            let offline = t.read(&format!("{}/online", self.back))?.as_deref() == Some("0");
            if is_old || offline { self.state_in(t, State::Closed) } else { Ok(()) }
        })?;
        Ok(is_old)
    }

    /// Returns whether the back end did not offer flushes to the front end. A connected front end
    /// relies on the offer of the last server.
    pub fn offered_no_flush(&self, store: &mut Store) -> Result<bool, StoreError> {
        Ok(store.read(&format!("{}/{FLUSH}", self.back))?.as_deref() == Some("0"))
    }

    /// Reads the setup that the front end requests.
    pub fn front_setup(
        &self,
        store: &mut Store,
        options: &XenOptions,
    ) -> Result<FrontSetup, NodeError> {
        let mut keys = Keys { store, path: &self.front };
        let protocol = keys.text("protocol")?;
        let abi = Abi::of(protocol.as_deref()).ok_or_else(|| {
            let wanted = "x86_64-abi and x86_32-abi are supported".into();
            NodeError::Value {
                key: "protocol".into(),
                value: short(&protocol.unwrap_or_default()),
                wanted,
            }
        })?;
        // A connected front end relies on the offer of the last server.
        let offered =
            keys.store.read(&format!("{}/{QUEUES}", self.back))?.and_then(|text| text.parse().ok());
        let most = offered.unwrap_or(options.queues).clamp(1, MAX_QUEUES).into();
        let queues = keys.number("multi-queue-num-queues", 1, most)?.unwrap_or(1);
        let order = keys.number("ring-page-order", 0, MAX_PAGE_ORDER)?;
        let persistent = keys.text("feature-persistent")?.as_deref() == Some("1");
        let queues = (0..queues).map(|number| {
            let folder = if queues == 1 { String::new() } else { format!("queue-{number}/") };
            keys.queue(&folder, order)
        });
        Ok(FrontSetup { abi, persistent, queues: queues.collect::<Result<_, NodeError>>()? })
    }
}

struct Keys<'a> {
    store: &'a mut Store,
    path: &'a str,
}

impl Keys<'_> {
    fn text(&mut self, key: &str) -> Result<Option<String>, NodeError> {
        Ok(self.store.read(&format!("{}/{key}", self.path))?)
    }

    fn number(&mut self, key: &str, least: u32, most: u32) -> Result<Option<u32>, NodeError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        let invalid = || NodeError::Value {
            key: key.into(),
            value: short(&text),
            wanted: format!("a number from {least} to {most} is expected"),
        };
        number.map(Some).ok_or_else(invalid)
    }

    fn needed(&mut self, key: &str) -> Result<u32, NodeError> {
        self.number(key, 0, u32::MAX)?.ok_or_else(|| NodeError::Missing(key.into()))
    }

    fn queue(&mut self, folder: &str, order: Option<u32>) -> Result<QueueKeys, NodeError> {
        let port = self.needed(&format!("{folder}event-channel"))?;
        let single = format!("{folder}ring-ref");
        let references = match order {
            // Without `ring-page-order`, the ring has one page, and its key has no number.
            None => vec![self.needed(&single)?],
            Some(0) if self.text(&single)?.is_some() => vec![self.needed(&single)?],
            Some(order) => (0..1 << order)
                .map(|at| self.needed(&format!("{single}{at}")))
                .collect::<Result<_, _>>()?,
        };
        Ok(QueueKeys { references, port })
    }
}

/// Shortens and escapes a guest's text for the log.
pub fn short(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_debug).collect()
}

/// The back end's description of the disk.
#[derive(Debug, PartialEq, Eq)]
struct Shape {
    /// Number of sectors of 512 bytes, independent of the disk's sector size.
    sectors: u64,
    logical: u32,
    physical: u32,
    info: u32,
}

/// Bits of `info`.
const CDROM: u32 = 1;
const READ_ONLY: u32 = 4;

impl Shape {
    fn of(disk: &Disk, cdrom: bool) -> Self {
        let source: Source = disk.source();
        let logical = source.logical_block();
        Shape {
            sectors: disk.capacity() / u64::from(logical) * u64::from(logical) / SECTOR,
            logical,
            physical: source.geometry().physical_block.max(logical),
            info: if disk.options().read_only { READ_ONLY } else { 0 }
                | if cdrom { CDROM } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests;
