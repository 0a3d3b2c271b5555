//! Lock of ranges of guest clusters: a cluster is allocated or copied by one request at a time,
//! across all reactors.
//!
//! Invariants: a task acquires several clusters in ascending order, so that no deadlock is
//! possible. A cancelled waiter leaves nothing behind.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Held runs, by their first cluster. The cost of a run does not depend on its length.
#[derive(Debug, Default)]
pub struct ClustersHeld(Mutex<BTreeMap<u64, Held>>);

#[derive(Debug)]
struct Held {
    end: u64,
    waiting: Vec<Waker>,
}

/// Guard of a run of clusters; dropping it releases them.
pub struct Hold<'a> {
    held: &'a ClustersHeld,
    clusters: Range<u64>,
}

impl ClustersHeld {
    /// Acquires each of `clusters` (guest clusters, by number) in ascending order.
    pub async fn hold(&self, clusters: Range<u64>) -> Hold<'_> {
        let mut hold = Hold { held: self, clusters: clusters.start..clusters.start };
        poll_fn(|cx| {
            let mut runs = self.runs();
            let mine = &mut hold.clusters;
            // The run that holds the next cluster, or else the first run behind it. This task's own
            // run ends before the next cluster.
            let before = runs.range(..=mine.end).next_back().filter(|(_, run)| run.end > mine.end);
            let other = before
                .or_else(|| runs.range(mine.end..clusters.end.max(mine.end)).next())
                .map(|(first, _)| *first);
            let free = other.map_or(clusters.end, |first| first.clamp(mine.end, clusters.end));
            if free > mine.end {
                mine.end = free;
                runs.entry(mine.start)
                    .or_insert_with(|| Held { end: free, waiting: Vec::new() })
                    .end = free;
            }
            match other.and_then(|first| runs.get_mut(&first)).filter(|_| free < clusters.end) {
                Some(run) => {
                    run.waiting.push(cx.waker().clone());
                    Poll::Pending
                }
                None => Poll::Ready(()),
            }
        })
        .await;
        hold
    }

    fn runs(&self) -> MutexGuard<'_, BTreeMap<u64, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if !self.clusters.is_empty() {
            let run = self.held.runs().remove(&self.clusters.start);
            run.into_iter().flat_map(|run| run.waiting).for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    use blockyard_storage::sim::{Rng, Sim, yield_now};

    #[test]
    fn each_cluster_has_one_holder_and_every_task_gets_its_clusters() {
        for seed in 0..100 {
            let sim = Sim::new(seed).step_limit(100_000);
            let shared: Rc<(ClustersHeld, Vec<Cell<bool>>)> =
                Rc::new((ClustersHeld::default(), vec![Cell::new(false); 16]));
            let mut rng = Rng::new(seed);
            let tasks: Vec<_> = (0..6)
                .map(|_| {
                    let (shared, mut rng) = (shared.clone(), rng.fork());
                    sim.spawn(async move {
                        for _ in 0..20 {
                            let start = rng.below(16);
                            let end = rng.between(start + 1, (start + 4).min(16));
                            let hold = shared.0.hold(start..end).await;
                            let mine = &shared.1[start as usize..end as usize];
                            mine.iter().for_each(|c| assert!(!c.replace(true)));
                            yield_now().await;
                            mine.iter().for_each(|c| assert!(c.replace(false)));
                            drop(hold);
                        }
                    })
                })
                .collect();
            sim.block_on(async move {
                for task in tasks {
                    task.await;
                }
            })
            .unwrap();
            assert!(shared.0.runs().is_empty());
        }
    }

    #[test]
    fn a_run_is_acquired_up_to_the_next_held_cluster() {
        let held = ClustersHeld::default();
        let poll = |hold: std::pin::Pin<&mut dyn Future<Output = ()>>| {
            hold.poll(&mut std::task::Context::from_waker(Waker::noop())).is_ready()
        };
        let ends = || held.runs().iter().map(|(first, run)| (*first, run.end)).collect::<Vec<_>>();
        let (mut middle, mut all) = (None, None);
        assert!(poll(std::pin::pin!(async { middle = Some(held.hold(5000..5001).await) })));
        {
            let mut waits = std::pin::pin!(async { all = Some(held.hold(0..1 << 40).await) });
            assert!(!poll(waits.as_mut()));
            assert_eq!(ends(), [(0, 5000), (5000, 5001)]);
            drop(middle);
            assert!(poll(waits.as_mut()));
        }
        assert_eq!(ends(), [(0, 1 << 40)]);
        {
            let mut waits = std::pin::pin!(async { drop(held.hold(3..4).await) });
            assert!(!poll(waits.as_mut()));
        }
        drop(all);
        assert!(ends().is_empty());
    }
}
