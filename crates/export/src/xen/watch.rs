//! Disks that a toolstack asks for: it makes the nodes of both sides, and names an image in
//! `params`.
//!
//! ```text
//!   toolstack ─► backend/TYPE/DOMID/NUMBER ─► thread of the watch ─► Wanted ─► program: opens the image ─► Xen::take
//!                        state 2 ◄─ at once ──────┘    state 6 ◄─ refuse, release ◄─┘
//! ```
//! In: nodes below `backend/TYPE` of the own domain. Out: disks that are wanted, each once, and the
//! states 2 and 6 of those that no [`super::Xen`] follows. What must hold
//! - A device is reported once, until the program refuses or releases it. Then only nodes in state
//!   1 make it wanted again.
//! - The nodes are the toolstack's. This side writes into them only while they are there, and
//!   removes none of them.
//! - State 6 is written when the image is closed: the toolstack may then give it to another server.
//! - A device in use that has no disk keeps its state, because state 6 would take the disk from the
//!   guest. It is wanted again later.
//! - What the thread knows, and what the program has said, outlives a connection to xenstore that
//!   is lost.
//! - However often nodes change, they are read every [`PAUSE`] at most, and the log grows slowly.

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
use super::{Control, Name, XenError, own_domain};
use crate::log::Budget;

/// The least time from one reading of all nodes to the next.
const PAUSE: Duration = Duration::from_millis(20);

/// Devices that are looked at. Xen's domains have numbers below 32752.
const MOST: usize = 4096;

/// Characters of a path in xenstore.
const PATH_MOST: usize = 512;

/// A device of a guest whose nodes a toolstack has made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolstackDevice {
    /// The type of back end, such as `vbd`.
    pub kind: Arc<str>,
    pub domain: u16,
    pub device: Name,
}

impl ToolstackDevice {
    /// The nodes of the back end in domain `own`.
    pub(super) fn path(&self, own: u16) -> String {
        format!("{}/{}/{}", top(own, &self.kind), self.domain, self.device.number())
    }
}

impl fmt::Display for ToolstackDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} of domain {} (backend/{})", self.device, self.domain, self.kind)
    }
}

fn top(own: u16, kind: &str) -> String {
    format!("/local/domain/{own}/backend/{kind}")
}

/// A disk that a toolstack asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub device: ToolstackDevice,
    /// What `params` says: text of the toolstack's, of at most 4096 bytes and without control
    /// characters.
    pub target: String,
    pub read_only: bool,
    pub cdrom: bool,
    pub(super) frontend: String,
    pub(super) mode: String,
}

/// Which nodes are looked at.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// The type of back end: nodes below `backend/KIND`.
    pub kind: String,
    /// Only devices whose hotplug script has this file name; `None`: all.
    pub script: Option<String>,
    /// Queues that are offered, 8 at most.
    pub queues: u16,
    /// A device in use that was refused is wanted again after this time.
    pub retry: Duration,
}

/// What the program says of a device.
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

/// What the thread knows of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The program has it.
    Taken,
    /// The program has it no more, or not yet.
    Idle,
    /// A guest uses it, and the program has refused it. It is wanted again at this time.
    Postponed(Instant),
}

/// What the nodes of a device ask for.
enum Asked {
    Disk(Box<Wanted>),
    /// Not this program's, or not complete yet.
    Nothing,
    /// They make no sense.
    Wrong(String),
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
    /// Begins to look. `wanted` is called by another thread, and must not block for long.
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

    /// There is no disk for the device. The reason goes to the log, and into nodes for the
    /// toolstack.
    pub fn refuse(&self, device: &ToolstackDevice, why: &str) {
        self.say(Verdict::Refuse(device.clone(), why.into()));
    }

    /// The device has ended, and its image is closed.
    pub fn release(&self, device: &ToolstackDevice) {
        self.say(Verdict::Release(device.clone()));
    }

    fn say(&self, verdict: Verdict) {
        lock(&self.verdicts).push(verdict);
        self.control.ring();
    }

    /// Asks for the end, and does not wait for it.
    pub fn finish(&self) {
        self.control.stop.store(true, Ordering::SeqCst);
        self.control.ring();
    }

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
    /// Looks until the end, over as many connections as it takes.
    fn watch(&mut self) {
        let mut reopen = Reopen::default();
        while let Err(e) = self.run() {
            self.warn(format_args!(
                "devices of toolstacks (backend/{}) are not looked at: {e}",
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
                    "devices of toolstacks (backend/{}) are looked at again",
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
            let mut released = self.hear()?;
            if changed && let Some(last) = last {
                // Meanwhile changes come together.
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

    /// When the first of the devices is wanted again that a guest uses, and that the program has
    /// refused.
    fn next_retry(&self) -> Option<Instant> {
        let times = self
            .known
            .values()
            .map(|known| if let Known::Postponed(time) = known { Some(*time) } else { None });
        times.flatten().min()
    }

    /// Waits until `end`, except for what the program says. Returns whether it has released a
    /// device.
    fn rest(&mut self, end: Instant) -> Result<bool, StoreError> {
        let mut released = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.control.stop.load(Ordering::SeqCst) {
                return Ok(released);
            }
            self.control.pause(left);
            released |= self.hear()?;
        }
    }

    /// Does what the program has said. Returns whether it has released a device.
    fn hear(&mut self) -> Result<bool, StoreError> {
        let verdicts = std::mem::take(&mut *lock(&self.verdicts));
        let mut released = false;
        for (at, verdict) in verdicts.iter().enumerate() {
            match self.act(verdict) {
                Ok(done) => released |= done,
                Err(e) => {
                    // The next connection begins with them.
                    lock(&self.verdicts).splice(..0, verdicts[at..].iter().cloned());
                    return Err(e);
                }
            }
        }
        Ok(released)
    }

    /// Does one thing that the program has said. Returns whether it has released the device.
    fn act(&mut self, verdict: &Verdict) -> Result<bool, StoreError> {
        match verdict {
            // The program has refused an older device of the same name.
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

    /// Reads the nodes of all devices that the program has not.
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
                        "there are more than {MOST} devices in backend/{}",
                        self.kind
                    ));
                    break;
                }
                there.insert(ToolstackDevice { kind: self.kind.clone(), domain: number, device });
            }
        }
        // Those that are gone while the program has them it releases when it notices.
        let now = Instant::now();
        self.known.retain(|device, known| match known {
            Known::Taken => true,
            Known::Idle => there.contains(device),
            Known::Postponed(time) => *time > now && there.contains(device),
        });
        for device in there {
            match self.known.get(&device) {
                Some(Known::Taken) => {}
                known => {
                    let new = known.is_none();
                    self.look_at(device, new)?;
                }
            }
        }
        Ok(())
    }

    fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.store.list(path) {
            Err(e) if !e.is_lost() => {
                self.warn(format_args!("listing {path}: {e}"));
                Ok(Vec::new())
            }
            names => names,
        }
    }

    /// `new`: nothing is known of the device yet, or it is to be taken again. A server that has
    /// ended may have left it in any state.
    fn look_at(&mut self, device: ToolstackDevice, new: bool) -> Result<(), StoreError> {
        let path = device.path(self.own);
        let state = self.read(&path, "state")?.and_then(|text| State::parse(&text));
        if !new && state != Some(State::Initialising) {
            return self.leave(&device, state);
        }
        if self.known.len() >= 2 * MOST {
            // Those that the program has although their nodes are gone count, too.
            self.warn(format_args!("{device} has to wait: there are too many devices"));
            return Ok(());
        }
        match self.asked(&device, &path)? {
            Asked::Nothing => {}
            Asked::Wrong(why) => self.refuse(&device, &why)?,
            Asked::Disk(wanted) => {
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

    /// A device that the program has not: a toolstack that wants it back need not wait.
    fn leave(&mut self, device: &ToolstackDevice, state: Option<State>) -> Result<(), StoreError> {
        let path = device.path(self.own);
        let mine = match self.known.get(device) {
            // The toolstack has asked the guest to close it.
            Some(Known::Postponed(_)) => !self.in_use(device)?,
            known => known.is_some(),
        };
        if mine
            && state != Some(State::Closed)
            && self.read(&path, "online")?.as_deref() == Some("0")
        {
            self.close(device)?;
        }
        Ok(())
    }

    /// State 6, unless the nodes were made anew, or are gone.
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
        // A node has room for less than a message may have.
        let why: String = why.chars().take(1000).collect();
        let done = self.paths(device).refuse(&mut self.store, &why).map(|in_use| {
            if in_use {
                self.known
                    .insert(device.clone(), Known::Postponed(Instant::now() + self.options.retry));
            }
        });
        self.note(device, done)
    }

    /// Nodes that cannot be read are of no device that is in use.
    fn in_use(&mut self, device: &ToolstackDevice) -> Result<bool, StoreError> {
        match self.paths(device).in_use(&mut self.store) {
            Err(e) if !e.is_lost() => Ok(false),
            in_use => in_use,
        }
    }

    /// Of an error with nodes of one device the log has a line.
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

    /// A node that is no text is as one that is not there.
    fn read(&mut self, path: &str, key: &str) -> Result<Option<String>, StoreError> {
        match self.store.read(&format!("{path}/{key}")) {
            Err(e) if !e.is_lost() => Ok(None),
            value => value,
        }
    }

    /// What the nodes of a device ask for.
    fn asked(&mut self, device: &ToolstackDevice, path: &str) -> Result<Asked, StoreError> {
        if let Some(ours) = self.options.script.clone() {
            let script = self.read(path, "script")?.unwrap_or_default();
            if script.rsplit('/').next() != Some(ours.as_str()) {
                return Ok(Asked::Nothing);
            }
        }
        let mut key = |key: &str| self.read(path, key);
        let (Some(frontend), Some(number), Some(target), Some(mode), Some(_)) =
            (key("frontend")?, key("frontend-id")?, key("params")?, key("mode")?, key("online")?)
        else {
            return Ok(Asked::Nothing);
        };
        let kind = key("device-type")?.unwrap_or_else(|| "disk".into());
        let is_path = frontend.starts_with('/')
            && frontend.len() <= PATH_MOST
            && frontend.bytes().all(is_of_path);
        let wrong = |key: &str, value: &str| {
            Ok(Asked::Wrong(format!("the node {key} is \"{}\"", short(value))))
        };
        if number != device.domain.to_string() {
            return wrong("frontend-id", &number);
        }
        if !is_path {
            return wrong("frontend", &frontend);
        }
        if target.is_empty() || target.chars().any(char::is_control) {
            return wrong("params", &target);
        }
        let cdrom = match kind.as_str() {
            "cdrom" => true,
            "disk" => false,
            _ => return wrong("device-type", &kind),
        };
        let read_only = match mode.as_str() {
            "w" | "w!" | "rw" => cdrom,
            "r" | "ro" => true,
            _ => return wrong("mode", &mode),
        };
        let device = device.clone();
        Ok(Asked::Disk(Box::new(Wanted { device, target, read_only, cdrom, frontend, mode })))
    }
}

/// Whether xenstore lets a path have this character.
fn is_of_path(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte)
}
