//! Limits of groups, and requests that wait for space.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockyard::{Access, Disk, Extent, Fill, Map, Place, Question, Shape, Target, Yard};

mod common;

use common::{Guest, Scratch};

/// Limit for hangs only.
const LIMIT: Duration = Duration::from_secs(60);

/// Puts each write into the data file, at the same offset, unless that has no space.
struct Bounded(Arc<AtomicBool>);

impl Map for Bounded {
    async fn locate(&self, asked: Question) -> io::Result<Vec<Extent>> {
        let Question { offset, len, write } = asked;
        let place = match write {
            false => Place::Zero,
            true if self.0.load(Ordering::Relaxed) => Err(io::ErrorKind::StorageFull)?,
            true => Place::New { file: 0, offset, fill: Fill::Zero },
        };
        Ok(vec![Extent { len, place }])
    }

    async fn flush(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_request_without_space_waits_until_it_is_resumed() {
    let scratch = Scratch::new("space");
    let (is_full, shape) =
        (Arc::new(AtomicBool::new(true)), Shape { size: 1 << 20, granule: 4096 });
    let map = is_full.clone();
    let target = Target::map("bounded", shape, async move |_, _| Ok(Bounded(map)));
    let target = target.data(scratch.file("data", &vec![0; 1 << 20]), Access::Write);
    let yard = Yard::start(1).unwrap();
    let disk = Disk::target("a", target).wait_for_space().vhost_user(scratch.path("s"));
    yard.serve(disk).unwrap();
    let mut guest = Guest::connect(&scratch.path("s"));
    std::thread::scope(|scope| {
        let write = scope.spawn(|| guest.write(0, &[7; 4096]));
        let began = Instant::now();
        let resumed = |what: &str| {
            assert!(began.elapsed() < LIMIT, "{what}");
            yard.resume("a").unwrap()
        };
        while resumed("the request does not wait") == 0 {}
        while resumed("it does not wait again") == 0 {}
        is_full.store(false, Ordering::Relaxed);
        while !write.is_finished() {
            resumed("it still waits");
        }
    });
    assert_eq!(guest.read(0, 4096), [7; 4096]);
    drop(guest);
    assert_eq!(yard.remove("a").unwrap().statistics.write.errors, 0);
}

#[test]
fn the_disks_of_a_group_share_its_limit() {
    let scratch = Scratch::new("group");
    let yard = Yard::start(1).unwrap();
    let like = || Disk::image("like", "");
    for name in ["a", "b"] {
        let image = scratch.file(name, &vec![1; 1 << 20]);
        let socket = scratch.path(&format!("{name}.sock"));
        yard.serve(Disk::image(name, image).group("guests").vhost_user(socket)).unwrap();
    }
    // The disks are there already.
    yard.limit_group("guests", &like().bytes_per_second(512));
    let free = scratch.file("free", &vec![2; 1 << 20]);
    yard.serve(Disk::image("free", free).vhost_user(scratch.path("free.sock"))).unwrap();
    let [mut a, mut b, mut free] =
        ["a", "b", "free"].map(|name| Guest::connect(&scratch.path(&format!("{name}.sock"))));
    // Debts of 128 s: the next request of each waits longer than a test that hangs.
    for one in [&mut a, &mut b] {
        assert_eq!(one.read(0, 64 << 10), vec![1; 64 << 10]);
    }
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| b.read(0, 2048));
        for offset in 0..10 {
            assert_eq!(free.read(offset * 512, 512), [2; 512]);
        }
        assert!(!waits.is_finished(), "the other disk of the group has no limit");
        yard.limit_group("guests", &like());
        assert_eq!(waits.join().unwrap(), [1; 2048]);
    });
}
