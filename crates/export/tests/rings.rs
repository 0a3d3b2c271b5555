//! The device's side of both ring layouts, tested against the driver's side in crate `driver`,
//! which shares no code with it.
//!
//! Random histories of a driver and a device: chains are made available, taken, used and published
//! in any order. Either side may sleep. The device is stopped or killed at any point, and replaced.
//! What must hold: chains arrive unchanged and in order. The driver gets each used chain back once.
//! A side that sleeps is notified. A new device finds exactly the unanswered chains.

mod history;

use std::sync::Arc;
use std::time::Duration;

use blockyard_driver::ring::{Buffer, Ring as _, RingOptions};
use blockyard_driver::{Memory, PackedRing, SplitRing};
use blockyard_export::vhost_user::parts::{self, MAX_CHAIN, RingError};
use history::{History, Layout, Step};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..4usize, any::<u64>()).prop_map(|(count, shape)| Step::Offer { count, shape }),
        4 => (1..5usize).prop_map(Step::Take),
        4 => (1..4usize, any::<u64>()).prop_map(|(count, which)| Step::Use { count, which }),
        3 => Just(Step::Publish),
        3 => (1..5usize).prop_map(Step::Reap),
        2 => Just(Step::DriverSleeps),
        2 => Just(Step::DeviceSleeps),
        1 => Just(Step::HandOver),
        1 => (0..4u8).prop_map(Step::Crash),
    ];
    prop::collection::vec(step, 1..300)
}

/// Generates options of split rings: the size of a ring, and the maximum number of its chains. With
/// indirect tables each chain takes one entry. Without, a chain takes up to three entries.
fn split_options() -> impl Strategy<Value = RingOptions> {
    (0..7u32, any::<bool>(), any::<bool>(), any::<prop::sample::Index>()).prop_map(
        |(log, event_idx, indirect, depth)| {
            let size = 1u16 << log;
            let indirect = indirect || size < 3;
            let most = if indirect { size } else { size / 3 };
            RingOptions { size, slots: depth.index(most.into()) as u16 + 1, event_idx, indirect }
        },
    )
}

fn packed_options() -> impl Strategy<Value = RingOptions> {
    (1..70u16, any::<bool>(), any::<bool>(), any::<prop::sample::Index>()).prop_map(
        |(size, event_idx, indirect, depth)| {
            let indirect = indirect || size < 3;
            let most = if indirect { size } else { size / 3 };
            RingOptions { size, slots: depth.index(most.into()) as u16 + 1, event_idx, indirect }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn split_histories(options in split_options(), tracked in any::<bool>(), steps in steps()) {
        History::<SplitRing>::new(options, tracked).run(&steps);
    }

    #[test]
    fn packed_histories(options in packed_options(), tracked in any::<bool>(), steps in steps()) {
        History::<PackedRing>::new(options, tracked).run(&steps);
    }
}

/// Runs histories that once failed.
#[test]
fn a_new_device_recovers_the_chains_of_a_killed_one() {
    let options = RingOptions { size: 9, slots: 3, event_idx: true, indirect: false };
    let offer = |count| Step::Offer { count, shape: 2 };
    let some = |count| Step::Use { count, which: 0 };
    let one = [offer(1), Step::Take(1), some(1), Step::Publish, Step::Reap(1)];
    // The device is killed with a batch that is pushed but not published. The next device publishes
    // a part of the batch.
    let batch =
        [offer(3), Step::Take(3), some(3), Step::Crash(0), some(1), Step::Publish, Step::Reap(3)];
    // The device is killed after it has published a whole ring at once, before it has updated the
    // region.
    let lap = [offer(3), Step::Take(3), some(3), Step::Crash(2), Step::Reap(3)];
    // A chain is taken after another chain was pushed, and before that other chain is published.
    let between =
        [offer(1), Step::Take(1), some(1), offer(1), Step::Take(1), Step::Publish, Step::Reap(1)];
    for steps in [&batch[..], &lap, &[&between[..]; 500].concat(), &[&one[..]; 700].concat()] {
        History::<SplitRing>::new(RingOptions { size: 16, ..options }, true).run(steps);
        History::<PackedRing>::new(options, true).run(steps);
        // A single chain has as many descriptors as the ring, in one entry.
        History::<PackedRing>::new(RingOptions { size: 3, indirect: true, ..options }, true)
            .run(steps);
    }
}

/// A chain may wrap around the ring's end and leave the position at 0. A ring at position 0 need
/// not be a new one.
#[test]
fn a_ring_is_handed_over_at_any_position() {
    let options = RingOptions { size: 4, slots: 1, event_idx: false, indirect: false };
    let steps = |shape| {
        [
            Step::Offer { count: 1, shape },
            Step::Take(1),
            Step::Use { count: 1, which: 0 },
            Step::Publish,
        ]
    };
    for shape in 0..500 {
        let mut history = History::<PackedRing>::new(options, false);
        for n in 0..20 {
            history.run(&steps(shape + n));
            history.run(&[Step::HandOver]);
        }
    }
}

/// Runs until 16-bit indices have wrapped around twice.
fn wrap_around<R: Layout>(options: RingOptions) {
    let mut history = History::<R>::new(options, true);
    let steps = [
        Step::DeviceSleeps,
        Step::Offer { count: 3, shape: 0x9e37_79b9_7f4a_7c15 },
        Step::DriverSleeps,
        Step::Take(2),
        Step::Use { count: 2, which: 1 },
        Step::Publish,
        Step::Take(5),
        Step::Use { count: 5, which: 0 },
        Step::Publish,
        Step::Reap(5),
    ];
    while history.offered < 140_000 {
        history.run(&steps);
    }
}

#[test]
fn indices_wrap_around() {
    for event_idx in [false, true] {
        wrap_around::<SplitRing>(RingOptions { size: 16, slots: 5, event_idx, indirect: false });
        wrap_around::<PackedRing>(RingOptions { size: 13, slots: 4, event_idx, indirect: false });
        wrap_around::<PackedRing>(RingOptions {
            size: 32768,
            slots: 9,
            event_idx,
            indirect: false,
        });
    }
}

/// Waits for an eventfd. Fails after a minute, because a notification was lost.
fn wait(event: &std::os::fd::OwnedFd, who: &str) {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let mut fds = [PollFd::new(event, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&limit))).unwrap();
    assert_eq!(ready, 1, "the {who} sleeps, and was not notified");
    rustix::io::read(event, &mut [0; 8]).unwrap();
}

/// Runs both sides at once, each on its own thread. A side sleeps whenever it has nothing to do.
fn no_notification_is_lost_with<R: Layout>(options: RingOptions, count: u32) {
    let mut memory = Memory::new(1 << 20).unwrap();
    let mut driver = R::new(&mut memory, options).unwrap();
    let event = || Arc::new(rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let (kick, call) = (event(), event());
    for slot in 0..options.slots {
        driver.lay(slot, &[Buffer { addr: u64::from(slot), len: 1, device_writes: true }]);
    }
    let (guest, addresses, fresh) =
        (history::map(&memory), driver.addresses(), driver.fresh_base());
    let (kicked, called) = (kick.clone(), call.clone());
    let device = std::thread::spawn(move || {
        let mut ring = R::device(guest, addresses, options, fresh).unwrap();
        let (mut descs, mut done) = (Vec::new(), 0);
        while done < count {
            let mut some = false;
            for _ in 0..4 {
                let Some(head) = ring.pop(&mut descs).unwrap() else { break };
                ring.push_used(head, 1);
                (some, done) = (true, done + 1);
            }
            if some {
                ring.publish();
                if ring.wants_signal() {
                    rustix::io::write(&*called, &1u64.to_ne_bytes()).unwrap();
                }
            } else {
                if ring.enable_kicks() {
                    wait(&kicked, "device");
                }
                ring.disable_kicks();
            }
        }
    });
    let mut free: Vec<u16> = (0..options.slots).collect();
    let (mut offered, mut reaped) = (0, 0);
    while reaped < count {
        while offered < count
            && let Some(slot) = free.pop()
        {
            driver.submit(slot);
            offered += 1;
        }
        if driver.publish() {
            rustix::io::write(&*kick, &1u64.to_ne_bytes()).unwrap();
        }
        let before = reaped;
        while let Some((id, _)) = driver.reap() {
            free.push(id as u16);
            reaped += 1;
        }
        if reaped == before {
            if !driver.arm() {
                wait(&call, "driver");
            }
            driver.disarm();
        }
        // Different delays make the sides sleep at different points.
        if reaped % 1024 < 8 {
            std::thread::sleep(Duration::from_micros(u64::from(reaped % 7) * 10));
        }
    }
    device.join().unwrap();
}

#[test]
fn no_notification_is_lost() {
    for event_idx in [false, true] {
        for (size, slots) in [(1, 1), (8, 3), (64, 32)] {
            no_notification_is_lost_with::<SplitRing>(
                RingOptions { size, slots, event_idx, indirect: true },
                30_000,
            );
            no_notification_is_lost_with::<PackedRing>(
                RingOptions { size: size + 5, slots, event_idx, indirect: true },
                30_000,
            );
        }
    }
}

/// A front end can write any number of indirect descriptors into the in-flight region.
#[test]
fn a_chain_from_the_in_flight_region_has_no_more_descriptors_than_one_from_the_ring() {
    let options = RingOptions { size: 64, slots: 1, event_idx: false, indirect: false };
    let mut memory = Memory::new(1 << 20).unwrap();
    let at = PackedRing::new(&mut memory, options).unwrap().addresses();
    let (table, slice) = memory.piece(MAX_CHAIN as u64 * 16, 16).unwrap();
    for index in 0..MAX_CHAIN {
        slice.copy_in(index * 16 + 8, 1u32.to_le_bytes());
    }
    let guest = std::rc::Rc::new(history::map(&memory));
    let parts = (at.desc, at.avail, at.used);
    let ring = parts::PackedRing::new(guest, parts, 64, 0, false).unwrap();
    let mut indirect = [0; 16];
    indirect[..8].copy_from_slice(&table.to_le_bytes());
    indirect[8..12].copy_from_slice(&(MAX_CHAIN as u32 * 16).to_le_bytes());
    indirect[14..].copy_from_slice(&4u16.to_le_bytes());
    let mut descs = Vec::new();
    assert_eq!(ring.retake(&[indirect], &mut descs).unwrap().count, 1);
    assert_eq!(descs.len(), MAX_CHAIN);
    let refused = ring.retake(&[indirect; 30], &mut descs);
    assert!(matches!(refused, Err(RingError::ChainTooLong { .. })), "{refused:?}");
    assert!(descs.len() <= 2 * MAX_CHAIN);
}

/// Covers the limits of ring sizes, addresses and positions.
#[test]
fn impossible_sizes_addresses_and_positions_are_errors() {
    let mut memory = Memory::new(4 << 20).unwrap();
    let start = memory.take(2 << 20, 4096).unwrap();
    let parts = (start, start + (1 << 20), start + (1 << 20) + (1 << 19));
    let (guest, end) =
        (std::rc::Rc::new(history::map(&memory)), memory.range().0 + memory.range().1);
    let split = |size, parts| parts::SplitRing::new(guest.clone(), parts, size, 0, true);
    let packed = |size, parts, base| parts::PackedRing::new(guest.clone(), parts, size, base, true);
    for (size, good, good_packed) in [
        (0, false, false),
        (1, true, true),
        (3, false, true),
        (32768, true, true),
        (32769, false, false),
        (65536, false, false),
    ] {
        assert_eq!(split(size, parts).is_ok(), good, "{size}");
        assert_eq!(packed(size, parts, 0x8000_8000).is_ok(), good_packed, "{size}");
    }
    for bad in [
        (start + 8, parts.1, parts.2),
        (start, parts.1 + 1, parts.2),
        (start, parts.1, parts.2 + 2),
    ] {
        assert!(split(8, bad).is_err() && packed(8, bad, 0x8000_8000).is_err(), "{bad:x?}");
    }
    for bad in [(end - 16, parts.1, parts.2), (0, parts.1, parts.2), (!15, parts.1, parts.2)] {
        assert!(split(8, bad).is_err() && packed(8, bad, 0x8000_8000).is_err(), "{bad:x?}");
    }
    // These positions are beyond the ring.
    assert!(packed(8, parts, 8).is_err() && packed(8, parts, 8 << 16).is_err());
    assert!(packed(8, parts, 0x8007_0007).is_ok());
}
