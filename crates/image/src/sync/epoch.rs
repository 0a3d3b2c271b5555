//! Who is still on the way: so that what a request may be using is not given to another.
//!
//! A cluster that was freed may still be read, or written in place, by requests that looked it up
//! before. It is used again only when those are through. Each reactor counts its own requests, in
//! two phases; turning the phase over and seeing the old one come to nothing means that everybody
//! who was there has left.
//!
//! What must hold: entering and leaving never wait, and touch no memory that reactors share but the
//! phase, which is read.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Default)]
pub struct Epoch {
    current: AtomicU64,
    participants: Mutex<Vec<Arc<Participant>>>,
}

/// One reactor's requests; a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Participant {
    counts: [AtomicU64; 2],
}

/// A request on its way, until it is dropped.
pub struct EpochGuard<'a>(&'a AtomicU64);

impl Epoch {
    /// A reactor's way in; it lasts as long as the reactor keeps it.
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

    #[inline]
    pub fn enter<'a>(&self, participant: &'a Participant) -> EpochGuard<'a> {
        loop {
            let epoch = self.current.load(SeqCst);
            let count = &participant.counts[epoch as usize & 1];
            count.fetch_add(1, SeqCst);
            // Turned over meanwhile: whoever did may not have seen this one.
            if self.current.load(SeqCst) == epoch {
                return EpochGuard(count);
            }
            count.fetch_sub(1, SeqCst);
        }
    }

    /// Turns the phase over, once everybody of the phase before has left: false, and nothing is
    /// done, if somebody has not.
    pub fn try_advance(&self) -> bool {
        if !self.previous_is_empty() {
            return false;
        }
        self.current.fetch_add(1, SeqCst);
        true
    }

    /// Whether all who entered before the last turn have left.
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
    fn those_who_were_there_are_waited_for_and_no_others() {
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
    fn nobody_slips_through_a_turn() {
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
                            // Who saw it in use is in before it was taken away.
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
                assert_eq!(in_use.load(SeqCst), 0, "somebody still uses what was taken away");
                free.store(false, SeqCst);
            }
        });
    }
}
