//! The operations that wait for the device. The device's lock protects this list.
//!
//! In: operations of disks that exceed their share, in order of arrival. Out: the next operation,
//! lowest start tag first. What must hold: the operations of one disk keep their order. A disk with
//! waiting operations has exactly one entry in the heap, with the start tag of its first operation.
//! Start tags wrap around; comparisons use their distance, which stays far below half of the range.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::task::Waker;

use crate::cost::Operation;

/// State of one operation that waits. The caller may reuse it for a later wait.
#[derive(Debug, Default)]
pub struct WaitToken {
    state: AtomicU8,
    /// Whether a drain admits the operation, and whether its cost is a part of the disk's debt to
    /// the device. The latter counts only if a drain admits it.
    is_forced: AtomicBool,
    owes_device: AtomicBool,
    /// Whether the admitted operation takes room that the disks in the queue share.
    takes_room: AtomicBool,
}

const IDLE: u8 = 0;
const WAITS: u8 = 1;
const GRANTED: u8 = 2;

impl WaitToken {
    pub(crate) fn start(&self) {
        self.is_forced.store(false, SeqCst);
        self.state.store(WAITS, SeqCst);
    }

    /// Admits the operation. Returns false if the caller has cancelled the wait.
    pub(crate) fn grant(&self) -> bool {
        self.state.compare_exchange(WAITS, GRANTED, SeqCst, SeqCst).is_ok()
    }

    /// Notes that a drain admits the operation. Call it before [`WaitToken::grant`].
    fn set_forced(&self, owes_device: bool) {
        self.owes_device.store(owes_device, SeqCst);
        self.is_forced.store(true, SeqCst);
    }

    pub(crate) fn is_forced(&self) -> bool {
        self.is_forced.load(SeqCst)
    }

    /// Returns whether a drain admits the operation, and its cost is a part of the debt.
    pub(crate) fn owes_device(&self) -> bool {
        self.is_forced() && self.owes_device.load(SeqCst)
    }

    /// Notes whether the operation takes room. Call it before [`WaitToken::grant`].
    pub(crate) fn set_takes_room(&self, takes_room: bool) {
        self.takes_room.store(takes_room, SeqCst);
    }

    pub(crate) fn takes_room(&self) -> bool {
        self.takes_room.load(SeqCst)
    }

    fn waits(&self) -> bool {
        self.state.load(SeqCst) == WAITS
    }

    /// Returns whether the operation is admitted.
    pub fn is_granted(&self) -> bool {
        self.state.load(SeqCst) == GRANTED
    }

    /// Returns whether the operation was admitted. Returns true once for each wait.
    pub fn take_grant(&self) -> bool {
        self.state.compare_exchange(GRANTED, IDLE, SeqCst, SeqCst).is_ok()
    }

    /// Cancels the wait. Returns true if the operation was admitted before the cancellation. Then
    /// the caller must release its grant.
    pub fn cancel(&self) -> bool {
        self.state.swap(IDLE, SeqCst) == GRANTED
    }
}

/// Returns whether start tag `a` is before `b`.
#[inline]
pub fn before(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) < 0
}

/// Returns the later of two start tags.
#[inline]
pub fn later(a: u64, b: u64) -> u64 {
    if before(a, b) { b } else { a }
}

#[derive(Debug)]
pub(crate) struct Waiter {
    pub token: Arc<WaitToken>,
    pub waker: Waker,
    pub cost_ns: u64,
    pub operation: Operation,
}

/// Entry of one disk in the heap. `BinaryHeap` pops the greatest entry, so the lowest start tag
/// compares as the greatest.
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

/// One FIFO of waiting operations for each disk, by the disk's number on the device, and the order
/// among the disks.
#[derive(Debug, Default)]
pub(crate) struct WaitList {
    queues: Vec<VecDeque<Waiter>>,
    heads: BinaryHeap<Head>,
}

impl WaitList {
    /// Adds an operation of a disk. `tag`: start tag of the disk's next operation.
    pub fn push(&mut self, disk: usize, tag: u64, waiter: Waiter) {
        if self.queues.len() <= disk {
            self.queues.resize_with(disk + 1, VecDeque::new);
        }
        if self.queues[disk].is_empty() {
            self.heads.push(Head { tag, disk });
        }
        self.queues[disk].push_back(waiter);
    }

    /// Returns the disk with the lowest start tag.
    pub fn head(&self) -> Option<usize> {
        self.heads.peek().map(|head| head.disk)
    }

    /// Removes the disk with the lowest start tag from the heap, and returns the disk's number and
    /// its tag. The caller must add the disk again with [`WaitList::push_head`], whether it takes
    /// the disk's operation ([`WaitList::take`]) or not.
    pub fn pop_head(&mut self) -> Option<(usize, u64)> {
        self.heads.pop().map(|head| (head.disk, head.tag))
    }

    /// Removes the first operation of a disk that [`WaitList::pop_head`] returned.
    pub fn take(&mut self, disk: usize) -> Option<Waiter> {
        self.queues[disk].pop_front()
    }

    /// Adds the disk to the heap with start tag `tag`, if the disk has another operation.
    pub fn push_head(&mut self, disk: usize, tag: u64) {
        if !self.queues[disk].is_empty() {
            self.heads.push(Head { tag, disk });
        }
    }

    /// Lowers the start tags in the heap to those that `tag_of` returns, after the start tags of
    /// disks have changed. A tag that is too low stays: [`crate::device`] corrects it when it pops
    /// the disk.
    pub fn lower_tags(&mut self, tag_of: impl Fn(usize) -> Option<u64>) {
        let mut heads = std::mem::take(&mut self.heads).into_vec();
        for head in &mut heads {
            if let Some(tag) = tag_of(head.disk).filter(|tag| before(*tag, head.tag)) {
                head.tag = tag;
            }
        }
        self.heads = heads.into();
    }

    /// Notes that a drain admits the operations of a disk that wait. Returns their cost.
    /// `owes_device`: it is a part of the disk's debt.
    pub fn set_forced(&self, disk: usize, owes_device: bool) -> u64 {
        let waiters = self.queues.get(disk).into_iter().flatten();
        let waiters = waiters.inspect(|waiter| waiter.token.set_forced(owes_device));
        waiters.fold(0, |cost, waiter| cost.saturating_add(waiter.cost_ns))
    }

    /// Wakes the first operation of each disk that waits, without admitting it.
    pub fn wake_first(&self) {
        let mut disks = self.disks();
        disks.sort_unstable();
        disks.into_iter().for_each(|disk| self.wake_first_of(disk));
    }

    /// Wakes the first operation of a disk, without admitting it.
    pub fn wake_first_of(&self, disk: usize) {
        // An operation that was cancelled has no task any more.
        if let Some(first) = self.queues[disk].iter().find(|waiter| waiter.token.waits()) {
            first.waker.wake_by_ref();
        }
    }

    /// Returns the numbers of the disks in the heap.
    pub fn disks(&self) -> Vec<usize> {
        self.heads.iter().map(|head| head.disk).collect()
    }

    /// Removes a disk's first operation out of order. The disk's next operation keeps the heap
    /// entry.
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
    use crate::cost::OperationKind;

    fn waiter(cost_ns: u64) -> Waiter {
        Waiter {
            token: Arc::default(),
            waker: Waker::noop().clone(),
            cost_ns,
            operation: Operation {
                kind: OperationKind::Read,
                bytes: 4096,
                sequential: false,
                requests: 1,
            },
        }
    }

    fn pop(wait_list: &mut WaitList) -> Option<(usize, u64)> {
        let (disk, _) = wait_list.pop_head()?;
        wait_list.take(disk).map(|waiter| (disk, waiter.cost_ns))
    }

    #[test]
    fn the_lowest_tag_goes_first_also_when_tags_wrap() {
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
    fn a_lower_tag_changes_the_order_and_a_higher_one_does_not() {
        let mut wait_list = WaitList::default();
        for disk in 0..4 {
            wait_list.push(disk, 10 * disk as u64, waiter(disk as u64));
        }
        let tags = [Some(100), None, Some(20), Some(5)];
        wait_list.lower_tags(|disk| tags[disk]);
        let order: Vec<_> = std::iter::from_fn(|| wait_list.pop_head()).collect();
        assert_eq!(order, [(0, 0), (3, 5), (1, 10), (2, 20)]);
    }

    #[test]
    fn an_operation_can_leave_the_list_out_of_order() {
        let mut wait_list = WaitList::default();
        wait_list.push(3, 10, waiter(1));
        wait_list.push(3, 0, waiter(2));
        assert_eq!(wait_list.pop_of(3).map(|w| w.cost_ns), Some(1));
        wait_list.push(4, 5, waiter(3));
        assert_eq!(wait_list.pop_of(4).map(|w| w.cost_ns), Some(3));
        assert_eq!(pop(&mut wait_list), Some((3, 2)));
        assert!(
            pop(&mut wait_list).is_none()
                && wait_list.pop_of(3).is_none()
                && wait_list.pop_of(9).is_none()
        );
    }

    #[test]
    fn a_wait_is_either_granted_or_cancelled() {
        let token = WaitToken::default();
        token.start();
        assert!(!token.take_grant() && token.grant() && token.take_grant() && !token.take_grant());
        token.start();
        assert!(!token.cancel() && !token.grant());
        token.start();
        assert!(token.grant() && token.cancel() && !token.take_grant());
    }
}
