//! A model of a device: requests take the time that a device of bounded parallelism takes, and nothing is stored.
//!
//! ```text
//!   requests of all disks and reactors ──► one queue, first come first served ──► N servers ──► done
//! ```
//! A request has one server for its kind's time, and for bytes x N / bandwidth: N servers that are never idle move just the
//! bandwidth. When it will be done is known when it comes, so that nothing is simulated: it sleeps until then.
//! In: a text form, [`FORM`]; then kinds, bytes, and the time now. Out: when each request is done.
//! What must hold: disks that name the same device share its servers, on whichever reactors they are.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use blockyard_image::SECTOR;
use blockyard_ring::Handle;

use super::parse_size;
use crate::filter::{Dice, TIME_FORM, parse_time};
use crate::statistics::OpKind;

pub(super) const FORM: &str = "a model of a device is delay:SIZE[,parallel=N][,KIND=TIME]...[,bandwidth=BYTES_PER_S]\
                               [,spread=exponential[,seed=N]][,device=NAME]";
const SIZE_FORM: &str = "a number of bytes with an optional suffix k, M, G or T (powers of 1024)";
const MOST_PARALLEL: usize = 65_536;

/// A device that exists as arithmetic only.
#[derive(Debug)]
pub struct Model {
    name: Option<String>,
    shape: Shape,
    state: Mutex<State>,
}

/// What the text form says, but the disk's size and the device's name.
#[derive(Clone, Debug, PartialEq)]
struct Shape {
    servers: usize,
    times: [Duration; 5],
    /// Bytes a second.
    bandwidth: Option<u64>,
    /// Service times are exponential with the mean that they would have; the seed.
    exponential: Option<u64>,
}

#[derive(Debug)]
struct State {
    /// When each server that was ever used has done all that it was given.
    free: BinaryHeap<Reverse<Instant>>,
    dice: Dice,
}

/// Devices with a name, while a disk uses them.
static NAMED: Mutex<Vec<Weak<Model>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Model {
    /// Reads what follows `delay:`. The size of the disk, and its device, which others may have already.
    pub(super) fn open(text: &str) -> Result<(u64, Arc<Self>), String> {
        let mut parts = text.split(',');
        let size = parts.next().and_then(parse_size).filter(|s| (SECTOR..1 << 62).contains(s));
        let size = size.ok_or_else(|| format!("a size is {SIZE_FORM}, at least {SECTOR}"))?;
        let mut shape = Shape { servers: 1, times: [Duration::ZERO; 5], bandwidth: None, exponential: None };
        let (mut name, mut seed) = (None, None);
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("\"{part}\" has no value: {FORM}"))?;
            match key {
                "device" if !value.is_empty() => name = Some(value.to_string()),
                "seed" => seed = Some(value.parse().map_err(|_| format!("seed \"{value}\" is not a number"))?),
                _ => shape.set(key, value)?,
            }
        }
        match (&mut shape.exponential, seed) {
            (Some(of_shape), Some(seed)) => *of_shape = seed,
            (None, Some(_)) => return Err("seed has no meaning without spread=exponential".into()),
            (_, None) => {}
        }
        Ok((size & !(SECTOR - 1), Model::shared(name, shape)?))
    }

    /// The device of that name, or a new one.
    fn shared(name: Option<String>, shape: Shape) -> Result<Arc<Self>, String> {
        let mut named = lock(&NAMED);
        named.retain(|model| model.strong_count() > 0);
        if let Some(known) = named.iter().filter_map(Weak::upgrade).find(|model| name.is_some() && model.name == name) {
            if known.shape == shape {
                return Ok(known);
            }
            let name = name.unwrap_or_default();
            return Err(format!(
                "another disk describes the device \"{name}\" otherwise: all its disks must say the same of it"
            ));
        }
        let dice = Dice::new(shape.exponential.unwrap_or_default());
        let state = Mutex::new(State { free: BinaryHeap::with_capacity(shape.servers), dice });
        let model = Arc::new(Model { name, shape, state });
        if model.name.is_some() {
            named.push(Arc::downgrade(&model));
        }
        Ok(model)
    }

    /// What its disks call it, where they have a name for it.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Gives a request that comes at `now` to the server that is free first; when it will be done.
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

/// The device on one reactor.
pub struct Delay {
    handle: Handle,
    model: Arc<Model>,
}

impl Delay {
    pub fn new(handle: &Handle, model: &Arc<Model>) -> Self {
        Delay { handle: handle.clone(), model: model.clone() }
    }

    /// Waits as a request of this kind would. One that is dropped keeps its server until its time.
    pub(super) async fn pass(&self, kind: OpKind, bytes: u64) {
        self.handle.sleep_until(self.model.book(Instant::now(), kind, bytes)).await;
    }
}

impl Shape {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        if let Some(kind) = OpKind::ALL.into_iter().find(|k| k.name() == key) {
            self.times[kind as usize] = parse_time(value).ok_or_else(|| format!("{key} \"{value}\": {TIME_FORM}"))?;
            return Ok(());
        }
        match key {
            "parallel" => {
                let servers = value.parse().ok().filter(|n| (1..=MOST_PARALLEL).contains(n));
                self.servers = servers
                    .ok_or_else(|| format!("parallel is a number from 1 to {MOST_PARALLEL}, not \"{value}\""))?;
            }
            "bandwidth" => {
                let bytes = parse_size(value).filter(|b| *b > 0);
                self.bandwidth =
                    Some(bytes.ok_or_else(|| format!("bandwidth \"{value}\": it is {SIZE_FORM}, at least 1"))?);
            }
            "spread" if value == "exponential" => self.exponential = Some(0),
            "spread" => return Err(format!("spread is exponential, or not given at all, not \"{value}\"")),
            _ => return Err(format!("\"{key}={value}\" is not known: {FORM}")),
        }
        Ok(())
    }

    /// How long a server has a request, in the mean. Only reads and writes move their bytes.
    fn service(&self, kind: OpKind, bytes: u64) -> Duration {
        let moved = if matches!(kind, OpKind::Read | OpKind::Write) { bytes } else { 0 };
        let transfer = self
            .bandwidth
            .map_or(0, |bandwidth| u128::from(moved) * self.servers as u128 * 1_000_000_000 / u128::from(bandwidth));
        // A year is for ever.
        let year = 365 * 24 * 3600 * 1_000_000_000;
        self.times[kind as usize] + Duration::from_nanos(transfer.min(year) as u64)
    }
}

#[cfg(test)]
mod tests;
