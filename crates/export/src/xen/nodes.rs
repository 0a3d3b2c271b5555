//! The nodes of a device in xenstore: those that the back end writes, and those that it reads of the front end.
//!
//! In: what a guest wrote. Out: a ring's references and ports, each a number in its range. What must hold: nothing that a guest
//! writes makes more rings, pages or queues than were offered.

use std::fmt::Display;

use blockyard_disk::{Disk, Source};
use blockyard_image::SECTOR;
use blockyard_ring::xen::{Access, Node, Store, StoreError};

use super::abi::{Abi, INDIRECT_SEGMENTS};
use super::{XenData, XenOptions};
use crate::fingerprint;

/// The type of back end under which devices are found that this program has made.
pub const KIND: &str = "blockyard";

/// The most that is offered: 16 pages of a ring.
pub const MAX_PAGE_ORDER: u32 = 4;
pub const MAX_QUEUES: u16 = 8;

/// The state of one side.
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
    fn parse(text: &str) -> Option<Self> {
        use State::*;
        let all = [Initialising, InitWait, Initialised, Connected, Closing, Closed];
        all.into_iter().find(|state| text == (*state as u8).to_string())
    }
}

/// Where the two sides of a device are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    pub back: String,
    pub front: String,
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the front end has no {0}")]
    Missing(String),
    #[error("the front end's {key} is \"{value}\"; {wanted}")]
    Value { key: String, value: String, wanted: String },
    #[error("queue {number}: {what}")]
    Queue { number: u16, what: String },
}

/// What the front end asks for.
#[derive(Debug, PartialEq, Eq)]
pub struct Wish {
    pub abi: Abi,
    pub persistent: bool,
    pub queues: Vec<QueueKeys>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct QueueKeys {
    pub references: Vec<u32>,
    pub port: u32,
}

impl QueueKeys {
    /// Tells these rings from others.
    pub fn fingerprint(&self) -> u64 {
        let numbers = self.references.iter().chain([&self.port]);
        fingerprint::of(numbers.flat_map(|number| number.to_le_bytes()))
    }
}

impl Paths {
    /// Of a device that this program makes. `own`: the domain of the back end.
    pub fn new(own: u16, options: &XenOptions) -> Self {
        let (domain, number) = (options.domain, options.device.number());
        Paths {
            back: format!("/local/domain/{own}/backend/{KIND}/{domain}/{number}"),
            front: format!("/local/domain/{domain}/device/vbd/{number}"),
        }
    }

    /// Makes the nodes of both sides, and shows each domain its own. False: they are there, made by this program before.
    pub fn make(&self, store: &mut Store, own: u16, options: &XenOptions, read_only: bool) -> Result<bool, NodeError> {
        let (domain, number) = (options.domain, options.device.number());
        let made = store.transaction(|t| {
            if let Some(back) = t.read(&format!("{}/backend", self.front))? {
                return Ok(Err(back));
            }
            for (path, owner, reader) in [(&self.back, own, domain), (&self.front, domain, own)] {
                t.make(path)?;
                t.set_access(path, owner, Access::None, &[(reader, Access::Read)])?;
            }
            let mut back = |key: &str, value: &dyn Display| t.write(&format!("{}/{key}", self.back), value);
            back("frontend", &self.front)?;
            back("frontend-id", &domain)?;
            back("online", &1)?;
            back("removable", &0)?;
            back("dev", &options.device)?;
            back("mode", &if read_only { "r" } else { "w" })?;
            back("device-type", &"disk")?;
            back("state", &(State::Initialising as u8))?;
            let mut front = |key: &str, value: &dyn Display| t.write(&format!("{}/{key}", self.front), value);
            front("backend", &self.back)?;
            front("backend-id", &own)?;
            front("virtual-device", &number)?;
            front("device-type", &"disk")?;
            front("state", &(State::Initialising as u8))?;
            Ok(Ok(()))
        })?;
        match made {
            Ok(()) => Ok(true),
            Err(back) if back == self.back => Ok(false),
            Err(back) => Err(NodeError::Value {
                key: "backend".into(),
                value: back,
                wanted: format!("domain {domain} has a device {} already", options.device),
            }),
        }
    }

    /// Removes the nodes of both sides.
    pub fn remove(&self, store: &mut Store) -> Result<(), StoreError> {
        store.transaction(|t| {
            t.remove(&self.front)?;
            t.remove(&self.back)?;
            // Those above it that were made for it.
            let mut path = self.back.as_str();
            for _ in 0..2 {
                path = path.rsplit_once('/').map_or("", |(above, _)| above);
                if !t.list(path)?.is_empty() {
                    break;
                }
                t.remove(path)?;
            }
            Ok(())
        })
    }

    pub fn front_state(&self, store: &mut Store) -> Result<Option<State>, StoreError> {
        Ok(store.read(&format!("{}/state", self.front))?.and_then(|text| State::parse(&text)))
    }

    pub fn back_state(&self, store: &mut Store) -> Result<Option<State>, StoreError> {
        Ok(store.read(&format!("{}/state", self.back))?.and_then(|text| State::parse(&text)))
    }

    /// Whether the device is to stay; `None`: its nodes are gone.
    pub fn online(&self, store: &mut Store) -> Result<Option<bool>, StoreError> {
        Ok(store.read(&format!("{}/online", self.back))?.map(|text| text != "0"))
    }

    pub fn set_state(&self, store: &mut Store, state: State) -> Result<(), StoreError> {
        store.write(&format!("{}/state", self.back), state as u8)
    }

    /// Tells the front end what this back end can do.
    pub fn offer(&self, store: &mut Store, disk: &Disk, options: &XenOptions) -> Result<(), StoreError> {
        let source = disk.source();
        // Where all data are copied, pages that stay the same would be copied twice.
        let persistent = u32::from(options.data != XenData::Copy);
        let flushes = u8::from(disk.options().cache.write_back());
        let discards = u8::from(!disk.options().read_only);
        let granularity = source.discard_unit().max(source.logical_block());
        store.transaction(|t| {
            let mut offer = |key: &str, value: u32| t.write(&format!("{}/{key}", self.back), value);
            offer("feature-flush-cache", flushes.into())?;
            offer("feature-barrier", flushes.into())?;
            offer("feature-persistent", persistent)?;
            offer("feature-max-indirect-segments", INDIRECT_SEGMENTS as u32)?;
            offer("max-ring-page-order", MAX_PAGE_ORDER)?;
            offer("multi-queue-max-queues", options.queues.min(MAX_QUEUES).into())?;
            offer("feature-discard", discards.into())?;
            if discards > 0 {
                offer("discard-granularity", granularity)?;
                offer("discard-alignment", 0)?;
                offer("discard-secure", 0)?;
            }
            self.state_in(t, State::InitWait)
        })
    }

    /// Tells the front end what the disk is, and that it may begin. Also tells a new size.
    pub fn connect(&self, store: &mut Store, disk: &Disk) -> Result<(), StoreError> {
        let Shape { sectors, logical, physical, info } = Shape::of(disk);
        store.transaction(|t| {
            let mut tell = |key: &str, value: u64| t.write(&format!("{}/{key}", self.back), value);
            tell("sectors", sectors)?;
            tell("sector-size", logical.into())?;
            tell("physical-sector-size", physical.into())?;
            tell("info", info.into())?;
            self.state_in(t, State::Connected)
        })
    }

    fn state_in(&self, node: &mut impl Node, state: State) -> Result<(), StoreError> {
        node.write(&format!("{}/state", self.back), state as u8)
    }

    /// Writes the node `error`, which tools show.
    pub fn complain(&self, store: &mut Store, what: &str) -> Result<(), StoreError> {
        store.write(&format!("{}/error", self.back), what)
    }

    /// What the front end asks for.
    pub fn wish(&self, store: &mut Store, options: &XenOptions) -> Result<Wish, NodeError> {
        let mut keys = Keys { store, path: &self.front };
        let protocol = keys.text("protocol")?;
        let abi = Abi::of(protocol.as_deref()).ok_or_else(|| {
            let wanted = "x86_64-abi and x86_32-abi are served".into();
            NodeError::Value { key: "protocol".into(), value: short(&protocol.unwrap_or_default()), wanted }
        })?;
        let most = options.queues.min(MAX_QUEUES).into();
        let queues = keys.number("multi-queue-num-queues", 1, most)?.unwrap_or(1);
        let order = keys.number("ring-page-order", 0, MAX_PAGE_ORDER)?;
        let persistent = keys.text("feature-persistent")?.as_deref() == Some("1");
        let queues = (0..queues).map(|number| {
            let folder = if queues == 1 { String::new() } else { format!("queue-{number}/") };
            keys.queue(&folder, order)
        });
        Ok(Wish { abi, persistent, queues: queues.collect::<Result<_, NodeError>>()? })
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
        let wrong = || NodeError::Value {
            key: key.into(),
            value: short(&text),
            wanted: format!("a number from {least} to {most} is wanted"),
        };
        number.map(Some).ok_or_else(wrong)
    }

    fn needed(&mut self, key: &str) -> Result<u32, NodeError> {
        self.number(key, 0, u32::MAX)?.ok_or_else(|| NodeError::Missing(key.into()))
    }

    fn queue(&mut self, folder: &str, order: Option<u32>) -> Result<QueueKeys, NodeError> {
        let port = self.needed(&format!("{folder}event-channel"))?;
        let single = format!("{folder}ring-ref");
        let references = match order {
            // With one page the reference has no number, unless the front end gave it one.
            None => vec![self.needed(&single)?],
            Some(0) if self.text(&single)?.is_some() => vec![self.needed(&single)?],
            Some(order) => (0..1 << order).map(|at| self.needed(&format!("{single}{at}"))).collect::<Result<_, _>>()?,
        };
        Ok(QueueKeys { references, port })
    }
}

/// A guest's text for the log.
fn short(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_debug).collect()
}

/// What the back end writes about the disk.
#[derive(Debug, PartialEq, Eq)]
struct Shape {
    /// Of 512 bytes each, whatever the sector size is.
    sectors: u64,
    logical: u32,
    physical: u32,
    info: u32,
}

/// A bit of `info`.
const READ_ONLY: u32 = 4;

impl Shape {
    fn of(disk: &Disk) -> Self {
        let source: Source = disk.source();
        let logical = source.logical_block();
        Shape {
            sectors: disk.capacity() / u64::from(logical) * u64::from(logical) / SECTOR,
            logical,
            physical: source.geometry().physical_block.max(logical),
            info: if disk.options().read_only { READ_ONLY } else { 0 },
        }
    }
}
