//! Completing an executor's request from another thread allocates nothing, on either thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::{Poll, Waker};

use blockyard_ring::Executor;

// The waits of this crate's tests. Not all of them are used here.
#[allow(dead_code)]
#[path = "../src/testing/waits.rs"]
mod waits;

struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

fn allocated() -> u64 {
    ALLOCATED.with(Cell::get)
}

// SAFETY: all calls are passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_completion_by_another_thread_allocates_nothing() {
    /// Rounds until all buffers have their final size.
    const WARM: u64 = 200;
    const ROUNDS: u64 = 2000;
    let executor = Executor::new().unwrap();
    let (give, waker) = mpsc::channel::<Waker>();
    let (asked, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (theirs, answers) = (asked.clone(), seen.clone());
    let thread = std::thread::spawn(move || {
        let waker = waits::receive(&waker, "the task waits");
        let mut before = 0;
        for round in 1..=WARM + ROUNDS {
            if round == WARM {
                before = allocated();
            }
            theirs.store(round, SeqCst);
            waker.wake_by_ref();
            waits::until("the task has seen it", || answers.load(SeqCst) >= round);
        }
        allocated() - before
    });
    let here = waits::block_on(&executor, async move {
        let (mut before, mut given) = (0, false);
        poll_fn(move |cx| {
            if !std::mem::replace(&mut given, true) {
                give.send(cx.waker().clone()).unwrap();
            }
            let round = asked.load(SeqCst);
            if round == WARM {
                before = allocated();
            }
            seen.store(round, SeqCst);
            if round == WARM + ROUNDS { Poll::Ready(allocated() - before) } else { Poll::Pending }
        })
        .await
    });
    assert_eq!((here.unwrap(), waits::join(thread, "it has counted")), (0, 0));
}
