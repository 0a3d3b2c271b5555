//! A guest's requests, from several clients at once, recorded by the oracle.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use blockyard_image::cow::{Cow, CowOptions};
use blockyard_image::journal::ImageSafety;
use blockyard_image::{Place, Raw};
use blockyard_ring::Segments;
use blockyard_storage::sim::{OpKind, Oracle, Power, Rng, SECTOR, SimHandle, WriteToken, pattern};

use super::plan::Plan;

/// Distance between the areas of a disk that clients use, in bytes; and the number of sectors in an
/// area.
pub const SPOT: u64 = 16 << 20;
pub const SPOT_SECTORS: u64 = 48;

/// The COW file over its backing file, on one reactor, as a guest's disk.
pub struct Stack {
    pub cow: Cow,
    pub base: Raw,
}

impl Stack {
    pub async fn read(&self, offset: u64, len: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < len {
            let at = offset + bytes.len() as u64;
            let Some(extent) = self.cow.try_lookup(at, offset + len - at) else {
                self.cow.load(at).await?;
                continue;
            };
            let buffer = Segments::buffer(extent.len as usize);
            let (buffer, result) = match extent.place {
                Place::Data(host) => self.cow.read(buffer, host).await,
                Place::Absent => self.base.read(buffer, at).await,
                other => panic!("{other:?} in a cow file"),
            };
            result?;
            let mut part = vec![0; buffer.len()];
            buffer.copy_out(0, &mut part);
            bytes.append(&mut part);
        }
        Ok(bytes)
    }
}

/// A guest's load on all its queues.
pub struct Load {
    pub plan: Plan,
    pub safety: ImageSafety,
    /// Whether the process dies at the end, and not the power: then all answered writes last.
    pub dies: bool,
    pub oracle: Rc<RefCell<Oracle>>,
    pub power: Power,
    pub rng: Rng,
    /// Number of successful flushes.
    pub flushes: Rc<Cell<u64>>,
}

impl Load {
    /// Opens the file and runs all clients to their end. Then it sometimes leaves the file to the
    /// next process. After a power cut the clients end too, without answers.
    pub async fn run(mut self, handle: &SimHandle, file: Raw, base: Raw) -> Result<(), String> {
        let (bitmap_memory, safety) = (self.plan.memory, self.safety.clone());
        let options = CowOptions { bitmap_memory, safety, ..CowOptions::default() };
        let cow = match Cow::open(file.clone(), &options).await {
            Ok(cow) => cow,
            Err(_) if self.power.is_off() || self.troubled_by(OpKind::Read) => return Ok(()),
            Err(e) => return Err(e.to_string()),
        };
        let view = |_| {
            Rc::new(Stack {
                cow: Cow::view(cow.shared().clone(), file.clone()),
                base: base.clone(),
            })
        };
        let reactors: Vec<_> = (0..self.plan.reactors).map(view).collect();
        let count = self.plan.clients;
        let client = |index: usize| {
            let client = Client {
                stack: reactors[index % reactors.len()].clone(),
                oracle: self.oracle.clone(),
                power: self.power.clone(),
                spots: self.plan.spots,
                rng: self.rng.fork(),
                dies: self.dies,
                troubled: self.plan.trouble.is_some(),
                lossy: self.troubled_by(OpKind::Sync),
                flushes: self.flushes.clone(),
            };
            handle.spawn(client.run(self.plan.requests))
        };
        let clients: Vec<_> = (0..count).map(client).collect();
        let mut results = Vec::new();
        for client in clients {
            results.push(client.await);
        }
        // Not drawn: seeds that have failed once stay what they were.
        if self.plan.seed.is_multiple_of(4)
            && let Err(e) = cow.leave().await
            && self.plan.trouble.is_none()
            && !self.power.is_off()
        {
            results.push(Err(format!("leaving the file failed: {e}")));
        }
        results.into_iter().collect()
    }

    fn troubled_by(&self, kind: OpKind) -> bool {
        self.plan.trouble.as_ref().is_some_and(|t| t.0 == kind)
    }
}

struct Client {
    stack: Rc<Stack>,
    oracle: Rc<RefCell<Oracle>>,
    power: Power,
    spots: u64,
    rng: Rng,
    dies: bool,
    /// Whether errors are injected, so that requests may fail.
    troubled: bool,
    /// Whether a sync may fail. A read may then return stale data that the file has at this offset,
    /// instead of the disk's former data.
    lossy: bool,
    flushes: Rc<Cell<u64>>,
}

impl Client {
    async fn run(mut self, requests: usize) -> Result<(), String> {
        for _ in 0..requests {
            let range = self.range();
            match self.rng.below(16) {
                0..7 => self.write(range).await?,
                7..9 => self.flush().await?,
                9..11 => self.zero(range).await?,
                11 => self.discard(range).await?,
                _ => self.read(range).await?,
            }
            if self.power.is_off() {
                break;
            }
        }
        Ok(())
    }

    /// Returns a random offset and length in bytes. Each area except the first one spans the border
    /// of two bitmap pages.
    fn range(&mut self) -> (u64, u64) {
        let start = spot_start(self.rng.below(self.spots));
        let first = self.rng.below(SPOT_SECTORS);
        let longest = if self.rng.one_in(4) { 24 } else { 6 };
        let count = self.rng.between(1, longest).min(SPOT_SECTORS - first);
        (start + first * SECTOR as u64, count * SECTOR as u64)
    }

    /// Returns whether the request succeeded. None: the power was cut, so the guest got no answer.
    /// Fails if an error has no injected cause.
    fn heard(&self, what: &str, result: &io::Result<()>) -> Result<Option<bool>, String> {
        match result {
            _ if self.power.is_off() => Ok(None),
            Err(e) if !self.troubled => Err(format!("{what} failed: {e}")),
            result => Ok(Some(result.is_ok())),
        }
    }

    fn changed(&self, what: &str, token: WriteToken, result: io::Result<()>) -> Result<(), String> {
        if let Some(good) = self.heard(what, &result)? {
            self.oracle.borrow_mut().write_answered(token, good, self.dies);
        }
        Ok(())
    }

    async fn write(&mut self, (offset, len): (u64, u64)) -> Result<(), String> {
        let data = pattern(self.rng.next_u64(), offset, len as usize);
        let token = self.oracle.borrow_mut().write_started(offset, &data);
        let (_, result) = self.stack.cow.write(Segments::from_bytes(&data), offset).await;
        self.changed("a write", token, result)
    }

    async fn zero(&mut self, (offset, len): (u64, u64)) -> Result<(), String> {
        let token = self.oracle.borrow_mut().zero_started(offset, len);
        let result = self.stack.cow.write_zeroes(offset, len, self.rng.one_in(2)).await;
        self.changed("a request to zero", token, result)
    }

    async fn discard(&mut self, (offset, len): (u64, u64)) -> Result<(), String> {
        let token = self.oracle.borrow_mut().discard_started(offset, len);
        let result = self.stack.cow.discard(offset, len).await;
        self.changed("a discard", token, result)
    }

    async fn flush(&mut self) -> Result<(), String> {
        let token = self.oracle.borrow_mut().flush_started();
        let result = self.stack.cow.flush().await;
        if let Some(good) = self.heard("a flush", &result)? {
            self.oracle.borrow_mut().flush_answered(token, good);
            self.flushes.set(self.flushes.get() + u64::from(good));
        }
        Ok(())
    }

    async fn read(&mut self, (offset, len): (u64, u64)) -> Result<(), String> {
        let token = self.oracle.borrow_mut().read_started();
        let result = self.stack.read(offset, len).await;
        match result {
            _ if self.power.is_off() || self.lossy => Ok(()),
            Ok(found) => self
                .oracle
                .borrow_mut()
                .check_read(token, offset, &found)
                .map_err(|e| e.to_string()),
            Err(_) if self.troubled => Ok(()),
            Err(e) => Err(format!("a read failed: {e}")),
        }
    }
}

/// Returns the start offset of an area, in bytes.
pub fn spot_start(spot: u64) -> u64 {
    (spot * SPOT).saturating_sub(SPOT_SECTORS / 2 * SECTOR as u64)
}
