//! A modelled device: requests take as long as on a device of bounded parallelism. The model stores
//! nothing, unless an image is below it. With an image, a request takes the longer of both times.
//!
//! ```text
//!   requests of all disks and reactors ──► one FIFO queue ──► N servers ──► done
//! ```
//!
//! A request occupies one server for the time of its kind and for bytes x N / bandwidth, so that N
//! busy servers transfer exactly the bandwidth. The completion time is known on arrival, so the
//! request just sleeps until then. In: a text form, [`FORM`]; then kind and bytes of each request,
//! and the time now. Out: when each request completes.
//!
//! What must hold: disks that name the same device share its servers, on all reactors.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use blockyard_image::{Format, Raw, SECTOR};
use blockyard_ring::{Handle, Segments};
use blockyard_sched::parse_size;
use blockyard_storage::{SizeError, disk_size};

use crate::filter::{Dice, MOST_TIME, TIME_FORM, parse_time};
use crate::statistics::OpKind;

pub(super) const FORM: &str = "a modelled device is delay:SIZE or delay:file=PATH, then [,parallel=N]\
                    [,KIND=TIME]...[,bandwidth=BYTES_PER_S][,spread=exponential[,seed=N]]\
                    [,device=NAME]";
const SIZE_FORM: &str = "a number of bytes with an optional suffix k, M, G or T (powers of 1024)";
const MOST_PARALLEL: usize = 65_536;

/// An error in a model's text form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("\"{0}\" has no value: {FORM}")]
    NoValue(String),
    #[error("\"{key}={value}\" is not known: {FORM}")]
    Unknown { key: String, value: String },
    #[error("a size is {SIZE_FORM}, at least {SECTOR}")]
    Size,
    #[error("{key} \"{value}\": {TIME_FORM}")]
    Time { key: String, value: String },
    #[error("parallel is a number from 1 to {MOST_PARALLEL}, not \"{0}\"")]
    Parallel(String),
    #[error("bandwidth \"{0}\": it is {SIZE_FORM}, at least 1")]
    Bandwidth(String),
    #[error("spread is exponential, or not given at all, not \"{0}\"")]
    Spread(String),
    #[error("seed \"{0}\" is not a number")]
    SeedNumber(String),
    #[error("seed has no meaning without spread=exponential")]
    Seed,
    #[error(
        "another disk has other settings for device \"{device}\": all its disks must have the same"
    )]
    Otherwise { device: String },
    #[error("a modelled device needs a raw image, but the name of {} means {format}",
        path.display())]
    NotRaw { path: PathBuf, format: Format },
}

/// A modelled device.
#[derive(Debug)]
pub struct Model {
    name: Option<String>,
    shape: Shape,
    state: Mutex<State>,
}

/// What a disk of a modelled device stores: nothing, or a raw image.
#[derive(Debug, PartialEq)]
pub(super) enum Below {
    Nothing { size: u64 },
    File(PathBuf),
}

/// The settings of the text form, except the disk's size and the device's name.
#[derive(Clone, Debug, PartialEq)]
struct Shape {
    servers: usize,
    times: [Duration; 5],
    /// Bandwidth of the device, in bytes a second.
    bandwidth: Option<u64>,
    /// Seed of exponentially distributed service times. None: they are constant.
    exponential: Option<u64>,
}

#[derive(Debug)]
struct State {
    /// For each server of the model that has served a request: the time when it becomes free.
    free: BinaryHeap<Reverse<Instant>>,
    dice: Dice,
}

/// Devices with a name that a disk uses.
static NAMED: Mutex<Vec<Weak<Model>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Model {
    /// Parses what follows `delay:`. Returns what the disk stores, and its device, which other
    /// disks may use already.
    pub(super) fn open(text: &str) -> Result<(Below, Arc<Self>), ModelError> {
        let mut parts = text.split(',');
        let below = Below::read(parts.next().unwrap_or_default())?;
        let mut shape =
            Shape { servers: 1, times: [Duration::ZERO; 5], bandwidth: None, exponential: None };
        let (mut name, mut seed) = (None, None);
        for part in parts {
            let (key, value) =
                part.split_once('=').ok_or_else(|| ModelError::NoValue(part.into()))?;
            match key {
                "device" if !value.is_empty() => name = Some(value.to_string()),
                "seed" => {
                    seed = Some(value.parse().map_err(|_| ModelError::SeedNumber(value.into()))?)
                }
                _ => shape.set(key, value)?,
            }
        }
        match (&mut shape.exponential, seed) {
            (Some(of_shape), Some(seed)) => *of_shape = seed,
            (None, Some(_)) => return Err(ModelError::Seed),
            (_, None) => {}
        }
        Ok((below, Model::shared(name, shape)?))
    }

    /// Returns the device of that name, or a new one.
    fn shared(name: Option<String>, shape: Shape) -> Result<Arc<Self>, ModelError> {
        let mut named = lock(&NAMED);
        named.retain(|model| model.strong_count() > 0);
        if let Some(known) = named
            .iter()
            .filter_map(Weak::upgrade)
            .find(|model| name.is_some() && model.name == name)
        {
            if known.shape == shape {
                return Ok(known);
            }
            let name = name.unwrap_or_default();
            return Err(ModelError::Otherwise { device: name });
        }
        let dice = Dice::new(shape.exponential.unwrap_or_default());
        let state = Mutex::new(State { free: BinaryHeap::with_capacity(shape.servers), dice });
        let model = Arc::new(Model { name, shape, state });
        if model.name.is_some() {
            named.push(Arc::downgrade(&model));
        }
        Ok(model)
    }

    /// Returns the name of the device, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Assigns a request that arrives at `now` to the server that is free first. Returns when it
    /// completes.
    pub(super) fn book(&self, now: Instant, kind: OpKind, bytes: u64) -> Instant {
        let mean = self.shape.service(kind, bytes);
        let State { free, dice } = &mut *lock(&self.state);
        let start = match free.len() < self.shape.servers {
            true => now,
            false => free.pop().map_or(now, |Reverse(at)| at.max(now)),
        };
        let service = match self.shape.exponential {
            None => mean,
            Some(_) => mean.mul_f64(-(1.0 - dice.roll()).ln()),
        };
        free.push(Reverse(start + service));
        start + service
    }
}

impl Below {
    /// Returns the path of the raw image, if the text after `delay:` names one.
    pub(super) fn path(text: &str) -> Option<PathBuf> {
        text.strip_prefix("file=")?.split(',').next().map(PathBuf::from)
    }

    fn read(text: &str) -> Result<Self, ModelError> {
        if let Some(path) = Below::path(text) {
            return match Format::of_name(&path).unwrap_or(Format::Raw) {
                Format::Raw => Ok(Below::File(path)),
                other => Err(ModelError::NotRaw { path, format: other }),
            };
        }
        let size = disk_size(text).map_err(|SizeError| ModelError::Size)?;
        Ok(Below::Nothing { size })
    }
}

/// A disk of the modelled device, on one reactor.
pub struct Delay {
    handle: Handle,
    model: Arc<Model>,
    raw: Option<Raw>,
}

impl Delay {
    pub(super) fn new(handle: &Handle, model: &Arc<Model>, raw: Option<Raw>) -> Self {
        Delay { handle: handle.clone(), model: model.clone(), raw }
    }

    pub(super) async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<()>) {
        let done = self.model.book(self.handle.read_clock(), OpKind::Read, segments.len() as u64);
        let answer = match &self.raw {
            Some(raw) => raw.read(segments, offset).await,
            None => (segments, Ok(())),
        };
        self.handle.sleep_until(done).await;
        answer
    }

    pub(super) async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<()>) {
        let done = self.model.book(self.handle.read_clock(), OpKind::Write, segments.len() as u64);
        let answer = match &self.raw {
            Some(raw) => raw.write(segments, offset, durable).await,
            None => (segments, Ok(())),
        };
        self.handle.sleep_until(done).await;
        answer
    }

    /// Does an operation that transfers no data. If its future is dropped, its server still stays
    /// busy until the completion time.
    pub(super) async fn other(
        &self,
        kind: OpKind,
        below: impl AsyncFnOnce(&Raw) -> io::Result<()>,
    ) -> io::Result<()> {
        let done = self.model.book(self.handle.read_clock(), kind, 0);
        let answer = match &self.raw {
            Some(raw) => below(raw).await,
            None => Ok(()),
        };
        self.handle.sleep_until(done).await;
        answer
    }
}

impl Shape {
    fn set(&mut self, key: &str, value: &str) -> Result<(), ModelError> {
        if let Some(kind) = OpKind::ALL.into_iter().find(|k| k.name() == key) {
            self.times[kind as usize] = parse_time(value)
                .ok_or_else(|| ModelError::Time { key: key.into(), value: value.into() })?;
            return Ok(());
        }
        match key {
            "parallel" => {
                let servers = value.parse().ok().filter(|n| (1..=MOST_PARALLEL).contains(n));
                self.servers = servers.ok_or_else(|| ModelError::Parallel(value.into()))?;
            }
            "bandwidth" => {
                let bytes = parse_size(value).filter(|b| *b > 0);
                self.bandwidth = Some(bytes.ok_or_else(|| ModelError::Bandwidth(value.into()))?);
            }
            "spread" if value == "exponential" => self.exponential = Some(0),
            "spread" => return Err(ModelError::Spread(value.into())),
            _ => return Err(ModelError::Unknown { key: key.into(), value: value.into() }),
        }
        Ok(())
    }

    /// Returns the mean service time of a request.
    fn service(&self, kind: OpKind, bytes: u64) -> Duration {
        let transfer = self.bandwidth.map_or(0, |bandwidth| {
            u128::from(bytes) * self.servers as u128 * 1_000_000_000 / u128::from(bandwidth)
        });
        self.times[kind as usize] + Duration::from_nanos(transfer.min(MOST_TIME.as_nanos()) as u64)
    }
}

#[cfg(test)]
mod tests;
