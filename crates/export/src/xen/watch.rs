//! Serves disks that a toolstack requests. The toolstack creates the nodes of both sides, and names
//! an image in `params`.
//!
//! ```text
//!   toolstack ─► backend/TYPE/DOMID/NUMBER ─► watch thread ─► Wanted ─► program ─► Xen::take
//!                    state 2 ◄─ at once ──────┘   state 6 ◄─ refuse, release ◄─┘
//! ```
//!
//! In: nodes below `backend/TYPE` of this domain. Out: requested disks, each reported once, and the
//! states 2 and 6 of devices that no [`super::Xen`] serves.
//!
//! What must hold
//! - The watch reports a device once, until the program refuses or releases it. After that, only
//!   nodes in state 1 cause a new report.
//! - The nodes belong to the toolstack. The watch writes nodes only while they exist, and removes
//!   none.
//! - The watch writes state 6 after the image is closed, because the toolstack may then give the
//!   image to another server.
//! - A device in use keeps its state if the program refuses its disk, because state 6 would take
//!   the disk from the guest. The watch reports such a device again later.
//! - The thread's knowledge, and the program's verdicts, survive a lost connection to xenstore.
//! - However often nodes change, the thread reads them at most once per [`PAUSE`], and the log is
//!   rate-limited.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_ring::xen::{Host, Node, Store, StoreError};

use super::nodes::{NodeError, Paths, State, short};
use super::reopen::Reopen;
use super::toolstack::{ToolstackDevice, Wanted, top};
use super::{Control, Name, XenError, own_domain};
use crate::log::Budget;

/// Shortest time between two scans of all nodes.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a watch that ends may wait for xenstore.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// Maximum number of devices that the watch checks in one scan. It ignores further devices.
const MOST: usize = 4096;

/// Longest path in xenstore, in characters.
const PATH_MOST: usize = 512;

/// Options of a watch: which devices it reports, and what it offers to front ends.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// The type of back end: nodes below `backend/KIND`.
    pub kind: String,
    /// Serves only devices with a hotplug script of this file name. `None`: all devices.
    pub script: Option<String>,
    /// Number of queues to offer, at most 8.
    pub queues: u16,
    /// Time after which a refused device that is in use is reported again.
    pub retry: Duration,
}

/// The program's decision about a device.
#[derive(Clone)]
enum Verdict {
    Refuse(ToolstackDevice, String),
    Release(ToolstackDevice),
}

/// A watch of nodes. `stop` (or drop) ends it, and leaves the devices as they are.
pub struct Watch {
    control: Arc<Control>,
    verdicts: Arc<Mutex<Vec<Verdict>>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread knows about a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The program has the device.
    Taken,
    /// The program has released or refused the device, or has not received it yet.
    Idle,
    /// The program refused the device while a guest uses it. The watch reports the device again at
    /// this time.
    Postponed(Instant),
}

/// What the nodes of a device request.
enum Parsed {
    Disk(Box<Wanted>),
    /// The device is not for this program, or its nodes are incomplete.
    Nothing,
    /// The nodes are invalid.
    Invalid(String),
}

struct Watcher<F> {
    host: Host,
    store: Store,
    own: u16,
    options: WatchOptions,
    kind: Arc<str>,
    control: Arc<Control>,
    verdicts: Arc<Mutex<Vec<Verdict>>>,
    known: HashMap<ToolstackDevice, Known>,
    wanted: F,
    lines: Budget,
}

impl Watch {
    /// Starts watching. Another thread calls `wanted`, which must not block for long.
    pub fn start(
        options: WatchOptions,
        host: &Host,
        wanted: impl Fn(Wanted) + Send + 'static,
    ) -> Result<Self, XenError> {
        let mut store = host.store().map_err(XenError::Host)?;
        let failed = |source: NodeError| XenError::Watch {
            kind: options.kind.clone(),
            source: Box::new(source),
        };
        let own = own_domain(&mut store).map_err(failed)?;
        store.watch(&top(own, &options.kind), "watch").map_err(|e| failed(e.into()))?;
        let control = Arc::new(Control::new().map_err(XenError::Host)?);
        store.share_limit(&control.deadline);
        let verdicts = Arc::default();
        let mut watcher = Watcher {
            host: host.clone(),
            store,
            own,
            kind: options.kind.as_str().into(),
            options,
            control: control.clone(),
            verdicts: Arc::clone(&verdicts),
            known: HashMap::new(),
            wanted,
            lines: Budget::default(),
        };
        let body = move || watcher.watch();
        let thread =
            std::thread::Builder::new().name("xen watch".into()).stack_size(512 << 10).spawn(body);
        Ok(Watch { control, verdicts, thread: Some(thread.map_err(XenError::Host)?) })
    }

    /// Reports that there is no disk for the device. The reason goes to the log, and into nodes for
    /// the toolstack.
    pub fn refuse(&self, device: &ToolstackDevice, why: &str) {
        self.send(Verdict::Refuse(device.clone(), why.into()));
    }

    /// Reports that the device has ended, and its image is closed.
    pub fn release(&self, device: &ToolstackDevice) {
        self.send(Verdict::Release(device.clone()));
    }

    fn send(&self, verdict: Verdict) {
        lock(&self.verdicts).push(verdict);
        self.control.ring();
    }

    /// Requests the end of the watch, without waiting for that end. From then on it waits for
    /// xenstore only for a moment.
    pub fn finish(&self) {
        *self.control.deadline() = Some(Instant::now() + LAST_CALLS);
        self.control.stop.store(true, Ordering::SeqCst);
        self.control.ring();
    }

    /// Ends the watch, and waits for its thread.
    pub fn stop(&mut self) {
        self.finish();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: Fn(Wanted)> Watcher<F> {
    /// Watches until the end, and reconnects to xenstore if necessary.
    fn watch(&mut self) {
        let mut reopen = Reopen::default();
        while let Err(e) = self.run() {
            self.warn(format_args!(
                "lost xenstore: devices of toolstacks (backend/{}) are not watched: {e}",
                self.kind
            ));
            let top = top(self.own, &self.kind);
            let Some(store) =
                reopen.open(&self.host, &self.control, |store| store.watch(&top, "watch"))
            else {
                return;
            };
            self.store = store;
            if let Some(withheld) = self.lines.admit(Instant::now()) {
                tracing::info!(
                    withheld,
                    "reconnected to xenstore: devices of toolstacks (backend/{}) are watched again",
                    self.kind
                );
            }
        }
    }

    fn run(&mut self) -> Result<(), StoreError> {
        let mut last: Option<Instant> = None;
        loop {
            let changed = self.store.event(self.control.wake.as_fd(), self.next_retry())?.is_some();
            let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
            let mut released = self.handle_verdicts()?;
            if changed && let Some(last) = last {
                // Several changes during this pause cause one scan.
                released |= self.rest(last + PAUSE)?;
            }
            if self.control.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            let is_due = self.next_retry().is_some_and(|time| time <= Instant::now());
            if changed || released || is_due {
                self.scan()?;
                last = Some(Instant::now());
            }
        }
    }

    /// Returns when the first of the postponed devices must be reported again.
    fn next_retry(&self) -> Option<Instant> {
        let times = self
            .known
            .values()
            .map(|known| if let Known::Postponed(time) = known { Some(*time) } else { None });
        times.flatten().min()
    }

    /// Waits until `end`, and handles verdicts during this time. Returns whether a device was
    /// released.
    fn rest(&mut self, end: Instant) -> Result<bool, StoreError> {
        let mut released = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.control.stop.load(Ordering::SeqCst) {
                return Ok(released);
            }
            self.control.pause(left);
            released |= self.handle_verdicts()?;
        }
    }

    /// Handles the verdicts of the program. Returns whether a device was released.
    fn handle_verdicts(&mut self) -> Result<bool, StoreError> {
        let verdicts = std::mem::take(&mut *lock(&self.verdicts));
        let mut released = false;
        for (at, verdict) in verdicts.iter().enumerate() {
            match self.handle(verdict) {
                Ok(done) => released |= done,
                Err(e) => {
                    // Put the remaining verdicts back, to handle them after reconnecting.
                    lock(&self.verdicts).splice(..0, verdicts[at..].iter().cloned());
                    return Err(e);
                }
            }
        }
        Ok(released)
    }

    /// Handles one verdict. Returns whether it released the device.
    fn handle(&mut self, verdict: &Verdict) -> Result<bool, StoreError> {
        match verdict {
            // The verdict is about an older device of the same name.
            Verdict::Refuse(device, _) if self.is_new(device)? => {
                self.known.insert(device.clone(), Known::Idle);
                Ok(true)
            }
            Verdict::Refuse(device, why) => self.refuse(device, why).map(|()| false),
            Verdict::Release(device) => {
                self.known.insert(device.clone(), Known::Idle);
                self.close(device).map(|()| true)
            }
        }
    }

    /// Scans the nodes of all devices that the program does not have.
    fn scan(&mut self) -> Result<(), StoreError> {
        let mut there = HashSet::new();
        let top = top(self.own, &self.kind);
        for domain in self.list(&top)? {
            let Some(number) =
                domain.parse::<u16>().ok().filter(|number| number.to_string() == domain)
            else {
                continue;
            };
            for device in self.list(&format!("{top}/{domain}"))? {
                let Some(device) = Name::of_node(&device) else { continue };
                if there.len() == MOST {
                    self.warn(format_args!(
                        "backend/{} has more than {MOST} devices: ignoring the others",
                        self.kind
                    ));
                    break;
                }
                there.insert(ToolstackDevice { kind: self.kind.clone(), domain: number, device });
            }
        }
        // If the nodes of a device disappear while the program has it, the program notices that
        // later and releases the device.
        let now = Instant::now();
        self.known.retain(|device, known| match known {
            Known::Taken => true,
            Known::Idle => there.contains(device),
            Known::Postponed(time) => *time > now && there.contains(device),
        });
        for device in there {
            if self.control.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            match self.known.get(&device) {
                Some(Known::Taken) => {}
                known => {
                    let new = known.is_none();
                    self.check_device(device, new)?;
                }
            }
        }
        Ok(())
    }

    fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.store.list(path) {
            Err(e) if !e.is_lost() => {
                self.warn(format_args!("cannot list {path} in xenstore: {e}"));
                Ok(Vec::new())
            }
            names => names,
        }
    }

    /// Checks a device. `new`: the watch knows nothing about the device yet, or its postponement is
    /// over. An earlier server may have left the device in any state.
    fn check_device(&mut self, device: ToolstackDevice, new: bool) -> Result<(), StoreError> {
        let path = device.path(self.own);
        let state = self.read(&path, "state")?.and_then(|text| State::parse(&text));
        if !new && state != Some(State::Initialising) {
            return self.leave(&device, state);
        }
        if self.known.len() >= 2 * MOST {
            // The limit also counts devices that the program still has although their nodes are
            // gone.
            self.warn(format_args!("{device} must wait: there are too many devices"));
            return Ok(());
        }
        match self.parse(&device, &path)? {
            Parsed::Nothing => {}
            Parsed::Invalid(why) => self.refuse(&device, &why)?,
            Parsed::Disk(wanted) => {
                let online = self.read(&path, "online")?.as_deref() == Some("1");
                let in_use = matches!(state, Some(State::Connected | State::Closing));
                if !online && !in_use {
                    self.known.insert(device.clone(), Known::Idle);
                    return self.leave(&device, state);
                }
                let paths = Paths::of_toolstack(self.own, &wanted);
                match paths.claim(&mut self.store, self.options.queues) {
                    Err(e) if e.is_lost() => return Err(e),
                    Err(e) => return self.refuse(&device, &e.to_string()),
                    Ok(_) => {}
                }
                self.known.insert(device, Known::Taken);
                (self.wanted)(*wanted);
            }
        }
        Ok(())
    }

    /// Closes a device that the program does not have, if the toolstack is removing it: the
    /// toolstack waits for state 6.
    fn leave(&mut self, device: &ToolstackDevice, state: Option<State>) -> Result<(), StoreError> {
        let path = device.path(self.own);
        let close = match self.known.get(device) {
            // The toolstack has requested that the guest closes the device.
            Some(Known::Postponed(_)) => !self.in_use(device)?,
            known => known.is_some(),
        };
        if close
            && state != Some(State::Closed)
            && self.read(&path, "online")?.as_deref() == Some("0")
        {
            self.close(device)?;
        }
        Ok(())
    }

    /// Sets state 6, unless the nodes were recreated or are gone.
    fn close(&mut self, device: &ToolstackDevice) -> Result<(), StoreError> {
        let done = self.paths(device).close(&mut self.store);
        self.note(device, done.map(drop))
    }

    fn is_new(&mut self, device: &ToolstackDevice) -> Result<bool, StoreError> {
        Ok(self.read(&device.path(self.own), "state")?.as_deref() == Some("1"))
    }

    fn refuse(&mut self, device: &ToolstackDevice, why: &str) -> Result<(), StoreError> {
        self.warn(format_args!("{device} has no disk: {why}"));
        self.known.insert(device.clone(), Known::Idle);
        // A node of xenstore holds less text than a message of the program may have.
        let why: String = why.chars().take(1000).collect();
        let done = self.paths(device).refuse(&mut self.store, &why).map(|in_use| {
            if in_use {
                self.known
                    .insert(device.clone(), Known::Postponed(Instant::now() + self.options.retry));
            }
        });
        self.note(device, done)
    }

    /// Returns whether a guest uses the device. Returns false if the device's nodes cannot be read.
    fn in_use(&mut self, device: &ToolstackDevice) -> Result<bool, StoreError> {
        match self.paths(device).in_use(&mut self.store) {
            Err(e) if !e.is_lost() => Ok(false),
            in_use => in_use,
        }
    }

    /// Logs an error with the nodes of one device. Returns the error if the connection is lost.
    fn note(
        &self,
        device: &ToolstackDevice,
        done: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        match done {
            Err(e) if !e.is_lost() => {
                self.warn(format_args!("{device}: {e}"));
                Ok(())
            }
            done => done,
        }
    }

    fn paths(&self, device: &ToolstackDevice) -> Paths {
        Paths::of_device(self.own, device)
    }

    fn warn(&self, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.lines.admit(Instant::now()) {
            tracing::warn!(withheld, "{what}");
        }
    }

    /// Reads a node. Invalid text counts as a missing node.
    fn read(&mut self, path: &str, key: &str) -> Result<Option<String>, StoreError> {
        match self.store.read(&format!("{path}/{key}")) {
            Err(e) if !e.is_lost() => Ok(None),
            value => value,
        }
    }

    /// Reads nodes of one moment, because a toolstack may replace a device meanwhile. Invalid text
    /// counts as a missing node.
    fn read_together<const N: usize>(
        &mut self,
        path: &str,
        keys: [&str; N],
    ) -> Result<[Option<String>; N], StoreError> {
        self.store.transaction(|t| {
            let mut values = [const { None }; N];
            for (value, key) in values.iter_mut().zip(keys) {
                *value = match t.read(&format!("{path}/{key}")) {
                    Err(e) if !e.is_lost() => None,
                    read => read?,
                };
            }
            Ok(values)
        })
    }

    /// Parses what the nodes of a device request.
    fn parse(&mut self, device: &ToolstackDevice, path: &str) -> Result<Parsed, StoreError> {
        let keys = ["script", "frontend", "frontend-id", "params", "mode", "online", "device-type"];
        let [script, frontend, number, target, mode, online, kind] =
            self.read_together(path, keys)?;
        if let Some(ours) = &self.options.script
            && script.unwrap_or_default().rsplit('/').next() != Some(ours.as_str())
        {
            return Ok(Parsed::Nothing);
        }
        let (Some(frontend), Some(number), Some(target), Some(mode), Some(_)) =
            (frontend, number, target, mode, online)
        else {
            return Ok(Parsed::Nothing);
        };
        let kind = kind.unwrap_or_else(|| "disk".into());
        let is_path = frontend.starts_with('/')
            && frontend.len() <= PATH_MOST
            && frontend.bytes().all(is_of_path);
        let invalid = |key: &str, value: &str| {
            Ok(Parsed::Invalid(format!("the node {key} is \"{}\"", short(value))))
        };
        if number != device.domain.to_string() {
            return invalid("frontend-id", &number);
        }
        if !is_path {
            return invalid("frontend", &frontend);
        }
        if target.is_empty() || target.chars().any(char::is_control) {
            return invalid("params", &target);
        }
        let cdrom = match kind.as_str() {
            "cdrom" => true,
            "disk" => false,
            _ => return invalid("device-type", &kind),
        };
        let read_only = match mode.as_str() {
            "w" | "w!" | "rw" => cdrom,
            "r" | "ro" => true,
            _ => return invalid("mode", &mode),
        };
        let device = device.clone();
        Ok(Parsed::Disk(Box::new(Wanted { device, target, read_only, cdrom, frontend, mode })))
    }
}

/// Returns whether xenstore allows this character in a path.
fn is_of_path(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte)
}

#[cfg(test)]
mod tests;
