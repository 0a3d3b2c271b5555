//! Epoch-based reclamation: a freed cluster is reused only when no request can still use it.
//!
//! A request that looked a cluster up before it was freed may still read it, or write it in place.
//! Each reactor counts its requests in flight in two counters, one for each of two successive
//! epochs. If the epoch was advanced and the counters of the previous epoch are 0, then all
//! requests that started before the change have ended.
//!
//! Invariant: entering and leaving never wait. The only memory that they share with other reactors
//! is the epoch number, which they only read.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

/// The current epoch, and the counters of all reactors.
#[derive(Debug, Default)]
pub struct Epoch {
    current: AtomicU64,
    participants: Mutex<Vec<Arc<Participant>>>,
}

/// One reactor's counters of requests in flight, in a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Participant {
    counts: [AtomicU64; 2],
}

/// A request inside an epoch; dropping it leaves the epoch.
pub struct EpochGuard<'a>(&'a AtomicU64);

impl Epoch {
    /// Registers a reactor. The registration ends when the reactor drops it.
    pub fn register(&self) -> Arc<Participant> {
        let participant = Arc::new(Participant::default());
        let mut participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        participants.retain(|participant| {
            Arc::strong_count(participant) > 1
                || participant.counts.iter().any(|c| c.load(SeqCst) > 0)
        });
        participants.push(participant.clone());
        participant
    }

    /// Enters the current epoch; the guard leaves it.
    #[inline]
    pub fn enter<'a>(&self, participant: &'a Participant) -> EpochGuard<'a> {
        loop {
            let epoch = self.current.load(SeqCst);
            let count = &participant.counts[epoch as usize & 1];
            count.fetch_add(1, SeqCst);
            // The epoch changed meanwhile, and the thread that advanced it may have missed this
            // count.
            if self.current.load(SeqCst) == epoch {
                return EpochGuard(count);
            }
            count.fetch_sub(1, SeqCst);
        }
    }

    /// Advances the epoch, if no request is left in the previous one. Returns false, and changes
    /// nothing, if a request is left there.
    pub fn try_advance(&self) -> bool {
        if !self.previous_is_empty() {
            return false;
        }
        self.current.fetch_add(1, SeqCst);
        true
    }

    /// Returns true if all requests that entered before the last advance have left.
    pub fn previous_is_empty(&self) -> bool {
        let old = (self.current.load(SeqCst) as usize & 1) ^ 1;
        let participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        participants.iter().all(|participant| participant.counts[old].load(SeqCst) == 0)
    }
}

impl Drop for EpochGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_ends_when_the_requests_inside_it_have_left() {
        let epoch = Epoch::default();
        let (a, b) = (epoch.register(), epoch.register());
        let early = epoch.enter(&a);
        assert!(epoch.try_advance());
        assert!(!epoch.previous_is_empty() && !epoch.try_advance());
        let late = epoch.enter(&b);
        drop(early);
        assert!(epoch.previous_is_empty());
        assert!(epoch.try_advance());
        assert!(!epoch.previous_is_empty());
        drop(late);
        assert!(epoch.previous_is_empty());
    }

    #[test]
    fn no_request_is_missed_when_the_epoch_advances() {
        let epoch = Epoch::default();
        let in_use = AtomicU64::new(0);
        let free = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    let participant = epoch.register();
                    for _ in 0..200_000 {
                        let _guard = epoch.enter(&participant);
                        if !free.load(SeqCst) {
                            in_use.fetch_add(1, SeqCst);
                            // A request that saw the resource in use entered before it was freed.
                            in_use.fetch_sub(1, SeqCst);
                        }
                    }
                });
            }
            for _ in 0..2_000 {
                free.store(true, SeqCst);
                while !epoch.try_advance() {
                    std::hint::spin_loop();
                }
                while !epoch.previous_is_empty() {
                    std::hint::spin_loop();
                }
                assert_eq!(in_use.load(SeqCst), 0, "a request still uses the freed resource");
                free.store(false, SeqCst);
            }
        });
    }
}
