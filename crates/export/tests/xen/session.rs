//! A session of the front end: how it reads the offer, and what it requests.

use blockyard_driver::xen::{Plan, Session, Terms, operation, status};

use crate::guest::{LIMIT, Setup};

#[test]
fn a_session_reads_the_offer_and_requests_no_more() {
    let setup = Setup::new(false);
    let _export = setup.start();
    let plan =
        Plan { terms: Terms { queues: 2, ..Terms::PLAIN }, ..Plan::new(1, 2, 100 << 10, true) };
    let mut session = Session::start(&setup.machine, 7, 51712, &plan).unwrap();
    let offer = session.offer;
    assert_eq!(
        (offer.sectors, offer.sector_size, offer.max_queues, offer.max_ring_page_order),
        (32768, 512, 4, 4)
    );
    assert!(offer.flush && offer.barrier && offer.discard && offer.persistent && !offer.read_only);
    let queue = &mut session.queues[1];
    let (len, mut back) = (70 << 10, vec![0; 70 << 10]);
    queue.write_data(0, &vec![0x5a; len]);
    assert_eq!(queue.call(operation::WRITE, 8, len as u32, LIMIT).unwrap(), status::OK);
    queue.write_data(0, &vec![0; len]);
    assert_eq!(queue.call(operation::READ, 8, len as u32, LIMIT).unwrap(), status::OK);
    queue.read_data(0, &mut back);
    assert!(back.iter().all(|byte| *byte == 0x5a));
    assert_eq!(queue.call(operation::FLUSH, 0, 0, LIMIT).unwrap(), status::OK);
    // The front end itself refuses a plan that exceeds the offer.
    for (plan, part) in [
        (Plan::new(5, 32, 4096, false), "5 queues are too many: the back end has at most 4"),
        (Plan::new(1, 1024, 4096, false), "1024 requests in flight"),
        (Plan::new(1, 1, 2 << 20, false), "the back end takes at most 256 pages"),
    ] {
        let setup = Setup::new(false);
        let _export = setup.start();
        let error = Session::start(&setup.machine, 7, 51712, &plan).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
