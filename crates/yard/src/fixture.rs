//! Exports, disks and an observer in memory, for the tests of this crate.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_disk::{ClientId, Disk, DiskObserver};
use blockyard_export::{Client, Export, Handed, LongestHold, Obstacle, Reactors};
use blockyard_image::ChainOptions;
use blockyard_ring::parcel::Parcel;

use crate::context::Context;
use crate::interface::observer::{Event, Observer};
use crate::interface::settings::{Activation, DiskSettings, Way, WayError};
use crate::jobs::Jobs;
use crate::shares::Shares;

/// Longest wait for an event. The event itself ends the wait.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The calls that exports got, in order.
pub type Calls = Arc<Mutex<Vec<String>>>;

/// Starts an export that records its calls.
#[derive(Clone, Default)]
pub struct FakeWay {
    pub name: &'static str,
    pub calls: Calls,
    /// The start fails.
    pub fails: bool,
    pub longest_hold: Option<Duration>,
    /// The device that the export has, which ends with its server.
    pub device: Option<PathBuf>,
    /// The export hands its clients over.
    pub hands_over: bool,
    /// The deadline of the export's stop.
    pub deadline: Arc<Mutex<Option<Instant>>>,
}

impl FakeWay {
    pub fn new(name: &'static str, calls: &Calls) -> Self {
        FakeWay { name, calls: calls.clone(), ..FakeWay::default() }
    }

    fn note(&self, call: &str) {
        self.calls.lock().unwrap().push(format!("{} {call}", self.name));
    }
}

impl Way for FakeWay {
    fn describe(&self) -> String {
        format!("/{}", self.name)
    }

    fn start(&self, _: &Arc<Disk>, _: &Arc<Reactors>) -> Result<Box<dyn Export>, WayError> {
        self.note("start");
        if self.fails {
            return Err(WayError::caller("the address is taken"));
        }
        Ok(Box::new(FakeExport(self.clone())))
    }
}

struct FakeExport(FakeWay);

impl Export for FakeExport {
    fn resize(&mut self) {
        self.0.note("resize");
    }

    fn stop(&mut self, deadline: Instant) {
        let mut known = self.0.deadline.lock().unwrap();
        if known.is_none() {
            self.0.note("stop");
            *known = Some(deadline);
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        self.0.device.clone().map(Obstacle::EndsWithServer)
    }

    fn hand_over(&mut self) -> Option<Handed> {
        self.0.note("hand over");
        let parcel = || Parcel { bytes: self.0.name.as_bytes().to_vec(), fds: Vec::new() };
        self.0.hands_over.then(|| Handed { kind: "fake", parcel: parcel() })
    }

    fn allow(&mut self, names: Option<&[String]>) {
        self.0.note(&format!("allow {names:?}"));
    }

    fn clients(&self) -> Vec<Client> {
        vec![Client::described(format!("client of {}", self.0.name))]
    }

    fn disconnect(&mut self, _: Option<&str>) -> Vec<Client> {
        self.clients()
    }

    fn longest_hold(&self) -> Option<LongestHold> {
        self.0.longest_hold.map(|time| LongestHold { time, why: "its clients are impatient" })
    }

    fn keep_images(&mut self) {
        self.0.note("keep images");
    }

    fn device(&self) -> Option<PathBuf> {
        self.0.device.clone()
    }
}

impl Drop for FakeExport {
    fn drop(&mut self) {
        self.0.note("gone");
    }
}

/// Records events as text. May hold each job before it begins.
pub struct FakeObserver {
    pub events: Mutex<Vec<String>>,
    held: Mutex<Receiver<()>>,
    release: Mutex<Option<Sender<()>>>,
    holds: bool,
}

impl FakeObserver {
    pub fn new() -> Arc<Self> {
        Self::of(false)
    }

    /// Returns an observer that holds each job before it begins, until [`FakeObserver::release`].
    pub fn holding() -> Arc<Self> {
        Self::of(true)
    }

    fn of(holds: bool) -> Arc<Self> {
        let (sender, receiver) = channel();
        Arc::new(FakeObserver {
            events: Mutex::default(),
            held: Mutex::new(receiver),
            release: Mutex::new(Some(sender)),
            holds,
        })
    }

    pub fn release(&self) {
        self.release.lock().unwrap().take();
    }

    pub fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }
}

impl DiskObserver for FakeObserver {
    fn changed(&self, _: &Arc<str>) -> bool {
        false
    }

    fn connected(&self, _: &str, _: &'static str, _: &ClientId) {}

    fn disconnected(&self, _: &str, _: &'static str, _: &ClientId, _: &str) {}
}

impl Observer for FakeObserver {
    fn event(&self, event: Event) {
        let text = match &event {
            Event::Added { name, size, ways, .. } => format!("added {name} {size} {ways:?}"),
            Event::Removed { disk, is_flushed, error } => {
                format!("removed {disk} {is_flushed} {error:?}")
            }
            Event::Resized { disk, size } => format!("resized {disk} {} {}", size.old, size.new),
            Event::GrowthBegun { disk, size } => format!("grows {disk} {size}"),
            Event::GrowthEnded { disk, error } => format!("grown {disk} {error:?}"),
            Event::JobBegun(job) => format!("begun {}", job.number()),
            Event::JobEnded(job) => format!("ended {} {:?}", job.number(), job.is_running()),
        };
        self.events.lock().unwrap().push(text);
        if self.holds && matches!(event, Event::JobBegun(_)) {
            let _ = self.held.lock().unwrap().recv_timeout(LIMIT);
        }
    }
}

pub fn shares() -> Shares {
    Shares::new(true, Vec::new(), BTreeMap::new())
}

/// Returns a context with one reactor.
pub fn context(observer: Option<Arc<dyn Observer>>) -> Context {
    let jobs = Jobs::new(observer.clone(), Arc::new(|| Some(Vec::new())));
    Context {
        reactors: Arc::new(Reactors::start(1, &[]).unwrap()),
        shares: shares(),
        images: Default::default(),
        jobs,
        observer,
        is_closing: Default::default(),
        openings: Default::default(),
    }
}

pub fn settings(
    name: &str,
    image: impl Into<PathBuf>,
    ways: impl IntoIterator<Item = FakeWay>,
) -> DiskSettings {
    DiskSettings {
        on_enospc: Default::default(),
        name: name.into(),
        serial: String::new(),
        image: ChainOptions::new(image),
        activation: Activation::Start,
        filters: Vec::new(),
        device: None,
        group: None,
        knobs: Default::default(),
        carried: None,
        ways: ways.into_iter().map(|way| Arc::new(way) as Arc<dyn Way>).collect(),
    }
}

/// A file that is removed at the end of its test.
pub struct Image(pub PathBuf);

impl Image {
    pub fn new(bytes: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-yard-unit-{}-{number}.raw", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        Image(path)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Waits until `happens` returns true.
#[track_caller]
pub fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happens() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}
