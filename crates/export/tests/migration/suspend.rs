//! Rings are stopped without a drain: requests that have not begun stay in the in-flight region.

use std::os::fd::AsFd;

use blockyard_driver::ring::Ring;
use blockyard_driver::{Data, Inflight, PackedRing, SplitRing, feature, request, status};
use vhost::vhost_user::message::{FrontendReq as R, VhostUserProtocolFeatures as P};

use crate::front::*;

const INFLIGHT: P = P::GET_VRING_BASE_INFLIGHT;
const SKIP_DRAIN: P = P::from_bits_retain(1 << 23);
/// GET_VRING_BASE_SKIP_DRAIN.
const STOP_NOW: u32 = 45;
const LEN: u32 = 4096;

/// Accepts more protocol features, and sends an in-flight region.
fn prepare<T: Ring>(front: &mut Front<T>, more: P) -> Inflight {
    let accepted = front.connection.protocol | more;
    let answer = front.ask(R::SET_PROTOCOL_FEATURES, &words(&[accepted.bits()]), &[]);
    assert_eq!(answer, Some(words(&[0])));
    let inflight = front.connection.inflight(1, ENTRIES).unwrap().unwrap();
    front.connection.set_inflight(&inflight).unwrap();
    inflight
}

fn sector_of(slot: u16) -> u64 {
    u64::from(slot) * 16
}

/// Submits writes, each of a content of its own, and waits until the device has taken them.
fn submit<T: Ring>(front: &mut Front<T>, inflight: &Inflight) {
    for slot in 0..SLOTS {
        front.queue.write_data(slot, &vec![slot as u8 + 1; LEN as usize]);
        front.queue.submit(slot, request::OUT, sector_of(slot), Data::ToDevice(LEN));
    }
    front.queue.publish().unwrap();
    front.queue.kick().unwrap();
    let is_packed = T::FEATURES & feature::RING_PACKED != 0;
    let mut region = vec![0; inflight.layout.mmap_size as usize];
    let start = std::time::Instant::now();
    loop {
        rustix::io::pread(inflight.file.as_fd(), &mut region, 0).unwrap();
        // Both layouts: entries begin with a byte that is 1 while the chain is in flight.
        let (header, entry) = if is_packed { (32, 32) } else { (16, 16) };
        let taken = region[header..header + 128 * entry].chunks(entry).filter(|e| e[0] == 1);
        if taken.count() == usize::from(SLOTS) {
            return;
        }
        assert!(start.elapsed() < LIMIT, "the device has not taken all requests");
        std::thread::yield_now();
    }
}

/// Restarts the ring. All requests must complete, once each, with their data on the disk.
fn completes<T: Ring>(front: &mut Front<T>, base: u32) {
    front.connection.set_ring(&front.queue.setup(), base, &front.memory).unwrap();
    front.connection.enable(0, true).unwrap();
    let mut done = front.wait(SLOTS.into());
    done.sort_unstable();
    assert_eq!(done, (0..SLOTS).map(|slot| (slot, status::OK)).collect::<Vec<_>>());
    for slot in 0..SLOTS {
        let mut bytes = vec![0; LEN as usize];
        let data = Data::FromDevice(LEN);
        front.queue.call(request::IN, sector_of(slot), data, &mut bytes, LIMIT).unwrap();
        assert_eq!(bytes, vec![slot as u8 + 1; LEN as usize], "slot {slot}");
    }
    assert!(front.queue.reap().unwrap().is_none());
}

/// Stops the ring while no request of the disk may begin. Returns the base.
fn stop<T: Ring>(front: &Front<T>, message: u32) -> u32 {
    let answer = front.ask_number(message, &words(&[0]), &[]).expect("the ring stops");
    assert_eq!(answer[..4], [0; 4]);
    u32::from_ne_bytes(answer[4..].try_into().unwrap())
}

fn suspended<T: Ring>(more: P, message: u32) {
    let mut front = Front::<T>::connect(true);
    let inflight = prepare(&mut front, more);
    front.start();
    // The source goes on: the migration failed.
    let held = front.disk.quiesce("a test").unwrap();
    submit(&mut front, &inflight);
    let base = stop(&front, message);
    drop(held);
    completes(&mut front, base);
    // The destination goes on, with the region's content.
    let held = front.disk.quiesce("a test").unwrap();
    submit(&mut front, &inflight);
    let base = stop(&front, message);
    drop(held);
    front.connection = connect_again(&front, &inflight);
    completes(&mut front, base);
    front.connection.stop_ring(0).unwrap();
}

fn connect_again<T: Ring>(front: &Front<T>, inflight: &Inflight) -> blockyard_driver::Connection {
    let _ = front.connection.socket().shutdown(std::net::Shutdown::Both);
    let mut connection = connect::<T>(&front.socket);
    connection.set_memory(&front.memory).unwrap();
    connection.set_inflight(inflight).unwrap();
    connection
}

#[test]
fn requests_that_have_not_begun_are_suspended() {
    suspended::<SplitRing>(INFLIGHT | SKIP_DRAIN, STOP_NOW);
    suspended::<PackedRing>(INFLIGHT | SKIP_DRAIN, STOP_NOW);
}

/// QEMU 11.0 has no message of its own.
#[test]
fn the_older_protocol_feature_alone_suspends_too() {
    suspended::<SplitRing>(INFLIGHT, R::GET_VRING_BASE as u32);
}

#[test]
fn without_an_in_flight_region_a_stop_drains() {
    let mut front = Front::<SplitRing>::connect(true);
    let accepted = front.connection.protocol | INFLIGHT | SKIP_DRAIN;
    front.ask(R::SET_PROTOCOL_FEATURES, &words(&[accepted.bits()]), &[]).unwrap();
    front.start();
    for slot in 0..SLOTS {
        front.queue.submit(slot, request::IN, 0, Data::FromDevice(LEN));
    }
    front.queue.publish().unwrap();
    stop(&front, STOP_NOW);
    // What was taken is answered. Nothing is in flight.
    while front.queue.reap().unwrap().is_some() {}
}

#[test]
fn the_message_must_be_negotiated() {
    let mut front = Front::<SplitRing>::connect(true);
    prepare(&mut front, INFLIGHT);
    front.start();
    assert_eq!(front.ask_number(STOP_NOW, &words(&[0]), &[]), None, "the session ends");
}
