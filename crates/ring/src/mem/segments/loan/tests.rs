use std::pin::pin;
use std::sync::Weak;
use std::task::Context;
use std::thread;

use super::super::lent::Lent;
use super::*;
use crate::mem::memory::GuestMemory;

/// Returns segments in two regions of a guest, and a region that shows when they are released.
fn guest() -> (Segments, Weak<Region>) {
    let region = |at| Region::memfd("test", at, at, 0x10000).unwrap().0;
    let memory = GuestMemory::default().with(region(0)).unwrap().with(region(0x20000)).unwrap();
    let mut segments = Segments::default();
    segments.reset(&Rc::new(memory));
    segments.push_guest(0x1000, 0x100).unwrap();
    segments.push_guest(0x20200, 0x100).unwrap();
    let Owner::Guest(memory) = &segments.parts().owner else { panic!("it is a guest's memory") };
    let region = Arc::downgrade(&memory.regions_of(&segments.parts().iov)[1]);
    (segments, region)
}

fn bytes(segments: &Segments) -> Vec<u8> {
    let mut bytes = vec![0; segments.len()];
    segments.copy_out(0, &mut bytes);
    bytes
}

/// Polls once.
fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Fills lent memory on another thread: each piece of 0x80 bytes has its number.
fn number(lent: Lent) {
    let work = move || {
        for (number, piece) in (1..).zip(lent.pieces(0x80)) {
            piece.copy_from(0, &vec![number; piece.len()]).unwrap();
        }
        assert_eq!(lent.slice(0x7f, 2).to_vec().unwrap(), [1, 2]);
        lent.slice(0x180, 0x80).segments().unwrap().zero(0, 0x80);
    };
    thread::spawn(work).join().unwrap();
}

const NUMBERED: [u8; 4] = [1, 2, 3, 0];

#[test]
fn the_memory_of_a_guest_is_lent_itself() {
    let (segments, region) = guest();
    assert!(segments.is_lendable());
    segments.copy_in(0, &[9; 0x200]);
    // The guest sees changes at once, as long as it has the memory.
    let view = segments.slice(0, 0x200);
    let loan = segments.lend(false);
    number(loan.lent());
    assert_eq!(bytes(&view).chunks(0x80).map(|piece| piece[0]).collect::<Vec<_>>(), NUMBERED);
    drop(view);
    let lent = loan.lent();
    let segments = poll(pin!(loan.end(true))).unwrap();
    assert_eq!(segments.len(), 0x200);
    assert_eq!(lent.to_vec().unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert_eq!(lent.copy_from(0, b"late").unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(segments);
    assert!(region.upgrade().is_none(), "a loan that has ended keeps no memory");
}

#[test]
fn other_segments_are_copied() {
    for is_filled in [false, true] {
        let segments = Segments::from_bytes(&[9; 0x200]);
        assert!(!segments.is_lendable());
        let loan = segments.lend(true);
        assert_eq!(loan.lent().to_vec().unwrap(), [9; 0x200]);
        number(loan.lent());
        let segments = poll(pin!(loan.end(is_filled))).unwrap();
        let pieces: Vec<_> = bytes(&segments).chunks(0x80).map(|piece| piece[0]).collect();
        assert_eq!(pieces, if is_filled { NUMBERED } else { [9; 4] });
    }
    let loan = Segments::from_bytes(&[9; 8]).lend(false);
    assert_eq!(loan.lent().to_vec().unwrap(), [0; 8], "data that nothing needs are not copied");
}

#[test]
fn the_end_waits_for_operations() {
    let (segments, region) = guest();
    let loan = segments.lend(false);
    let lent = loan.lent();
    let operation = lent.slice(0x100, 0x10).segments().unwrap();
    {
        let mut end = pin!(loan.end(false));
        assert!(poll(end.as_mut()).is_none());
        assert!(lent.segments().is_err(), "no later operation begins");
        assert!(poll(end.as_mut()).is_none());
        drop(operation);
        assert!(poll(end.as_mut()).is_some());
    }
    assert!(region.upgrade().is_none());
}

#[test]
fn memory_stays_for_an_operation_whose_request_has_gone() {
    let (segments, region) = guest();
    let loan = segments.lend(false);
    let operation = loan.lent().segments().unwrap();
    drop(loan);
    operation.copy_in(0, &[1; 0x200]);
    assert!(region.upgrade().is_some());
    drop(operation);
    assert!(region.upgrade().is_none());
    // A copy is not waited for, if nothing needs it.
    let loan = Segments::from_bytes(&[9; 8]).lend(true);
    let operation = loan.lent().segments().unwrap();
    assert!(poll(pin!(loan.end(false))).is_some());
    operation.copy_in(0, &[1; 8]);
}
