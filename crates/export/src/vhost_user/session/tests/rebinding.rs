//! A driver of User Mode Linux that ends and begins again. At its end the front end disables the
//! ring and sends no GET_VRING_BASE, and the guest frees the ring.

use blockyard_driver::PackedRing;

use super::*;

/// What the guest writes into the memory of the ring that it has freed.
const FREED: u8 = 0x5a;

/// Parts of a freed ring: descriptors, driver's part, device's part.
struct Freed([blockyard_ring::SharedSlice; 3]);

impl Freed {
    fn is_untouched(&self) -> bool {
        self.0.iter().all(|part| part.copy_out::<4>(0) == [FREED; 4])
    }
}

impl<R: Ring> Front<R> {
    /// Returns a front end without EVENT_IDX that has read three sectors.
    fn busy(has_region: bool) -> Self {
        let mut front = Front::<R>::of_ring(false);
        front.start(Some(event()), has_region);
        (0..3).for_each(|_| front.read());
        front
    }

    /// Disables the ring, and frees its memory.
    fn unbind(&mut self) -> Freed {
        assert_eq!(self.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
        let at = self.ring.addresses();
        let parts = [at.desc, at.avail, at.used].map(|part| self.memory.slice(part, 4, 4).unwrap());
        parts.iter().for_each(|part| part.copy_in(0, [FREED; 4]));
        self.ring = R::new(&mut self.memory, options(false)).unwrap();
        Freed(parts)
    }

    /// Lets another session continue this one's state. `died`: as after the death of a server.
    fn hand_over(&mut self, died: bool) {
        let mut state = self.session().release();
        if died {
            state.vrings[0].is_base_lost = true;
            state.vrings[0].is_base_valid = false;
        }
        *self.session() = session(&self.export, state).unwrap();
    }
}

fn both(test: fn(bool), packed: fn(bool)) {
    for has_region in [false, true] {
        test(has_region);
        packed(has_region);
    }
}

fn begins_again<R: Ring>(has_region: bool) {
    let mut front = Front::<R>::busy(has_region);
    for _ in 0..2 {
        let freed = front.unbind();
        let features = front.session().state.features;
        assert_eq!(front.send(Req::SET_FEATURES, &words(&[features]), &[]), DONE);
        front.set_up(Some(event()));
        (0..3).for_each(|_| front.read());
        assert!(freed.is_untouched(), "in-flight region: {has_region}");
    }
}

#[test]
fn a_ring_that_was_disabled_begins_again_at_the_base_that_is_set() {
    both(begins_again::<SplitRing>, begins_again::<PackedRing>);
}

fn wakes<R: Ring>(has_region: bool) {
    let mut front = Front::<R>::busy(has_region);
    let freed = front.unbind();
    // Each message runs on the ring's reactor. The queue runs between two of them.
    for _ in 0..3 {
        assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    }
    assert!(freed.is_untouched());
    front.session().release();
    assert!(freed.is_untouched(), "at the end of the session");
}

#[test]
fn a_disabled_ring_gets_no_kick_setting() {
    both(wakes::<SplitRing>, wakes::<PackedRing>);
}

fn changes_servers<R: Ring>(has_region: bool) {
    for died in [false, true] {
        let mut front = Front::<R>::busy(has_region);
        let freed = front.unbind();
        assert_eq!(front.send(Req::SET_VRING_BASE, &of_ring(0, 0), &[]), DONE);
        front.hand_over(died);
        assert_eq!(front.send(Req::SET_VRING_ADDR, &front.addresses(), &[]), DONE);
        front.kick_off(Some(event()));
        (0..3).for_each(|_| front.read());
        assert!(freed.is_untouched());
    }
}

#[test]
fn another_server_knows_the_base_of_a_disabled_ring() {
    both(changes_servers::<SplitRing>, changes_servers::<PackedRing>);
}

fn goes_on<R: Ring>(has_region: bool) {
    let mut front = Front::<R>::busy(has_region);
    let kick = |front: &mut Front<R>| {
        front.kick_off(Some(event()));
        front.read();
    };
    // A base that a front end sets while the ring is enabled has no effect.
    assert_eq!(front.send(Req::SET_VRING_BASE, &of_ring(0, 0), &[]), DONE);
    kick(&mut front);
    // A ring that is only disabled and enabled goes on where it was.
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    kick(&mut front);
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    assert_eq!(front.send(Req::SET_VRING_BASE, &of_ring(0, 0), &[]), DONE);
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 1), &[]), DONE);
    kick(&mut front);
    // The ring's own position changes nothing.
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    let base = front.ring.base();
    assert_eq!(front.send(Req::SET_VRING_BASE, &of_ring(0, base), &[]), DONE);
    kick(&mut front);
    // GET_VRING_BASE of a disabled ring: QEMU stops a device so.
    assert_eq!(front.send(Req::SET_VRING_ENABLE, &of_ring(0, 0), &[]), DONE);
    let base = front.ring.base();
    assert_eq!(
        front.send(Req::GET_VRING_BASE, &of_ring(0, 0), &[]),
        Some(u64::from(base) << 32),
        "in-flight region: {has_region}"
    );
    assert_eq!(front.send(Req::SET_VRING_BASE, &of_ring(0, base), &[]), DONE);
    let call = front.call.try_clone().unwrap();
    assert_eq!(front.send(Req::SET_VRING_CALL, &words(&[0]), &[&call]), DONE);
    kick(&mut front);
}

#[test]
fn a_ring_goes_on_where_it_was_if_it_has_not_ended() {
    both(goes_on::<SplitRing>, goes_on::<PackedRing>);
}
