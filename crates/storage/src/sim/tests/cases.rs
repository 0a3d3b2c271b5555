//! Single rules of the disk: what it promises, and what it may do.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use super::*;
use blockyard_ring::Executor;

/// Returns the first byte of each sector as a string. The tests write letters.
fn letters(image: &SimImage) -> String {
    let bytes = image.bytes();
    bytes
        .chunks(SECTOR)
        .map(|sector| if sector[0] == 0 { '.' } else { sector[0] as char })
        .collect()
}

fn sectors(of: &str) -> Vec<u8> {
    of.bytes().flat_map(|letter| [letter; SECTOR]).collect()
}

/// Polls a future once, without dropping it.
async fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    let mut future = future;
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

#[test]
fn synced_writes_survive_a_cut_and_others_may() {
    let seen: BTreeSet<_> = (0..100)
        .map(|seed| {
            let image = then_cut(seed, |disk| async move {
                put(&disk, 0, &sectors("a"), false).await.unwrap();
                disk.sync().await.unwrap();
                put(&disk, 0, &sectors("b"), false).await.unwrap();
                put(&disk, 0, &sectors("c"), false).await.unwrap();
                assert_eq!(
                    take(&disk, 0, SECTOR).await.unwrap(),
                    sectors("c"),
                    "a read sees the last answered write"
                );
            });
            letters(&image)[..1].to_string()
        })
        .collect();
    assert_eq!(seen, ["a", "b", "c"].map(String::from).into());
}

#[test]
fn a_durable_write_needs_no_sync() {
    for seed in 0..100 {
        let image = then_cut(seed, |disk| async move {
            put(&disk, 0, &sectors("abc"), false).await.unwrap();
            put(&disk, SECTOR as u64, &sectors("xy"), true).await.unwrap();
        });
        assert_eq!(letters(&image)[1..3], *"xy", "seed {seed}");
    }
}

#[test]
fn writes_tear_between_sectors_but_not_within_one() {
    let torn = |unit: usize| {
        let mut torn = 0;
        for seed in 0..100 {
            let disk = SimDisk::new(SimImage::zeroed(DISK).atomic(unit), SimConfig::new(seed));
            let writer = disk.clone();
            let work = async move { put(&writer, 0, &sectors("aaaaaaaa"), false).await };
            Sim::new(seed).block_on(work).unwrap().unwrap();
            let bytes = disk.power_cut().bytes();
            let whole = |piece: &[u8]| piece.iter().all(|&b| b == piece[0]);
            assert!(bytes.chunks(unit).all(whole), "seed {seed}: torn within {unit} bytes");
            torn += usize::from(!whole(&bytes[..4096]));
        }
        torn
    };
    assert!(torn(512) > 20 && torn(4096) == 0);
}

#[test]
fn writes_between_syncs_survive_in_any_order() {
    let seen: BTreeSet<_> = (0..200)
        .map(|seed| {
            let image = then_cut(seed, |disk| async move {
                for (i, letter) in ["a", "b"].iter().enumerate() {
                    put(&disk, (i * SECTOR) as u64, &sectors(letter), false).await.unwrap();
                }
            });
            letters(&image)[..2].to_string()
        })
        .collect();
    assert_eq!(seen, ["..", "a.", ".b", "ab"].map(String::from).into());
}

#[test]
fn concurrent_writes_reach_the_disk_in_any_order_sector_by_sector() {
    let seen: BTreeSet<_> = (0..200)
        .map(|seed| {
            let (disk, sim) = (disk(seed), Sim::new(seed));
            let writes = ["aa", "bb"].map(|data| {
                let disk = disk.clone();
                sim.spawn(async move { put(&disk, 0, &sectors(data), false).await.unwrap() })
            });
            sim.block_on(async move {
                for write in writes {
                    write.await;
                }
            })
            .unwrap();
            letters(&SimImage::from_bytes(&disk.contents()))[..2].to_string()
        })
        .collect();
    assert_eq!(seen, ["aa", "ab", "ba", "bb"].map(String::from).into());
}

#[test]
fn a_power_cut_leaves_operations_unanswered() {
    let mut survived = 0;
    for seed in 0..100 {
        // The start happens, but not the answer.
        let disk = SimDisk::new(SimImage::zeroed(DISK), SimConfig::new(seed).cut_after(1));
        let (sim, writer) = (Sim::new(seed), disk.clone());
        let stalled = sim.block_on(async move { put(&writer, 0, &sectors("a"), true).await });
        assert!(stalled.unwrap_err().reason.contains("nothing is ready"));
        let late = disk.clone();
        let errors =
            async move { (put(&late, 0, b"x", false).await, late.len().await, late.sync().await) };
        let (write, len, sync) = sim.block_on(errors).unwrap();
        let kinds = [write.unwrap_err().kind(), len.unwrap_err().kind(), sync.unwrap_err().kind()];
        assert_eq!(kinds, [io::ErrorKind::NotConnected; 3]);
        survived += usize::from(letters(&disk.power_cut()).starts_with('a'));
    }
    assert!((10..90).contains(&survived), "a write in flight survived {survived} of 100 cuts");
}

#[test]
fn giving_up_fails_all_pending_operations() {
    let disk = SimDisk::new(SimImage::zeroed(DISK), SimConfig::new(3).cut_after(3));
    let sim = Sim::new(3);
    let waiting: Vec<_> = (0..4)
        .map(|i| {
            let disk = disk.clone();
            sim.spawn(async move { put(&disk, i * SECTOR as u64, &sectors("a"), true).await })
        })
        .collect();
    let failed = Rc::new(Cell::new(None));
    let (seen, ended) = (failed.clone(), failed.clone());
    let work = async move {
        let mut count = 0;
        for write in waiting {
            count += usize::from(write.await.is_err());
        }
        seen.set(Some(count));
    };
    sim.block_on(work).unwrap_err();
    disk.give_up();
    sim.block_on(async move {
        while ended.get().is_none() {
            yield_now().await;
        }
    })
    .unwrap();
    let answered = disk.trace().iter().filter(|t| t.phase == Phase::Answered).count();
    assert!(
        answered <= 1 && failed.get() == Some(4 - answered),
        "{answered} answered, {failed:?} failed"
    );
}

#[test]
fn a_power_cut_affects_all_disks_of_a_power_supply_and_has_many_outcomes() {
    let power = Power::on();
    let disks = [1, 2].map(|seed| {
        SimDisk::new(
            SimImage::zeroed(DISK),
            SimConfig { power: power.clone(), ..SimConfig::new(seed) },
        )
    });
    let writers = disks.clone();
    let work = async move {
        for disk in &writers {
            put(disk, 0, &sectors("a"), false).await.unwrap();
        }
    };
    Sim::new(1).block_on(work).unwrap();
    assert_eq!(power.events(), 4);
    let outcomes: BTreeSet<_> = (0..20).map(|_| letters(&disks[0].power_cut())).collect();
    assert_eq!(outcomes.len(), 2);
    assert!(disks[1].is_off());
}

#[test]
fn a_failed_sync_loses_writes_and_the_next_one_succeeds() {
    let (mut lost, mut reread) = (0, 0);
    for seed in 0..100 {
        let still_read = Rc::new(Cell::new(false));
        let seen = still_read.clone();
        let image = then_cut(seed, |disk| async move {
            disk.fail(Fault::new(OpKind::Sync, 5));
            put(&disk, 0, &sectors("a"), false).await.unwrap();
            assert_eq!(disk.sync().await.unwrap_err().raw_os_error(), Some(5));
            disk.sync().await.unwrap();
            seen.set(take(&disk, 0, SECTOR).await.unwrap() == sectors("a"));
        });
        let survived = letters(&image).starts_with('a');
        assert!(!survived || still_read.get());
        lost += usize::from(!survived);
        reread += usize::from(!survived && still_read.get());
    }
    assert!(
        (20..100).contains(&lost) && (5..lost).contains(&reread),
        "{lost} lost, {reread} of them still read"
    );
}

#[test]
fn a_fault_applies_in_its_range_and_as_often_as_configured() {
    let disk = disk(1);
    let tester = disk.clone();
    let work = async move {
        let disk = tester;
        disk.fail(
            Fault::new(OpKind::Write, io::ErrorKind::StorageFull)
                .within(1024..2048)
                .after(1)
                .times(2),
        );
        let mut kinds = Vec::new();
        for offset in [0, 512, 1024, 1536, 2048, 1024, 1024] {
            kinds.push(put(&disk, offset, &sectors("a"), false).await.map_err(|e| e.kind()).err());
        }
        let full = Some(io::ErrorKind::StorageFull);
        assert_eq!(kinds, [None, None, None, full, None, full, None]);
        disk.fail(Fault::new(OpKind::Zero, io::ErrorKind::Unsupported).always());
        for _ in 0..3 {
            assert_eq!(
                disk.zero(0, 512, true).await.unwrap_err().kind(),
                io::ErrorKind::Unsupported
            );
        }
        assert_eq!(
            take(&disk, 0, SECTOR).await.unwrap(),
            sectors("a"),
            "what is unsupported does nothing"
        );
        disk.heal();
        disk.zero(0, 512, true).await.unwrap();
        assert_eq!(take(&disk, 0, SECTOR).await.unwrap(), [0; SECTOR]);
        assert_eq!(
            put(&disk, u64::MAX, b"x", false).await.unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    };
    Sim::new(1).block_on(work).unwrap();
}

#[test]
fn a_power_cut_keeps_a_prefix_of_the_changes_of_length() {
    let seen: BTreeSet<_> = (0..300)
        .map(|seed| {
            let disk = SimDisk::new(SimImage::from_bytes(&sectors("abcd")), SimConfig::new(seed));
            let owner = disk.clone();
            let work = async move {
                owner.set_len(2 * SECTOR as u64).await.unwrap();
                owner.set_len(3 * SECTOR as u64).await.unwrap();
                put(&owner, 3 * SECTOR as u64, &sectors("x"), false).await.unwrap();
                assert_eq!(owner.len().await.unwrap(), 4 * SECTOR as u64);
                assert_eq!(
                    take(&owner, 2 * SECTOR as u64, 4 * SECTOR).await.unwrap(),
                    sectors("\0x")
                );
            };
            Sim::new(seed).block_on(work).unwrap();
            letters(&disk.power_cut())
        })
        .collect();
    assert_eq!(seen, ["abcd", "ab", "ab.", "ab..", "ab.x"].map(String::from).into());
}

#[test]
fn a_length_becomes_durable_with_the_data_that_need_it() {
    for seed in 0..100 {
        for durable in [false, true] {
            let image = then_cut(seed, move |disk| async move {
                disk.set_len(100).await.unwrap();
                put(&disk, 5000, b"tail", durable).await.unwrap();
                if !durable {
                    disk.sync().await.unwrap();
                }
                put(&disk, 9000, b"more", false).await.unwrap();
            });
            assert!([5004, 9004].contains(&image.len()), "seed {seed}: {image:?}");
            let mut tail = [0; 4];
            image.read(5000, &mut tail);
            assert_eq!(&tail, b"tail");
        }
    }
}

#[test]
fn a_durable_write_commits_the_journal_of_lengths() {
    for seed in 0..100 {
        let disk = SimDisk::new(SimImage::from_bytes(&sectors("abcd")), SimConfig::new(seed));
        let owner = disk.clone();
        let work = async move {
            owner.set_len(2 * SECTOR as u64).await.unwrap();
            owner.set_len(4 * SECTOR as u64).await.unwrap();
            put(&owner, 0, &sectors("x"), true).await.unwrap();
        };
        Sim::new(seed).block_on(work).unwrap();
        assert_eq!(letters(&disk.power_cut()), "xb..", "seed {seed}");
    }
}

#[test]
fn a_failed_sync_does_not_lose_a_durable_write_in_flight() {
    for seed in 0..1000 {
        let latency = Latency { write: 40, sync: 1, ..Latency::default() };
        let disk =
            SimDisk::new(SimImage::zeroed(DISK), SimConfig { latency, ..SimConfig::new(seed) });
        let (sim, owner, other) = (Sim::new(seed), disk.clone(), disk.clone());
        let durable = sim.spawn(async move { put(&other, 0, &sectors("d"), true).await.unwrap() });
        let work = async move {
            put(&owner, 0, &sectors("v"), false).await.unwrap();
            owner.fail(Fault::new(OpKind::Sync, io::ErrorKind::Other));
            owner.sync().await.unwrap_err();
            durable.await;
        };
        sim.block_on(work).unwrap();
        assert_ne!(letters(&disk.power_cut())[..1], *".", "seed {seed}");
    }
}

#[test]
fn images_with_the_same_bytes_are_the_same() {
    let image = SimImage::from_bytes(&sectors("abcd"));
    let (rebuilt, unused) = (SimImage::from_bytes(&sectors("abcd")), image.clone());
    assert!(SimDisk::new(unused, SimConfig::new(1)).power_cut().same_as(&image));
    assert!(rebuilt.same_as(&image) && rebuilt.atomic(4096).same_as(&image));
    assert!(SimImage::from_bytes(&[0; 1024]).same_as(&SimImage::zeroed(1024)));
    for other in ["abcx", "abc", "abcda"] {
        assert!(!SimImage::from_bytes(&sectors(other)).same_as(&image), "{other}");
    }
}

#[test]
fn a_write_to_a_disk_leaves_the_image_of_its_start_unchanged() {
    let image = SimImage::from_bytes(&sectors("abcd"));
    let disk = SimDisk::new(image.clone(), SimConfig::new(1));
    let writer = disk.clone();
    let work = async move { put(&writer, SECTOR as u64, &sectors("x"), true).await };
    Sim::new(1).block_on(work).unwrap().unwrap();
    let left = disk.power_cut();
    assert!(letters(&left) == "axcd" && !left.same_as(&image), "{left:?}");
    assert_eq!(letters(&image), "abcd");
}

#[test]
fn a_read_beyond_the_end_returns_zeroes() {
    let bytes = pattern(1, 0, 2048);
    let (image, mut part) = (SimImage::from_bytes(&bytes[..2000]), vec![9; 1000]);
    image.read(1300, &mut part);
    assert!(part[..700] == bytes[1300..2000] && part[700..] == [0; 300]);
}

#[test]
fn a_dropped_operation_still_reaches_the_disk() {
    let image = then_cut(3, |disk| async move {
        let mut write = Box::pin(put(&disk, 0, b"left alone", false));
        assert!(poll_once(write.as_mut()).await.is_pending());
        drop(write);
        while !disk.contents().starts_with(b"left alone") {
            take(&disk, 4096, 512).await.unwrap();
        }
        disk.sync().await.unwrap();
        assert!(disk.trace().iter().any(|t| t.kind == OpKind::Write && t.phase == Phase::Answered));
    });
    assert!(image.bytes().starts_with(b"left alone"));
}

#[test]
fn the_real_executor_can_drive_the_disk() {
    let executor = Executor::new().unwrap();
    let disk = disk(5);
    let (worker, handle) = (disk.clone(), executor.handle().clone());
    let work = async move {
        let other = worker.clone();
        handle.spawn(async move {
            put(&other, 512, &sectors("b"), false).await.unwrap();
        });
        put(&worker, 0, &sectors("a"), true).await.unwrap();
        while take(&worker, 512, SECTOR).await.unwrap() != sectors("b") {
            yield_now().await;
        }
        worker.sync().await.unwrap();
    };
    executor.block_on(work).unwrap();
    assert!(letters(&disk.power_cut()).starts_with("ab"));
}

#[test]
fn the_step_limit_stops_a_task_that_spins() {
    let spin = async {
        loop {
            yield_now().await;
        }
    };
    let stalled = Sim::new(9).step_limit(1000).block_on::<()>(spin).unwrap_err();
    let text = "seed 9: the step limit is reached, and tasks still spin after 1000 steps, \
                with 1 tasks left";
    assert_eq!(stalled.to_string(), text);
}

#[test]
fn the_oracle_reports_the_sector_and_the_allowed_contents() {
    let mut oracle = Oracle::new();
    let first = oracle.write_started(1024, &sectors("aa"));
    oracle.write_answered(first, true, false);
    let second = oracle.write_started(1536, &sectors("b"));
    let flush = oracle.flush_started();
    oracle.write_answered(second, true, false);
    oracle.flush_answered(flush, true);
    // The first write is durable. The second one only began before the flush.
    let third = oracle.write_started(1024, &sectors("c"));
    for good in ["aa", "ab", "ca", "cb"] {
        oracle
            .check_now(1024, &sectors(good))
            .err()
            .iter()
            .for_each(|e| assert!(good.ends_with('a'), "{good}: {e}"));
    }
    let lost = oracle.check_after_cut(1024, &sectors("a\0")).unwrap_err();
    assert_eq!(lost.sector, 3);
    let text = lost.to_string();
    let parts = [
        "sector 3 (offset 1536) after the cut: found [zeroes]",
        "stale: initial zeroes",
        "write #1 (durable)",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    oracle.check_after_cut(1024, &sectors("ca")).unwrap();
    assert!(
        oracle.check_now(1024, &sectors("aa")).is_err(),
        "what was found after the cut is what there is"
    );
    drop(third);
}
