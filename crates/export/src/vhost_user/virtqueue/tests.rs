//! The device's side of rings whose driver breaks the rules, and of rings that another back end has
//! served. The driver is that of crate `driver`, or the tests write the ring's bytes themselves.

use std::sync::atomic::Ordering;

use blockyard_driver::ring::{Buffer, INDIRECT, NEXT, Ring as _, RingOptions, WRITE};
use blockyard_driver::{Memory, PackedRing as PackedDriver, SplitRing as SplitDriver};

use super::*;

const SIZE: u16 = 8;
/// The bit that makes a descriptor of a packed ring available on the first lap.
const AVAILABLE: u16 = 1 << 7;
/// Offset of the index in the available ring and in the used ring.
const INDEX: usize = 2;

/// Returns the device's side of a driver's ring. `base`: where it starts.
fn device<R: blockyard_driver::Ring>(
    memory: &Memory,
    driver: &R,
    event_idx: bool,
    base: u32,
    is_packed: bool,
) -> Ring {
    let at = driver.addresses();
    let (parts, size) = ((at.desc, at.avail, at.used), u32::from(driver.size()));
    let memory = Rc::new(memory.guest().clone());
    if is_packed {
        Ring::Packed(PackedRing::new(memory, parts, size, base, event_idx).unwrap())
    } else {
        Ring::Split(SplitRing::new(memory, parts, size, base as u16, event_idx).unwrap())
    }
}

fn options(event_idx: bool) -> RingOptions {
    RingOptions { size: SIZE, slots: SIZE, event_idx, indirect: true }
}

fn split(event_idx: bool) -> (Memory, SplitDriver) {
    let mut memory = Memory::new(1 << 20).unwrap();
    let driver = SplitDriver::new(&mut memory, options(event_idx)).unwrap();
    (memory, driver)
}

fn packed(event_idx: bool) -> (Memory, PackedDriver) {
    let mut memory = Memory::new(1 << 20).unwrap();
    let driver = PackedDriver::new(&mut memory, options(event_idx)).unwrap();
    (memory, driver)
}

/// A split ring of `SIZE` entries can have `SIZE` chains available, and not one more. The indices
/// wrap around.
#[test]
fn an_available_index_is_at_most_the_ring_s_size_ahead() {
    for base in [0, 5, u16::MAX - 3] {
        let index = |ahead: u16| {
            let (memory, driver) = split(false);
            for head in 0..SIZE {
                driver.write_descriptor(head, u64::from(head), 1, WRITE, 0);
            }
            let index = base.wrapping_add(ahead);
            driver.avail.store_u16(INDEX, index, Ordering::Release);
            let mut ring = device(&memory, &driver, false, base.into(), false);
            let (mut descs, mut taken) = (Vec::new(), 0);
            loop {
                match ring.pop(&mut descs) {
                    Ok(Some(_)) => taken += 1,
                    Ok(None) => return Ok(taken),
                    Err(RingError::AvailIndex { index: seen, next }) => {
                        assert_eq!((seen, next), (index, base), "the error names both");
                        return Err(taken);
                    }
                    Err(e) => panic!("{e}"),
                }
                assert!(taken <= SIZE, "the ring has no more entries");
            }
        };
        for ahead in [0, 1, SIZE - 1, SIZE] {
            assert_eq!(index(ahead), Ok(ahead), "base {base}");
        }
        // An index that goes back is far ahead, too.
        for ahead in [SIZE + 1, 2 * SIZE, 1 << 15, u16::MAX] {
            assert_eq!(index(ahead), Err(0), "base {base}, {ahead} ahead");
        }
    }
}

/// Serves one chain, and then starts a new back end in its place, because the first one was killed
/// after it published the chain and before it signalled. The driver sleeps meanwhile. Returns
/// whether the new back end signals: before it has used a chain, and again after that.
fn signals_of_a_new_back_end<R: blockyard_driver::Ring>(
    (mut memory, mut driver): (Memory, R),
    event_idx: bool,
    is_packed: bool,
) -> [bool; 2] {
    let (addr, _) = memory.piece(1, 1).unwrap();
    for slot in 0..SIZE {
        driver.lay(slot, &[Buffer { addr, len: 1, device_writes: true }]);
    }
    assert!(!driver.arm(), "nothing is used yet, so the driver sleeps");
    driver.submit(0);
    driver.publish();
    let (fresh, mut descs) = (driver.fresh_base(), Vec::new());
    let mut first = device(&memory, &driver, event_idx, fresh, is_packed);
    let head = first.pop(&mut descs).unwrap().expect("a chain is available");
    first.push_used(head, 1);
    first.publish();
    let mut second = device(&memory, &driver, event_idx, first.base(), is_packed);
    let begins = second.wants_signal();
    // The driver awakes, and sleeps again.
    assert_eq!(driver.reap(), Some((0, 1)));
    assert!(!driver.arm());
    assert!(!second.wants_signal(), "nothing is published since the last signal");
    driver.submit(1);
    driver.publish();
    let head = second.pop(&mut descs).unwrap().expect("a chain is available");
    second.push_used(head, 1);
    second.publish();
    [begins, second.wants_signal()]
}

#[test]
fn a_new_back_end_repeats_the_signal_of_one_that_was_killed() {
    for event_idx in [false, true] {
        let of_split = signals_of_a_new_back_end(split(event_idx), event_idx, false);
        assert_eq!(of_split, [true, true], "split, event index: {event_idx}");
        let of_packed = signals_of_a_new_back_end(packed(event_idx), event_idx, true);
        assert_eq!(of_packed, [true, true], "packed, event index: {event_idx}");
    }
}

/// Writes a chain of these directions into a ring, and returns what the device's side makes of it.
/// `true`: the device writes the buffer.
fn chain(is_packed: bool, is_indirect: bool, writable: &[bool]) -> Result<Vec<bool>, RingError> {
    let last = writable.len() as u16 - 1;
    let flags = |at: u16| {
        let next = if at < last { NEXT } else { 0 };
        next | if writable[usize::from(at)] { WRITE } else { 0 }
    };
    let (mut memory, mut descs) = (Memory::new(1 << 20).unwrap(), Vec::new());
    let (table, slice) = memory.piece(DESC_LEN as u64 * writable.len() as u64, 16).unwrap();
    for at in 0..=last {
        let from = usize::from(at) * DESC_LEN;
        slice.copy_in(from + 8, 1u32.to_le_bytes());
        // The last two fields: flags and next, or the buffer id and flags.
        let (one, two) = if is_packed { (0, flags(at)) } else { (flags(at), at + 1) };
        slice.store_u16(from + 12, one, Ordering::Relaxed);
        slice.store_u16(from + 14, two, Ordering::Relaxed);
    }
    let bytes = (writable.len() * DESC_LEN) as u32;
    let mut ring = if is_packed {
        let driver = PackedDriver::new(&mut memory, options(false)).unwrap();
        if is_indirect {
            driver.write_descriptor(0, table, bytes, 0, INDIRECT | AVAILABLE);
        } else {
            (0..=last).for_each(|at| driver.write_descriptor(at, 0, 1, 0, flags(at) | AVAILABLE));
        }
        device(&memory, &driver, false, driver.fresh_base(), true)
    } else {
        let mut driver = SplitDriver::new(&mut memory, options(false)).unwrap();
        if is_indirect {
            driver.write_descriptor(0, table, bytes, INDIRECT, 0);
        } else {
            (0..=last).for_each(|at| driver.write_descriptor(at, 0, 1, flags(at), at + 1));
        }
        driver.push_available(0);
        driver.publish();
        device(&memory, &driver, false, 0, false)
    };
    ring.pop(&mut descs)?.expect("a chain is available");
    Ok(descs.iter().map(|desc| desc.writable).collect())
}

#[test]
fn a_chain_has_no_readable_descriptor_behind_a_writable_one() {
    for (is_packed, is_indirect) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!("packed: {is_packed}, indirect: {is_indirect}");
        for good in [&[false][..], &[true], &[false, true], &[false, false, true, true]] {
            assert_eq!(chain(is_packed, is_indirect, good).unwrap(), good, "{what}");
        }
        for bad in [&[true, false][..], &[false, true, false], &[true, false, true]] {
            let refused = chain(is_packed, is_indirect, bad);
            assert!(matches!(refused, Err(RingError::Order { head: 0 })), "{what}: {refused:?}");
        }
    }
}

/// What the device's side makes of a split ring that a test has written.
fn taken(write: impl FnOnce(&mut Memory, &SplitDriver)) -> Result<Vec<Desc>, RingError> {
    let (mut memory, mut driver) = split(false);
    write(&mut memory, &driver);
    driver.push_available(0);
    driver.publish();
    let (mut ring, mut descs) = (device(&memory, &driver, false, 0, false), Vec::new());
    ring.pop(&mut descs)?.expect("a chain is available");
    Ok(descs)
}

#[test]
fn a_chain_of_a_split_ring_stays_in_its_table_and_ends() {
    let next = |to: u16| taken(|_, driver| driver.write_descriptor(0, 0, 1, NEXT, to));
    for beyond in [SIZE, u16::MAX] {
        let error = next(beyond).unwrap_err();
        assert!(matches!(error, RingError::DescIndex { index, size: SIZE } if index == beyond));
    }
    let error = next(0).unwrap_err();
    assert!(matches!(error, RingError::ChainTooLong { head: 0, max } if max == usize::from(SIZE)));
}

#[test]
fn an_indirect_table_has_whole_descriptors_and_no_further_table() {
    let table = |bytes: u32, inner: u16| {
        taken(|memory, driver| {
            let (at, slice) = memory.piece(64, 16).unwrap();
            slice.copy_in(8, 1u32.to_le_bytes());
            slice.store_u16(12, inner, Ordering::Relaxed);
            driver.write_descriptor(0, at, bytes, INDIRECT, 0);
        })
    };
    assert_eq!(table(16, WRITE).unwrap().len(), 1);
    for (bytes, inner) in [(0, 0), (24, 0), (16, INDIRECT)] {
        let error = table(bytes, inner).unwrap_err();
        assert!(matches!(error, RingError::Indirect { head: 0, .. }), "{bytes}: {error}");
    }
}

/// Virtio 1.2, section 2.7.
#[test]
fn the_size_of_a_split_ring_is_a_power_of_two() {
    let (memory, driver) = split(false);
    let at = driver.addresses();
    let new = |size| {
        let guest = Rc::new(memory.guest().clone());
        SplitRing::new(guest, (at.desc, at.avail, at.used), size, 0, false).map(|_| ())
    };
    assert!(new(4).is_ok());
    for size in [0, 3, 6, 65536] {
        assert!(matches!(new(size), Err(RingError::Size(got)) if got == size), "{size}");
    }
}

#[test]
fn a_driver_that_polls_gets_no_signal() {
    for polls in [false, true] {
        let (memory, mut driver) = split(false);
        driver.write_descriptor(0, 0, 1, WRITE, 0);
        driver.push_available(0);
        driver.publish();
        driver.avail.store_u16(0, u16::from(polls), Ordering::Relaxed);
        let mut ring = device(&memory, &driver, false, 0, false);
        let head = ring.pop(&mut Vec::new()).unwrap().expect("a chain is available");
        ring.push_used(head, 1);
        ring.publish();
        assert_eq!(ring.wants_signal(), !polls);
    }
}
