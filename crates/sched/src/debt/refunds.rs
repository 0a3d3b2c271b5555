//! Refunds beside a drain on another reactor, in each order of their steps. No order leaves a debt
//! for an operation that does not begin.

use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};

use super::Debt;
use super::tests::{NOW, READ, SECOND, bps, neighbours, write};
use crate::limit::Limiter;
use crate::{DeviceProfile, Host, Knobs, ReactorShare, Share, Time, WaitToken};

/// A request on another reactor. It takes its grant as soon as it is woken, and refunds it, because
/// the disk is quiesced.
struct Interrupted(Arc<Share>, Arc<WaitToken>);

impl Interrupted {
    fn refund(&self) {
        assert!(self.1.take_grant());
        self.0.refund(NOW, &READ, self.0.granted(NOW, NOW, &READ, &self.1));
    }
}

impl Wake for Interrupted {
    fn wake(self: Arc<Self>) {
        self.refund();
    }
}

/// Cancels the wait of another request when it is woken.
struct Cancels(Arc<WaitToken>);

impl Wake for Cancels {
    fn wake(self: Arc<Self>) {
        assert!(!self.0.cancel(), "the drain has not come to it yet");
    }
}

/// Returns two disks that share a device. The operations of the first one fill the window.
fn full() -> [ReactorShare; 2] {
    let [one, two] = neighbours();
    let _ = two.ask(NOW, &READ).unwrap();
    while one.ask(NOW, &READ).is_some() {}
    [one, two]
}

/// Adds a request to the wait list of the device.
fn wait(disk: &ReactorShare, token: &Arc<WaitToken>, waker: &Waker) {
    disk.wait(NOW, &READ, token, waker);
    assert!(!token.is_granted(), "the window is full");
}

#[test]
fn a_request_that_is_interrupted_during_the_drain_leaves_no_debt() {
    let [one, _two] = full();
    let token = Arc::<WaitToken>::default();
    let waker = Waker::from(Arc::new(Interrupted(Arc::clone(&one), token.clone())));
    wait(&one, &token, &waker);
    one.release(NOW);
    assert!(!token.is_granted(), "it has taken its grant during the drain");
    assert_eq!(one.paused_until(NOW), None);
}

#[test]
fn a_request_that_is_interrupted_before_or_after_the_drain_leaves_no_debt() {
    for before in [true, false] {
        let [one, _two] = full();
        let request = Interrupted(Arc::clone(&one), Arc::default());
        wait(&one, &request.1, Waker::noop());
        if before {
            assert!(!request.1.cancel());
            one.withdraw(NOW, &READ);
        }
        one.release(NOW);
        if !before {
            assert!(one.paused_until(NOW).is_some());
            request.refund();
        }
        assert_eq!(one.paused_until(NOW), None, "before: {before}");
    }
}

#[test]
fn a_request_that_is_cancelled_during_the_drain_leaves_no_debt() {
    let [one, _two] = full();
    let (first, second) = (Interrupted(Arc::clone(&one), Arc::default()), Arc::default());
    wait(&one, &first.1, &Waker::from(Arc::new(Cancels(Arc::clone(&second)))));
    wait(&one, &second, Waker::noop());
    one.release(NOW);
    one.withdraw(NOW, &READ);
    assert!(one.paused_until(NOW).is_some(), "the first one is admitted");
    first.refund();
    assert_eq!(one.paused_until(NOW), None);
}

/// A disk without neighbours owes nothing. A refund takes off what its operation owes, whether the
/// disk has neighbours by then or not.
#[test]
fn a_refund_takes_off_what_its_operation_owes() {
    let large = write(40 << 30);
    let work = |disk: &ReactorShare, now| disk.done(now, disk.ask(now, &READ).unwrap());
    // The neighbour goes, and returns.
    let ([one, two], mut now) = (neighbours(), NOW);
    let grant = one.force(now, &large);
    assert!(one.paused_until(now).unwrap() > now + 30 * SECOND);
    while one.has_neighbours() {
        now += SECOND / 2;
        assert!(now < NOW + 20 * SECOND, "the neighbour counts as present");
        if let Some(grant) = one.ask(now, &READ) {
            one.done(now, grant);
        }
    }
    one.refund(now, &large, grant);
    work(&two, now);
    assert!(one.has_neighbours());
    assert_eq!(one.paused_until(now), None);
    // The neighbour comes.
    let host = Host::default();
    let device = Some(("d", &DeviceProfile::FLASH));
    let [one, two] = [(); 2].map(|()| host.share(device, None, &Knobs::default()).on_reactor());
    work(&one, NOW);
    let alone = one.force(NOW, &large);
    work(&two, NOW);
    one.done(NOW, one.force(NOW, &large));
    one.refund(NOW, &large, alone);
    assert!(one.paused_until(NOW).is_some(), "the second operation begins");
}

/// Lets two threads take steps in an order.
struct Steps(Mutex<Turns>, Condvar);

struct Turns {
    /// Which thread takes the next step, bit by bit. The first thread takes those beyond the end.
    order: u32,
    left: u32,
    steps: Option<usize>,
    ended: [bool; 2],
}

impl Turns {
    fn next(&self) -> usize {
        let next = if self.left > 0 { (self.order & 1) as usize } else { 0 };
        if self.ended[next] { 1 - next } else { next }
    }
}

impl Steps {
    fn of(order: u32, left: u32) -> Self {
        Steps(Mutex::new(Turns { order, left, steps: None, ended: [false; 2] }), Condvar::new())
    }

    /// Ends a step of a thread, and waits for its next one.
    fn next(&self, thread: usize) {
        let mut turns = self.0.lock().unwrap();
        turns.steps.take_if(|steps| *steps == thread);
        self.1.notify_all();
        let waits = |turns: &mut Turns| turns.steps.is_some() || turns.next() != thread;
        let mut turns = self.1.wait_while(turns, waits).unwrap();
        turns.steps = Some(thread);
        (turns.order, turns.left) = (turns.order >> 1, turns.left.saturating_sub(1));
    }

    fn end(&self, thread: usize) {
        let mut turns = self.0.lock().unwrap();
        turns.steps = None;
        turns.ended[thread] = true;
        self.1.notify_all();
    }
}

/// One reactor drains a queue, and another one refunds an operation that the limits have admitted
/// before, or a drain.
#[test]
fn a_refund_beside_a_drain_leaves_the_debt_of_what_begins() {
    const STEPS: u32 = 8;
    let (begins, refunded) = (write(1_000), write(5_000));
    let limits = bps(1_000).limits;
    let orders = (0..1 << STEPS).filter(|order: &u32| order.count_ones() == STEPS / 2);
    for (order, was_forced) in orders.flat_map(|order| [(order, false), (order, true)]) {
        let (limiter, debt) = (Limiter::new(&limits), Debt::default());
        let until = limiter.force(NOW, &refunded);
        if was_forced {
            debt.owe_limits(until, || limiter.opens());
        }
        let steps = Steps::of(order, STEPS);
        let opens = |thread: usize| -> Time {
            steps.next(thread);
            let opens = limiter.opens();
            steps.next(thread);
            opens
        };
        let drain = || {
            steps.next(0);
            let until = limiter.force(NOW, &begins);
            steps.next(0);
            debt.owe_limits(until, || opens(0));
            steps.end(0);
        };
        let refund = || {
            steps.next(1);
            limiter.refund(&refunded, None);
            steps.next(1);
            debt.limits_changed(|| opens(1));
            steps.end(1);
        };
        std::thread::scope(|scope| {
            scope.spawn(drain);
            scope.spawn(refund);
        });
        let (owed, expected) = (debt.limits_left(NOW), limiter.opens() - NOW);
        assert!(owed <= expected, "order {order:b}: {owed} ns instead of {expected}");
        // The debt of the refunded operation may hide that of a smaller one.
        assert!(owed == expected || was_forced, "order {order:b}: {owed} ns of {expected}");
    }
}
