use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::mem::memory::Region;

fn guest() -> Rc<GuestMemory> {
    Rc::new(GuestMemory::default().with(Region::memfd("test", 0, 0, 0x10000).unwrap().0).unwrap())
}

#[test]
fn adjacent_pieces_become_one_entry() {
    let mut segments = Segments::default();
    segments.reset(&guest());
    segments.push_guest(0x1000, 0x1000).unwrap();
    segments.push_guest(0x2000, 0x1000).unwrap();
    segments.push_guest(0x8000, 0x200).unwrap();
    assert_eq!((segments.count(), segments.len()), (2, 0x2200));
    assert!(
        segments.is_aligned(512, 512)
            && segments.is_aligned(4096, 512)
            && !segments.is_aligned(512, 1024)
    );
    assert!(segments.push_guest(0xffff, 2).is_err());
}

#[test]
fn only_memory_of_the_same_owner_is_appended() {
    let memory = guest();
    let of = |memory, pieces: &[(u64, u64)]| {
        let mut segments = Segments::default();
        segments.reset(memory);
        pieces.iter().for_each(|&(at, len)| segments.push_guest(at, len).unwrap());
        segments
    };
    let mut all = Segments::default();
    assert!(all.append(&of(&memory, &[(0x1000, 0x200), (0x3000, 0x200)])));
    assert!(all.append(&of(&memory, &[(0x3200, 0x200), (0x100, 0x10)])));
    assert_eq!((all.count(), all.len()), (3, 0x610), "adjacent pieces are one entry");
    for other in [of(&guest(), &[(0x3400, 0x200)]), Segments::buffer(16), Segments::default()] {
        assert!(!all.append(&other), "{other:?}");
    }
    assert_eq!((all.count(), all.len()), (3, 0x610));
    // Appended memory stays alive, whichever segments are dropped.
    let regions = std::rc::Rc::downgrade(&memory);
    drop(memory);
    all.copy_in(0x3f8, b"from one piece to the next");
    let mut out = [0; 8];
    all.copy_out(0x3fe, &mut out);
    assert_eq!(&out, b"ne piece");
    all.release();
    assert!(regions.upgrade().is_none());
    let buffer = Segments::from_bytes(b"0123456789");
    assert!(all.append(&buffer.slice(2, 3)) && all.append(&buffer.slice(7, 2)));
    drop(buffer);
    all.copy_out(0, &mut out[..5]);
    assert_eq!(&out[..5], b"23478");
}

#[test]
fn a_buffer_is_reused_if_it_has_no_other_owner() {
    let mut buffer = Segments::buffer(8192).slice(100, 50);
    let other = buffer.slice(0, 1);
    assert!(!buffer.refit(10) && buffer.len() == 50);
    drop(other);
    assert!(!buffer.refit(8193));
    assert!(buffer.refit(8192) && buffer.len() == 8192 && buffer.is_aligned(4096, 4096));
    assert!(!Segments::default().refit(0));
}

#[test]
fn gathered_memory_is_kept_alive_by_all_its_owners() {
    let memory = guest();
    let mut one = Segments::default();
    one.reset(&memory);
    one.push_guest(0x1000, 4).unwrap();
    one.copy_in(0, b"abcd");
    let (two, three) = (Segments::from_bytes(b"0123456789"), Segments::from_bytes(b"xyz"));
    let mut all = Segments::default();
    all.gather(&two, 2, 3);
    all.gather(&two, 8, 2);
    all.gather(&one, 1, 2);
    let mut again = Segments::default();
    again.gather(&three, 0, 1);
    again.gather(&all, 0, all.len());
    let regions = Rc::downgrade(&memory);
    drop((memory, one, two, three, all));
    let mut out = [0; 8];
    again.copy_out(0, &mut out);
    assert_eq!(&out, b"x23489bc");
    again.release();
    assert!(regions.upgrade().is_none());
}

#[test]
fn nonzero_bytes_and_differences_are_found() {
    let (a, b) = (Segments::buffer(10_000), Segments::buffer(10_000));
    assert_eq!((a.find_nonzero(0, 10_000), a.find_difference(0, &b, 0, 10_000)), (None, None));
    for at in [0, 1, 255, 256, 300, 5000, 9999] {
        b.copy_in(at, &[7]);
        assert_eq!(
            (b.find_nonzero(0, 10_000), a.find_difference(0, &b, 0, 10_000)),
            (Some(at), Some(at))
        );
        assert_eq!(b.find_nonzero(at, 10_000 - at), Some(0));
        assert_eq!((b.find_nonzero(0, at), b.find_difference(0, &a, 0, at)), (None, None));
        b.zero(at, 1);
    }
    // Compare segments whose entries have different boundaries.
    let mut pieces = a.slice(0, 100);
    assert!(pieces.append(&a.slice(200, 3000)) && pieces.append(&a.slice(5000, 17)));
    let other = Segments::buffer(4000);
    other.copy_in(700 + 3100, &[1]);
    assert_eq!(pieces.find_difference(0, &other, 700, 3117), Some(3100));
    assert_eq!(other.find_difference(700, &pieces, 0, 3117), Some(3100));
    assert_eq!(pieces.find_difference(1, &other, 0, 3000), None);
}

#[test]
fn copies_cross_entries() {
    let memory = guest();
    let mut segments = Segments::default();
    segments.reset(&memory);
    for at in [0x100, 0x300, 0x500] {
        segments.push_guest(at, 3).unwrap();
    }
    segments.copy_in(1, b"abcdefg");
    let mut out = [0; 7];
    segments.copy_out(1, &mut out);
    assert_eq!(&out, b"abcdefg");
    let other = Segments::from_bytes(b"0123456789");
    segments.copy_from(2, &other, 4, 5);
    segments.slice(2, 5).copy_out(0, &mut out[..5]);
    assert_eq!(&out[..5], b"45678");
    segments.zero(3, 2);
    segments.copy_out(0, &mut out);
    assert_eq!(&out[1..6], b"a4\0\x007");
}

/// A guest may change its memory during a search, and an operation may write to the segments:
/// searches use copies.
#[test]
fn memory_that_changes_concurrently_can_be_searched() {
    let memory = guest();
    let slice = memory.slice(0, 0x8000, 1).unwrap();
    let mut segments = Segments::default();
    segments.reset(&memory);
    segments.push_guest(0, 0x3000).unwrap();
    segments.push_guest(0x5000, 0x1000).unwrap();
    assert_eq!(segments.find_nonzero(0, 0x4000), None);
    slice.write(0x5003, &[1]);
    assert_eq!(segments.find_nonzero(0, 0x4000), Some(0x3003));
    assert_eq!(segments.find_difference(1, &Segments::buffer(0x4000), 0, 0x3fff), Some(0x3002));
    let ends = AtomicBool::new(false);
    // Also if a search fails.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _end = End(&ends);
        scope.spawn(|| {
            let slice = slice;
            while !ends.load(Ordering::Relaxed) {
                slice.write(0x100, &[1]);
                slice.write(0x100, &[0]);
            }
        });
        for _ in 0..200 {
            let found = segments.find_nonzero(0, 0x4000);
            assert!(matches!(found, Some(0x100 | 0x3003)), "{found:?}");
        }
    });
}

#[test]
fn slices_have_the_bytes_of_their_range() {
    let memory = guest();
    let mut segments = Segments::default();
    segments.reset(&memory);
    for at in [0x100, 0x300, 0x500] {
        segments.push_guest(at, 3).unwrap();
    }
    segments.copy_in(0, b"abcdefghi");
    for from in 0..=9 {
        for len in 0..=9 - from {
            let slice = segments.slice(from, len);
            let mut out = vec![0; len];
            slice.copy_out(0, &mut out);
            assert_eq!((slice.len(), out.as_slice()), (len, &b"abcdefghi"[from..from + len]));
            // There are no empty entries, because some operations refuse them.
            assert_eq!(
                slice.count(),
                (from..from + len)
                    .map(|at| at / 3)
                    .collect::<std::collections::BTreeSet<_>>()
                    .len()
            );
        }
    }
}

#[test]
fn accesses_beyond_the_end_panic() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let segments = Segments::buffer(16).slice(4, 8);
    for (offset, len) in [(8, 1), (1, usize::MAX), (usize::MAX, 1)] {
        let touched = catch_unwind(AssertUnwindSafe(|| segments.zero(offset, len)));
        assert!(touched.is_err(), "{offset} {len}");
    }
    segments.zero(8, 0);
    assert!(
        catch_unwind(AssertUnwindSafe(|| segments.copy_from(0, &Segments::buffer(7), 0, 8)))
            .is_err()
    );
}

#[test]
fn pieces_of_regions_are_checked_and_keep_the_regions() {
    let region = Arc::new(Region::memfd("test", 0, 0, 0x2000).unwrap().0);
    let mut segments = Segments::default();
    assert!(segments.push_region(&region, 0, 1).is_err(), "reset_regions was not called");
    segments.reset_regions();
    segments.push_region(&region, 0x1000, 0x800).unwrap();
    segments.push_region(&region, 0x1800, 0x800).unwrap();
    for (offset, len) in [(0x2000, 1), (0x1fff, 2), (u64::MAX, 2), (1, u64::MAX)] {
        assert!(segments.push_region(&region, offset, len).is_err(), "{offset:#x} {len:#x}");
    }
    assert_eq!((segments.count(), segments.len()), (1, 0x1000), "an error adds nothing");
    assert!(segments.push_guest(0, 1).is_err(), "the owner is a region");
    // The segments hold the region once, however many ranges they have; each slice holds it too.
    assert_eq!(Arc::strong_count(&region), 2);
    let slice = segments.slice(0x7ff, 2);
    segments.reset_regions();
    assert_eq!((segments.len(), Arc::strong_count(&region)), (0, 2));
    slice.copy_in(0, b"xy");
    drop(slice);
    assert_eq!(Arc::strong_count(&region), 1);
}

/// A guest may name the same memory twice.
#[test]
fn an_overlapping_copy_moves_the_bytes() {
    let buffer = Segments::from_bytes(b"0123456789");
    let (to, from) = (buffer.slice(2, 6), buffer.slice(0, 6));
    to.copy_from(0, &from, 0, 6);
    let mut out = [0; 10];
    buffer.copy_out(0, &mut out);
    assert_eq!(&out, b"0101234589");
}

#[test]
fn every_entry_must_be_aligned() {
    let memory = guest();
    let of = |pieces: &[(u64, u64)]| {
        let mut segments = Segments::default();
        segments.reset(&memory);
        pieces.iter().for_each(|(at, len)| segments.push_guest(*at, *len).unwrap());
        segments
    };
    assert!(of(&[(0x1000, 512), (0x3000, 1024)]).is_aligned(4096, 512));
    for pieces in [
        [(0x1000, 512), (0x3000, 256)],
        [(0x1000, 512), (0x3100, 512)],
        [(0x1000, 100), (0x3000, 412)],
    ] {
        assert!(!of(&pieces).is_aligned(512, 512), "{pieces:x?}");
    }
}

#[test]
fn segments_are_one_pointer() {
    assert_eq!(size_of::<Segments>(), size_of::<usize>());
}
