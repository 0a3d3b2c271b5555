use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::task::{Poll, Waker};

use super::*;
use crate::Executor;
use crate::testing::waits;

#[test]
fn the_eventfd_is_written_once_per_sleep_and_only_then() {
    let inbox = Inbox::<()>::with_slots(4).unwrap();
    let written = || {
        let mut count = [0; 8];
        rustix::io::read(&inbox.event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    let marks: Vec<_> = (0..3).map(|_| AtomicBool::new(false)).collect();
    inbox.wake(0, &marks[0]);
    assert_eq!(written(), 0, "the executor is awake");
    assert!(!inbox.may_sleep(), "a job is waiting");
    inbox.wake(1, &marks[1]);
    assert_eq!(written(), 0, "the executor did not sleep");
    while inbox.pop().is_some() {}
    assert!(inbox.may_sleep());
    // A mark that is still set: the job was taken, but its mark is not cleared yet.
    inbox.wake(0, &marks[0]);
    assert_eq!(written(), 0);
    inbox.wake(2, &marks[2]);
    inbox.call(Box::new(|_| ()));
    assert_eq!(written(), 1);
}

#[test]
fn a_wake_up_without_a_slot_is_a_mark_and_no_task_takes_two_slots() {
    let inbox = Inbox::<()>::with_slots(2).unwrap();
    let marks: Vec<_> = (0..3).map(|_| AtomicBool::new(false)).collect();
    for _ in 0..5 {
        inbox.wake(0, &marks[0]);
    }
    inbox.wake(1, &marks[1]);
    assert!(!inbox.take_marked(), "two tasks take two slots");
    inbox.wake(2, &marks[2]);
    assert!(inbox.take_marked() && !inbox.take_marked());
    assert!(marks[2].load(SeqCst));
    let jobs: Vec<_> = std::iter::from_fn(|| inbox.pop()).collect();
    assert!(matches!(jobs[..], [Job::Wake(0), Job::Wake(1)]));
}

#[test]
fn calls_run_in_order_even_if_the_ring_is_full() {
    const CALLS: usize = 3 * SLOTS + 7;
    let executor = Executor::new().unwrap();
    let (remote, ran) = (executor.remote(), Arc::new(Mutex::new(Vec::new())));
    let note = |number: usize| {
        let ran = ran.clone();
        remote.run(move |handle| {
            let mut ran = ran.lock().unwrap();
            ran.push(number);
            if ran.len() == CALLS {
                handle.stop();
            }
        });
    };
    (0..CALLS).for_each(note);
    waits::run(&executor).unwrap();
    assert_eq!(*ran.lock().unwrap(), (0..CALLS).collect::<Vec<_>>());
}

#[test]
fn calls_of_several_threads_run_in_each_threads_order() {
    const THREADS: usize = 4;
    const CALLS: usize = 4000;
    let executor = Executor::new().unwrap();
    let last = Rc::new(RefCell::new([0; THREADS]));
    // The closures must be Send, so they reach this thread's state through a thread-local.
    thread_local! {
        static LAST: RefCell<Option<Rc<RefCell<[usize; THREADS]>>>> = const { RefCell::new(None) };
    }
    LAST.set(Some(last.clone()));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let remote = executor.remote();
            std::thread::spawn(move || {
                for number in 1..=CALLS {
                    remote.run(move |handle| {
                        LAST.with_borrow(|last| {
                            let mut last = last.as_ref().unwrap().borrow_mut();
                            assert_eq!(last[thread] + 1, number, "thread {thread}");
                            last[thread] = number;
                            if *last == [CALLS; THREADS] {
                                handle.stop();
                            }
                        });
                    });
                }
            })
        })
        .collect();
    waits::run(&executor).unwrap();
    threads.into_iter().for_each(|thread| waits::join(thread, "its work is done"));
    assert_eq!(*last.borrow(), [CALLS; THREADS]);
}

/// Waits until `count` is at least `wanted`, and sends its waker to another thread.
async fn reaches(count: &AtomicU64, wanted: u64, waker: &mpsc::Sender<Waker>) {
    let mut given = false;
    poll_fn(|cx| {
        if !std::mem::replace(&mut given, true) {
            waker.send(cx.waker().clone()).unwrap();
        }
        if count.load(SeqCst) >= wanted { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[test]
fn no_wake_up_is_lost_if_tasks_outnumber_slots() {
    const TASKS: usize = SLOTS + 300;
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let (wakers, all) = mpsc::channel::<Waker>();
    let (count, done) = (Arc::new(AtomicU64::new(0)), Rc::new(Cell::new(0)));
    for _ in 0..TASKS {
        let (count, done, wakers, ends) =
            (count.clone(), done.clone(), wakers.clone(), handle.clone());
        handle.spawn(async move {
            reaches(&count, 1, &wakers).await;
            done.set(done.get() + 1);
            if done.get() == TASKS {
                ends.stop();
            }
        });
    }
    let remote = executor.remote();
    let waking = std::thread::spawn(move || {
        let all: Vec<_> = (0..TASKS).map(|_| waits::receive(&all, "all tasks wait")).collect();
        // Hold the executor, so that the ring fills up.
        let (hold, held) = mpsc::channel::<()>();
        let (begins, begun) = mpsc::channel();
        remote.run(move |_| {
            begins.send(()).unwrap();
            waits::receive(&held, "all wake-ups are made");
        });
        waits::receive(&begun, "the executor is held");
        count.store(1, SeqCst);
        all.iter().for_each(Waker::wake_by_ref);
        hold.send(()).unwrap();
    });
    waits::run(&executor).unwrap();
    waits::join(waking, "all tasks are woken");
    assert_eq!(done.get(), TASKS);
}

#[test]
fn no_wake_up_from_several_threads_is_lost() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 3000;
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let (left, mut threads) = (Rc::new(Cell::new(THREADS)), Vec::new());
    for _ in 0..THREADS {
        let (wakers, waker) = mpsc::channel::<Waker>();
        let (seen, heard) = mpsc::channel::<u64>();
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        threads.push(std::thread::spawn(move || {
            for round in 1..=ROUNDS {
                let waker = waits::receive(&waker, "the task waits");
                counted.store(round, SeqCst);
                waker.wake();
                assert_eq!(waits::receive(&heard, "the task is woken"), round);
            }
        }));
        let (left, ends) = (left.clone(), handle.clone());
        handle.spawn(async move {
            for round in 1..=ROUNDS {
                reaches(&count, round, &wakers).await;
                seen.send(round).unwrap();
            }
            left.set(left.get() - 1);
            if left.get() == 0 {
                ends.stop();
            }
        });
    }
    waits::run(&executor).unwrap();
    threads.into_iter().for_each(|thread| waits::join(thread, "its work is done"));
}
