//! Random work of several tasks on a disk. The oracle checks every answer and every power cut.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::*;

type Judge = Rc<RefCell<Oracle>>;

/// Lets only one flush of the workers run at a time.
///
/// A test with failing syncs needs this. Of two concurrent flushes only one returns the error, and
/// the oracle would take the other's Ok for a promise. That is no fault of the disk.
type Gate = Option<Rc<Cell<bool>>>;

async fn worker(disk: Store, judge: Judge, gate: Gate, mut rng: Rng) -> Result<(), Mismatch> {
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
fn work(sim: &Sim, disk: Store, judge: &Judge, gate: Gate, rng: &mut Rng) -> Result<(), Mismatch> {
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
fn life(seed: u64, lie: Option<Lie>) -> Result<Vec<Trace>, String> {
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
        let storage: Store = match lie {
            Some(lie) => Liar::new(disk.clone(), lie).into(),
            None => disk.clone().into(),
        };
        work(&sim, storage, &judge, gate, &mut rng).map_err(explain)?;
        image = disk.power_cut();
        trace.append(&mut disk.trace());
        judge.borrow_mut().check_after_cut(0, &image.bytes()).map_err(explain)?;
    }
    Ok(trace)
}

#[test]
fn two_thousand_disks_keep_their_promises() {
    for seed in 0..2_000 {
        life(seed, None).unwrap();
    }
}

#[test]
fn the_oracle_detects_every_faulty_disk() {
    for lie in
        [Lie::NoSync, Lie::EarlySync, Lie::NotDurable, Lie::LosesWrites(0), Lie::ReadsZeroes(0)]
    {
        let caught = (0..100).filter(|&seed| life(seed, Some(lie)).is_err()).count();
        assert!(caught >= 10, "{lie:?} was caught in {caught} of 100 lives");
    }
}

#[test]
fn a_seed_determines_everything() {
    for seed in 0..50 {
        let trace = life(seed, None).unwrap();
        assert!(trace == life(seed, None).unwrap(), "seed {seed} gave two histories");
        assert!(
            trace != life(seed + 1, None).unwrap(),
            "seeds {seed} and the next gave one history"
        );
    }
}

#[test]
fn a_run_can_be_cut_at_every_event() {
    let run = |events: u64| {
        let disk = SimDisk::new(SimImage::zeroed(DISK), SimConfig::new(7).cut_after(events));
        let judge = Judge::default();
        work(&Sim::new(7), disk.clone().into(), &judge, None, &mut Rng::new(7)).unwrap();
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
