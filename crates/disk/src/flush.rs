//! Flush groups: flushes that wait at the same time share one sync of the storage.
//!
//! A flush covers the writes that were answered before it arrived. A running sync may have begun
//! before some of them, so a flush that arrives meanwhile waits for the next sync. All waiting
//! flushes share that one.
//!
//! What must hold: only one sync of an image runs at a time, on any reactor. The kernel reports a
//! failed write-back to one sync of an open file description only. A second sync at the same time
//! would return Ok for lost data. Each flush takes this lock a few times; nothing else takes it.

use std::future::{Future, poll_fn};
use std::sync::Mutex;
use std::task::{Poll, Waker};

/// The flushes of one disk; see the module documentation.
#[derive(Debug, Default)]
pub struct FlushGroup {
    state: Mutex<State>,
}

/// Number of flushes, and of the syncs that they shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushFigures {
    pub requested: u64,
    pub syncs: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Number of flushes that were requested.
    requested: u64,
    /// Number of syncs begun, and number of the newest that succeeded.
    begun: u64,
    ended: u64,
    running: bool,
    waiting: Vec<Waker>,
}

impl FlushGroup {
    /// Runs `sync` for this flush, or waits for one that begins after this call. Returns `Err` only
    /// from its own sync, which must poison the disk if it may have lost writes. Flushes that
    /// waited for a failed sync run `sync` themselves. They fail because of the poison, if there is
    /// one.
    pub async fn flush<E, F: Future<Output = Result<(), E>>>(
        &self,
        sync: impl Fn() -> F,
    ) -> Result<(), E> {
        let mine = {
            let mut state = self.state();
            state.requested += 1;
            state.begun + 1
        };
        let number = poll_fn(|cx| {
            let mut state = self.state();
            if state.ended >= mine {
                return Poll::Ready(None);
            }
            if state.running {
                state.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            state.running = true;
            state.begun += 1;
            Poll::Ready(Some(state.begun))
        })
        .await;
        let Some(number) = number else { return Ok(()) };
        let _leader = Leader(self);
        let result = sync().await;
        if result.is_ok() {
            self.state().ended = number;
        }
        result
    }

    /// Continues the numbers of another server. Call it before the first flush.
    pub fn continue_from(&self, requested: u64, syncs: u64) {
        let mut state = self.state();
        state.requested += requested;
        (state.begun, state.ended) = (state.begun + syncs, state.ended + syncs);
    }

    /// Returns the number of flushes that were requested, and the number of syncs that were begun
    /// for them.
    pub fn counted(&self) -> FlushFigures {
        let state = self.state();
        FlushFigures { requested: state.requested, syncs: state.begun }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The flush that syncs for the group. If its future is dropped half-way, another flush must take
/// over.
struct Leader<'a>(&'a FlushGroup);

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running = false;
        for waker in state.waiting.drain(..) {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    use blockyard_ring::{Executor, Signal};

    #[test]
    fn waiting_flushes_share_one_sync_that_begins_after_them() {
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let syncs = Rc::new(Cell::new(0));
        let (counted, counted_by) = (syncs.clone(), Rc::new(FlushGroup::default()));
        let group = counted_by.clone();
        executor
            .block_on(async move {
                let (gate, done) = (Signal::new(&handle), Rc::new(Cell::new(0)));
                for _ in 0..10 {
                    let (group, gate, done, syncs) =
                        (group.clone(), gate.clone(), done.clone(), counted.clone());
                    handle.spawn(async move {
                        group
                            .flush(|| {
                                syncs.set(syncs.get() + 1);
                                gate.wait_then_ok()
                            })
                            .await
                            .unwrap();
                        done.set(done.get() + 1);
                    });
                }
                for _ in 0..5 {
                    handle.yield_now().await;
                }
                assert_eq!((counted.get(), done.get()), (1, 0));
                gate.ring();
                while done.get() < 1 {
                    handle.yield_now().await;
                }
                for _ in 0..5 {
                    handle.sleep(std::time::Duration::from_millis(1)).await;
                }
                assert_eq!(
                    (counted.get(), done.get()),
                    (2, 1),
                    "the nine others wait for one new sync"
                );
                gate.ring();
                while done.get() < 10 {
                    handle.sleep(std::time::Duration::from_millis(1)).await;
                }
            })
            .unwrap();
        assert_eq!(syncs.get(), 2);
        assert_eq!(counted_by.counted(), FlushFigures { requested: 10, syncs: 2 });
    }

    /// Returns the answers of flushes, and the number of syncs. The first flush begins a sync. The
    /// others wait for it, so they share the second sync. `fails`: the number of the sync that
    /// fails.
    fn three_flushes(fails: u32) -> (Vec<Result<(), &'static str>>, u32) {
        use blockyard_storage::sim::{Sim, yield_now};

        let (sim, group, syncs) =
            (Sim::new(1), Rc::new(FlushGroup::default()), Rc::new(Cell::new(0)));
        let flush = |first: bool| {
            let (group, syncs) = (group.clone(), syncs.clone());
            sim.spawn(async move {
                while !first && syncs.get() == 0 {
                    yield_now().await;
                }
                let sync = async || {
                    syncs.set(syncs.get() + 1);
                    let number = syncs.get();
                    for _ in 0..10 {
                        yield_now().await;
                    }
                    if number == fails { Err("this sync fails") } else { Ok(()) }
                };
                group.flush(sync).await
            })
        };
        let all = [flush(true), flush(false), flush(false)];
        let answers = sim.block_on(async move {
            let mut answers = Vec::new();
            for one in all {
                answers.push(one.await);
            }
            answers
        });
        (answers.unwrap(), syncs.get())
    }

    #[test]
    fn flushes_that_waited_for_a_failed_sync_run_a_sync_of_their_own() {
        let failed = Err("this sync fails");
        assert_eq!(three_flushes(1), (vec![failed, Ok(()), Ok(())], 2));
        // One of the two that share the second sync runs it, and the other one must not succeed by
        // it.
        let (answers, syncs) = three_flushes(2);
        assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 1, "{answers:?}");
        assert_eq!((answers[0], syncs), (Ok(()), 3));
    }

    /// The numbers of an earlier server's syncs cover no write of this one.
    #[test]
    fn the_first_flush_after_a_hand_over_syncs() {
        use blockyard_storage::sim::Sim;

        let (group, syncs) = (FlushGroup::default(), Rc::new(Cell::new(0)));
        group.continue_from(9, 5);
        let counted = syncs.clone();
        let flushed = Sim::new(1).block_on(async move {
            let sync = async || {
                counted.set(counted.get() + 1);
                Ok::<_, ()>(())
            };
            (group.flush(sync).await, group.counted())
        });
        let figures = FlushFigures { requested: 10, syncs: 6 };
        assert_eq!((flushed.unwrap(), syncs.get()), ((Ok(()), figures), 1));
    }

    trait WaitThenOk {
        fn wait_then_ok(&self) -> impl Future<Output = Result<(), ()>>;
    }

    impl WaitThenOk for Signal {
        async fn wait_then_ok(&self) -> Result<(), ()> {
            self.wait().await;
            Ok(())
        }
    }
}
