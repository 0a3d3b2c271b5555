//! A device on its own thread: follows the states of both sides in xenstore, and starts and stops
//! its queues.
//!
//! ```text
//!   front   1 Initialising ─► 3 Initialised ─► 4 Connected ─► 5 Closing ─► 6 Closed ─► 1 ...
//!   back    2 InitWait ─────► 4 Connected ──────────────────► 5 Closing ─► 6 Closed ─► 2 ...
//! ```
//!
//! After its domain was saved and restored, a front end reappears in state 1 or 3, with new rings.
//!
//! In: watches of the nodes of both sides. Out: queues on reactors, states, log lines.
//!
//! What must hold
//! - Queues run only while the front end has rings.
//! - The thread writes a state only if the state changes. Without this rule the two sides would
//!   wake each other endlessly.
//! - Queues continue while the connection to xenstore is lost. The thread reconnects.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_disk::Disk;
use blockyard_ring::xen::{Host, Node, Store, StoreError};

use super::claim::images;
use super::nodes::{FrontSetup, KIND, MAX_QUEUES, NodeError, Paths, QueueKeys, SERVER, State};
use super::queue::{Counts, Data, QueueHandle, QueueSetup, Shared};
use super::reopen::Reopen;
use super::{COUNTED, Control, Name, XenData, XenError, XenOptions, own_domain};
use crate::export::GRACE;
use crate::start::StartError;
use crate::{Client, Reactors};

pub(super) struct Device {
    options: XenOptions,
    host: Host,
    reactors: Arc<Reactors>,
    store: Store,
    paths: Paths,
    control: Arc<Control>,
    shared: Arc<Shared>,
    queues: Vec<QueueHandle>,
    /// The state that the back end wrote last.
    state: Option<State>,
    /// The setup that the front end requested when it was connected.
    setup: Option<FrontSetup>,
    /// Whether the front end has reached state Connected with the current rings.
    front_connected: bool,
    /// Whether the back end has closed the device because the front end requested something
    /// invalid. The front end may start again.
    refused: bool,
    /// Whether another server was connected to the rings of the front end, and may have left
    /// requests in flight.
    inherits: bool,
    reopen: Reopen,
}

/// The next step of the device's loop.
#[derive(PartialEq, Eq)]
enum Next {
    Wait,
    /// The toolstack or `detach` removed the device, or its domain has ended. Another device may
    /// already have the same name.
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
        let (queues, state, setup, front_connected, refused, inherits, reopen) = Default::default();
        #[rustfmt::skip]
        let device = Device {
            options, host, reactors, store, paths, control, shared, queues, state, setup,
            front_connected, refused, inherits, reopen,
        };
        device
    }

    /// Prepares the device before its thread starts: sets the watches, and offers the features
    /// unless the front end is already connected.
    pub fn begin(&mut self) -> Result<(), NodeError> {
        self.store.share_limit(&self.control.deadline);
        self.state = self.paths.back_state(&mut self.store)?;
        // An earlier version left no note, and took requests without a record too.
        self.inherits = matches!(self.state, Some(State::Connected | State::Closing))
            && self.paths.is_recorded(&mut self.store)?;
        watch(&mut self.store, &self.paths)?;
        // If the toolstack is removing the device, the toolstack waits for state 6.
        let stays = self.paths.online(&mut self.store)? == Some(true);
        if self.state != Some(State::Connected) && stays {
            self.offer()?;
        }
        Ok(())
    }

    /// Follows the device until it ends. Returns true if the device is gone, false if the device
    /// waits for the next server.
    pub fn run(mut self) -> bool {
        let gone = loop {
            if self.control.stop.load(Ordering::SeqCst) {
                break false;
            }
            match self.step() {
                Ok(Next::Wait) => {}
                Ok(Next::Remove) => break true,
                Err(e) if e.is_lost() => {
                    self.reopen(&e);
                    continue;
                }
                // The device was removed during the step, so the step found no node to read.
                Err(_) if self.is_gone().unwrap_or(false) => break true,
                Err(e) => self.close_with_error(&e),
            }
            if let Err(e) = self.store.event(self.control.wake.as_fd(), None) {
                self.reopen(&e.into());
                continue;
            }
            let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
        };
        let was_connected = !self.queues.is_empty();
        self.disconnect();
        if let Some(deadline) = *self.control.deadline() {
            self.store.set_limit(deadline.max(Instant::now() + GRACE));
        }
        if gone && self.remove_nodes() {
            self.remove_records();
        }
        if !gone
            && !self.paths.toolstack
            && let Err(e) = self.paths.note_image(&mut self.store, &images(&self.shared.disk))
        {
            tracing::warn!(
                disk = self.name(),
                "cannot write the image's name of device {} into xenstore: {e}",
                self.options.device
            );
        }
        // If this fails, the next server needs the records.
        if !gone && was_connected {
            let _ = self.paths.note_settled(&mut self.store);
        }
        self.log_counts();
        gone
    }

    /// Reconnects to xenstore, unless the service stops first. The queues continue during this
    /// time.
    fn reopen(&mut self, error: &NodeError) {
        let Device { host, control, paths, shared, reopen, .. } = self;
        let name = shared.disk.name();
        shared.log.warn(
            name,
            None,
            format_args!(
                "lost xenstore: the device is served, but its states are not followed: {error}"
            ),
        );
        if let Some(store) = reopen.open(host, control, |store| watch(store, paths)) {
            self.store = store;
            shared.log.info(
                name,
                None,
                format_args!("reconnected to xenstore: the device's states are followed again"),
            );
        }
    }

    fn name(&self) -> &str {
        self.shared.disk.name()
    }

    /// Removes the nodes. Returns false if a later device has this name, because the records then
    /// belong to that device.
    fn remove_nodes(&mut self) -> bool {
        if self.paths.toolstack {
            return true;
        }
        // The queues may have waited long for the disk, so the nodes may have changed.
        self.paths.remove(&mut self.store).unwrap_or_else(|e| {
            tracing::warn!(
                disk = self.name(),
                "cannot remove the nodes of device {} from xenstore: {e}",
                self.options.device
            );
            true
        })
    }

    fn step(&mut self) -> Result<Next, NodeError> {
        let front = self.paths.front_state(&mut self.store)?;
        let Some(online) = self.paths.online(&mut self.store)? else { return Ok(Next::Remove) };
        if self.is_gone()? {
            return Ok(Next::Remove);
        }
        match front {
            Some(State::Initialising) => {
                (self.refused, self.inherits) = (false, false);
                if !online {
                    return Ok(Next::Remove);
                }
                self.disconnect();
                self.remove_records();
                if self.state != Some(State::InitWait) {
                    self.offer()?;
                }
            }
            // Do not connect a device that is being removed, unless requests may wait in its rings.
            Some(State::Initialised) if self.queues.is_empty() && online && !self.refused => {
                // The front end sends requests only when both sides are connected.
                self.inherits = false;
                self.connect()?
            }
            Some(State::Initialised) if !self.queues.is_empty() => self.reconnect()?,
            Some(State::Connected) if self.queues.is_empty() && !self.refused => self.connect()?,
            Some(State::Connected) if !self.queues.is_empty() => {
                self.front_connected = true;
                self.follow_rings()?;
            }
            Some(State::Closing) => self.set_state(State::Closing)?,
            Some(State::Closed) => {
                self.inherits = false;
                self.disconnect();
                // The next rings may use the same pages, so their key may match the old records.
                self.remove_records();
                if !online {
                    return Ok(Next::Remove);
                }
                self.set_state(State::Closed)?;
            }
            _ => {}
        }
        let is_ready = matches!(front, Some(State::Initialised | State::Connected));
        if is_ready && online && !self.queues.is_empty() && self.state != Some(State::Connected) {
            // xenstore was lost before the rings were announced.
            self.announce()?;
        }
        if self.control.resized.swap(false, Ordering::SeqCst) && !self.queues.is_empty() && online {
            let announced = self.paths.connect(&mut self.store, &self.shared.disk);
            // The next step announces the size if xenstore has failed now.
            announced.inspect_err(|_| self.control.resized.store(true, Ordering::SeqCst))?;
        }
        if !online && matches!(self.state, Some(State::Connected | State::InitWait)) {
            self.set_state(State::Closing)?;
        }
        Ok(Next::Wait)
    }

    /// Returns whether the device was removed. Another device may already have the same name.
    fn is_gone(&mut self) -> Result<bool, NodeError> {
        let is_there = self.paths.online(&mut self.store)?.is_some()
            && self.store.read(&format!("{}/backend", self.paths.front))?.is_some();
        Ok(!is_there || !self.paths.is_same(&mut self.store)? || self.is_recreated()?)
    }

    /// Returns whether a toolstack has removed the device and created a new one with the same name.
    /// The new device may request another disk.
    fn is_recreated(&mut self) -> Result<bool, StoreError> {
        let known =
            self.paths.toolstack && self.state.is_some_and(|state| state != State::Initialising);
        Ok(known && self.paths.back_state(&mut self.store)? == Some(State::Initialising))
    }

    /// Handles state 3 of the front end while its rings are served. After a restore in the same
    /// domain, the front end has new rings.
    fn reconnect(&mut self) -> Result<(), NodeError> {
        let setup = self.paths.front_setup(&mut self.store, &self.options)?;
        if self.front_connected || self.setup.as_ref() != Some(&setup) {
            self.connect_again()?;
        }
        Ok(())
    }

    /// Connects again if the front end has other rings, and this thread did not see its state 3.
    fn follow_rings(&mut self) -> Result<(), NodeError> {
        let mut last = None;
        // A front end that writes its nodes meanwhile has not two equal setups. Its next write is
        // an event.
        for _ in 0..2 {
            match self.paths.front_setup(&mut self.store, &self.options) {
                Ok(setup) if self.setup.as_ref() == Some(&setup) => return Ok(()),
                Ok(setup) if last.as_ref() == Some(&setup) => return self.connect_again(),
                Ok(setup) => last = Some(setup),
                Err(e) if e.is_lost() => return Err(e),
                // Invalid nodes of a front end that is connected change nothing.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn connect_again(&mut self) -> Result<(), NodeError> {
        self.disconnect();
        self.remove_records();
        self.connect()
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

    /// Connects to the rings that the front end has created.
    fn connect(&mut self) -> Result<(), NodeError> {
        let setup = self.paths.front_setup(&mut self.store, &self.options)?;
        let FrontSetup { abi, queues, .. } = &setup;
        let fua = !self.shared.disk.options().cache.write_back()
            || self.paths.offered_no_flush(&mut self.store)?;
        if self.options.records.is_some() {
            self.paths.note_recorded(&mut self.store)?;
        }
        for (number, keys) in (0..).zip(queues) {
            match self.queue(number, keys, &setup, fua) {
                Ok(queue) => self.queues.push(queue),
                Err(error) => {
                    self.disconnect();
                    return Err(NodeError::Queue { number, error });
                }
            }
        }
        // The queues serve requests from now on, even if the connection to xenstore is lost before
        // the reply to the new state.
        let id = Client::described(format!("domain {}", self.options.domain)).id();
        *self.control.connected() = Some(self.shared.disk.client(COUNTED, id));
        (self.inherits, self.setup) = (false, Some(setup.clone()));
        self.announce()?;
        let pages = queues.first().map_or(0, |queue| queue.references.len());
        self.shared.log.info(
            self.shared.disk.name(),
            None,
            format_args!(
                "domain {} is connected: {} queues, {pages} pages per ring, {abi:?}, grants {}",
                self.options.domain,
                queues.len(),
                match self.data(&setup) {
                    Data::Mapped => "are mapped for each request",
                    Data::Persistent => "stay mapped",
                    Data::Copied => "are copied",
                }
            ),
        );
        Ok(())
    }

    /// Tells the front end that its rings are served.
    fn announce(&mut self) -> Result<(), NodeError> {
        self.paths.connect(&mut self.store, &self.shared.disk)?;
        self.state = Some(State::Connected);
        self.front_connected = false;
        Ok(())
    }

    fn queue(
        &self,
        index: u16,
        keys: &QueueKeys,
        setup: &FrontSetup,
        fua: bool,
    ) -> Result<QueueHandle, StartError> {
        let domain = self.options.domain;
        let grants =
            self.host.grants(domain).map_err(|e| StartError::ring("cannot open its grants", e))?;
        let ring = grants
            .map(&keys.references, true)
            .map_err(|e| StartError::ring("cannot map its ring", e))?;
        let channel = self.host.channel(domain, keys.port);
        let channel = channel.map_err(|e| {
            StartError::ring(format!("cannot bind its event channel {}", keys.port), e)
        })?;
        let setup = QueueSetup {
            index,
            shared: self.shared.clone(),
            ring,
            abi: setup.abi,
            channel,
            grants,
            data: self.data(setup),
            fua,
            record: self.record(index, keys),
            settled: !self.inherits,
        };
        QueueHandle::start(self.reactors.next(), setup)
    }

    /// Returns the path of a queue's record, and the key that identifies its ring.
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

    /// Decides how data is transferred. Pages that stay mapped cost nothing. For other pages copies
    /// are better: one call per batch, without a change of mappings.
    fn data(&self, setup: &FrontSetup) -> Data {
        match (self.options.data, setup.persistent) {
            (XenData::Copy, _) | (XenData::Auto, false) => Data::Copied,
            (XenData::Map | XenData::Auto, true) => Data::Persistent,
            (XenData::Map, false) => Data::Mapped,
        }
    }

    /// Stops the queues. Each queue completes the requests that it has taken, and unmaps its ring.
    fn disconnect(&mut self) {
        if let Some(client) = self.control.connected().take() {
            client.ends("its device is disconnected");
        }
        for queue in self.queues.drain(..) {
            queue.stop();
        }
    }

    /// Closes the device, because its front end requested something invalid.
    fn close_with_error(&mut self, error: &NodeError) {
        // The back end watches its own nodes too. Without this check, each error written would
        // cause the next one.
        if self.refused {
            return;
        }
        self.shared.log.warn(
            self.shared.disk.name(),
            None,
            format_args!(
                "device {} of domain {} is closed: {error}",
                self.options.device, self.options.domain
            ),
        );
        self.refused = true;
        self.disconnect();
        let reported = self.paths.write_error(&mut self.store, &error.to_string());
        if reported.and_then(|()| self.set_state(State::Closing)).is_err_and(|e| e.is_lost()) {
            // Clear the flag, so that an error after the next connection is reported.
            self.refused = false;
        }
    }

    fn log_counts(&self) {
        let Counts { requests, events, notifications, maps, pages, copies, copied } =
            &self.shared.counts;
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
                "requests of the front end, and the calls that they needed"
            );
        }
    }
}

/// Watches the nodes that both sides write.
fn watch(store: &mut Store, paths: &Paths) -> Result<(), StoreError> {
    store.watch(&paths.back, "back")?;
    store.watch(&format!("{}/state", paths.front), "front")
}

/// A device of this program, as described in xenstore.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The type of back end, which is part of the device's path in xenstore.
    pub kind: String,
    pub domain: u16,
    pub device: Name,
    /// `connected`, or the event for which the device waits.
    pub state: &'static str,
    /// Number of sectors of 512 bytes. `None`: the device was never connected.
    pub sectors: Option<u64>,
    pub read_only: bool,
}

/// Returns the devices of other domains that this program serves, or has served, from this domain.
pub fn list(host: &Host) -> Result<Vec<Listed>, XenError> {
    let mut store = host.store().map_err(XenError::Host)?;
    let failed = |e: NodeError| XenError::Host(std::io::Error::other(e));
    let own = own_domain(&mut store).map_err(failed)?;
    let top = format!("/local/domain/{own}/backend");
    let mut found = Vec::new();
    let mut scan = || -> Result<(), StoreError> {
        for kind in store.list(&top)? {
            for domain in store.list(&format!("{top}/{kind}"))? {
                for number in store.list(&format!("{top}/{kind}/{domain}"))? {
                    let path = format!("{top}/{kind}/{domain}/{number}");
                    if let (Ok(domain), Some(device)) = (domain.parse(), Name::of_node(&number)) {
                        found.extend(listed(&mut store, &path, &kind, domain, device)?);
                    }
                }
            }
        }
        Ok(())
    };
    scan().map_err(|e| failed(e.into()))?;
    Ok(found)
}

/// Reads a device. Returns `None` if another program serves the device.
fn listed(
    store: &mut Store,
    path: &str,
    kind: &str,
    domain: u16,
    device: Name,
) -> Result<Option<Listed>, StoreError> {
    let is_ours = kind == KIND || store.read(&format!("{path}/{SERVER}"))?.as_deref() == Some(KIND);
    if !is_ours {
        return Ok(None);
    }
    let state = match store.read(&format!("{path}/state"))?.as_deref() {
        Some("1" | "2") => "waiting for the guest",
        Some("3" | "4") => "connected",
        _ => "closing",
    };
    let sectors = store.read(&format!("{path}/sectors"))?.and_then(|text| text.parse().ok());
    let read_only = store.read(&format!("{path}/mode"))?.as_deref() == Some("r");
    Ok(Some(Listed { kind: kind.into(), domain, device, state, sectors, read_only }))
}

/// Requests that the guest closes a device. With `force`, removes the device without the guest.
/// Returns false if the guest has not closed the device after `patience`. The device is removed
/// when the guest closes it later.
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
    let mut paths = Paths::new(
        own,
        &XenOptions { domain, device, queues: 1, data: XenData::Auto, records: None },
    );
    let store_failed = |e: StoreError| failed(e.into());
    paths.adopt(&mut store).map_err(store_failed)?;
    if paths.online(&mut store).map_err(store_failed)?.is_none() {
        return Err(XenError::Missing { domain, device });
    }
    if force {
        paths.remove(&mut store).map_err(store_failed)?;
        return Ok(true);
    }
    paths.request_close(&mut store).map_err(store_failed)?;
    store.watch(&paths.back, "back").map_err(store_failed)?;
    let (never, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| XenError::Host(e.into()))?;
    let deadline = std::time::Instant::now() + patience;
    let is_there = |store: &mut Store| Ok(paths.online(store)?.is_some() && paths.is_same(store)?);
    while is_there(&mut store).map_err(store_failed)? {
        if store.event(never.as_fd(), Some(deadline)).map_err(store_failed)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
