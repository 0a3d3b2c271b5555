use std::future::poll_fn;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;
use std::task::Poll;

use super::*;
use crate::UringFile;
use crate::testing::waits;

/// What the tasks have logged, in order.
#[derive(Clone, Default)]
struct Log(Rc<RefCell<Vec<&'static str>>>);

impl Log {
    fn add(&self, what: &'static str) {
        self.0.borrow_mut().push(what);
    }

    fn taken(&self) -> Vec<&'static str> {
        self.0.take()
    }
}

/// Logs its name when it is dropped.
struct Logs(Log, &'static str);

impl Drop for Logs {
    fn drop(&mut self) {
        self.0.add(self.1);
    }
}

/// Runs `f` when it is dropped.
struct AtEnd<F: FnMut()>(F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn work<T: 'static>(f: impl AsyncFnOnce(Handle) -> T + 'static) -> T {
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move { f(handle).await }).unwrap()
}

/// Waits for the next poll, which the caller must cause.
async fn once_more() {
    crate::park().await;
}

#[test]
fn tasks_are_polled_in_wake_up_order_and_once_per_iteration() {
    work(async |handle| {
        let log = Log::default();
        let sleeper = |name: &'static str| {
            let log = log.clone();
            handle.spawn(async move {
                loop {
                    once_more().await;
                    log.add(name);
                }
            })
        };
        let [a, b, c] = ["a", "b", "c"].map(sleeper);
        handle.yield_now().await;
        assert_eq!(log.taken(), [""; 0], "they were not woken");
        // Several wake-ups of a task cause one poll.
        for id in [c, a, c, b, a] {
            handle.wake(id);
        }
        let iteration = handle.iteration();
        handle.yield_now().await;
        assert_eq!((log.taken(), handle.iteration()), (vec!["c", "a", "b"], iteration + 1));
    });
}

#[test]
fn a_task_is_first_polled_after_all_that_were_ready() {
    work(async |handle| {
        let log = Log::default();
        for name in ["first", "second"] {
            let (log, spawner) = (log.clone(), handle.clone());
            handle.spawn(async move {
                log.add(name);
                let (log, iteration) = (log.clone(), spawner.iteration());
                spawner.clone().spawn(async move {
                    assert_eq!(spawner.iteration(), iteration + 1);
                    log.add("child");
                });
            });
        }
        assert_eq!(log.taken(), [""; 0], "a spawn polls nothing");
        handle.yield_now().await;
        handle.yield_now().await;
        assert_eq!(log.taken(), ["first", "second", "child", "child"]);
    });
}

/// A task that waits for the last read of a batch finds all other reads of the batch complete.
#[test]
fn a_task_that_yields_runs_after_the_tasks_of_the_next_reap() {
    work(async |handle| {
        let log = Log::default();
        let (reader_end, writer_end) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer_end, b"x").unwrap();
        let file = UringFile::new(&handle, Arc::new(reader_end)).unwrap();
        let reader = log.clone();
        handle.spawn(async move {
            file.read(Segments::buffer(1), u64::MAX).await.1.unwrap();
            reader.add("read");
        });
        // The task begins its read in the next iteration, and the reap of that iteration wakes it.
        handle.yield_now().await;
        handle.yield_now().await;
        log.add("yielded");
        assert_eq!(log.taken(), ["read", "yielded"]);
    });
}

#[test]
fn a_task_that_wakes_itself_is_polled_again() {
    work(async |_| {
        let mut polls = 0;
        poll_fn(move |cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls == 3 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
}

#[test]
fn poll_now_polls_the_other_task_in_the_same_iteration() {
    work(async |handle| {
        let log = Log::default();
        let (other, seen) = (log.clone(), Rc::new(Cell::new((NO_TASK, 0))));
        let (inner, noted) = (handle.clone(), seen.clone());
        let id = handle.spawn(async move {
            loop {
                noted.set((inner.current(), inner.iteration()));
                other.add("polled");
                once_more().await;
            }
        });
        let (caller, iteration) = (handle.current(), handle.iteration());
        handle.poll_now(id);
        assert_eq!(
            (log.taken(), seen.get(), handle.current()),
            (vec!["polled"], (id, iteration), caller)
        );
        // The task was ready, too, so the next iteration polls it once more: a spurious poll.
        handle.yield_now().await;
        log.taken();
        handle.yield_now().await;
        assert_eq!(log.taken(), [""; 0]);
    });
}

#[test]
fn a_task_that_has_ended_is_not_woken_and_its_number_is_reused() {
    work(async |handle| {
        let log = Log::default();
        let (dropped, keeps) = (log.clone(), handle.clone());
        let (give, taken) = mpsc::channel();
        let first = handle.spawn(async move {
            let _at_end = Logs(dropped.clone(), "dropped");
            poll_fn(|cx| {
                give.send(cx.waker().clone()).unwrap();
                Poll::Ready(())
            })
            .await;
            dropped.add("ended");
            let _ = &keeps;
        });
        handle.yield_now().await;
        assert_eq!(log.taken(), ["ended", "dropped"]);
        let stale = waits::receive(&taken, "the task has run");
        // Wake-ups of a task that has ended have no effect.
        stale.wake_by_ref();
        handle.wake(first);
        handle.poll_now(first);
        let (again, polls) = (log.clone(), Rc::new(Cell::new(0)));
        let count = polls.clone();
        let second = handle.spawn(async move {
            poll_fn(|_| {
                count.set(count.get() + 1);
                if count.get() == 3 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            again.add("second");
        });
        assert_eq!(second, first, "the number is free");
        handle.yield_now().await;
        // A stale waker of the first task causes a spurious wake-up of the second.
        stale.wake();
        handle.yield_now().await;
        assert_eq!((polls.get(), log.taken()), (2, vec![]));
        handle.wake(second);
        handle.yield_now().await;
        assert_eq!((polls.get(), log.taken()), (3, vec!["second"]));
    });
}

/// Dropping a future may spawn a task. So the future's task number must not be free before it is
/// dropped.
#[test]
fn a_task_number_is_not_reused_before_its_future_is_dropped() {
    work(async |handle| {
        let log = Log::default();
        let (spawner, child, given) = (handle.clone(), log.clone(), Rc::new(Cell::new(NO_TASK)));
        let child_id = given.clone();
        let spawns = AtEnd(move || {
            let child = child.clone();
            child_id.set(spawner.spawn(async move { child.add("child") }));
        });
        // The closure is dropped with the future, not when the future completes.
        let id = handle.spawn(poll_fn(move |_| {
            let _ = &spawns;
            Poll::Ready(())
        }));
        handle.yield_now().await;
        handle.yield_now().await;
        assert_ne!(given.get(), id);
        assert_eq!(log.taken(), ["child"]);
    });
}

/// Each wake-up by another thread causes a poll that begins after it.
#[test]
fn wake_ups_by_another_thread_reach_a_sleeping_task() {
    const ROUNDS: u32 = 500;
    let asked = Arc::new(AtomicU32::new(0));
    let (give, waker) = mpsc::channel::<Waker>();
    let (answer, answers) = mpsc::channel();
    let theirs = asked.clone();
    let thread = std::thread::spawn(move || {
        let waker = waits::receive(&waker, "the task waits");
        for round in 1..=ROUNDS {
            theirs.store(round, Ordering::SeqCst);
            waker.wake_by_ref();
            while waits::receive(&answers, "the task is polled") < round {}
        }
    });
    work(async move |_| {
        let mut given = false;
        poll_fn(move |cx| {
            if !std::mem::replace(&mut given, true) {
                give.send(cx.waker().clone()).unwrap();
            }
            let round = asked.load(Ordering::SeqCst);
            answer.send(round).unwrap();
            if round == ROUNDS { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
    waits::join(thread, "it has woken the task");
}

#[test]
fn a_task_may_be_woken_after_its_executor_is_gone() {
    let (give, waker) = mpsc::channel::<Waker>();
    work(async move |_| {
        poll_fn(|cx| {
            give.send(cx.waker().clone()).unwrap();
            Poll::Ready(())
        })
        .await
    });
    let waker = waits::receive(&waker, "the task has run");
    waker.wake_by_ref();
    waits::within("the wake-up returns", move || waker.wake());
}

#[test]
fn block_on_fails_if_the_executor_is_stopped_and_can_run_again() {
    let executor = Executor::new().unwrap();
    let (handle, log) = (executor.handle().clone(), Log::default());
    let (stops, logs) = (handle.clone(), log.clone());
    handle.spawn(async move {
        stops.stop();
        stops.yield_now().await;
        logs.add("went on");
    });
    assert!(waits::block_on(&executor, std::future::pending::<()>()).is_err());
    assert_eq!(log.taken(), [""; 0]);
    // The next run resumes the task.
    let inner = handle.clone();
    let done = waits::block_on(&executor, async move {
        inner.yield_now().await;
        3
    });
    assert_eq!((done.unwrap(), log.taken()), (3, vec!["went on"]));
}

#[test]
fn tasks_with_operations_in_flight_are_dropped_with_their_executor() {
    let executor = Executor::new().unwrap();
    let (handle, log) = (executor.handle().clone(), Log::default());
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = UringFile::new(&handle, Arc::new(reader)).unwrap();
    for name in ["first", "second"] {
        let (file, at_end) = (file.clone(), Logs(log.clone(), name));
        handle.spawn(async move {
            let _at_end = at_end;
            let _ = file.read(Segments::buffer(4096), u64::MAX).await;
            unreachable!("nothing is written to the pipe before the end");
        });
    }
    let yields = handle.clone();
    waits::block_on(&executor, async move { yields.yield_now().await }).unwrap();
    // In flight: the two reads, and the executor's own poll, which is being cancelled.
    assert_eq!(handle.uring().in_flight(), 2 + 1);
    // The kernel completes the abandoned reads; dropping the executor reaps them.
    drop((file, writer));
    drop(executor);
    assert_eq!(log.taken(), ["first", "second"]);
    assert_eq!(handle.uring().in_flight(), 0);
}

/// A task owns a value that keeps the executor's state alive: both must be dropped.
#[test]
fn a_task_that_is_spawned_while_the_executor_is_dropped_is_dropped_too() {
    let executor = Executor::new().unwrap();
    let (handle, log) = (executor.handle().clone(), Log::default());
    // Free task numbers, so that a new task reuses one.
    for _ in 0..3 {
        handle.spawn(async {});
    }
    let yields = handle.clone();
    waits::block_on(&executor, async move { yields.yield_now().await }).unwrap();
    let (spawner, at_end) = (handle.clone(), log.clone());
    let spawns = AtEnd(move || {
        let late = Logs(at_end.clone(), "late");
        spawner.spawn(async move {
            let _late = late;
            once_more().await;
        });
    });
    handle.spawn(async move {
        let _spawns = spawns;
        once_more().await;
    });
    drop(executor);
    assert_eq!(log.taken(), ["late"]);
}

/// Runs `work` with a simulated clock.
fn simulated<T: 'static>(work: impl AsyncFnOnce(Handle) -> T + 'static) -> io::Result<T> {
    let executor = Executor::simulated().unwrap();
    let handle = executor.handle().clone();
    waits::block_on(&executor, async move { work(handle).await })
}

#[test]
fn timers_fire_in_order_and_at_their_times() {
    simulated(async |handle| {
        let (log, start) = (Log::default(), handle.read_clock());
        let (left, mut tasks) = (Rc::new(Cell::new(4)), Vec::new());
        let done = crate::Signal::new(&handle);
        // A time that has passed fires at once.
        for (name, at) in [("third", 3000), ("first", 1000), ("second", 2000), ("over", 0)] {
            let (log, timers, left, done) =
                (log.clone(), handle.clone(), left.clone(), done.clone());
            tasks.push(handle.spawn(async move {
                let at = start + Duration::from_micros(at);
                timers.sleep_until(at).await;
                assert_eq!(timers.read_clock(), at);
                log.add(name);
                left.set(left.get() - 1);
                done.ring();
            }));
        }
        // Another wake-up does not end a sleep.
        handle.yield_now().await;
        tasks.into_iter().for_each(|task| handle.wake(task));
        while left.get() > 0 {
            done.wait().await;
        }
        assert_eq!(log.taken(), ["over", "first", "second", "third"]);
    })
    .unwrap();
}

/// When a call was carried out.
#[derive(Default)]
struct Called(Cell<Option<Instant>>);

#[test]
fn a_simulated_clock_stands_still_while_a_task_is_ready() {
    simulated(async |handle| {
        let (start, hour) = (handle.read_clock(), Duration::from_secs(3600));
        handle.wake_at(start + hour);
        for _ in 0..1000 {
            handle.yield_now().await;
            assert_eq!((handle.read_clock(), handle.now()), (start, start));
        }
        // A call through the inbox comes before the timer.
        handle.remote().run(|handle| handle.local::<Called>().0.set(Some(handle.now())));
        handle.sleep(2 * hour).await;
        assert_eq!(handle.local::<Called>().0.get(), Some(start));
        assert_eq!((handle.read_clock(), handle.now()), (start + 2 * hour, start + 2 * hour));
    })
    .unwrap();
}

#[test]
fn a_simulation_without_timers_fails_if_nothing_is_ready() {
    let stalled = simulated(async |_| std::future::pending::<()>().await);
    assert!(stalled.unwrap_err().to_string().contains("no timer is set"));
}

/// The batch has more operations than the submission and completion queues hold.
#[test]
fn every_operation_of_a_large_batch_completes_once() {
    const READS: u32 = 5000;
    work(async |handle| {
        let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes: Vec<u8> = (0..READS * 4).map(|at| (at / 4 % 251) as u8).collect();
        rustix::io::pwrite(&fd, &bytes, 0).unwrap();
        let file = UringFile::new(&handle, Arc::new(fd)).unwrap();
        let done = Rc::new(Cell::new(0));
        let all = crate::Signal::new(&handle);
        for number in 0..READS {
            let (file, done, all) = (file.clone(), done.clone(), all.clone());
            handle.spawn(async move {
                let (segments, read) = file.read(Segments::buffer(4), u64::from(number) * 4).await;
                let mut found = [0; 4];
                segments.copy_out(0, &mut found);
                assert_eq!((read.unwrap(), found), (4, [(number % 251) as u8; 4]));
                done.set(done.get() + 1);
                if done.get() == READS {
                    all.ring();
                }
            });
        }
        all.wait().await;
        // The next operations reuse the same slots.
        assert_eq!(handle.uring().in_flight(), 1, "only the executor's own poll is in flight");
    });
}

#[test]
fn a_meter_counts_only_files_of_its_handle() {
    work(async |handle| {
        let meter = Rc::new(Meter::default());
        let open = |handle: &Handle| {
            let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            UringFile::new(handle, Arc::new(fd)).unwrap()
        };
        let (counted, other) = (open(&handle.metered(&meter)), open(&handle));
        for file in [&counted, &other] {
            file.write(Segments::buffer(300), 0, false).await.1.unwrap();
            file.read(Segments::buffer(200), 0).await.1.unwrap();
            file.sync().await.unwrap();
        }
        assert_eq!(meter.counted(), (3, 500));
    });
}

#[test]
fn a_file_is_closed_when_the_operation_that_has_it_ends() {
    use std::io::{Read, Write};

    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let slot = Rc::new(crate::uring::file_slot::FileSlot::uncounted(&handle, Arc::new(ours)));
    waits::block_on(&executor, async move {
        let read = Action::Read { offset: 0 };
        let read = handle.operation(read, Segments::buffer(1), slot);
        theirs.write_all(b"x").unwrap();
        assert_eq!(read.await.0, 1);
        theirs.set_nonblocking(true).unwrap();
        let mut yields = 0;
        while theirs.read(&mut [0]).is_err() {
            handle.yield_now().await;
            yields += 1;
            assert!(yields < 100_000, "the connection has not ended");
        }
    })
    .unwrap();
}
