//! A device on its own thread: follows the states of both sides in xenstore, and starts and stops its queues.
//!
//! ```text
//!   front   1 Initialising ─► 3 Initialised ─► 4 Connected ─► 5 Closing ─► 6 Closed ─► 1 ...
//!   back    2 InitWait ─────► 4 Connected ──────────────────► 5 Closing ─► 6 Closed ─► 2 ...
//! ```
//! In: watches of the nodes of both sides. Out: queues on reactors, states, the log.
//! What must hold: queues run only while the front end has its rings; a state is written only when it changes, so that two sides
//! never wake one another without end.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockyard_disk::Disk;
use blockyard_ring::xen::{Host, Node, Store, StoreError};

use super::nodes::{KIND, MAX_QUEUES, NodeError, Paths, QueueKeys, State, Wish};
use super::queue::{Counts, Data, QueueHandle, QueueSetup, Shared};
use super::{Control, Name, XenData, XenError, XenOptions, own_domain};
use crate::Reactors;

pub(super) struct Device {
    options: XenOptions,
    host: Host,
    reactors: Arc<Reactors>,
    store: Store,
    paths: Paths,
    control: Arc<Control>,
    shared: Arc<Shared>,
    queues: Vec<QueueHandle>,
    /// The state that this side has written.
    state: Option<State>,
    /// The front end asked for what cannot be; it may begin anew.
    refused: bool,
}

/// What the loop does next.
#[derive(PartialEq, Eq)]
enum Next {
    Wait,
    /// The toolstack or `detach` removed the device, or its domain has ended.
    Remove,
}

impl Device {
    pub fn new(
        disk: Arc<Disk>,
        options: XenOptions,
        host: Host,
        reactors: Arc<Reactors>,
        store: Store,
        paths: Paths,
        control: Arc<Control>,
    ) -> Self {
        let shared = Arc::new(Shared { disk, log: Default::default(), counts: Counts::default() });
        let (queues, state, refused) = Default::default();
        Device { options, host, reactors, store, paths, control, shared, queues, state, refused }
    }

    /// Before the thread: watches, and offers what this side can do, unless the front end is connected already.
    pub fn begin(&mut self) -> Result<(), NodeError> {
        self.state = self.paths.back_state(&mut self.store)?;
        self.store.watch(&self.paths.back, "back")?;
        self.store.watch(&format!("{}/state", self.paths.front), "front")?;
        if self.state != Some(State::Connected) {
            self.offer()?;
        }
        Ok(())
    }

    /// Follows the device until it ends; true: there is none any more. False: it waits for the next server.
    pub fn run(mut self) -> bool {
        let gone = loop {
            if self.control.stop.load(Ordering::SeqCst) {
                break false;
            }
            match self.step() {
                Ok(Next::Wait) => {}
                Ok(Next::Remove) => break true,
                Err(e) => self.complain(&e),
            }
            if let Err(e) = self.store.event(self.control.wake.as_fd(), None) {
                tracing::error!(disk = self.name(), "the device is not followed any more: {e}");
                break false;
            }
            let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
        };
        self.disconnect();
        if gone && let Err(e) = self.paths.remove(&mut self.store) {
            tracing::warn!(disk = self.name(), "removing the nodes of {}: {e}", self.options.device);
        }
        if gone {
            self.remove_records();
        }
        self.log_counts();
        gone
    }

    fn name(&self) -> &str {
        self.shared.disk.name()
    }

    fn step(&mut self) -> Result<Next, NodeError> {
        let front = self.paths.front_state(&mut self.store)?;
        let Some(online) = self.paths.online(&mut self.store)? else { return Ok(Next::Remove) };
        let is_there = self.store.read(&format!("{}/backend", self.paths.front))?.is_some();
        if !is_there {
            return Ok(Next::Remove);
        }
        match front {
            Some(State::Initialising) => {
                self.refused = false;
                if !online {
                    return Ok(Next::Remove);
                }
                self.disconnect();
                self.remove_records();
                if self.state != Some(State::InitWait) {
                    self.offer()?;
                }
            }
            Some(State::Initialised | State::Connected) if self.queues.is_empty() && !self.refused => self.connect()?,
            Some(State::Closing) => self.set_state(State::Closing)?,
            Some(State::Closed) => {
                self.disconnect();
                // The next rings may be in the same pages.
                self.remove_records();
                self.set_state(State::Closed)?;
                if !online {
                    return Ok(Next::Remove);
                }
            }
            _ => {}
        }
        if self.control.resized.swap(false, Ordering::SeqCst) && !self.queues.is_empty() && online {
            self.paths.connect(&mut self.store, &self.shared.disk)?;
        }
        if !online && matches!(self.state, Some(State::Connected | State::InitWait)) {
            self.set_state(State::Closing)?;
        }
        Ok(Next::Wait)
    }

    fn offer(&mut self) -> Result<(), StoreError> {
        self.paths.offer(&mut self.store, &self.shared.disk, &self.options)?;
        self.state = Some(State::InitWait);
        Ok(())
    }

    fn set_state(&mut self, state: State) -> Result<(), StoreError> {
        if self.state != Some(state) {
            self.paths.set_state(&mut self.store, state)?;
            self.state = Some(state);
        }
        Ok(())
    }

    /// Takes the rings that the front end has made.
    fn connect(&mut self) -> Result<(), NodeError> {
        let wish = self.paths.wish(&mut self.store, &self.options)?;
        let Wish { abi, queues, .. } = &wish;
        for (number, keys) in (0..).zip(queues) {
            match self.queue(number, keys, &wish) {
                Ok(queue) => self.queues.push(queue),
                Err(what) => {
                    self.disconnect();
                    return Err(NodeError::Queue { number, what });
                }
            }
        }
        self.paths.connect(&mut self.store, &self.shared.disk)?;
        self.state = Some(State::Connected);
        let pages = queues.first().map_or(0, |queue| queue.references.len());
        self.shared.log.info(
            self.shared.disk.name(),
            None,
            format_args!(
                "domain {} is connected: {} queues, {pages} pages a ring, {abi:?}, grants {}",
                self.options.domain,
                queues.len(),
                match self.data(&wish) {
                    Data::Mapped => "are mapped for each request",
                    Data::Persistent => "stay mapped",
                    Data::Copied => "are copied",
                }
            ),
        );
        Ok(())
    }

    fn queue(&self, index: u16, keys: &QueueKeys, wish: &Wish) -> Result<QueueHandle, String> {
        let domain = self.options.domain;
        let grants = self.host.grants(domain).map_err(|e| format!("opening its grants: {e}"))?;
        let ring = grants.map(&keys.references, true).map_err(|e| format!("mapping its ring: {e}"))?;
        let channel = self.host.channel(domain, keys.port);
        let channel = channel.map_err(|e| format!("binding its event channel {}: {e}", keys.port))?;
        let setup = QueueSetup {
            index,
            shared: self.shared.clone(),
            ring,
            abi: wish.abi,
            channel,
            grants,
            data: self.data(wish),
            record: self.record(index, keys),
        };
        QueueHandle::start(self.reactors.next(), setup)
    }

    /// Where the record of a queue is, and what tells its ring from others.
    fn record(&self, index: u16, keys: &QueueKeys) -> Option<(PathBuf, u64)> {
        let XenOptions { domain, device, records, .. } = &self.options;
        let path = records.as_ref()?.join(format!("{domain}-{device}-{index}"));
        Some((path, keys.fingerprint()))
    }

    /// Removes the records of a device that is gone.
    fn remove_records(&self) {
        for index in 0..MAX_QUEUES {
            let keys = QueueKeys { references: Vec::new(), port: 0 };
            let _ = self.record(index, &keys).map(|(path, _)| std::fs::remove_file(path));
        }
    }

    /// How the data of requests come. Pages that stay mapped cost nothing; else a copy is one call for a batch, without the memory
    /// of any process being changed.
    fn data(&self, wish: &Wish) -> Data {
        match (self.options.data, wish.persistent) {
            (XenData::Copy, _) | (XenData::Auto, false) => Data::Copied,
            (XenData::Map | XenData::Auto, true) => Data::Persistent,
            (XenData::Map, false) => Data::Mapped,
        }
    }

    /// Stops the queues: they answer what they have taken, and unmap the rings.
    fn disconnect(&mut self) {
        for queue in self.queues.drain(..) {
            queue.stop();
        }
    }

    /// What a front end asked for cannot be: its device is closed.
    fn complain(&mut self, error: &NodeError) {
        // The device watches its own nodes too. Without this check each complaint would cause the next one.
        if self.refused {
            return;
        }
        self.shared.log.warn(
            self.shared.disk.name(),
            None,
            format_args!("device {} of domain {} is closed: {error}", self.options.device, self.options.domain),
        );
        self.refused = true;
        self.disconnect();
        let _ = self.paths.complain(&mut self.store, &error.to_string());
        let _ = self.set_state(State::Closing);
    }

    fn log_counts(&self) {
        let Counts { requests, events, notifications, maps, pages, copies, copied } = &self.shared.counts;
        let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        if of(requests) > 0 {
            tracing::info!(
                disk = self.name(),
                requests = of(requests),
                events = of(events),
                notifications = of(notifications),
                maps = of(maps),
                pages = of(pages),
                copies = of(copies),
                copied = of(copied),
                "what the front end asked for, and what it cost"
            );
        }
    }
}

/// A device of this program, as xenstore has it.
#[derive(Clone, Debug)]
pub struct Listed {
    pub domain: u16,
    pub device: Name,
    /// `connected`, or what it waits for.
    pub state: &'static str,
    /// Of 512 bytes each; `None`: it was never connected.
    pub sectors: Option<u64>,
    pub read_only: bool,
}

/// The devices that this domain serves to others by this program, or has served.
pub fn list(host: &Host) -> Result<Vec<Listed>, XenError> {
    let mut store = host.store().map_err(XenError::Host)?;
    let failed = |e: NodeError| XenError::Host(std::io::Error::other(e));
    let own = own_domain(&mut store).map_err(failed)?;
    let top = format!("/local/domain/{own}/backend/{KIND}");
    let mut found = Vec::new();
    let mut look = || -> Result<(), StoreError> {
        for domain in store.list(&top)? {
            for number in store.list(&format!("{top}/{domain}"))? {
                let (Ok(domain), Some(device)) = (domain.parse(), number.parse().ok().and_then(Name::of_number)) else {
                    continue;
                };
                let path = format!("{top}/{domain}/{number}");
                let state = match store.read(&format!("{path}/state"))?.as_deref() {
                    Some("1" | "2") => "waiting for the guest",
                    Some("3" | "4") => "connected",
                    _ => "closing",
                };
                let sectors = store.read(&format!("{path}/sectors"))?.and_then(|text| text.parse().ok());
                let read_only = store.read(&format!("{path}/mode"))?.as_deref() == Some("r");
                found.push(Listed { domain, device, state, sectors, read_only });
            }
        }
        Ok(())
    };
    look().map_err(|e| failed(e.into()))?;
    Ok(found)
}

/// Asks the guest to close a device. With `force` it removes the device without asking.
/// Returns false if the guest has not closed it after `patience`. The device goes when the guest closes it.
pub fn detach(
    host: &Host,
    domain: u16,
    device: Name,
    force: bool,
    patience: std::time::Duration,
) -> Result<bool, XenError> {
    let mut store = host.store().map_err(XenError::Host)?;
    let failed = |source: NodeError| XenError::Nodes { domain, device, source: Box::new(source) };
    let own = own_domain(&mut store).map_err(failed)?;
    let paths = Paths::new(own, &XenOptions { domain, device, queues: 1, data: XenData::Auto, records: None });
    let store_failed = |e: StoreError| failed(e.into());
    if paths.online(&mut store).map_err(store_failed)?.is_none() {
        return Err(XenError::Missing { domain, device });
    }
    if force {
        paths.remove(&mut store).map_err(store_failed)?;
        return Ok(true);
    }
    store.write(&format!("{}/online", paths.back), 0).map_err(store_failed)?;
    paths.set_state(&mut store, State::Closing).map_err(store_failed)?;
    store.watch(&paths.back, "back").map_err(store_failed)?;
    let (never, _writer) = rustix::pipe::pipe().map_err(|e| XenError::Host(e.into()))?;
    let deadline = std::time::Instant::now() + patience;
    while paths.online(&mut store).map_err(store_failed)?.is_some() {
        if store.event(never.as_fd(), Some(deadline)).map_err(store_failed)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}
