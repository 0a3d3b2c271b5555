//! The order of copies, and requests that wait for them: on a simulated clock, and from several
//! threads.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_image::join_all;
use blockyard_ring::Executor;
use blockyard_storage::sim::Rng;

use super::*;

const PART: u64 = 64 << 10;
const MIB: u64 = 1 << 20;
/// Longest wait of a test on threads. It is longer than the limit of the map, which has its own
/// error for a request that misses its copy.
const HANGS: Duration = Duration::from_secs(120);

fn new_map(size: u64) -> CopyMap {
    CopyMap::new(size, Path::new("copy.raw"), LIMIT)
}

/// Runs `work` on a simulated clock. The clock advances only while no task is ready.
fn run(work: impl AsyncFnOnce(Handle) + 'static) {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(handle).await }).unwrap();
}

/// Begins a request. The cell gets the time at which the request may change its range.
fn request(handle: &Handle, map: &Rc<CopyMap>, offset: u64, len: u64) -> Rc<Cell<Option<Instant>>> {
    let ended = Rc::new(Cell::new(None));
    let (map, clock, end) = (map.clone(), handle.clone(), ended.clone());
    handle.spawn(async move {
        map.wait(Some(&clock), offset, len).await;
        assert!(map.allows(offset, len));
        end.set(Some(clock.read_clock()));
    });
    ended
}

#[test]
fn each_part_is_copied_once_and_in_order() {
    let size = 2 * MIB + PART + 512;
    let map = new_map(size);
    let runs: Vec<_> = std::iter::from_fn(|| map.next_run()).collect();
    let ranges: Vec<_> = runs.iter().map(|run| run.range.clone()).collect();
    assert_eq!(ranges, [0..MIB, MIB..2 * MIB, 2 * MIB..size]);
    assert!(runs.iter().all(|run| !run.is_urgent));
    assert_eq!(map.next_run(), None);
    let empty = new_map(0);
    assert_eq!(empty.next_run(), None);
    assert!(empty.allows(0, u64::MAX));
    // A large disk has larger parts. They have more than 1 MiB only if they were too many.
    for (size, part) in [(1 << 40, 256 << 10), (64 << 40, MIB), (256 << 40, 4 * MIB)] {
        let large = new_map(size);
        assert_eq!(large.touched(0, 1), 0..1);
        assert_eq!(large.touched(part - 1, 2), 0..2, "{size}");
        assert_eq!(large.next_run().unwrap().range, 0..part.max(MIB));
    }
}

#[test]
fn a_range_may_change_when_all_its_parts_are_copied() {
    let size = 10 * MIB + 512;
    let map = new_map(size);
    let first = map.next_run().unwrap();
    assert!(!map.allows(0, 1) && !map.allows(MIB - 1, 1));
    for (offset, len) in [(5, 0), (size, 512), (u64::MAX, u64::MAX)] {
        assert!(map.allows(offset, len), "{offset}+{len}");
    }
    map.copied(&first);
    assert!(map.allows(0, MIB));
    assert!(!map.allows(0, MIB + 1) && !map.allows(MIB - 1, u64::MAX));
    while let Some(run) = map.next_run() {
        assert!(!map.allows(run.range.start, 1));
        map.copied(&run);
    }
    assert!(map.allows(0, u64::MAX));
    assert!(map.check().is_ok());
}

#[test]
fn parts_for_which_requests_wait_are_copied_first() {
    run(async |handle| {
        let map = Rc::new(new_map(8 * MIB));
        let first = map.next_run().unwrap();
        let small = request(&handle, &map, 5 * MIB, 1);
        let long = request(&handle, &map, 3 * MIB, 3 * MIB);
        let begun = request(&handle, &map, 512, 512);
        handle.yield_now().await;
        let urgent = map.next_run().unwrap();
        assert_eq!((urgent.range.clone(), urgent.is_urgent), (5 * MIB..5 * MIB + PART, true));
        assert!(!urgent.may_skip(), "it is read at once");
        // The long request makes one MiB urgent at a time.
        let part = map.next_run().unwrap();
        assert_eq!((part.range.clone(), part.is_urgent), (3 * MIB..4 * MIB, true));
        assert!(part.may_skip());
        let next = map.next_run().unwrap();
        assert_eq!((next.range.clone(), next.is_urgent), (MIB..2 * MIB, false));
        assert!(next.may_skip());
        let ended = || [&small, &long, &begun].map(|request| request.get().is_some());
        assert_eq!(ended(), [false; 3]);
        map.copied(&urgent);
        handle.yield_now().await;
        assert_eq!(ended(), [true, false, false]);
        map.copied(&first);
        map.copied(&part);
        handle.yield_now().await;
        assert_eq!(ended(), [true, false, true]);
        // The part at 5 MiB is copied already.
        for range in [4 * MIB..5 * MIB, 5 * MIB + PART..6 * MIB] {
            let part = map.next_run().unwrap();
            assert_eq!((part.range.clone(), part.is_urgent), (range, true));
            map.copied(&part);
            handle.yield_now().await;
        }
        assert_eq!(ended(), [true; 3]);
        let rest: Vec<_> = std::iter::from_fn(|| map.next_run()).map(|run| run.range).collect();
        assert_eq!(rest, [2 * MIB..3 * MIB, 6 * MIB..7 * MIB, 7 * MIB..8 * MIB]);
    });
}

/// A request may have changed a part since it was copied.
#[test]
fn a_run_in_order_ends_before_a_part_that_was_urgent() {
    run(async |handle| {
        let map = Rc::new(new_map(MIB));
        let ended = request(&handle, &map, 2 * PART, 1);
        handle.yield_now().await;
        let urgent = map.next_run().unwrap();
        map.copied(&urgent);
        handle.yield_now().await;
        assert!(ended.get().is_some());
        let rest: Vec<_> = std::iter::from_fn(|| map.next_run()).map(|run| run.range).collect();
        assert_eq!(rest, [0..2 * PART, 3 * PART..MIB]);
    });
}

#[test]
fn a_request_that_waits_too_long_ends_the_map_for_all() {
    run(async |handle| {
        let (map, begin) = (Rc::new(new_map(8 * MIB)), handle.read_clock());
        let run = map.next_run().unwrap();
        let late = request(&handle, &map, PART + 512, 512);
        handle.sleep(LIMIT / 2).await;
        let other = request(&handle, &map, 4 * MIB, MIB);
        handle.sleep(LIMIT).await;
        assert_eq!([&late, &other].map(|request| request.get()), [Some(begin + LIMIT); 2]);
        let error = map.check().unwrap_err().to_string();
        assert!(error.contains("5 s") && error.contains("offset 65536"), "{error}");
        assert!(error.contains("into copy.raw"), "{error}");
        assert!(map.allows(0, 8 * MIB));
        assert_eq!(map.next_run(), None);
        // The copy that was in flight comes too late.
        map.copied(&run);
        assert!(map.check().is_err());
    });
}

#[test]
fn a_long_request_may_wait_longer_and_a_copy_in_time_ends_nothing() {
    run(async |handle| {
        // Three whole units of `PER_SECOND`, and more than ten.
        for (len, seconds) in [(4 * PER_SECOND - 1, 3), (u64::MAX, 10)] {
            let (map, begin) = (Rc::new(new_map(MIB)), handle.read_clock());
            let long = request(&handle, &map, 0, len);
            handle.sleep(LIMIT * 4).await;
            assert_eq!(long.get(), Some(begin + LIMIT + Duration::from_secs(seconds)));
        }
        let map = Rc::new(new_map(MIB));
        let (run, begin) = (map.next_run().unwrap(), handle.read_clock());
        let request = request(&handle, &map, 0, 512);
        let almost = LIMIT - Duration::from_millis(1);
        handle.sleep(almost).await;
        map.copied(&run);
        handle.sleep(LIMIT).await;
        assert_eq!(request.get(), Some(begin + almost));
        map.give_up(&(0..1), LIMIT);
        assert!(map.check().is_ok(), "the part was copied");
    });
}

#[test]
fn a_request_that_is_withdrawn_makes_nothing_urgent() {
    run(async |handle| {
        let map = new_map(8 * MIB);
        {
            let mut waits = pin!(map.wait(Some(&handle), 5 * MIB, 1));
            for _ in 0..2 {
                let poll = poll_fn(|cx| Poll::Ready(waits.as_mut().poll(cx)));
                assert!(poll.await.is_pending());
                assert_eq!(map.waiting(), 1, "it has one entry");
            }
        }
        assert_eq!(map.waiting(), 0);
        assert_eq!(map.next_run().unwrap().range, 0..MIB);
    });
}

#[test]
fn requests_of_several_threads_miss_no_copy() {
    const PARTS: u64 = 2048;
    const REQUESTS: usize = 300;
    // A request that misses its copy ends the map.
    let map = CopyMap::new(PARTS * PART, Path::new("copy.raw"), Duration::from_secs(60));
    let map = Arc::new(map);
    let requests = |seed: u64| {
        let map = map.clone();
        std::thread::spawn(move || {
            let executor = Executor::new().unwrap();
            let (handle, mut rng) = (executor.handle().clone(), Rng::new(seed));
            let requests: Vec<_> = (0..REQUESTS)
                .map(|_| (rng.below(PARTS) * PART, rng.between(1, 4 * PART)))
                .collect();
            let all = async move {
                let requests = requests.into_iter().map(|(offset, len)| {
                    let (map, handle) = (&map, &handle);
                    async move {
                        map.wait(Some(handle), offset, len).await;
                        assert!(map.allows(offset, len));
                        Ok::<_, ()>(())
                    }
                });
                join_all(16, requests).await
            };
            executor.block_on(all).unwrap().unwrap();
        })
    };
    let threads: Vec<_> = (1..4).map(requests).collect();
    // Only requests that wait let this copy, so that most requests have to wait.
    let begun = Instant::now();
    while threads.iter().any(|thread| !thread.is_finished()) {
        assert!(begun.elapsed() < HANGS, "the requests hang");
        if map.waiting() == 0 {
            std::thread::yield_now();
        } else if let Some(run) = map.next_run() {
            map.copied(&run);
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    map.check().unwrap();
}
