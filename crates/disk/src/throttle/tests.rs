//! Which requests a drain lets pass. No limit here lets a second request pass while a test runs.

use std::rc::Rc;
use std::time::Duration;

use blockyard_ring::Executor;
use blockyard_sched::{DeviceProfile, Host, Knobs, Limit, Limits};

use super::*;

const WRITE: Operation =
    Operation { kind: OperationKind::Write, bytes: 1 << 30, sequential: false, requests: 1 };

/// A disk with a limit of a byte a second, and the requests that have passed.
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

    /// Requests come; returns which have passed so far.
    async fn come(&self, count: u64) -> Vec<u64> {
        for _ in 0..count {
            let (throttle, passed) = (self.throttle.clone(), self.passed.clone());
            self.handle.spawn(async move {
                let number = throttle.arrive();
                drop(throttle.enter(&WRITE, number).await);
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
fn a_drain_lets_pass_what_stands_in_line_and_nothing_that_comes_later() {
    run(async |stage| {
        assert_eq!(stage.come(3).await, [1], "the limit lets one pass");
        stage.throttle.drain();
        assert_eq!(stage.passed().await, [1, 2, 3]);
        assert_eq!(
            stage.come(2).await,
            [1, 2, 3],
            "the drain is not over, and what comes waits all the same"
        );
        assert!(stage.throttle.held_back().is_some(), "what passed is owed");
        stage.throttle.drain();
        assert_eq!(stage.passed().await, [1, 2, 3, 4, 5]);
    });
}

#[test]
fn at_the_end_of_an_export_everything_passes() {
    run(async |stage| {
        assert_eq!(stage.come(2).await, [1]);
        stage.throttle.suspend();
        assert_eq!(stage.come(2).await, [1, 2, 3, 4]);
        assert_eq!(stage.throttle.held_back(), None);
        stage.throttle.resume();
        assert_eq!(stage.come(1).await, [1, 2, 3, 4]);
        assert!(stage.throttle.held_back().is_some());
    });
}

#[test]
fn a_line_that_is_left_counts_no_more() {
    run(async |stage| {
        assert!(stage.throttle.held_back().is_none());
        let number = stage.throttle.arrive();
        drop(stage.throttle.enter(&WRITE, number).await);
        assert!(
            stage.throttle.held_back().is_none(),
            "one operation that passed in its time is no debt"
        );
        let number = stage.throttle.arrive();
        let mut waiting = Box::pin(stage.throttle.enter(&WRITE, number));
        assert!(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
        assert!(stage.throttle.held_back().is_some(), "a line of more than half a minute");
        drop(waiting);
        assert!(stage.throttle.held_back().is_none());
    });
}

/// Of streams that take turns each is sequential on flash. The heads of a rotational device seek
/// between them.
#[test]
fn streams_that_take_turns_are_no_sequential_ones_on_a_rotational_device() {
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
