//! Who waits for the device: what is kept under its lock.
//!
//! In: requests of disks that are ahead of their share, in the order they came. Out: the next one,
//! lowest tag first. What must hold: a disk's requests keep their order; a disk with requests here
//! has one place in the heap, under the tag at which its first one begins. Tags wrap: they are
//! compared by their distance, which stays far below half their range.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::task::Waker;

/// A request's place among those that wait; used again for the next one.
#[derive(Debug, Default)]
pub struct WaitToken(AtomicU8);

const IDLE: u8 = 0;
const WAITS: u8 = 1;
const GRANTED: u8 = 2;

impl WaitToken {
    pub(crate) fn start(&self) {
        self.0.store(WAITS, SeqCst);
    }

    /// False: whoever waited has gone.
    pub(crate) fn grant(&self) -> bool {
        self.0.compare_exchange(WAITS, GRANTED, SeqCst, SeqCst).is_ok()
    }

    /// Whether the request may begin: once, for each wait.
    pub fn take_grant(&self) -> bool {
        self.0.compare_exchange(GRANTED, IDLE, SeqCst, SeqCst).is_ok()
    }

    /// Nobody waits any more. True: the request was let in meanwhile, and its grant is to be given
    /// back.
    pub fn cancel(&self) -> bool {
        self.0.swap(IDLE, SeqCst) == GRANTED
    }
}

/// Whether tag `a` comes before `b`.
#[inline]
pub fn before(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) < 0
}

/// The later of two tags.
#[inline]
pub fn later(a: u64, b: u64) -> u64 {
    if before(a, b) { b } else { a }
}

#[derive(Debug)]
pub(crate) struct Waiter {
    pub token: Arc<WaitToken>,
    pub waker: Waker,
    pub cost: u64,
    pub bytes: u64,
    pub requests: u32,
}

/// A place in the heap: the lowest tag is the greatest.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    tag: u64,
    disk: usize,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.tag.wrapping_sub(self.tag) as i64).cmp(&0).then(other.disk.cmp(&self.disk))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The queues of the disks, by their number on the device, and the order among them.
#[derive(Debug, Default)]
pub(crate) struct WaitList {
    queues: Vec<VecDeque<Waiter>>,
    heads: BinaryHeap<Head>,
}

impl WaitList {
    pub fn push(&mut self, disk: usize, tag: u64, waiter: Waiter) {
        if self.queues.len() <= disk {
            self.queues.resize_with(disk + 1, VecDeque::new);
        }
        if self.queues[disk].is_empty() {
            self.heads.push(Head { tag, disk });
        }
        self.queues[disk].push_back(waiter);
    }

    /// The disk whose turn it is, and its tag. It keeps no place in the heap: the caller says where
    /// it goes on ([`WaitList::again`]), whether it takes the disk's request ([`WaitList::take`]) or not.
    pub fn pop_head(&mut self) -> Option<(usize, u64)> {
        self.heads.pop().map(|head| (head.disk, head.tag))
    }

    /// The first request of the disk whose turn it is.
    pub fn take(&mut self, disk: usize) -> Option<Waiter> {
        self.queues[disk].pop_front()
    }

    /// The disk's next request, if it has one, begins at `tag`.
    pub fn push_head(&mut self, disk: usize, tag: u64) {
        if !self.queues[disk].is_empty() {
            self.heads.push(Head { tag, disk });
        }
    }

    /// Takes a disk's first request out of turn; its next one keeps the place.
    pub fn pop_of(&mut self, disk: usize) -> Option<Waiter> {
        let queue = self.queues.get_mut(disk)?;
        let waiter = queue.pop_front()?;
        if queue.is_empty() {
            self.heads.retain(|head| head.disk != disk);
        }
        Some(waiter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiter(cost: u64) -> Waiter {
        Waiter { token: Arc::default(), waker: Waker::noop().clone(), cost, bytes: 0, requests: 1 }
    }

    fn pop(wait_list: &mut WaitList) -> Option<(usize, u64)> {
        let (disk, _) = wait_list.pop_head()?;
        wait_list.take(disk).map(|waiter| (disk, waiter.cost))
    }

    #[test]
    fn the_lowest_tag_goes_first_also_where_tags_wrap() {
        let mut wait_list = WaitList::default();
        let near_end = u64::MAX - 5;
        for (disk, tag) in
            [(0, near_end.wrapping_add(10)), (1, near_end), (2, near_end.wrapping_add(5))]
        {
            wait_list.push(disk, tag, waiter(disk as u64));
        }
        wait_list.push(1, 0, waiter(11));
        assert_eq!(pop(&mut wait_list), Some((1, 1)));
        wait_list.push_head(1, near_end.wrapping_add(7));
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut wait_list)).collect();
        assert_eq!(order, [(2, 2), (1, 11), (0, 0)]);
    }

    #[test]
    fn out_of_turn() {
        let mut wait_list = WaitList::default();
        wait_list.push(3, 10, waiter(1));
        wait_list.push(3, 0, waiter(2));
        assert_eq!(wait_list.pop_of(3).map(|w| w.cost), Some(1));
        wait_list.push(4, 5, waiter(3));
        assert_eq!(wait_list.pop_of(4).map(|w| w.cost), Some(3));
        assert_eq!(pop(&mut wait_list), Some((3, 2)));
        assert!(
            pop(&mut wait_list).is_none()
                && wait_list.pop_of(3).is_none()
                && wait_list.pop_of(9).is_none()
        );
    }

    #[test]
    fn a_slot_is_granted_or_cancelled() {
        let token = WaitToken::default();
        token.start();
        assert!(!token.take_grant() && token.grant() && token.take_grant() && !token.take_grant());
        token.start();
        assert!(!token.cancel() && !token.grant());
        token.start();
        assert!(token.grant() && token.cancel() && !token.take_grant());
    }
}
