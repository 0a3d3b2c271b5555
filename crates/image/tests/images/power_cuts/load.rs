//! The load: clients send requests to one or two reactors' views of a chain, until they have ended
//! or the power is cut.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use blockyard_image::qcow2::{Compression, pack};
use blockyard_image::{Image, Layer};
use blockyard_ring::Segments;
use blockyard_storage::sim::{Power, Rng, SECTOR, Sim, pattern, yield_now};

use super::chain::Disks;
use super::judge::Judge;
use super::plan::Plan;

/// Runs the clients to their end. After a power cut they end too, without answers. Returns true if
/// the power is still on.
pub fn run(
    plan: &Plan,
    capacity: u64,
    judge: &Rc<Judge>,
    sim: &Sim,
    views: &[Rc<Image>],
    rng: &mut Rng,
) -> Result<bool, String> {
    let sectors = capacity / SECTOR as u64;
    let failed = Rc::new(RefCell::new(None));
    let running = Rc::new(Cell::new(plan.clients));
    let hot: Rc<Vec<u64>> = Rc::new((0..3).map(|_| rng.below(sectors)).collect());
    let cluster = plan.top().layout.cluster() / SECTOR as u64;
    // Each half needs a cluster. (An operation may have made the disk smaller.)
    let packs = plan.packs && sectors >= 2 * cluster;
    let packed = packs.then(|| Rc::new(Packed::half_of(sectors, cluster, rng)));
    for index in 0..plan.clients {
        let client = Client {
            judge: judge.clone(),
            image: views[index % views.len()].clone(),
            sectors,
            packed: packed.clone(),
            zstd: plan.top().zstd,
            cluster,
            unit: plan.top().layout.unit() / SECTOR as u64,
            hot: hot.clone(),
            spread: plan.spread,
            rng: rng.fork(),
        };
        let (requests, failed, running) = (plan.requests, failed.clone(), running.clone());
        sim.spawn(async move {
            if let Err(e) = client.run(requests).await {
                failed.borrow_mut().get_or_insert(e);
            }
            running.set(running.get() - 1);
        });
    }
    wait(sim, &judge.power, &judge.disks, async move {
        while running.get() > 0 {
            yield_now().await;
        }
    })?;
    match failed.take() {
        Some(e) => Err(e),
        None => Ok(!judge.power.is_off()),
    }
}

/// Runs a future that uses the disks until it ends. At a power cut, lets all waiting operations of
/// the disks end, so that the future ends too.
pub fn wait<T: 'static>(
    sim: &Sim,
    power: &Power,
    disks: &Rc<Disks>,
    work: impl Future<Output = T> + 'static,
) -> Result<T, String> {
    let (power, disks) = (power.clone(), disks.clone());
    let watch = async move {
        let mut work = Box::pin(work);
        let mut gave_up = false;
        std::future::poll_fn(|cx| {
            let done = work.as_mut().poll(cx);
            if power.is_off() && !std::mem::replace(&mut gave_up, true) {
                disks.all().for_each(|disk| disk.give_up());
            }
            // Poll again at each step, to notice a power cut while another task is polled.
            if done.is_pending() && !gave_up {
                cx.waker().wake_by_ref();
            }
            done
        })
        .await
    };
    sim.block_on(watch).map_err(|e| format!("requests are left without an answer: {e}"))
}

/// Reads the guest's whole disk, with no other request in flight.
pub async fn read_all(judge: &Judge, image: &Image, capacity: u64) -> Result<(), String> {
    const PIECE: u64 = 128 * SECTOR as u64;
    for offset in (0..capacity).step_by(PIECE as usize) {
        let token = judge.oracle.borrow_mut().read_started();
        let len = PIECE.min(capacity - offset) as usize;
        let (segments, result) = image.read(Segments::buffer(len), offset).await;
        judge.read(token, offset, &segments, result)?;
    }
    Ok(())
}

/// Half of the disk in which a boot writes compressed clusters. Each cluster is written at most
/// once, and no other request of this boot changes it, because `Qcow2::write_compressed` requires
/// that.
struct Packed {
    /// Half for compressed writes, as a range of cluster numbers.
    half: Range<u64>,
    next: Cell<u64>,
    /// The other half of the disk, as a range of sectors: all other writes go there.
    rest: Range<u64>,
}

impl Packed {
    fn half_of(sectors: u64, cluster: u64, rng: &mut Rng) -> Self {
        let (middle, end) = (sectors / cluster / 2, sectors.div_ceil(cluster));
        let lower = rng.one_in(2);
        let half = if lower { 0..middle } else { middle..end };
        let rest = if lower { middle * cluster..sectors } else { 0..middle * cluster };
        Packed { next: Cell::new(half.start), half, rest }
    }
}

/// A client with always one request in flight.
struct Client {
    judge: Rc<Judge>,
    image: Rc<Image>,
    packed: Option<Rc<Packed>>,
    zstd: bool,
    /// Sizes of the disk, of a cluster and of a unit of allocation, in sectors.
    sectors: u64,
    cluster: u64,
    unit: u64,
    /// Offsets that clients use again and again.
    hot: Rc<Vec<u64>>,
    spread: bool,
    rng: Rng,
}

impl Client {
    async fn run(mut self, requests: usize) -> Result<(), String> {
        for _ in 0..requests {
            let range = self.range();
            let heard = if self.judge.poisoned() {
                self.read(range).await?
            } else if let Some(packed) = self.packed.clone() {
                self.pack_or_change(&packed, range).await?
            } else if self.spread {
                match self.rng.below(64) {
                    0..22 => self.write(range).await?,
                    22..42 => self.discard(range).await?,
                    42..56 => self.zero(range).await?,
                    56 => self.flush().await?,
                    _ => self.read(range).await?,
                }
            } else {
                match self.rng.below(32) {
                    0..14 => self.write(range).await?,
                    14..20 => self.flush().await?,
                    20..23 => self.zero(range).await?,
                    23..26 => self.discard(range).await?,
                    26 => self.populate(range).await?,
                    _ => self.read(range).await?,
                }
            };
            if !heard {
                break;
            }
        }
        Ok(())
    }

    async fn pack_or_change(&mut self, packed: &Packed, range: (u64, u64)) -> Result<bool, String> {
        let (start, end) = (packed.rest.start * SECTOR as u64, packed.rest.end * SECTOR as u64);
        let offset = range.0.clamp(start, end - SECTOR as u64);
        let changed = (offset, range.1.min(end - offset));
        match self.rng.below(32) {
            0..10 => self.pack(packed).await,
            10..13 => self.write(changed).await,
            13..18 => self.discard(changed).await,
            18..25 => self.flush().await,
            _ => self.read(range).await,
        }
    }

    /// Writes the next cluster of `Packed::half` compressed, as `tools::convert` does.
    async fn pack(&mut self, packed: &Packed) -> Result<bool, String> {
        let cluster = packed.next.get();
        if cluster == packed.half.end {
            return self.flush().await;
        }
        packed.next.set(cluster + 1);
        let (size, offset) =
            (self.cluster as usize * SECTOR, cluster * self.cluster * SECTOR as u64);
        let inside = size.min(self.sectors as usize * SECTOR - offset as usize);
        let mut plain = vec![0; size];
        for sector in plain[..inside].chunks_mut(SECTOR) {
            sector[..8].copy_from_slice(&self.rng.next_u64().to_le_bytes());
        }
        let kind = if self.zstd { Compression::Zstd } else { Compression::Zlib };
        let small = pack(&plain, kind).unwrap().expect("mostly zeroes");
        let Layer::Qcow2(top) = &self.image.layers()[0] else {
            unreachable!("the topmost image is qcow2")
        };
        let token = self.judge.oracle.borrow_mut().write_started(offset, &plain[..inside]);
        let result = match top.write_compressed(offset, &small).await {
            // The image has data there already.
            Ok(false) => self.image.write(Segments::from_bytes(&plain[..inside]), offset).await.1,
            done => done.map(|_| ()),
        };
        self.judge.changed("compressed write", token, result)
    }

    /// Returns a random offset and length in bytes, in whole sectors.
    fn range(&mut self) -> (u64, u64) {
        if self.spread {
            let count = self.unit * self.rng.between(1, 3);
            let first = self.unit * self.rng.below(self.sectors / self.unit);
            return (first * SECTOR as u64, count.min(self.sectors - first) * SECTOR as u64);
        }
        let mut first = match self.rng.below(4) {
            0 => self.rng.below(self.sectors),
            _ => {
                let near = *self.rng.pick(&self.hot) + self.rng.below(2 * self.cluster + 1);
                near.saturating_sub(self.cluster).min(self.sectors - 1)
            }
        };
        let mut count = match self.rng.below(8) {
            0 => self.rng.between(1, 6 * self.cluster),
            1..3 => self.rng.between(1, 2 * self.cluster),
            3..5 => self.unit * self.rng.between(1, 4),
            _ => self.rng.between(1, 8),
        };
        if self.rng.one_in(2) {
            first -= first % self.unit;
            count = count.next_multiple_of(self.unit);
        }
        let count = count.min(1024).min(self.sectors - first);
        (first * SECTOR as u64, count * SECTOR as u64)
    }

    async fn write(&mut self, (offset, len): (u64, u64)) -> Result<bool, String> {
        let data = pattern(self.rng.next_u64(), offset, len as usize);
        let token = self.judge.oracle.borrow_mut().write_started(offset, &data);
        let (_, result) = self.image.write(Segments::from_bytes(&data), offset).await;
        self.judge.changed("write", token, result)
    }

    async fn zero(&mut self, (offset, len): (u64, u64)) -> Result<bool, String> {
        let token = self.judge.oracle.borrow_mut().zero_started(offset, len);
        let result = self.image.write_zeroes(offset, len, self.rng.one_in(2)).await;
        self.judge.changed("zero", token, result)
    }

    async fn discard(&mut self, (offset, len): (u64, u64)) -> Result<bool, String> {
        let token = self.judge.oracle.borrow_mut().discard_started(offset, len);
        let result = self.image.discard(offset, len).await;
        self.judge.changed("discard", token, result)
    }

    async fn populate(&mut self, (offset, len): (u64, u64)) -> Result<bool, String> {
        let result = self.image.populate(offset, len).await;
        self.judge.answered("populate", result)
    }

    async fn flush(&mut self) -> Result<bool, String> {
        let token = self.judge.oracle.borrow_mut().flush_started();
        let result = self.image.flush().await;
        self.judge.flushed(token, result)
    }

    async fn read(&mut self, (offset, len): (u64, u64)) -> Result<bool, String> {
        let token = self.judge.oracle.borrow_mut().read_started();
        let (segments, result) = self.image.read(Segments::buffer(len as usize), offset).await;
        self.judge.read(token, offset, &segments, result)
    }
}
