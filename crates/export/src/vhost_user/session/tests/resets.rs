//! A device that is reset while its in-flight region has unanswered chains.

use blockyard_driver::PackedRing;

use super::*;

fn serves_a_fresh_ring<R: Ring>() {
    let mut front = Front::<R>::of_ring(false);
    front.start(Some(event()), true);
    front.read();
    {
        // A chain that was not answered. Its descriptors are not in the fresh ring.
        let session = front.session();
        let region = session.inflight.as_ref().unwrap();
        let mut part = region.queue(0, front.is_packed()).unwrap().unwrap();
        if front.is_packed() {
            part.taken_packed(&[[0xff; 16]]);
        } else {
            part.taken_split(SIZE - 1);
        }
    }
    let features = front.session().state.features;
    assert_eq!(front.send(Req::RESET_DEVICE, &[], &[]), DONE);
    front.ring = R::new(&mut front.memory, options(false)).unwrap();
    assert_eq!(front.send(Req::SET_FEATURES, &words(&[features]), &[]), DONE);
    front.set_up(Some(event()));
    (0..3).for_each(|_| front.read());
}

#[test]
fn a_fresh_ring_after_a_reset_repeats_no_chain_of_the_old_one() {
    serves_a_fresh_ring::<SplitRing>();
    serves_a_fresh_ring::<PackedRing>();
}
