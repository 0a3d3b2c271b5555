//! Each page that the back end changes is marked, and no page that it did not write.

use std::collections::BTreeSet;

use blockyard_driver::ring::Ring;
use blockyard_driver::{Data, PackedRing, SplitRing, request, status};

use crate::front::*;

/// Requests of one round: type, sector, data.
fn requests(round: u64) -> Vec<(u32, u64, Data)> {
    let mut seed = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    (0..SLOTS)
        .map(|_| {
            let len = (random(u64::from(ROOM) / 512) as u32 + 1) * 512;
            let sector = random(SECTORS - u64::from(ROOM) / 512);
            match random(8) {
                0 => (request::OUT, sector, Data::ToDevice(len)),
                1 => (request::FLUSH, 0, Data::None),
                2 => (request::ID, 0, Data::FromDevice(20)),
                3 => (request::IN, BAD.start + random(100), Data::FromDevice(len)),
                // A request that is refused: its data cross the end of the disk.
                4 => (request::IN, SECTORS, Data::FromDevice(512)),
                5 => (99, 0, Data::FromDevice(512)),
                _ => (request::IN, sector, Data::FromDevice(len)),
            }
        })
        .collect()
}

/// Returns the numbers of the pages that differ. `first`: the number of the first page.
fn changed_pages(first: u64, before: &[u8], after: &[u8]) -> BTreeSet<u64> {
    let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
    let differ = pages.zip(first..).filter(|((before, after), _)| before != after);
    differ.map(|(_, page)| page).collect()
}

/// Runs rounds of requests while the driver writes nothing, and compares memory and log.
fn exact<T: Ring>(event_idx: bool, is_packed: bool) {
    let mut front = Front::<T>::connect(event_idx);
    front.start();
    let descriptors_so_far = 3 * front.fill();
    let log = front.new_log();
    assert_eq!(front.log_used(true, USED_LOG), Some(words(&[0])));
    // Last, so that this message alone must change what the running ring marks.
    front.features(true, event_idx);
    log.take();
    let (start, _) = front.memory.range();
    let addresses = front.queue.ring.addresses();
    let pages_of = |addr: u64, len: u64| addr / PAGE..=(addr + len - 1) / PAGE;
    let entries = u64::from(ENTRIES);
    let [of_flags, of_elements, of_event] = [0, 1, 2].map(|page| USED_LOG / PAGE + page);
    let (mut seen, mut has_event, mut position) = ([0; 256], false, descriptors_so_far);
    for round in 1..40 {
        let filler = vec![0xee; ROOM as usize];
        let requests = requests(round);
        for (slot, (kind, sector, data)) in requests.iter().enumerate() {
            front.queue.write_data(slot as u16, &filler);
            front.queue.submit(slot as u16, *kind, *sector, *data);
        }
        let before = front.snapshot();
        // The device may see the available chains before the kick.
        front.queue.publish().unwrap();
        front.queue.kick().unwrap();
        for (_, status) in front.wait(requests.len()) {
            seen[usize::from(status)] += 1;
        }
        // The device has published, but may not have marked that yet.
        front.log_used(true, USED_LOG).unwrap();
        let after = front.snapshot();
        let marked: BTreeSet<u64> = log.take().into_iter().collect();

        let changed = changed_pages(start / PAGE, &before, &after);
        let (mut allowed, mut descriptors) = (BTreeSet::new(), 0);
        for (slot, (_, _, data)) in requests.iter().enumerate() {
            descriptors += if *data == Data::None { 2 } else { 3 };
            if let Data::FromDevice(len) = data {
                allowed.extend(pages_of(front.data_address(slot as u16), (*len).into()));
            }
            allowed.extend(pages_of(front.status_address(slot as u16), 1));
        }
        has_event |= marked.contains(&of_event);
        if is_packed {
            // The first and the last used element.
            for at in [position, position + descriptors - 3] {
                let page = (addresses.desc + at % entries * 16) / PAGE;
                assert!(marked.contains(&page), "round {round}: descriptor {at} is not marked");
            }
            position += descriptors;
            allowed.extend(pages_of(addresses.desc, entries * 16));
            // The device's event suppression structure.
            allowed.insert(of_flags);
        } else {
            for page in [of_flags, of_elements] {
                assert!(marked.contains(&page), "round {round}: page {page:#x} of the used ring");
            }
            allowed.extend([of_flags, of_elements, of_event]);
        }
        // The used ring is logged elsewhere. The driver writes the other parts when it publishes.
        let mut of_ring: BTreeSet<u64> = pages_of(addresses.used, 6 + entries * 8).collect();
        of_ring.extend(pages_of(addresses.avail, 6 + entries * 2));
        of_ring.extend(pages_of(addresses.desc, entries * 16));
        for page in changed.difference(&of_ring) {
            let is_marked = marked.contains(page);
            assert!(is_marked, "round {round}: page {page:#x} changed and is not marked");
        }
        for page in &marked {
            let is_allowed = allowed.contains(page);
            assert!(is_allowed, "round {round}: page {page:#x} is marked and was not written");
        }
    }
    assert_eq!(has_event, event_idx && !is_packed, "the event index is marked");
    for status in [status::OK, status::IOERR, status::UNSUPP] {
        assert!(seen[usize::from(status)] > 10, "{status}: {seen:?}");
    }

    // Without the features nothing is marked.
    front.features(false, event_idx);
    front.log_used(false, 0).unwrap();
    log.take();
    front.queue.submit(0, request::IN, 0, Data::FromDevice(4096));
    front.queue.publish().unwrap();
    front.wait(1);
    front.connection.stop_ring(0).unwrap();
    assert_eq!(log.take(), Vec::<u64>::new());
}

#[test]
fn a_split_ring_marks_exactly_what_it_writes() {
    exact::<SplitRing>(true, false);
    exact::<SplitRing>(false, false);
}

#[test]
fn a_packed_ring_marks_exactly_what_it_writes() {
    exact::<PackedRing>(true, true);
    exact::<PackedRing>(false, true);
}

/// VHOST_F_LOG_ALL and VHOST_VRING_F_LOG are independent.
#[test]
fn the_used_ring_alone_can_be_logged() {
    let mut front = Front::<SplitRing>::connect(true);
    front.start();
    let log = front.new_log();
    front.log_used(true, USED_LOG).unwrap();
    front.queue.submit(0, request::IN, 0, Data::FromDevice(4096));
    front.queue.publish().unwrap();
    front.wait(1);
    front.connection.stop_ring(0).unwrap();
    let page = USED_LOG / PAGE;
    // The event index is written if the queue sleeps before it is stopped.
    let marked = log.take();
    assert!(marked == [page, page + 1] || marked == [page, page + 1, page + 2], "{marked:?}");
}
