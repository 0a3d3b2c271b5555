//! What a device decides at once, and not only at the end of a control period.

use super::period::take_stats;
use super::*;
use crate::{DeviceProfile, Host, Knobs, ReactorShare};

const NOW: Time = 1_000_000_000;

fn accounts(device: &Device) -> Vec<Arc<Account>> {
    device.state().accounts.all().cloned().collect()
}

/// Returns two disks that share a device.
fn neighbours() -> [ReactorShare; 2] {
    let host = Host::default();
    let device = Some(("d", &DeviceProfile::FLASH));
    [(); 2].map(|()| host.share(device, None, &Knobs::default()).on_reactor())
}

#[test]
fn the_window_closes_as_soon_as_a_disk_begins_to_work_beside_another() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let _ = one.ask(NOW, &SMALL).unwrap();
    let open = device.window();
    let _ = two.ask(NOW, &SMALL).unwrap();
    assert!(device.window() < open / 2, "{} of {open}", device.window());
}

#[test]
fn a_wait_that_is_cancelled_ends_the_probe() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        let _ = disk.ask(NOW, &SMALL).unwrap();
    }
    let accounts = accounts(device);
    accounts[1].is_over_share.store(true, Relaxed);
    device.begin_probe(&mut device.state(), NOW);
    assert!(device.state().probe.is_on() && accounts[1].held.load(Relaxed));
    one.withdraw(NOW + 1, &SMALL);
    assert!(!device.state().probe.is_on() && !accounts[1].held.load(Relaxed));
}

#[test]
fn a_probe_that_gives_up_counts_no_samples_of_an_earlier_one() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        let _ = disk.ask(NOW, &SMALL).unwrap();
    }
    accounts(device)[1].is_over_share.store(true, Relaxed);
    device.quiet_samples.store(100, Relaxed);
    let mut state = device.state();
    device.begin_probe(&mut state, NOW);
    let deadline = state.probe.deadline(NOW, state.window.period()).unwrap();
    device.step_probe(&mut state, deadline);
    assert!(!state.probe.is_on() && !state.probe.may_begin(deadline));
}

#[test]
fn a_disk_that_takes_much_more_than_its_share_is_over_it_without_a_wait() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let grants = [&one, &two].map(|disk| disk.ask(NOW, &SMALL).unwrap());
    one.done(NOW, grants[0]);
    two.done(NOW, grants[1]);
    for _ in 0..9 {
        one.done(NOW, one.ask(NOW, &SMALL).unwrap());
    }
    let stats = take_stats(&device.state(), NOW, 1_000_000, device.max_held_ns);
    let is_over: Vec<_> = accounts(device).iter().map(|a| a.is_over_share()).collect();
    assert_eq!(is_over, [true, false]);
    assert_eq!((stats.operations, stats.within_operations), (11, 1));
}

#[test]
fn a_completion_long_after_the_last_one_ends_a_stall() {
    const PERIOD: u64 = DeviceClass::FLASH.period_ns;
    let [one, _] = neighbours();
    let device = one.device().unwrap();
    one.done(NOW + 100_000, one.ask(NOW, &SMALL).unwrap());
    let grant = one.ask(NOW + 100_000, &SMALL).unwrap();
    // The first period has a completion, and the second one has none.
    device.end_period(NOW + PERIOD);
    device.end_period(NOW + 2 * PERIOD);
    assert_eq!(device.stall_at.load(Relaxed), NOW + 4 * PERIOD);
    one.done(NOW + 5 * PERIOD, grant);
    assert_eq!(device.stalled_until.load(Relaxed), NOW + 5 * PERIOD);
}

/// A disk that reads only what its image knows would else make every other disk look slow.
#[test]
fn an_operation_that_left_the_device_idle_teaches_nothing() {
    let [one, _two] = neighbours();
    let device = one.device().unwrap();
    for _ in 0..100 {
        one.done(NOW + 90_000, one.ask(NOW, &SMALL).unwrap());
    }
    let class = OperationClass::of(SMALL.kind, SMALL.bytes, 0);
    let before = device.baseline.expected(class);
    assert!(before > 0);
    for _ in 0..100 {
        let mut grant = one.ask(NOW + 90_000, &SMALL).unwrap();
        grant.set_idle();
        one.done(NOW + 90_000, grant);
    }
    assert_eq!(device.baseline.expected(class), before);
}

/// The operation takes a hundred times as long as its cost says. Its disk begins no other while it
/// is in flight, and pauses for as long afterwards.
#[test]
fn a_large_operation_of_a_disk_in_the_queue_takes_a_turn() {
    let [one, _two] = neighbours();
    let device = one.device().unwrap();
    device.leaves_gaps.store(true, Relaxed);
    let account = &accounts(device)[0];
    account.set_due(0.5, 1.0);
    let cost = 2 * device.max_held_ns;
    assert!(device.count_large(account, cost, &SMALL));
    device.begin_turn(account, NOW, cost, &SMALL);
    let service = 100 * cost;
    assert!(device.is_in_gap(account, NOW + service));
    let before = account.start_tag.load(Relaxed);
    let grant = Grant { began: NOW, is_queued: true, cost_ns: cost, ..large() };
    device.end_turn(account, NOW + service, &grant);
    assert!(device.is_in_gap(account, NOW + 2 * service - 1));
    assert!(!device.is_in_gap(account, NOW + 2 * service));
    let charged = account.start_tag.load(Relaxed).wrapping_sub(before);
    assert_eq!(charged, account.virtual_cost(service - cost));
}

/// An operation of 0.3 s is followed by a gap of 0.3 s, although the longest gap after a short one
/// is less.
#[test]
fn the_gap_after_a_long_operation_gives_the_others_as_much_time() {
    let [one, _two] = neighbours();
    let device = one.device().unwrap();
    device.leaves_gaps.store(true, Relaxed);
    let account = &accounts(device)[0];
    account.set_due(0.5, 1.0);
    let end = NOW + 300_000_000;
    account.large_in_flight.store(1, Relaxed);
    let grant = Grant { began: NOW, is_queued: true, ..large() };
    device.end_turn(account, end, &grant);
    assert!(device.is_in_gap(account, end + 299_999_999));
    assert!(!device.is_in_gap(account, end + 300_000_000));
    let discard = Operation { kind: OperationKind::Discard, ..SMALL };
    assert!(device.is_large(1, &discard) && !device.is_large(1, &SMALL));
}

fn large() -> Grant {
    Grant { is_large: true, ..Grant::default() }
}

/// Otherwise the disk would begin nothing for 10 s when turns begin again.
#[test]
fn a_turn_ends_also_if_turns_have_ended_meanwhile() {
    let [one, _two] = neighbours();
    let device = one.device().unwrap();
    let account = &accounts(device)[0];
    for grant in [Grant { is_queued: true, ..large() }, large()] {
        device.leaves_gaps.store(true, Relaxed);
        account.large_in_flight.store(2, Relaxed);
        device.begin_turn(account, NOW, 2 * device.max_held_ns, &SMALL);
        device.end_turn(account, NOW + 1, &grant);
        assert!(device.is_in_gap(account, NOW + 1), "another one is in flight");
        device.leaves_gaps.store(!grant.is_queued, Relaxed);
        device.end_turn(account, NOW + 1, &grant);
        device.leaves_gaps.store(true, Relaxed);
        assert!(!device.is_in_gap(account, NOW + 1));
    }
}

/// A discard of many entries of an image leaves its room. It ends its turn once.
#[test]
fn a_large_operation_that_leaves_its_room_is_counted_once() {
    let [one, _two] = neighbours();
    let discard = Operation { kind: OperationKind::Discard, ..SMALL };
    let mut grant = one.ask(NOW, &discard).unwrap();
    let account = &accounts(one.device().unwrap())[0];
    assert_eq!(account.large_in_flight.load(Relaxed), 1);
    one.leave_room(NOW, &mut grant);
    one.done(NOW, grant);
    assert_eq!(account.large_in_flight.load(Relaxed), 0);
}

/// What a disk was charged at its old weight is worth less at a higher one.
#[test]
fn a_higher_weight_shortens_the_lead_of_a_disk() {
    let [one, _two] = neighbours();
    let account = &accounts(one.device().unwrap())[0];
    let (device, lead) = (u64::MAX - 1_000, 1_000_000);
    account.set_weight(100.0, device);
    account.start_tag.store(device.wrapping_add(lead), Relaxed);
    account.set_weight(400.0, device);
    assert_eq!(account.start_tag.load(Relaxed).wrapping_sub(device), lead / 4);
    // A disk that is behind has no lead.
    account.start_tag.store(device.wrapping_sub(lead), Relaxed);
    account.set_weight(100.0, device);
    assert_eq!(device.wrapping_sub(account.start_tag.load(Relaxed)), lead);
}

/// Its operation waits with the tag of the old weight.
#[test]
fn a_higher_weight_reaches_an_operation_that_waits() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let _ = one.ask(NOW, &SMALL).unwrap();
    let of_two: Vec<_> = std::iter::from_fn(|| two.ask(NOW, &SMALL)).collect();
    let tokens: [Arc<WaitToken>; 2] = Default::default();
    let virtual_time = device.virtual_time.0.load(SeqCst);
    let waits = [(&one, &tokens[0], 1_u64 << 40), (&two, &tokens[1], 1 << 39)];
    for (at, (disk, token, lead)) in waits.into_iter().enumerate() {
        accounts(device)[at].start_tag.store(virtual_time.wrapping_add(lead), Relaxed);
        disk.wait(NOW, &SMALL, token, Waker::noop());
        assert!(!token.is_granted(), "the window is full");
    }
    one.set(&Knobs { weight: 400, ..Knobs::default() }, NOW);
    let granted = || tokens.each_ref().map(|token| token.is_granted());
    for grant in of_two {
        two.done(NOW, grant);
        if granted() != [false; 2] {
            break;
        }
    }
    assert_eq!(granted(), [true, false], "its lead is a quarter of what it was");
}

/// A control period of this device is as long as a disk may rest before it leaves its part of the
/// weight to the others.
#[test]
fn the_busy_disks_of_a_group_divide_its_weight_on_a_rotational_device() {
    const STEP: u64 = DeviceClass::ROTATIONAL.period_ns / 10;
    let host = Host::default();
    let (device, group) = (Some(("d", &DeviceProfile::ROTATIONAL)), Knobs::default());
    let members =
        [(); 2].map(|()| host.share(device, Some(("g", &group)), &Knobs::default()).on_reactor());
    let work = |steps: std::ops::Range<u64>, members: &[ReactorShare]| {
        for now in steps.map(|step| NOW + step * STEP) {
            for member in members {
                if let Some(grant) = member.ask(now, &SMALL) {
                    member.done(now, grant);
                }
            }
        }
    };
    // Control periods are short at first.
    work(0..400, &members);
    assert_eq!(members.each_ref().map(|member| member.figures().weight), [50.0; 2]);
    // One of them rests.
    work(400..500, &members[..1]);
    assert_eq!(members[0].figures().weight, 100.0);
}

/// A drain admits operations without a limit. Other disks must not wait for their end.
#[test]
fn operations_that_a_drain_admits_take_no_room_of_other_disks() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let mut of_two = vec![two.ask(NOW, &SMALL).unwrap()];
    let of_one: Vec<_> = std::iter::from_fn(|| one.ask(NOW, &SMALL)).collect();
    let tokens: Vec<Arc<WaitToken>> = (0..1000).map(|_| Arc::default()).collect();
    for token in &tokens {
        one.wait(NOW, &SMALL, token, Waker::noop());
    }
    one.release(NOW);
    let mut forced: Vec<_> = (0..1000).map(|_| one.force(NOW, &SMALL)).collect();
    assert!(tokens.iter().all(|token| token.take_grant()));
    forced.extend(tokens.iter().map(|token| one.granted(NOW, NOW, &SMALL, token)));
    of_one.into_iter().for_each(|grant| one.done(NOW, grant));

    let beside = two.ask(NOW, &SMALL).unwrap();
    assert!(!beside.was_alone, "it does not show what the device does without load");
    of_two.push(beside);
    of_two.into_iter().for_each(|grant| two.done(NOW, grant));
    forced.into_iter().for_each(|grant| one.done(NOW, grant));
    let left = [&device.in_flight.0, &device.queued_in_flight, &device.forced];
    assert_eq!(left.map(|count| count.load(SeqCst)), [0; 3]);
    assert_eq!(accounts(device)[0].in_flight.get(), (0, 0));
}

/// What a drain admits slows down the operations that fill the window. They must not keep another
/// disk waiting for as long.
#[test]
fn a_disk_with_nothing_in_flight_does_not_wait_while_a_drain_is_on() {
    let [one, two] = neighbours();
    let first = two.ask(NOW, &SMALL).unwrap();
    let of_one: Vec<_> = std::iter::from_fn(|| one.ask(NOW, &SMALL)).collect();
    let of_two: Vec<_> = std::iter::from_fn(|| two.ask(NOW, &SMALL)).collect();
    let tokens: [Arc<WaitToken>; 3] = Default::default();
    let waits = |token: &Arc<WaitToken>| two.wait(NOW, &SMALL, token, Waker::noop());
    let granted = || tokens.each_ref().map(|token| token.is_granted());
    waits(&tokens[0]);
    for grant in of_two.into_iter().chain([first]) {
        two.done(NOW, grant);
    }
    assert_eq!(granted(), [false; 3], "the other disk's operations fill the window");
    waits(&tokens[1]);
    // The drain begins.
    let forced = one.force(NOW, &SMALL);
    one.release(NOW);
    assert_eq!(granted(), [true, false, false]);
    waits(&tokens[2]);
    assert_eq!(granted(), [true, false, false], "one at a time");
    two.done(NOW, two.granted(NOW, NOW, &SMALL, &tokens[0]));
    assert_eq!(granted(), [true, true, false]);
    // The drain is over.
    one.done(NOW, forced);
    two.done(NOW, two.granted(NOW, NOW, &SMALL, &tokens[1]));
    assert_eq!(granted(), [true, true, false]);
    of_one.into_iter().for_each(|grant| one.done(NOW, grant));
    assert_eq!(granted(), [true; 3]);
}

/// A request that changes many entries of an image keeps the device busy for a small part of its
/// time.
#[test]
fn an_operation_that_leaves_its_room_lets_a_waiting_disk_begin() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let beside = two.ask(NOW, &SMALL).unwrap();
    let mut of_one: Vec<_> = std::iter::from_fn(|| one.ask(NOW, &SMALL)).collect();
    let token = Arc::new(WaitToken::default());
    one.wait(NOW, &SMALL, &token, Waker::noop());
    two.done(NOW, beside);
    assert!(!token.is_granted(), "the operations of the disk itself fill the window");
    of_one.iter_mut().for_each(|grant| one.leave_room(NOW, grant));
    assert!(token.take_grant());
    of_one.push(one.granted(NOW, NOW, &SMALL, &token));
    of_one.into_iter().for_each(|grant| one.done(NOW, grant));
    let left = [&device.in_flight.0, &device.queued_in_flight, &device.forced];
    assert_eq!(left.map(|count| count.load(SeqCst)), [0; 3]);
    assert_eq!(accounts(device)[0].in_flight.get(), (0, 0));
}

/// Returns the number of accounts that ten seconds of one busy disk visit, beside `idle` disks that
/// have worked before.
fn visits_beside(idle: usize, group: Option<(&str, &Knobs)>) -> u64 {
    const STEP: u64 = 1_000_000;
    let host = Host::default();
    let device = Some(("d", &DeviceProfile::FLASH));
    let disk = || host.share(device, group, &Knobs::default()).on_reactor();
    let idle: Vec<_> = (0..idle).map(|_| disk()).collect();
    let busy = [disk(), disk()];
    for disk in &idle {
        disk.done(NOW, disk.ask(NOW, &SMALL).expect("the device is idle"));
    }
    let begin = NOW + 1_000_000_000;
    let mut before = 0;
    for now in (NOW..begin + 10_000_000_000).step_by(STEP as usize) {
        if now == begin {
            before = busy[0].device().unwrap().state().accounts.visits.get();
        }
        // The second disk works once a second. Each time it begins to work.
        let works = [true, now % 1_000_000_000 == 0];
        for (disk, _) in busy.iter().zip(works).filter(|(_, works)| *works) {
            disk.done(now, disk.ask(now, &SMALL).expect("the device is idle"));
        }
    }
    let visits = busy[0].device().unwrap().state().accounts.visits.get();
    visits - before
}

/// 4,000 idle disks once made a request take 28 us instead of 16.
#[test]
fn idle_disks_cost_a_control_period_nothing() {
    for group in [None, Some(("g", &Knobs::default()))] {
        let alone = visits_beside(0, group);
        assert!((500 * 4..500 * 40).contains(&alone), "{alone} visits in 500 periods");
        for idle in [1, 100, 4_000] {
            let more = visits_beside(idle, group).saturating_sub(alone);
            // Each idle disk becomes absent once.
            assert!(more <= idle as u64, "{idle} idle disks: {more} visits more");
        }
    }
}

/// A disk that was charged for work beyond its share must not lose this debt by a rest.
#[test]
fn a_rest_forgets_no_lead_on_a_shared_device() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        disk.done(NOW, disk.ask(NOW, &SMALL).unwrap());
    }
    let account = &accounts(device)[0];
    let lead = 1 << 40;
    account.start_tag.fetch_add(lead, Relaxed);
    let tag = account.start_tag.load(Relaxed);
    for second in 1..5 {
        let now = NOW + second * 1_000_000_000;
        two.done(now, two.ask(now, &SMALL).unwrap());
    }
    assert!(!account.awake.load(Relaxed) && account.is_active.load(Relaxed));
    assert_eq!(account.start_tag.load(Relaxed), tag);
    // The device's virtual time has caught up with it.
    device.virtual_time.0.store(tag.wrapping_add(1), SeqCst);
    two.done(NOW + 5_000_000_000, two.ask(NOW + 5_000_000_000, &SMALL).unwrap());
    assert!(!account.is_active.load(Relaxed));
}

/// Tags wrap around. A disk that rested for hours would else compare as ahead for hours.
#[test]
fn a_disk_that_rested_for_long_begins_at_the_virtual_time() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        disk.done(NOW, disk.ask(NOW, &SMALL).unwrap());
    }
    let now = NOW + 1_000_000_000;
    two.done(now, two.ask(now, &SMALL).unwrap());
    let account = &accounts(device)[0];
    assert!(!account.is_active.load(Relaxed));
    let virtual_time = device.virtual_time.0.load(SeqCst).wrapping_add(3 << 62);
    device.virtual_time.0.store(virtual_time, SeqCst);
    one.done(now, one.ask(now, &SMALL).unwrap());
    let lead = account.start_tag.load(Relaxed).wrapping_sub(virtual_time);
    assert!(lead <= account.virtual_cost(device.costs.of(&SMALL)), "{lead}");
}

/// Presence decides whether operations are charged at all.
#[test]
fn a_disk_is_absent_after_ten_seconds_also_if_a_drain_gave_it_operations() {
    let [one, two] = neighbours();
    let device = two.device().unwrap();
    let work = |disk: &ReactorShare, now| disk.done(now, disk.ask(now, &SMALL).unwrap());
    work(&one, NOW);
    work(&two, NOW);
    let forced = NOW + ABSENT_NS / 2;
    work(&two, forced);
    one.done(forced, one.force(forced, &SMALL));
    for at in [DeviceClass::FLASH.period_ns, ABSENT_NS / 2, ABSENT_NS - 1] {
        work(&two, forced + at);
        assert!(device.is_shared(), "{at} ns after its last operation");
    }
    work(&two, forced + ABSENT_NS + 2 * DeviceClass::FLASH.period_ns);
    assert!(!device.is_shared());
    work(&one, forced + 2 * ABSENT_NS);
    assert!(device.is_shared());
    drop(one);
    assert_eq!(device.state().accounts.present(), 1);
}

/// The part of the window that a disk within its share holds stays its own while it waits. Else the
/// disks in the queue would share what is left, and the device would idle.
#[test]
fn a_disk_within_its_share_keeps_its_part_of_the_window_while_it_waits() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        let _ = disk.ask(NOW, &SMALL).unwrap();
    }
    let accounts = accounts(device);
    let each = device.held(device.costs.of(&SMALL));
    accounts[0].set_part(3 * each, each);
    // The queue's part is full.
    device.room.store(each, Relaxed);
    device.queued_in_flight.store(each, SeqCst);
    let tokens: [Arc<WaitToken>; 4] = Default::default();
    let waits = |disk: &ReactorShare, token| disk.wait(NOW, &SMALL, token, Waker::noop());
    waits(&one, &tokens[0]);
    assert!(tokens[0].is_granted() && !tokens[0].takes_room());
    waits(&two, &tokens[1]);
    assert!(!tokens[1].is_granted(), "it has no part of its own");
    waits(&one, &tokens[2]);
    waits(&one, &tokens[3]);
    assert!(!tokens[3].is_granted(), "its part is full");
    assert_eq!(device.queued_in_flight.load(SeqCst), each);
}
