//! The front end of one device: its nodes in xenstore, its states, and its requested parameters.

use std::fmt::Display;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, ErrorKind, Result, ensure};
use blockyard_ring::SharedSlice;
use blockyard_ring::xen::machine::Domain;
use blockyard_ring::xen::{Machine, Node, Store};

use super::request::Abi;
use super::ring::FrontRing;
use super::state;

/// Names and values of xenstore nodes.
pub type Nodes = Vec<(String, String)>;

/// Parameters that a front end requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub queues: usize,
    /// Value of the node `ring-page-order`: each ring has 2^`order` pages. `None`: the ring has one
    /// page, and the front end writes no such node, like front ends without multi-page rings.
    pub order: Option<u32>,
    pub persistent: bool,
    pub abi: Abi,
}

impl Terms {
    /// One queue with a ring of one page, without persistent grants.
    pub const PLAIN: Terms = Terms { queues: 1, order: None, persistent: false, abi: Abi::X86_64 };

    /// Returns the number of pages of each ring.
    pub fn ring_pages(&self) -> usize {
        1 << self.order.unwrap_or(0)
    }
}

/// The front end of one device. Its rings are the first pages of the domain's memory.
pub struct Front {
    pub domain: Arc<Domain>,
    pub memory: SharedSlice,
    pub store: Store,
    path: String,
    back: Option<String>,
    limit: Duration,
}

impl Front {
    /// Creates the front end of device number `device` of a domain. `limit`: longest wait for each
    /// change by the back end.
    pub fn new(
        machine: &Machine,
        domain: Arc<Domain>,
        device: u32,
        limit: Duration,
    ) -> Result<Self> {
        let mut store = machine.store(domain.number())?;
        let path = format!("/local/domain/{}/device/vbd/{device}", domain.number());
        store.watch(&path, "front")?;
        Ok(Front { memory: domain.memory(), domain, store, path, back: None, limit })
    }

    /// Returns the path of the front end's nodes.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Writes one of the front end's nodes.
    pub fn set(&mut self, key: &str, value: impl Display) -> Result<()> {
        Ok(self.store.write(&format!("{}/{key}", self.path), value)?)
    }

    /// Reads a node of the back end. The front end's node `backend` contains the back end's path.
    pub fn back(&mut self, key: &str) -> Result<Option<String>> {
        let back = self.back.as_ref().ok_or_else(no_back)?;
        Ok(self.store.read(&format!("{back}/{key}"))?)
    }

    /// Reads a number that the back end wrote. Returns 0 if the node is missing.
    pub fn back_number(&mut self, key: &str) -> Result<u64> {
        let text = self.back(key)?.unwrap_or_else(|| "0".into());
        text.parse::<u64>().context(format!("the back end's {key} is \"{text}\""))
    }

    /// Waits until a node of the back end has this value.
    pub fn wait(&mut self, key: &str, value: Option<&str>) -> Result<()> {
        let back = self.back.as_ref().ok_or_else(no_back)?;
        wait_for_node(&mut self.store, &format!("{back}/{key}"), value, self.limit)
    }

    /// Waits until the back end is in this state.
    pub fn wait_for_state(&mut self, state: u8) -> Result<()> {
        self.find_back()?;
        self.wait("state", Some(&state.to_string()))
    }

    /// Waits until a toolstack has created the device. Reads the back end's path from the device's
    /// nodes, and watches the back end's nodes.
    fn find_back(&mut self) -> Result<()> {
        let path = format!("{}/backend", self.path);
        let back = until(&mut self.store, self.limit, |store| Ok(store.read(&path)?));
        let back = back.context("no toolstack has created the device")?;
        if self.back.as_ref() != Some(&back) {
            if let Some(last) = &self.back {
                self.store.unwatch(last, "back")?;
            }
            self.store.watch(&back, "back")?;
            self.back = Some(back);
        }
        Ok(())
    }

    /// Creates empty rings in the domain's pages from `first` on. Returns the rings, and the nodes
    /// that describe them. The caller must write these nodes. `references`: the grant references of
    /// the domain's first pages.
    pub fn rings(
        &self,
        terms: &Terms,
        first: usize,
        references: &[u32],
    ) -> Result<(Vec<FrontRing>, Nodes)> {
        let pages = terms.ring_pages();
        let mut keys = vec![
            ("feature-persistent".to_string(), u8::from(terms.persistent).to_string()),
            ("protocol".to_string(), terms.abi.name().to_string()),
        ];
        if terms.queues > 1 {
            keys.push(("multi-queue-num-queues".into(), terms.queues.to_string()));
        }
        if let Some(order) = terms.order {
            keys.push(("ring-page-order".into(), order.to_string()));
        }
        let mut rings = Vec::new();
        for number in 0..terms.queues {
            let folder = if terms.queues > 1 { format!("queue-{number}/") } else { String::new() };
            let first = first + number * pages;
            for (at, reference) in references[first..first + pages].iter().enumerate() {
                let key =
                    if terms.order.is_some() { format!("ring-ref{at}") } else { "ring-ref".into() };
                keys.push((format!("{folder}{key}"), reference.to_string()));
            }
            let channel = self.domain.channel()?;
            keys.push((format!("{folder}event-channel"), channel.port.to_string()));
            rings.push(FrontRing::new(self.memory.clone(), first, pages, terms.abi, channel)?);
        }
        Ok((rings, keys))
    }

    /// Writes the nodes of the front end's rings, and state Initialised. First removes nodes of
    /// earlier rings that the new rings do not have.
    pub fn offer(&mut self, keys: &[(String, String)]) -> Result<()> {
        for key in ["multi-queue-num-queues", "ring-page-order"] {
            self.store.remove(&format!("{}/{key}", self.path))?;
        }
        for (key, value) in keys {
            self.set(key, value)?;
        }
        self.set("state", state::INITIALISED)
    }

    /// Creates rings, and waits until the back end has connected to them.
    pub fn connect(&mut self, terms: &Terms, references: &[u32]) -> Result<Vec<FrontRing>> {
        self.wait_for_state(state::INIT_WAIT)?;
        let (rings, keys) = self.rings(terms, 0, references)?;
        self.offer(&keys)?;
        self.wait_for_state(state::CONNECTED)?;
        self.set("state", state::CONNECTED)?;
        Ok(rings)
    }

    /// Closes the device, and waits until the back end has closed it as well.
    pub fn close(&mut self) -> Result<()> {
        self.set("state", state::CLOSED)?;
        self.wait_for_state(state::CLOSED)
    }
}

/// Waits until a node has this value. `store` must watch it.
pub fn wait_for_node(
    store: &mut Store,
    path: &str,
    value: Option<&str>,
    limit: Duration,
) -> Result<()> {
    until(store, limit, |store| Ok((store.read(path)?.as_deref() == value).then_some(())))
        .context(format!("waiting until node {path} has the value {value:?}"))
}

fn no_back() -> Error {
    Error::new(ErrorKind::Usage, "the path of the device's back end is not known yet")
}

/// Calls `check` at once and after each watch event, until it returns a value.
fn until<T>(
    store: &mut Store,
    limit: Duration,
    mut check: impl FnMut(&mut Store) -> Result<Option<T>>,
) -> Result<T> {
    let (never, _writer) = rustix::pipe::pipe()?;
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = check(store)? {
            return Ok(found);
        }
        let event = store.event(never.as_fd(), Some(deadline))?;
        ensure!(event.is_some(), Late, "no watched node has changed for {limit:?}");
    }
}
