//! Clusters that somebody allocates or copies: one at a time each, on whichever reactor.
//!
//! What must hold: whoever holds several took them in ascending order; a waiter that goes away leaves nothing behind.

use std::collections::HashMap;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

#[derive(Debug, Default)]
pub struct ClustersHeld(Mutex<HashMap<u64, Vec<Waker>>>);

/// A run of clusters that is held; dropped, it is free again.
pub struct Hold<'a> {
    held: &'a ClustersHeld,
    clusters: Range<u64>,
}

impl ClustersHeld {
    /// Waits for each of `clusters` (guest clusters, by number) in turn, and holds them.
    pub async fn hold(&self, clusters: Range<u64>) -> Hold<'_> {
        let mut hold = Hold { held: self, clusters: clusters.start..clusters.start };
        for cluster in clusters {
            poll_fn(|cx| {
                let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                match map.get_mut(&cluster) {
                    Some(waiting) => {
                        waiting.push(cx.waker().clone());
                        Poll::Pending
                    }
                    None => {
                        map.insert(cluster, Vec::new());
                        Poll::Ready(())
                    }
                }
            })
            .await;
            hold.clusters.end = cluster + 1;
        }
        hold
    }
}

impl ClustersHeld {
    fn release(&self, clusters: Range<u64>) {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting: Vec<_> = clusters.filter_map(|cluster| map.remove(&cluster)).flatten().collect();
        drop(map);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.held.release(self.clusters.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    use blockyard_ring::sim::{Rng, Sim, yield_now};

    #[test]
    fn one_at_a_time_each_and_everybody_gets_them() {
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
            assert!(shared.0.0.lock().unwrap().is_empty());
        }
    }
}
