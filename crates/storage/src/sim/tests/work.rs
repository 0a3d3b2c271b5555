//! Random work of several tasks on a disk. The oracle checks every answer and every power cut.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Poll;

use super::*;

/// How a faulty disk breaks its promises.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Nothing,
    /// The disk answers a sync without making data durable.
    NoSync,
    /// The disk answers a sync that has only begun.
    EarlySync,
    NotDurable,
    LostWrite,
    OldRead,
}

#[derive(Clone)]
struct Liar {
    disk: SimDisk,
    lie: Lie,
}

impl Storage for Liar {
    async fn read(&self, segments: Segments, offset: u64) -> (Segments, io::Result<usize>) {
        let (segments, n) = self.disk.read(segments, offset).await;
        if self.lie == Lie::OldRead && offset == 0 {
            segments.zero(0, SECTOR);
        }
        (segments, n)
    }

    async fn write(
        &self,
        segments: Segments,
        offset: u64,
        durable: bool,
    ) -> (Segments, io::Result<usize>) {
        if self.lie == Lie::LostWrite && offset == 0 {
            let n = segments.len();
            return (segments, Ok(n));
        }
        self.disk.write(segments, offset, durable && self.lie != Lie::NotDurable).await
    }

    async fn sync(&self) -> io::Result<()> {
        match self.lie {
            Lie::NoSync => Ok(()),
            Lie::EarlySync => {
                let mut sync = Box::pin(self.disk.sync());
                std::future::poll_fn(|cx| match sync.as_mut().poll(cx) {
                    Poll::Ready(answer) => Poll::Ready(answer),
                    Poll::Pending => Poll::Ready(Ok(())),
                })
                .await
            }
            _ => self.disk.sync().await,
        }
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.discard(offset, len).await
    }

    async fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.disk.zero(offset, len, unmap).await
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.set_len(len).await
    }

    async fn len(&self) -> io::Result<u64> {
        self.disk.len().await
    }
}

type Judge = Rc<RefCell<Oracle>>;

/// Lets only one flush of the workers run at a time.
///
/// A test with failing syncs needs this. Of two concurrent flushes only one returns the error, and
/// the oracle would take the other's Ok for a promise. That is no fault of the disk.
type Gate = Option<Rc<Cell<bool>>>;

async fn worker(
    disk: impl Storage,
    judge: Judge,
    gate: Gate,
    mut rng: Rng,
) -> Result<(), Mismatch> {
    for _ in 0..12 {
        let first = rng.below(DISK / SECTOR as u64);
        let sectors = rng.between(1, 8).min(DISK / SECTOR as u64 - first);
        let (offset, len) = (first * SECTOR as u64, sectors * SECTOR as u64);
        match rng.below(16) {
            0..8 => {
                let (data, durable) =
                    (pattern(rng.next_u64(), offset, len as usize), rng.one_in(4));
                let token = judge.borrow_mut().write_started(offset, &data);
                let ok = put(&disk, offset, &data, durable).await.is_ok();
                judge.borrow_mut().write_answered(token, ok, durable);
            }
            8..10 => {
                if gate.as_ref().is_some_and(|busy| busy.replace(true)) {
                    continue;
                }
                let token = judge.borrow_mut().flush_started();
                let ok = disk.sync().await.is_ok();
                judge.borrow_mut().flush_answered(token, ok);
                gate.iter().for_each(|busy| busy.set(false));
            }
            10 => {
                let token = judge.borrow_mut().zero_started(offset, len);
                let ok = disk.zero(offset, len, true).await.is_ok();
                judge.borrow_mut().write_answered(token, ok, false);
            }
            11 => {
                let token = judge.borrow_mut().discard_started(offset, len);
                let ok = disk.discard(offset, len).await.is_ok();
                judge.borrow_mut().write_answered(token, ok, false);
            }
            _ => {
                let token = judge.borrow_mut().read_started();
                if let Ok(content) = take(&disk, offset, len as usize).await {
                    judge.borrow_mut().check_read(token, offset, &content)?;
                }
            }
        }
    }
    Ok(())
}

/// Runs three tasks on one disk. The power may go at any time. Returns Ok without a value if it
/// did.
fn work(
    sim: &Sim,
    disk: impl Storage + Clone,
    judge: &Judge,
    gate: Gate,
    rng: &mut Rng,
) -> Result<(), Mismatch> {
    let workers: Vec<_> = (0..3)
        .map(|_| sim.spawn(worker(disk.clone(), judge.clone(), gate.clone(), rng.fork())))
        .collect();
    let all = async {
        for worker in workers {
            worker.await?;
        }
        Ok(())
    };
    sim.block_on(all).unwrap_or(Ok(()))
}

/// Runs a load three times, each until a power cut. After each cut, checks the disk's contents. The
/// next load starts with them.
fn life(seed: u64, lie: Lie) -> Result<Vec<Trace>, String> {
    let mut rng = Rng::new(seed);
    let mut image = SimImage::zeroed(DISK).atomic(*rng.pick(&[512, 512, 1024, 4096]));
    let judge = Judge::default();
    let mut trace = Vec::new();
    for cut in 0..3 {
        let explain = |e: Mismatch| format!("seed {seed}, after {cut} cuts: {e}");
        let mut config = SimConfig::new(rng.next_u64()).cut_after(rng.below(100));
        config.discard_zeroes = rng.one_in(2);
        let disk = SimDisk::new(image, config);
        let mut gate = None;
        if rng.one_in(4) {
            let kind = *rng.pick(&[
                OpKind::Write,
                OpKind::Sync,
                OpKind::Zero,
                OpKind::Discard,
                OpKind::Read,
            ]);
            if kind == OpKind::Sync {
                judge.borrow_mut().expect_failing_flushes();
                gate = Some(Rc::default());
            }
            disk.fail(
                Fault::new(kind, io::ErrorKind::Other).after(rng.below(8)).times(rng.between(1, 3)),
            );
        }
        let sim = Sim::new(rng.next_u64());
        work(&sim, Liar { disk: disk.clone(), lie }, &judge, gate, &mut rng).map_err(explain)?;
        image = disk.power_cut();
        trace.append(&mut disk.trace());
        judge.borrow_mut().check_after_cut(0, &image.bytes()).map_err(explain)?;
    }
    Ok(trace)
}

#[test]
fn two_thousand_disks_keep_their_promises() {
    for seed in 0..2_000 {
        life(seed, Lie::Nothing).unwrap();
    }
}

#[test]
fn the_oracle_detects_every_faulty_disk() {
    for lie in [Lie::NoSync, Lie::EarlySync, Lie::NotDurable, Lie::LostWrite, Lie::OldRead] {
        let caught = (0..100).filter(|&seed| life(seed, lie).is_err()).count();
        assert!(caught >= 10, "{lie:?} was caught in {caught} of 100 lives");
    }
}

#[test]
fn a_seed_determines_everything() {
    for seed in 0..50 {
        let trace = life(seed, Lie::Nothing).unwrap();
        assert!(trace == life(seed, Lie::Nothing).unwrap(), "seed {seed} gave two histories");
        assert!(
            trace != life(seed + 1, Lie::Nothing).unwrap(),
            "seeds {seed} and the next gave one history"
        );
    }
}

#[test]
fn a_run_can_be_cut_at_every_event() {
    let run = |events: u64| {
        let disk = SimDisk::new(SimImage::zeroed(DISK), SimConfig::new(7).cut_after(events));
        let judge = Judge::default();
        work(&Sim::new(7), disk.clone(), &judge, None, &mut Rng::new(7)).unwrap();
        let survived = !disk.is_off();
        assert!(
            survived || disk.events() == events,
            "cut after {} events, not {events}",
            disk.events()
        );
        judge.borrow_mut().check_after_cut(0, &disk.power_cut().bytes()).unwrap();
        survived
    };
    let whole = (0..).find(|&events| run(events)).unwrap();
    assert!(whole > 40, "the run had only {whole} events");
}
