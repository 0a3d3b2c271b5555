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
pub struct Traffic {
    phase: AtomicU64,
    lanes: Mutex<Vec<Arc<Lane>>>,
}

/// One reactor's requests; a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Lane {
    counts: [AtomicU64; 2],
}

/// A request on its way, until it is dropped.
pub struct Pass<'a>(&'a AtomicU64);

impl Traffic {
    /// A reactor's way in; it lasts as long as the reactor keeps it.
    pub fn lane(&self) -> Arc<Lane> {
        let lane = Arc::new(Lane::default());
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|lane| {
            Arc::strong_count(lane) > 1 || lane.counts.iter().any(|c| c.load(SeqCst) > 0)
        });
        lanes.push(lane.clone());
        lane
    }

    #[inline]
    pub fn enter<'a>(&self, lane: &'a Lane) -> Pass<'a> {
        loop {
            let phase = self.phase.load(SeqCst);
            let count = &lane.counts[phase as usize & 1];
            count.fetch_add(1, SeqCst);
            // Turned over meanwhile: whoever did may not have seen this one.
            if self.phase.load(SeqCst) == phase {
                return Pass(count);
            }
            count.fetch_sub(1, SeqCst);
        }
    }

    /// Turns the phase over, once everybody of the phase before has left: false, and nothing is
    /// done, if somebody has not.
    pub fn turn(&self) -> bool {
        if !self.has_left() {
            return false;
        }
        self.phase.fetch_add(1, SeqCst);
        true
    }

    /// Whether all who entered before the last turn have left.
    pub fn has_left(&self) -> bool {
        let old = (self.phase.load(SeqCst) as usize & 1) ^ 1;
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.iter().all(|lane| lane.counts[old].load(SeqCst) == 0)
    }
}

impl Drop for Pass<'_> {
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
        let traffic = Traffic::default();
        let (a, b) = (traffic.lane(), traffic.lane());
        let early = traffic.enter(&a);
        assert!(traffic.turn());
        assert!(!traffic.has_left() && !traffic.turn());
        let late = traffic.enter(&b);
        drop(early);
        assert!(traffic.has_left());
        assert!(traffic.turn());
        assert!(!traffic.has_left());
        drop(late);
        assert!(traffic.has_left());
    }

    #[test]
    fn nobody_slips_through_a_turn() {
        let traffic = Traffic::default();
        let in_use = AtomicU64::new(0);
        let free = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    let lane = traffic.lane();
                    for _ in 0..200_000 {
                        let _pass = traffic.enter(&lane);
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
                while !traffic.turn() {
                    std::hint::spin_loop();
                }
                while !traffic.has_left() {
                    std::hint::spin_loop();
                }
                assert_eq!(in_use.load(SeqCst), 0, "somebody still uses what was taken away");
                free.store(false, SeqCst);
            }
        });
    }
}
