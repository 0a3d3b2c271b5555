use super::*;

fn region(size: u16, is_packed: bool) -> InflightRegion {
    let (fd, len) = allocate(1, size, is_packed).unwrap();
    InflightRegion::map(&Mapper::new(false), fd, (0, len), 1).unwrap()
}

#[test]
fn a_split_ring_s_unanswered_chains_are_found_in_order() {
    let region = region(8, false);
    let mut queue = region.queue(0, false).unwrap().unwrap();
    for head in [5, 2, 7, 0] {
        queue.taken_split(head);
    }
    queue.pushed_split(2);
    queue.published_split(1);
    queue.pushed_split(0);
    // The process is killed here. The ring's index shows whether the last entry was published.
    assert_eq!(region.queue(0, false).unwrap().unwrap().recover_split(1), [5, 7, 0]);
    let region2 = region.clone();
    let mut queue = region2.queue(0, false).unwrap().unwrap();
    queue.pushed_split(0);
    assert_eq!(region.queue(0, false).unwrap().unwrap().recover_split(2), [5, 7]);
    assert!(region.queue(1, false).unwrap().is_none());
}

/// The second back end takes a chain, too, before it is killed.
#[test]
fn chains_of_two_dead_back_ends_are_found_in_order() {
    let region = region(8, false);
    let mut first = region.queue(0, false).unwrap().unwrap();
    [6, 3].into_iter().for_each(|head| first.taken_split(head));
    let mut second = region.queue(0, false).unwrap().unwrap();
    assert_eq!(second.recover_split(0), [6, 3]);
    second.taken_split(1);
    assert_eq!(region.queue(0, false).unwrap().unwrap().recover_split(0), [6, 3, 1]);
}

/// The back end is killed after the guest sees a batch, and before it has cleared the batch.
#[test]
fn a_published_batch_is_found_from_its_last_entry() {
    let region = region(8, false);
    let mut queue = region.queue(0, false).unwrap().unwrap();
    [4, 0, 7, 2].into_iter().for_each(|head| queue.taken_split(head));
    [7, 0, 4].into_iter().for_each(|head| queue.pushed_split(head));
    assert_eq!(region.queue(0, false).unwrap().unwrap().recover_split(3), [2]);
}

#[test]
fn a_packed_ring_s_descriptors_are_kept() {
    let region = region(8, true);
    let mut queue = region.queue(0, true).unwrap().unwrap();
    let raw = |n: u8| [n; 16];
    let a = queue.taken_packed(&[raw(1), raw(2)]);
    let b = queue.taken_packed(&[raw(3)]);
    let c = queue.taken_packed(&[raw(4), raw(5), raw(6)]);
    queue.pushed_packed(b);
    queue.publishing_packed(1, true);
    queue.published_packed();
    queue.pushed_packed(a);
    queue.publishing_packed(3, true);
    // The process is killed before it writes the ring's flags: `a` is still unanswered.
    let (chains, used) =
        region.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false).unwrap();
    assert_eq!(used, (1, true));
    assert_eq!(chains.iter().map(|c| c.entry).collect::<Vec<_>>(), [a, c]);
    assert_eq!(chains[0].raw, [raw(1), raw(2)]);
    // The process is killed after it writes the ring's flags: only `c` is unanswered.
    let mut queue = region.queue(0, true).unwrap().unwrap();
    queue.pushed_packed(a);
    queue.publishing_packed(3, true);
    let (chains, used) =
        region.queue(0, true).unwrap().unwrap().recover_packed(|_, _| true).unwrap();
    assert_eq!((used, chains.len()), ((3, true), 1));
    assert_eq!(chains[0].raw, [raw(4), raw(5), raw(6)]);
}

/// The back end is killed before it has published anything. The ring has a past: it was stopped
/// after its last request, and started again.
#[test]
fn a_ring_that_does_not_begin_at_zero_loses_no_chain() {
    let split = region(8, false);
    let mut queue = split.queue(0, false).unwrap().unwrap();
    queue.begins_split(100);
    for head in [3, 0] {
        queue.taken_split(head);
    }
    assert_eq!(split.queue(0, false).unwrap().unwrap().recover_split(100), [3, 0]);
    let packed = region(8, true);
    let mut queue = packed.queue(0, true).unwrap().unwrap();
    queue.begins_packed((5, false));
    queue.taken_packed(&[[1; 16]]);
    let (chains, used) =
        packed.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false).unwrap();
    assert_eq!((chains.len(), used), (1, (5, false)));
}

#[test]
fn a_damaged_region_is_an_error() {
    let damaged = |entry: usize, at: usize, value: u16| {
        let region = region(64, true);
        let mut queue = region.queue(0, true).unwrap().unwrap();
        queue.taken_packed(&[[1; 16], [2; 16]]);
        queue.slice.store_u16(
            packed::HEADER + entry * packed::ENTRY + at,
            value,
            Ordering::Relaxed,
        );
        region.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false)
    };
    assert_eq!(damaged(5, packed::NUM, 9).unwrap().0.len(), 1, "an entry that is in no chain");
    for (entry, at, value) in
        [(0, packed::NUM, 0), (0, packed::NUM, u16::MAX), (0, packed::NEXT, u16::MAX)]
    {
        assert!(
            matches!(damaged(entry, at, value), Err(RingError::Region(_))),
            "{entry} {at} {value}"
        );
    }
    // Each of many chains claims the length of the region. The back end reads at most as many
    // entries as the region has.
    let region = region(64, true);
    let mut queue = region.queue(0, true).unwrap().unwrap();
    for entry in 0..usize::from(queue.size()) {
        assert_eq!(usize::from(queue.taken_packed(&[[1; 16]])), entry);
        queue.slice.store_u16(
            packed::HEADER + entry * packed::ENTRY + packed::NUM,
            900,
            Ordering::Relaxed,
        );
    }
    assert!(region.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false).is_err());
}

#[test]
fn counters_may_overflow_and_regions_may_be_huge() {
    let region = region(8, false);
    let mut queue = region.queue(0, false).unwrap().unwrap();
    queue.taken_split(3);
    queue.slice.copy_in(split::HEADER + 3 * split::ENTRY + split::COUNTER, u64::MAX.to_le_bytes());
    let mut queue = region.queue(0, false).unwrap().unwrap();
    queue.taken_split(4);
    assert_eq!(queue.recover_split(0).len(), 2);
    // The file is sparse and stays sparse, because the back end touches only entries that it may
    // use.
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 40).unwrap();
    let mapper = Mapper::new(false);
    let vast = InflightRegion::map(&mapper, fd.try_clone().unwrap(), (0, 1 << 40), 1).unwrap();
    for is_packed in [false, true] {
        assert_eq!(vast.queue(0, is_packed).unwrap().unwrap().size(), 32768);
    }
    assert!(rustix::fs::fstat(&fd).unwrap().st_blocks * 512 < 2 << 20);
    assert!(
        InflightRegion::map(&mapper, fd, (3, 4096), 1).is_err(),
        "counters would not be aligned"
    );
}

/// After chains are taken, pushed and published in every order, each entry is free in the end.
#[test]
fn entries_taken_between_push_and_publication_are_not_lost() {
    let region = region(8, true);
    let mut queue = region.queue(0, true).unwrap().unwrap();
    for round in 0..2000u16 {
        let a = queue.taken_packed(&[[1; 16]; 3]);
        queue.pushed_packed(a);
        let b = queue.taken_packed(&[[2; 16]; 2]);
        assert!(a < queue.size() && b < queue.size() && a != b, "round {round}: {a} {b}");
        queue.publishing_packed(1 + round % 7, true);
        queue.published_packed();
        queue.pushed_packed(b);
        queue.publishing_packed(round % 7, false);
        queue.published_packed();
    }
    assert_eq!(region.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false).unwrap().0, []);
}

/// Returns a region as libvhost-user lays it out for rings of 128 entries. It has 128 entries in
/// 2,112 bytes, which have room for 131. `edit` changes the region before it is mapped.
fn foreign(
    is_packed: bool,
    entries: u16,
    len: u64,
    edit: impl FnOnce(&mut [u8]),
) -> InflightRegion {
    let fd = rustix::fs::memfd_create("foreign", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut bytes = vec![0; len as usize];
    bytes[VERSION_AT..][..2].copy_from_slice(&1u16.to_le_bytes());
    bytes[DESC_NUM..][..2].copy_from_slice(&entries.to_le_bytes());
    if is_packed {
        bytes[packed::USED_WRAP..][..2].fill(1);
    }
    edit(&mut bytes);
    assert_eq!(rustix::io::pwrite(&fd, &bytes, 0).unwrap(), bytes.len());
    InflightRegion::map(&Mapper::new(false), fd, (0, len), 1).unwrap()
}

#[test]
fn a_region_of_another_back_end_is_read_by_its_fields() {
    let noted = foreign(false, 128, 2112, |bytes| {
        for (head, counter) in [(0, 1u64), (6, 3)] {
            let at = split::HEADER + split::ENTRY * head;
            bytes[at] = 1;
            bytes[at + split::COUNTER..][..8].copy_from_slice(&counter.to_le_bytes());
        }
        bytes[split::LAST_BATCH_HEAD..][..2].copy_from_slice(&3u16.to_le_bytes());
        bytes[split::USED_IDX..][..2].copy_from_slice(&1u16.to_le_bytes());
    });
    let mut queue = noted.queue(0, false).unwrap().unwrap();
    assert_eq!((queue.size(), queue.recover_split(1)), (128, vec![0, 6]));
    // A region for a packed ring, with a chain of entries 0 and 2. The descriptor fields are in the
    // specification's order.
    let noted = foreign(true, 4, 192, |bytes| {
        let mut entry = |number: usize, next: u16, id: u16| {
            let at = packed::HEADER + packed::ENTRY * number;
            bytes[at + packed::NEXT..][..2].copy_from_slice(&next.to_le_bytes());
            bytes[at + packed::DESC..][..2].copy_from_slice(&id.to_le_bytes());
            bytes[at + packed::DESC + 2..][..2].copy_from_slice(&1u16.to_le_bytes());
            bytes[at + packed::DESC + 4..][..4].copy_from_slice(&512u32.to_le_bytes());
            bytes[at + packed::DESC + 8..][..8].copy_from_slice(&0x1_2345_6000u64.to_le_bytes());
        };
        for (index, state, count) in [(0, 2, 7), (2, 1, 7), (1, 3, 0), (3, 4, 0)] {
            entry(index, state, count);
        }
        let first = packed::HEADER;
        (
            bytes[first],
            bytes[first + packed::NUM],
            bytes[first + packed::LAST],
            bytes[first + packed::COUNTER],
        ) = (1, 2, 2, 1);
        (bytes[packed::FREE_HEAD], bytes[packed::OLD_FREE_HEAD]) = (1, 1);
    });
    let (chains, used) =
        noted.queue(0, true).unwrap().unwrap().recover_packed(|_, _| false).unwrap();
    let mut ring = [0; 16];
    ring[..8].copy_from_slice(&0x1_2345_6000u64.to_le_bytes());
    ring[8..12].copy_from_slice(&512u32.to_le_bytes());
    (ring[12], ring[14]) = (7, 1);
    assert_eq!((chains, used), (vec![PackedChain { entry: 0, raw: vec![ring; 2] }], (0, true)));
}

#[test]
fn a_region_that_cannot_be_read_is_an_error() {
    let unreadable = |edit: fn(&mut [u8])| foreign(false, 128, 2112, edit).queue(0, false);
    for (what, edit) in [
        ("another version", (|bytes: &mut [u8]| bytes[VERSION_AT] = 2) as fn(&mut [u8])),
        ("unknown features", |bytes| bytes[FEATURES + 3] = 1),
        ("more entries than there is room for", |bytes| bytes[DESC_NUM] = 132),
        ("no entries", |bytes| bytes[DESC_NUM] = 0),
    ] {
        assert!(matches!(unreadable(edit), Err(RingError::Region(_))), "{what}");
    }
    assert_eq!(
        unreadable(|bytes| bytes[VERSION_AT] = 0).unwrap().unwrap().size(),
        131,
        "a new one"
    );
}

#[test]
fn a_formatted_part_has_nothing_of_the_ring_before() {
    for is_packed in [false, true] {
        let region = region(8, is_packed);
        let mut queue = region.queue(0, is_packed).unwrap().unwrap();
        if is_packed {
            let entry = queue.taken_packed(&[[1; 16]]);
            queue.format_if_idle();
            assert!(queue.is_used(), "one is in flight");
            queue.pushed_packed(entry);
            queue.publishing_packed(1, true);
            queue.published_packed();
        } else {
            queue.taken_split(3);
            queue.format_if_idle();
            assert!(queue.is_used(), "one is in flight");
            queue.pushed_split(3);
            queue.published_split(1);
        }
        queue.format_if_idle();
        assert!(!queue.is_used());
        assert!(!region.queue(0, is_packed).unwrap().unwrap().is_used());
    }
}
