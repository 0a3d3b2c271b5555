//! Devices with large granules get whole granules only, and nothing beyond the end of their disk.

use std::cell::RefCell;
use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};

use blockyard::{Device, Disk, Handle, Lent, Shape, Target, Yard};

mod common;

use common::{Guest, LIMIT, Scratch};

const GRANULE: usize = 64 << 10;
const SIZE: usize = 16 * GRANULE;
const SHAPE: Shape = Shape { size: SIZE as u64, granule: GRANULE as u64 };
/// virtio-blk's status of a failed request.
const IOERR: u8 = 1;

/// Offset and length of each discard, and of each range of zeroes.
type Ranges = Arc<Mutex<[Vec<(usize, usize)>; 2]>>;

/// Memory that zeroes ranges itself. It notes which ones.
struct Memory {
    bytes: RefCell<Vec<u8>>,
    ranges: Ranges,
}

impl Memory {
    fn take_in(&self, kind: usize, offset: u64, len: u64) -> io::Result<()> {
        let range = (offset as usize, len as usize);
        self.ranges.lock().unwrap()[kind].push(range);
        self.bytes.borrow_mut()[range.0..][..range.1].fill(0);
        Ok(())
    }
}

impl Device for Memory {
    async fn read(&self, offset: u64, data: Lent) -> io::Result<()> {
        data.copy_from(0, &self.bytes.borrow()[offset as usize..][..data.len()])
    }

    async fn write(&self, offset: u64, data: Lent) -> io::Result<()> {
        assert!((offset as usize | data.len()).is_multiple_of(GRANULE), "a part of a granule");
        data.copy_to(0, &mut self.bytes.borrow_mut()[offset as usize..][..data.len()])
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.take_in(0, offset, len)
    }

    async fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        self.take_in(1, offset, len)
    }
}

#[test]
fn discards_and_zeroes_reach_a_device_in_whole_granules() {
    let scratch = Scratch::new("granules");
    let ranges = Ranges::default();
    let noted = ranges.clone();
    let target = Target::device("memory", SHAPE, async move |_, _| {
        Ok(Memory { bytes: vec![7; SIZE].into(), ranges: noted })
    });
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("a", target).vhost_user(scratch.path("socket"))).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    let mut expected = vec![7; SIZE];
    // Less than a granule: the discard has no effect, and the zeroes are written.
    guest.discard(4096, 4096);
    guest.write_zeroes(8192, 4096);
    expected[8192..12288].fill(0);
    // Parts of granules at both ends.
    guest.discard(2 * GRANULE - 4096, GRANULE + 8192);
    expected[2 * GRANULE..3 * GRANULE].fill(0);
    guest.write_zeroes(5 * GRANULE - 4096, GRANULE + 8192);
    expected[5 * GRANULE - 4096..6 * GRANULE + 4096].fill(0);
    // Whole granules.
    guest.write_zeroes(8 * GRANULE, 2 * GRANULE);
    expected[8 * GRANULE..10 * GRANULE].fill(0);
    assert!(guest.read(0, SIZE) == expected);
    let [discards, zeroes] = ranges.lock().unwrap().clone();
    assert_eq!(discards, [(2 * GRANULE, GRANULE)]);
    assert_eq!(zeroes, [(8 * GRANULE, 2 * GRANULE)]);
    drop(guest);
    yard.remove("a").unwrap();
}

#[test]
fn a_device_that_became_smaller_gets_nothing_beyond_its_end() {
    let scratch = Scratch::new("smaller");
    let ranges = Ranges::default();
    let noted = ranges.clone();
    let (sender, receiver) = sync_channel::<Handle>(1);
    let target = Target::device("memory", SHAPE, async move |_, handle| {
        let _ = sender.send(handle);
        Ok(Memory { bytes: vec![7; SIZE].into(), ranges: noted })
    });
    let yard = Yard::start(1).unwrap();
    yard.serve(Disk::target("a", target).vhost_user(scratch.path("socket"))).unwrap();
    let handle = receiver.recv_timeout(LIMIT).unwrap();
    let mut guest = Guest::connect(&scratch.path("socket"));
    let end = SIZE - 4 * GRANULE;
    // The guest still has the old size.
    assert!(handle.set_size(end as u64));
    assert_eq!(guest.try_write(end, &vec![9; GRANULE]), IOERR);
    for at in [end, end - GRANULE] {
        assert_eq!(guest.try_discard(at, 2 * GRANULE), IOERR);
        assert_eq!(guest.try_write_zeroes(at, 2 * GRANULE), IOERR);
    }
    assert!(guest.read(end, 4 * GRANULE) == vec![0; 4 * GRANULE]);
    assert_eq!(*ranges.lock().unwrap(), [Vec::new(), Vec::new()]);
    assert!(handle.set_size(SIZE as u64));
    assert!(guest.read(end, 4 * GRANULE) == vec![7; 4 * GRANULE], "nothing has reached the device");
    drop(guest);
    yard.remove("a").unwrap();
}
