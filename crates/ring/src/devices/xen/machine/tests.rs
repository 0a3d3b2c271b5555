use std::os::fd::AsFd;
use std::time::Instant;

use super::*;
use crate::Segments;
use crate::devices::xen::{Access, CopyBatch, CopyStatus, Grants, Host, Node, abi::PAGE};
use crate::testing::waits;

fn event(store: &mut Store, never: &OwnedFd) -> Option<String> {
    store.event(never.as_fd(), Some(Instant::now() + waits::LIMIT)).unwrap()
}

#[test]
fn transactions_are_atomic_and_watches_report_them() {
    let machine = Machine::new();
    let (mut one, mut two) = (machine.store(0).unwrap(), machine.store(1).unwrap());
    let (never, _writer) = rustix::pipe::pipe().unwrap();
    one.watch("/x", "token").unwrap();
    assert_eq!(event(&mut one, &never).as_deref(), Some("token"));
    let mut tries = 0;
    let done = one.transaction(|t| {
        tries += 1;
        t.write("/x/a/b", 1)?;
        t.set_access("/x/a", 0, Access::None, &[(1, Access::Read)])?;
        if tries == 1 {
            // Other connections do not see the changes yet. Their own change makes the transaction
            // start again.
            assert_eq!(two.read("/x/a/b").unwrap(), None);
            two.write("/y", "z").unwrap();
        }
        t.read("/x/a/b")
    });
    assert_eq!((done.unwrap().as_deref(), tries), (Some("1"), 2));
    assert_eq!(event(&mut one, &never).as_deref(), Some("token"));
    assert_eq!(two.list("/x/a").unwrap(), ["b"]);
    assert_eq!(two.list("/nothing").unwrap(), [""; 0]);
    let failed = one.transaction(|t| {
        t.write("/x/c", 1)?;
        t.make("no path")
    });
    assert_eq!(failed.unwrap_err().to_string(), "xenstore: no path: EINVAL");
    assert_eq!(two.read("/x/c").unwrap(), None);
    two.remove("/x").unwrap();
    two.remove("/x").unwrap();
    assert_eq!(event(&mut one, &never).as_deref(), Some("token"));
    assert_eq!(one.read("/x/a/b").unwrap(), None);
    one.unwatch("/x", "token").unwrap();
}

#[test]
fn a_channel_is_bound_once_and_carries_events_both_ways() {
    let machine = Machine::new();
    let domain = machine.add(3, 1).unwrap();
    let host = Host::Machine(machine.clone());
    let front = domain.channel().unwrap();
    let back = host.channel(3, front.port).unwrap();
    assert!(
        host.channel(3, front.port).is_err()
            && host.channel(3, 99).is_err()
            && host.channel(4, 1).is_err()
    );
    assert!(back.take().unwrap(), "an event is pending after binding");
    assert!(!back.take().unwrap());
    front.notify();
    front.notify();
    assert!(back.take().unwrap() && !back.take().unwrap());
    back.notify().unwrap();
    assert_eq!((front.take(), front.take()), (1, 0));
    drop(back);
    assert!(host.channel(3, front.port).is_ok());
}

fn grants() -> (Arc<Domain>, Grants) {
    let machine = Machine::new();
    let domain = machine.add(3, 4).unwrap();
    let grants = Host::Machine(machine).grants(3).unwrap();
    (domain, grants)
}

#[test]
fn pages_are_mapped_in_the_order_of_their_references() {
    let (domain, grants) = grants();
    let (first, second) = (domain.grant(2, false), domain.grant(0, false));
    let region = Arc::new(grants.map(&[first, second], true).unwrap());
    domain.memory().write(2 * PAGE, b"page 2");
    region.slice().write(PAGE, b"page 0");
    assert_eq!((&domain.memory().copy_out(0), &region.slice().copy_out(0)), (b"page 0", b"page 2"));
    // Segments keep the mapping alive, and the mapping the grant.
    let mut segments = Segments::default();
    segments.reset_regions();
    segments.push_region(&region, 2, 4).unwrap();
    segments.push_region(&region, PAGE as u64, 6).unwrap();
    assert!(segments.push_region(&region, 2 * PAGE as u64 - 1, 2).is_err());
    drop(region);
    assert!(!domain.revoke(first));
    assert_eq!(domain.mapped(), 2);
    let mut bytes = [0; 10];
    segments.copy_out(0, &mut bytes);
    assert_eq!(&bytes, b"ge 2page 0");
    segments.release();
    assert_eq!(domain.mapped(), 0);
    let counts = GrantCounts { map_calls: 1, mapped: 2, unmap_calls: 1, ..GrantCounts::default() };
    assert_eq!(domain.counts(), counts);
    assert!(domain.revoke(first) && !domain.revoke(first));
}

#[test]
fn if_one_page_cannot_be_mapped_none_is() {
    let (domain, grants) = grants();
    let (good, read_only, beyond) =
        (domain.grant(0, false), domain.grant(1, true), domain.grant(4, false));
    for (references, write) in
        [(&[good, 99][..], false), (&[good, read_only], true), (&[beyond], false), (&[], true)]
    {
        assert!(grants.map(references, write).is_err());
    }
    assert!(grants.map(&[good, read_only], false).is_ok());
    assert_eq!(domain.mapped(), 0);
}

#[test]
fn each_copy_has_its_status() {
    let (domain, grants) = grants();
    let (page, read_only) = (domain.grant(1, false), domain.grant(2, true));
    domain.memory().write(PAGE + 10, b"from guest");
    let buffer = Segments::buffer(100);
    buffer.copy_in(50, b"to guest");
    let mut batch = CopyBatch::default();
    assert!(batch.push(&grants, &buffer, 0, (page, 10, 10), false));
    assert!(batch.push(&grants, &buffer, 50, (read_only, 0, 8), true));
    assert!(batch.push(&grants, &buffer, 50, (page, 4088, 8), true));
    assert!(batch.push(&grants, &buffer, 50, (99, 0, 8), true));
    for range in [(page, 4089, 8), (page, 0, 0), (page, u16::MAX, 1)] {
        assert!(!batch.push(&grants, &buffer, 50, range, true));
    }
    grants.copy(&mut batch).unwrap();
    let good: Vec<_> = batch.statuses().map(CopyStatus::is_ok).collect();
    assert_eq!(good, [true, false, true, false]);
    let mut bytes = [0; 10];
    buffer.copy_out(0, &mut bytes);
    assert_eq!((&bytes, &domain.memory().copy_out(PAGE + 4088)), (b"from guest", b"to guest"));
    assert_eq!(domain.counts(), GrantCounts { copy_calls: 1, copied: 4, ..GrantCounts::default() });
    batch.clear();
    assert!(batch.is_empty());
}

#[test]
fn a_list_of_names_may_exceed_one_message() {
    let machine = Machine::new();
    let mut store = machine.store(0).unwrap();
    let names: Vec<_> = (1000..2000).map(|number| format!("node-{number}")).collect();
    let made =
        store.transaction(|t| names.iter().try_for_each(|name| t.make(&format!("/x/{name}"))));
    made.unwrap();
    assert_eq!(store.list("/x").unwrap(), names);
}
