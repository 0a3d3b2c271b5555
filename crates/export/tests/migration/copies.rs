//! A migration without QEMU: memory is copied by the log while requests run.

use blockyard_driver::ring::Ring;
use blockyard_driver::{Data, PackedRing, SplitRing, request};

use crate::front::*;

/// Copies pages of the source to the copy.
fn copy<T: Ring>(front: &Front<T>, copy: &mut [u8], pages: impl IntoIterator<Item = u64>) {
    let (start, len) = front.memory.range();
    let slice = front.memory.slice(start, len, 1).unwrap();
    for page in pages {
        let Some(at) = (page * PAGE).checked_sub(start).filter(|at| *at < len) else { continue };
        slice.read(at as usize, &mut copy[at as usize..(at + PAGE) as usize]);
    }
}

/// Keeps requests in flight until `count` more have completed.
fn run<T: Ring>(front: &mut Front<T>, count: u64, number: &mut u64) {
    let mut completed = 0;
    for slot in 0..SLOTS {
        submit(front, slot, number);
    }
    front.queue.publish().unwrap();
    while completed < count {
        let done = front.wait(1);
        completed += done.len() as u64;
        for (slot, _) in done {
            submit(front, slot, number);
        }
        front.queue.publish().unwrap();
    }
}

fn submit<T: Ring>(front: &mut Front<T>, slot: u16, number: &mut u64) {
    *number += 1;
    let len = 512 * (1 + *number as u32 * 7 % 32);
    front.queue.submit(slot, request::IN, *number * 13 % (BAD.start - 64), Data::FromDevice(len));
}

/// The log comes on under load, moves to another file, and is read in passes, as QEMU does it.
fn migrate<T: Ring>() {
    let mut front = Front::<T>::connect(true);
    front.start();
    front.fill();
    let mut number = 0;
    for attempt in 0..5 {
        run(&mut front, 20, &mut number);
        // Requests are in flight. Their data may arrive after the first copy of all memory.
        let mut log = front.new_log();
        front.features(true, true);
        assert_eq!(front.log_used(true, front.queue.ring.addresses().used), Some(words(&[0])));
        let mut target = front.snapshot();
        for pass in 0..4 {
            let done = front.wait(SLOTS.into());
            assert_eq!(done.len(), usize::from(SLOTS));
            run(&mut front, 50, &mut number);
            if pass == 1 {
                let old = std::mem::replace(&mut log, front.new_log());
                copy(&front, &mut target, old.take());
            }
            let marked = log.take();
            copy(&front, &mut target, marked);
        }
        let base = front.connection.stop_ring(0).unwrap();
        let marked = log.take();
        copy(&front, &mut target, marked);
        // The guest's processor writes these pages, and QEMU logs them by itself.
        let addresses = front.queue.ring.addresses();
        let of_descriptors = addresses.desc / PAGE..=(addresses.desc / PAGE + 1);
        copy(&front, &mut target, of_descriptors);
        let driver = [addresses.avail, front.status_address(0)];
        copy(&front, &mut target, driver.map(|addr| addr / PAGE));
        let source = front.snapshot();
        let differ: Vec<_> = (0..source.len() / PAGE as usize)
            .filter(|page| {
                let at = page * PAGE as usize..(page + 1) * PAGE as usize;
                source[at.clone()] != target[at]
            })
            .collect();
        assert!(differ.is_empty(), "attempt {attempt}: pages {differ:?} differ");
        // The migration fails: the source goes on, with the requests that it had not taken.
        front.features(false, true);
        front.log_used(false, 0).unwrap();
        front.connection.set_ring(&front.queue.setup(), base, &front.memory).unwrap();
        front.connection.enable(0, true).unwrap();
        front.wait(SLOTS.into());
    }
}

#[test]
fn memory_is_copied_while_a_split_ring_runs() {
    migrate::<SplitRing>();
}

#[test]
fn memory_is_copied_while_a_packed_ring_runs() {
    migrate::<PackedRing>();
}
