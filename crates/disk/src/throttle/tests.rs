//! Which requests a drain admits. The limit in these tests admits only one request.

use std::rc::Rc;
use std::time::Duration;

use blockyard_ring::Executor;
use blockyard_sched::{DeviceProfile, Host, Knobs, Limit, Limits};

use super::*;

mod simulated;

const WRITE: Operation =
    Operation { kind: OperationKind::Write, bytes: 1 << 30, sequential: false, requests: 1 };

/// The limit does not apply to it.
const DISCARD: Operation = Operation { kind: OperationKind::Discard, ..WRITE };
const READ: Operation =
    Operation { kind: OperationKind::Read, bytes: 4096, sequential: false, requests: 1 };

/// A disk with a limit of a byte a second, and the requests that were admitted.
struct Stage {
    handle: Handle,
    throttle: Rc<Throttle>,
    passed: Rc<RefCell<Vec<u64>>>,
}

impl Stage {
    fn new(handle: &Handle) -> Self {
        let bps = Some(Limit { rate: 1, max: None, length: Duration::from_secs(1) });
        let knobs = Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() };
        let share = Arc::new(Share::new(None, None, &knobs));
        let throttle = Rc::new(Throttle::new(share, Some(handle.clone()), false));
        Stage { handle: handle.clone(), throttle, passed: Rc::default() }
    }

    /// Starts `count` writes. Returns the numbers of the requests that were admitted so far.
    async fn come(&self, count: u64) -> Vec<u64> {
        self.come_with(&WRITE, count).await
    }

    async fn come_with(&self, operation: &'static Operation, count: u64) -> Vec<u64> {
        for _ in 0..count {
            let (throttle, passed) = (self.throttle.clone(), self.passed.clone());
            self.handle.spawn(async move {
                let number = throttle.arrive();
                drop(throttle.enter(operation, number).await);
                passed.borrow_mut().push(number);
            });
        }
        self.passed().await
    }

    async fn passed(&self) -> Vec<u64> {
        for _ in 0..10 {
            self.handle.yield_now().await;
        }
        self.passed.borrow().clone()
    }
}

fn run(work: impl AsyncFnOnce(Stage) + 'static) {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    executor.block_on(async move { work(Stage::new(&handle)).await }).unwrap();
}

#[test]
fn a_drain_admits_the_waiting_requests_and_no_later_ones() {
    run(async |stage| {
        assert_eq!(stage.come(3).await, [1], "the limit admits one");
        stage.throttle.drain();
        assert_eq!(stage.passed().await, [1, 2, 3]);
        assert_eq!(stage.come(2).await, [1, 2, 3], "later requests wait, even during the drain");
        assert!(stage.throttle.queue_pause(false).is_some(), "the admitted requests are a debt");
        stage.throttle.drain();
        assert_eq!(stage.passed().await, [1, 2, 3, 4, 5]);
    });
}

#[test]
fn at_the_end_of_an_export_every_request_is_admitted() {
    run(async |stage| {
        assert_eq!(stage.come(2).await, [1]);
        stage.throttle.suspend();
        assert_eq!(stage.come(2).await, [1, 2, 3, 4]);
        assert!(stage.throttle.queue_pause(false).is_some(), "queues take no further ones in debt");
        stage.throttle.resume();
        assert_eq!(stage.come(1).await, [1, 2, 3, 4]);
        assert!(stage.throttle.queue_pause(false).is_some());
    });
}

#[test]
fn a_request_that_stops_waiting_no_longer_counts() {
    run(async |stage| {
        assert!(stage.throttle.queue_pause(false).is_none());
        let number = stage.throttle.arrive();
        drop(stage.throttle.enter(&WRITE, number).await);
        assert!(
            stage.throttle.queue_pause(false).is_none(),
            "an operation that was admitted in time is no debt"
        );
        let number = stage.throttle.arrive();
        let mut waiting = Box::pin(stage.throttle.enter(&WRITE, number));
        assert!(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
        assert!(
            stage.throttle.queue_pause(false).is_some(),
            "more than half a minute of waiting operations"
        );
        assert!(stage.throttle.queue_pause(true).is_none(), "they hold no queue that is idle");
        drop(waiting);
        assert!(stage.throttle.queue_pause(false).is_none());
    });
}

/// A queue that stops withdraws its requests, and the guest or the next server sends them again.
#[test]
fn a_request_that_stops_waiting_for_the_device_has_used_no_limit() {
    for in_group in [false, true] {
        let executor = Executor::simulated().unwrap();
        let handle = executor.handle().clone();
        executor.block_on(async move { stops_waiting(&handle, in_group).await }).unwrap();
    }
}

async fn stops_waiting(handle: &Handle, in_group: bool) {
    let (host, free) = (Host::default(), Knobs::default());
    let disk = || {
        let group = in_group.then_some(("g", &free));
        let share = host.share(Some(("d", &DeviceProfile::FLASH)), group, &free);
        Throttle::new(share, Some(handle.clone()), false)
    };
    let (polite, busy) = (disk(), disk());
    let held = polite.enter(&READ, polite.arrive()).await;
    let mut admitted = Vec::new();
    loop {
        let mut request = Box::pin(busy.enter(&READ, busy.arrive()));
        match poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await {
            Poll::Ready(admission) => admitted.push(admission),
            Poll::Pending => break,
        }
        assert!(admitted.len() < 100_000, "the window admits everything");
    }
    // A read takes a second of the limit. A group is charged a twentieth of it at once.
    let bps = Some(Limit { rate: READ.bytes, max: None, length: Duration::from_secs(1) });
    let limited = Knobs { limits: Limits { bps, ..Limits::default() }, ..Knobs::default() };
    let share = busy.share();
    match in_group {
        true => host.set_group("g", &limited, busy.read_clock()),
        false => share.set(&limited, busy.read_clock()),
    }
    let limit = || share.limit(busy.read_clock(), &READ, &share.new_flow());
    let mut waiting = Box::pin(busy.enter(&READ, busy.arrive()));
    assert!(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
    assert!(limit().is_err(), "the request has used the limit, and waits for the device");
    assert_eq!(share.owes_group(), in_group);
    drop(waiting);
    assert!(!share.owes_group());
    assert_eq!(limit(), Ok(()));
    drop((admitted, held));
}

#[test]
fn a_request_overtakes_none_that_waits_for_limits() {
    run(async |stage| {
        assert_eq!(stage.come_with(&DISCARD, 1).await, [1]);
        assert_eq!(stage.come(2).await, [1, 2], "the limit admits one write");
        assert_eq!(stage.come_with(&DISCARD, 1).await, [1, 2]);
        stage.throttle.drain();
        assert_eq!(stage.passed().await, [1, 2, 3, 4]);
    });
}

/// Its token may still be in the device's wait list.
#[test]
fn the_token_of_a_request_that_stops_waiting_is_not_used_again() {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let test = async move {
        let host = Host::default();
        let disk = || {
            let share = host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
            Throttle::new(share, Some(handle.clone()), false)
        };
        let (polite, busy) = (disk(), disk());
        let held = polite.enter(&READ, polite.arrive()).await;
        let mut admitted = Vec::new();
        let waiting = loop {
            let mut request = Box::pin(busy.enter(&READ, busy.arrive()));
            match poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await {
                Poll::Ready(admission) => admitted.push(admission),
                Poll::Pending => break request,
            }
            assert!(admitted.len() < 100_000, "the window admits everything");
        };
        drop(waiting);
        assert!(busy.tokens.borrow().is_empty());
        let mut waiting = Box::pin(busy.enter(&READ, busy.arrive()));
        assert!(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
        drop((admitted, held));
        waiting.await;
        assert_eq!(busy.tokens.borrow().len(), 1, "a request that was admitted returns its token");
    };
    executor.block_on(test).unwrap();
}

/// A queue may stop between the grant of a request and the next iteration.
#[test]
fn a_request_that_stops_waiting_after_its_grant_leaves_its_room() {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    let test = async move {
        let host = Host::default();
        let disk = || {
            let share = host.share(Some(("d", &DeviceProfile::FLASH)), None, &Knobs::default());
            Throttle::new(share, Some(handle.clone()), false)
        };
        let (polite, busy) = (disk(), disk());
        let held = polite.enter(&READ, polite.arrive()).await;
        let mut rounds = Vec::new();
        for _ in 0..5 {
            let mut admitted = Vec::new();
            let waiting = loop {
                let mut request = Box::pin(busy.enter(&READ, busy.arrive()));
                match poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await {
                    Poll::Ready(admission) => admitted.push(admission),
                    Poll::Pending => break request,
                }
                assert!(admitted.len() < 100_000, "the window admits everything");
            };
            rounds.push(admitted.len());
            // The end of the others grants it.
            drop(admitted);
            drop(waiting);
        }
        // The window of the first round is that of a new device.
        assert_eq!(rounds[1..], [rounds[1]; 4]);
        drop(held);
    };
    executor.block_on(test).unwrap();
}

/// On flash, each of two interleaved streams is sequential. The heads of a rotational device seek
/// between them.
#[test]
fn interleaved_streams_are_not_sequential_on_a_rotational_device() {
    for (profile, several) in [(DeviceProfile::FLASH, true), (DeviceProfile::ROTATIONAL, false)] {
        let host = Host::default();
        let throttle =
            Throttle::new(host.share(Some(("d", &profile)), None, &Knobs::default()), None, false);
        let follows = |at: u64| throttle.operation(Op::Read, at, 4096, 1).sequential;
        let first = 1 << 20;
        assert!(!follows(first));
        assert!(follows(first + 4096) && follows(first + 8192), "one stream");
        assert!(!follows(1 << 30));
        for block in 1..8 {
            assert_eq!(follows(first + ((2 + block) << 12)), several, "the first stream");
            assert_eq!(follows((1 << 30) + (block << 12)), several, "the second one");
        }
    }
}

#[test]
fn a_time_that_was_never_set_is_long_past() {
    let now = sched_time();
    assert!(now >= 1_000_000_000, "{now}");
}

/// A queue that stops withdraws its requests, which are not the first ones.
#[test]
fn withdrawn_requests_take_no_place_and_the_others_keep_their_order() {
    let (mut waiting, waker) = (Waiting::default(), Waker::noop());
    let numbers = [3, 1, 2, 5, 4, 6, 7, 8, 9];
    numbers.iter().for_each(|number| waiting.push(*number, waker.clone()));
    [9, 4, 1, 2, 2].iter().for_each(|number| waiting.remove(*number));
    // It has waited before.
    waiting.push(2, waker.clone());
    for number in [3, 5, 6, 7, 8, 2] {
        assert!(waiting.is_first(number) && waiting.withdrawn <= waiting.all.len() / 2);
        waiting.remove(number);
    }
    assert!(waiting.is_empty());
    (0..1000).for_each(|number| waiting.push(number, waker.clone()));
    (1..1000).rev().for_each(|number| waiting.remove(number));
    assert!(waiting.is_first(0) && waiting.all.len() <= 2, "{} entries", waiting.all.len());
}
