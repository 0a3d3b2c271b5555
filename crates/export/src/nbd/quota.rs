//! The quota of buffer memory for the connections of one reactor.
//!
//! In: the size of a buffer, and the usage of the connection that needs it. Out: permission to hold
//! that number of bytes. What must hold:
//! - A connection gets its first [`GUARANTEED`] bytes at once, whatever other connections hold.
//!   This applies even while the connection waits for more bytes.
//! - All bytes beyond the guaranteed ones are at most [`MOST`] for all connections together.
//! - A request waits only while the quota is used up, or while its disk has its part of it. The
//!   quota serves the connection that holds least first.
//! - The requests of a disk that does not answer leave quota for the other disks: a disk gets more
//!   only while it holds less than what is free. (A threshold that follows the free space:
//!   Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
//!   1998.) A disk that holds nothing gets what is free.
//! - A connection that ends, or that another server continues, waits no longer.
//! - Payloads get their memory in steps, so they could deadlock. To prevent that, the quota
//!   reserves its last [`LONGEST`] bytes for one payload at a time, so that this payload can
//!   complete.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use blockyard_nbd::wire;
use blockyard_ring::{Handle, Signal};

/// Bytes that the connections of one reactor share.
const MOST: usize = 256 << 20;
/// Bytes that each connection may hold in addition, whatever other connections hold.
pub const GUARANTEED: usize = 256 << 10;
/// Maximum number of bytes of a payload.
const LONGEST: usize = wire::MOST_PAYLOAD as usize;

/// The quota of one reactor, and the requests that wait for it.
#[derive(Default)]
pub struct Quota {
    /// Bytes that all connections hold beyond their guaranteed bytes.
    shared: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
    reserve: RefCell<Reserve>,
    /// Called when a request must wait.
    alarm: Cell<Option<fn(&Handle)>>,
}

/// Bytes that one connection holds.
#[derive(Default)]
pub struct Usage {
    held: Cell<usize>,
    of_disk: RefCell<Rc<DiskUsage>>,
    /// Whether the connection waits for nothing any more.
    has_ended: Cell<bool>,
}

/// Bytes that the connections of one disk hold beyond their guaranteed bytes.
#[derive(Default)]
pub struct DiskUsage(Cell<usize>);

/// The last [`LONGEST`] bytes of the quota, which only an arriving payload may take.
#[derive(Default)]
enum Reserve {
    #[default]
    Free,
    /// The reserve is for the payload of this connection.
    For(Rc<Usage>),
    /// The payload that had the reserve has ended, but its connection has not returned the bytes
    /// yet.
    Used,
}

/// The purpose for which a connection takes bytes from the quota.
#[derive(Clone, Copy, PartialEq)]
pub enum Need {
    /// A whole buffer, which the disk fills (a read) or the client fills with a short payload (a
    /// write).
    Buffer,
    /// The next step of an arriving payload.
    Payload,
}

struct Waiting {
    usage: Rc<Usage>,
    size: usize,
    need: Need,
    signal: Signal,
    granted: Cell<bool>,
}

impl Usage {
    /// Returns the number of bytes that the connection holds.
    pub fn held(&self) -> usize {
        self.held.get()
    }

    /// Returns whether the connection holds more than its guaranteed bytes.
    pub fn shares(&self) -> bool {
        self.held.get() > GUARANTEED
    }

    /// Counts what the connection holds from now on for a disk, too. It holds nothing yet.
    pub fn set_disk(&self, disk: Rc<DiskUsage>) {
        debug_assert!(!self.shares());
        self.of_disk.replace(disk);
    }

    fn disk_bytes(&self) -> usize {
        self.of_disk.borrow().0.get()
    }

    /// Returns how many of `size` further bytes would exceed the guaranteed bytes.
    fn beyond(&self, size: usize) -> usize {
        let held = self.held.get();
        (held + size).saturating_sub(GUARANTEED) - held.saturating_sub(GUARANTEED)
    }
}

impl Quota {
    /// Waits until the connection with this `usage` may hold `size` more bytes.
    #[inline]
    pub async fn take(&self, handle: &Handle, usage: &Rc<Usage>, size: usize, need: Need) {
        if let Some(waiting) = self.enter(handle, usage, size, need) {
            if let Some(alarm) = self.alarm.get() {
                alarm(handle);
            }
            while !waiting.granted.get() {
                waiting.signal.wait().await;
            }
        }
    }

    /// Takes the bytes and returns `None`, or enters the wait queue and returns the new waiter.
    fn enter(
        &self,
        handle: &Handle,
        usage: &Rc<Usage>,
        size: usize,
        need: Need,
    ) -> Option<Rc<Waiting>> {
        let beyond = usage.beyond(size);
        let first = usage.has_ended.get()
            || self.waiting.borrow().is_empty()
            || (need == Need::Payload && self.is_reserved_for(usage));
        if beyond == 0 || (first && self.fits(usage, beyond, need)) {
            self.grant(usage, size);
            return None;
        }
        let (usage, signal, granted) = (usage.clone(), Signal::new(handle), Cell::new(false));
        let waiting = Rc::new(Waiting { usage, size, need, signal, granted });
        self.waiting.borrow_mut().push_back(waiting.clone());
        // The new waiter may be the payload that can take the free reserve.
        self.serve();
        Some(waiting)
    }

    /// Calls `alarm` from now on when a request must wait.
    pub fn on_shortage(&self, alarm: fn(&Handle)) {
        self.alarm.set(Some(alarm));
    }

    /// Returns whether a request waits.
    pub fn is_short(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Returns `size` bytes, and grants waiting requests.
    #[inline]
    pub fn give_back(&self, usage: &Usage, size: usize) {
        let held = usage.held.replace(usage.held.get() - size);
        let beyond = held.saturating_sub(GUARANTEED) - usage.held.get().saturating_sub(GUARANTEED);
        self.shared.set(self.shared.get() - beyond);
        let disk = usage.of_disk.borrow();
        disk.0.set(disk.0.get() - beyond);
        if self.is_short() || !matches!(*self.reserve.borrow(), Reserve::Free) {
            self.serve();
        }
    }

    /// Records that the connection's payload is complete or abandoned.
    pub fn payload_ended(&self, usage: &Rc<Usage>) {
        if self.is_reserved_for(usage) {
            self.reserve.replace(Reserve::Used);
            self.serve();
        }
    }

    fn is_reserved_for(&self, usage: &Rc<Usage>) -> bool {
        matches!(&*self.reserve.borrow(), Reserve::For(owner) if Rc::ptr_eq(owner, usage))
    }

    fn fits(&self, usage: &Rc<Usage>, beyond: usize, need: Need) -> bool {
        let reserved = need == Need::Payload && self.is_reserved_for(usage);
        let most = if reserved { MOST } else { MOST - LONGEST };
        let fits = self.shared.get() + beyond <= most;
        usage.has_ended.get() || (fits && (reserved || self.is_within_part(usage, beyond)))
    }

    /// Returns whether the connection's disk may hold so many more bytes.
    fn is_within_part(&self, usage: &Usage, beyond: usize) -> bool {
        let (disk, free) = (usage.disk_bytes(), (MOST - LONGEST).saturating_sub(self.shared.get()));
        disk == 0 || disk + beyond <= free
    }

    fn grant(&self, usage: &Usage, size: usize) {
        let beyond = usage.beyond(size);
        self.shared.set(self.shared.get() + beyond);
        let disk = usage.of_disk.borrow();
        disk.0.set(disk.0.get() + beyond);
        usage.held.set(usage.held.get() + size);
    }

    /// Ends the connection's waits, because the connection ends. It gives back what it gets.
    pub fn end(&self, usage: &Usage) {
        usage.has_ended.set(true);
        if self.is_short() {
            self.serve();
        }
    }

    /// Grants waiting requests while there is quota.
    fn serve(&self) {
        if matches!(*self.reserve.borrow(), Reserve::Used) && self.shared.get() <= MOST - LONGEST {
            self.reserve.replace(Reserve::Free);
        }
        while let Some(at) = self.next() {
            let Some(next) = self.waiting.borrow_mut().remove(at) else { break };
            self.grant(&next.usage, next.size);
            next.granted.set(true);
            next.signal.ring();
        }
    }

    /// Returns the index of the waiting request to grant next, if one can be granted.
    fn next(&self) -> Option<usize> {
        let waiting = self.waiting.borrow();
        let is_free = |w: &Rc<Waiting>| w.usage.has_ended.get() || w.usage.beyond(w.size) == 0;
        if let Some(at) = waiting.iter().position(is_free) {
            return Some(at);
        }
        // Requests of a disk that has its part make no others wait.
        let smallest = |payload: bool| {
            let all = waiting.iter().enumerate().filter(|(_, w)| match payload {
                true => w.need == Need::Payload,
                false => {
                    let beyond = w.usage.beyond(w.size);
                    self.is_within_part(&w.usage, beyond) || self.fits(&w.usage, beyond, w.need)
                }
            });
            all.min_by_key(|(_, w)| w.usage.held()).map(|(at, _)| at)
        };
        if let Some(first) = smallest(false) {
            let Waiting { usage, size, need, .. } = &*waiting[first];
            if self.fits(usage, usage.beyond(*size), *need) {
                return Some(first);
            }
        }
        if !matches!(*self.reserve.borrow(), Reserve::Free) {
            return None;
        }
        let payload = smallest(true)?;
        self.reserve.replace(Reserve::For(waiting[payload].usage.clone()));
        Some(payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    struct Reactor(blockyard_ring::Executor, Quota);

    impl Reactor {
        fn new() -> Self {
            Reactor(blockyard_ring::Executor::new().unwrap(), Quota::default())
        }

        /// Returns `None` if the bytes were granted at once.
        fn take(&self, usage: &Rc<Usage>, size: usize) -> Option<Rc<Waiting>> {
            self.1.enter(self.0.handle(), usage, size, Need::Buffer)
        }

        fn step(&self, usage: &Rc<Usage>, size: usize) -> Option<Rc<Waiting>> {
            self.1.enter(self.0.handle(), usage, size, Need::Payload)
        }

        /// Makes seven connections hold all bytes that whole buffers may take.
        fn full(&self) -> Vec<Rc<Usage>> {
            let all: Vec<Rc<Usage>> = (0..7).map(|_| Rc::default()).collect();
            all.iter().for_each(|usage| assert!(self.take(usage, 32 * MB + GUARANTEED).is_none()));
            all
        }
    }

    #[test]
    fn guaranteed_bytes_are_granted_at_once_even_after_a_wait() {
        let reactor = Reactor::new();
        let _full = reactor.full();
        let client = Rc::default();
        for _ in 0..64 {
            assert!(reactor.take(&client, 4096).is_none());
        }
        // The other connection waits first. The 65th request waits behind it.
        let other = Rc::default();
        let long = reactor.take(&other, MB).unwrap();
        let waiting = reactor.take(&client, 4096).unwrap();
        assert!(!waiting.granted.get());
        reactor.1.give_back(&client, 4096);
        assert!(waiting.granted.get() && !long.granted.get());
        assert_eq!(client.held(), GUARANTEED);
    }

    #[test]
    fn the_connection_that_holds_least_is_first() {
        let reactor = Reactor::new();
        let full = reactor.full();
        let greedy = reactor.take(&full[1], 4 * MB).unwrap();
        let modest = Rc::default();
        let small = reactor.take(&modest, 8 * MB).unwrap();
        let later = Rc::default();
        let smallest = reactor.take(&later, 8 * MB).unwrap();
        reactor.1.give_back(&full[0], 8 * MB);
        assert!(small.granted.get() && !smallest.granted.get() && !greedy.granted.get());
        reactor.1.give_back(&full[0], 8 * MB);
        assert!(smallest.granted.get() && !greedy.granted.get());
        reactor.1.give_back(&full[0], 8 * MB);
        assert!(!greedy.granted.get(), "its disk holds more than what is free");
        reactor.1.give_back(&full[2], 32 * MB);
        assert!(greedy.granted.get() && !reactor.1.is_short());
    }

    /// Payloads have taken the whole quota in steps, and each needs more. They complete one after
    /// the other.
    #[test]
    fn arriving_payloads_do_not_deadlock() {
        let reactor = Reactor::new();
        let usages: Vec<Rc<Usage>> = (0..16).map(|_| Rc::default()).collect();
        let mut waiting: Vec<Option<Rc<Waiting>>> =
            usages.iter().map(|usage| reactor.step(usage, GUARANTEED)).collect();
        let mut done = 0;
        while done < usages.len() {
            let mut steps = 0;
            for (usage, waits) in usages.iter().zip(&mut waiting) {
                assert!(reactor.1.shared.get() <= MOST);
                if waits.as_ref().is_some_and(|waits| !waits.granted.get()) || usage.held() == 0 {
                    continue;
                }
                steps += 1;
                if usage.held() == LONGEST {
                    reactor.1.payload_ended(usage);
                    reactor.1.give_back(usage, LONGEST);
                    (*waits, done) = (None, done + 1);
                } else {
                    *waits = reactor.step(usage, usage.held());
                }
            }
            assert!(
                steps > 0,
                "{done} of {} payloads are complete, and all others wait",
                usages.len()
            );
        }
        assert_eq!((reactor.1.shared.get(), reactor.1.is_short()), (0, false));
        assert!(matches!(*reactor.1.reserve.borrow(), Reserve::Free));
    }

    /// One payload has the reserve. The next payload of the same connection does not inherit it.
    #[test]
    fn the_reserve_is_free_after_its_bytes_are_returned() {
        let reactor = Reactor::new();
        let full = reactor.full();
        let client = Rc::default();
        assert!(reactor.step(&client, GUARANTEED).is_none());
        // No further step fits. The reserve lets this payload be completed.
        assert!(reactor.step(&client, GUARANTEED).is_some_and(|waiting| waiting.granted.get()));
        assert!(reactor.step(&client, LONGEST - 2 * GUARANTEED).is_none());
        reactor.1.payload_ended(&client);
        let next = reactor.step(&client, GUARANTEED).unwrap();
        assert!(!next.granted.get());
        reactor.1.give_back(&client, LONGEST);
        assert!(next.granted.get());
        full.iter().for_each(|usage| reactor.1.give_back(usage, 32 * MB + GUARANTEED));
        reactor.1.give_back(&client, GUARANTEED);
        assert_eq!(reactor.1.shared.get(), 0);
    }

    #[test]
    fn a_disk_that_does_not_answer_leaves_quota_for_the_others() {
        let (reactor, disk) = (Reactor::new(), Rc::<DiskUsage>::default());
        let of_disk: Vec<_> = (0..8).map(|_| Rc::<Usage>::default()).collect();
        of_disk.iter().for_each(|usage| usage.set_disk(disk.clone()));
        let waiting: Vec<_> =
            of_disk.iter().filter_map(|usage| reactor.take(usage, 32 * MB)).collect();
        assert!(waiting.len() >= 4 && waiting.iter().all(|waiting| !waiting.granted.get()));
        // Each further disk gets a part, too.
        for _ in 0..2 {
            let other = Rc::<Usage>::default();
            let waiting = reactor.take(&other, 32 * MB);
            assert!(waiting.is_none_or(|waiting| waiting.granted.get()));
            reactor.1.give_back(&other, 32 * MB);
        }
        // What the disk gives back goes to its own requests.
        reactor.1.give_back(&of_disk[0], 32 * MB);
        assert!(waiting[0].granted.get() && !waiting[1].granted.get());
    }

    #[test]
    fn a_connection_that_ends_waits_no_longer() {
        let reactor = Reactor::new();
        let _full = reactor.full();
        let usage = Rc::<Usage>::default();
        let waiting = reactor.take(&usage, 32 * MB).unwrap();
        assert!(!waiting.granted.get());
        reactor.1.end(&usage);
        assert!(waiting.granted.get());
        assert!(reactor.take(&usage, 32 * MB).is_none(), "nor later");
        reactor.1.give_back(&usage, 64 * MB);
        assert_eq!(usage.disk_bytes(), 0);
    }
}
