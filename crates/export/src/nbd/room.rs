//! Room: how many bytes of buffers the connections of one reactor may hold.
//!
//! In: sizes of buffers, and the account of the connection that needs one. Out: permission to hold
//! so many bytes more. What must hold:
//! - A connection has its first [`GUARANTEED`] bytes at once, whatever all others do, also while it
//!   waits for more.
//! - What connections hold beyond that is at most [`MOST`] bytes in all.
//! - A request waits only while room is short. The connection that holds least is served first.
//! - Payloads that arrive in steps cannot wait for one another for ever: [`LONGEST`] bytes of the
//!   room are for one connection at a time, which completes its payload with them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use blockyard_nbd::wire;
use blockyard_ring::{Handle, Signal};

/// Bytes that connections of one reactor share.
const MOST: usize = 256 << 20;
/// Bytes that each connection may hold besides, whatever the others hold.
pub const GUARANTEED: usize = 256 << 10;
/// Bytes of the longest request.
const LONGEST: usize = wire::MOST_PAYLOAD as usize;

#[derive(Default)]
pub struct Room {
    /// Bytes that connections hold beyond what is guaranteed to them.
    shared: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
    reserve: RefCell<Reserve>,
    /// What to do when a request must wait.
    alarm: Cell<Option<fn(&Handle)>>,
}

/// What one connection holds.
#[derive(Default)]
pub struct Account {
    held: Cell<usize>,
}

/// The last [`LONGEST`] bytes of the room, which only a payload that arrives may take.
#[derive(Default)]
enum Reserve {
    #[default]
    Free,
    /// For the payload of this connection.
    For(Rc<Account>),
    /// That payload is complete, and its bytes are not given back yet.
    Used,
}

/// What the bytes are for.
#[derive(Clone, Copy, PartialEq)]
pub enum Need {
    /// A whole buffer, filled by the disk or with few bytes of a client.
    Buffer,
    /// The next step of a payload that arrives.
    Payload,
}

struct Waiting {
    account: Rc<Account>,
    size: usize,
    need: Need,
    signal: Signal,
    granted: Cell<bool>,
}

impl Account {
    pub fn held(&self) -> usize {
        self.held.get()
    }

    /// Whether it holds room that others could have.
    pub fn shares(&self) -> bool {
        self.held.get() > GUARANTEED
    }

    /// Shared bytes that `size` more bytes take.
    fn beyond(&self, size: usize) -> usize {
        let held = self.held.get();
        (held + size).saturating_sub(GUARANTEED) - held.saturating_sub(GUARANTEED)
    }
}

impl Room {
    /// Waits until `account` may hold `size` bytes more.
    #[inline]
    pub async fn take(&self, handle: &Handle, account: &Rc<Account>, size: usize, need: Need) {
        if let Some(waiting) = self.enter(handle, account, size, need) {
            if let Some(alarm) = self.alarm.get() {
                alarm(handle);
            }
            while !waiting.granted.get() {
                waiting.signal.wait().await;
            }
        }
    }

    /// Takes the room, or a place in the wait queue.
    fn enter(
        &self,
        handle: &Handle,
        account: &Rc<Account>,
        size: usize,
        need: Need,
    ) -> Option<Rc<Waiting>> {
        let beyond = account.beyond(size);
        let first = self.waiting.borrow().is_empty()
            || (need == Need::Payload && self.is_reserved_for(account));
        if beyond == 0 || (first && self.fits(account, beyond, need)) {
            self.grant(account, size);
            return None;
        }
        let (account, signal, granted) = (account.clone(), Signal::new(handle), Cell::new(false));
        let waiting = Rc::new(Waiting { account, size, need, signal, granted });
        self.waiting.borrow_mut().push_back(waiting.clone());
        // It may be the payload that the reserve is for.
        self.serve();
        Some(waiting)
    }

    /// Calls `alarm` from now on when a request must wait.
    pub fn on_shortage(&self, alarm: fn(&Handle)) {
        self.alarm.set(Some(alarm));
    }

    pub fn is_short(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    #[inline]
    pub fn give_back(&self, account: &Account, size: usize) {
        let held = account.held.replace(account.held.get() - size);
        let beyond =
            held.saturating_sub(GUARANTEED) - account.held.get().saturating_sub(GUARANTEED);
        self.shared.set(self.shared.get() - beyond);
        if self.is_short() || !matches!(*self.reserve.borrow(), Reserve::Free) {
            self.serve();
        }
    }

    /// The payload of this connection is complete, or will not be.
    pub fn payload_ended(&self, account: &Rc<Account>) {
        if self.is_reserved_for(account) {
            self.reserve.replace(Reserve::Used);
            self.serve();
        }
    }

    fn is_reserved_for(&self, account: &Rc<Account>) -> bool {
        matches!(&*self.reserve.borrow(), Reserve::For(owner) if Rc::ptr_eq(owner, account))
    }

    fn fits(&self, account: &Rc<Account>, beyond: usize, need: Need) -> bool {
        let reserved = need == Need::Payload && self.is_reserved_for(account);
        self.shared.get() + beyond <= if reserved { MOST } else { MOST - LONGEST }
    }

    fn grant(&self, account: &Account, size: usize) {
        self.shared.set(self.shared.get() + account.beyond(size));
        account.held.set(account.held.get() + size);
    }

    /// Serves the wait queue as far as there is room.
    fn serve(&self) {
        if matches!(*self.reserve.borrow(), Reserve::Used) && self.shared.get() <= MOST - LONGEST {
            self.reserve.replace(Reserve::Free);
        }
        while let Some(at) = self.next() {
            let Some(next) = self.waiting.borrow_mut().remove(at) else { break };
            self.grant(&next.account, next.size);
            next.granted.set(true);
            next.signal.ring();
        }
    }

    /// The place of the request that is served next, if one can be.
    fn next(&self) -> Option<usize> {
        let waiting = self.waiting.borrow();
        if let Some(at) =
            waiting.iter().position(|waiting| waiting.account.beyond(waiting.size) == 0)
        {
            return Some(at);
        }
        let smallest = |payload: bool| {
            let all =
                waiting.iter().enumerate().filter(|(_, w)| !payload || w.need == Need::Payload);
            all.min_by_key(|(_, w)| w.account.held()).map(|(at, _)| at)
        };
        let first = smallest(false)?;
        let Waiting { account, size, need, .. } = &*waiting[first];
        if self.fits(account, account.beyond(*size), *need) {
            return Some(first);
        }
        if !matches!(*self.reserve.borrow(), Reserve::Free) {
            return None;
        }
        let payload = smallest(true)?;
        self.reserve.replace(Reserve::For(waiting[payload].account.clone()));
        Some(payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    struct Reactor(blockyard_ring::Executor, Room);

    impl Reactor {
        fn new() -> Self {
            Reactor(blockyard_ring::Executor::new().unwrap(), Room::default())
        }

        /// None: the room was there.
        fn take(&self, account: &Rc<Account>, size: usize) -> Option<Rc<Waiting>> {
            self.1.enter(self.0.handle(), account, size, Need::Buffer)
        }

        fn step(&self, account: &Rc<Account>, size: usize) -> Option<Rc<Waiting>> {
            self.1.enter(self.0.handle(), account, size, Need::Payload)
        }

        /// Seven connections that hold all that whole buffers may have.
        fn full(&self) -> Vec<Rc<Account>> {
            let all: Vec<Rc<Account>> = (0..7).map(|_| Rc::default()).collect();
            all.iter()
                .for_each(|account| assert!(self.take(account, 32 * MB + GUARANTEED).is_none()));
            all
        }
    }

    #[test]
    fn the_guaranteed_part_is_there_at_once_also_when_it_is_free_again() {
        let reactor = Reactor::new();
        let _full = reactor.full();
        let client = Rc::default();
        for _ in 0..64 {
            assert!(reactor.take(&client, 4096).is_none());
        }
        // It waits for the 65th behind another one.
        let other = Rc::default();
        let long = reactor.take(&other, MB).unwrap();
        let waiting = reactor.take(&client, 4096).unwrap();
        assert!(!waiting.granted.get());
        reactor.1.give_back(&client, 4096);
        assert!(waiting.granted.get() && !long.granted.get());
        assert_eq!(client.held(), GUARANTEED);
    }

    #[test]
    fn the_smallest_holder_is_first() {
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
        assert!(greedy.granted.get() && !reactor.1.is_short());
    }

    /// Payloads that have taken all the room in steps, and each need more of it, are completed one
    /// after the other.
    #[test]
    fn payloads_do_not_wait_for_one_another_for_ever() {
        let reactor = Reactor::new();
        let accounts: Vec<Rc<Account>> = (0..16).map(|_| Rc::default()).collect();
        let mut waiting: Vec<Option<Rc<Waiting>>> =
            accounts.iter().map(|account| reactor.step(account, GUARANTEED)).collect();
        let mut done = 0;
        while done < accounts.len() {
            let mut steps = 0;
            for (account, waits) in accounts.iter().zip(&mut waiting) {
                assert!(reactor.1.shared.get() <= MOST);
                if waits.as_ref().is_some_and(|waits| !waits.granted.get()) || account.held() == 0 {
                    continue;
                }
                steps += 1;
                if account.held() == LONGEST {
                    reactor.1.payload_ended(account);
                    reactor.1.give_back(account, LONGEST);
                    (*waits, done) = (None, done + 1);
                } else {
                    *waits = reactor.step(account, account.held());
                }
            }
            assert!(
                steps > 0,
                "{done} of {} payloads are complete, and all others wait",
                accounts.len()
            );
        }
        assert_eq!((reactor.1.shared.get(), reactor.1.is_short()), (0, false));
        assert!(matches!(*reactor.1.reserve.borrow(), Reserve::Free));
    }

    /// The reserve is for one payload, not for the next ones of its connection.
    #[test]
    fn the_reserve_is_free_when_its_bytes_are_back() {
        let reactor = Reactor::new();
        let full = reactor.full();
        let client = Rc::default();
        assert!(reactor.step(&client, GUARANTEED).is_none());
        // Nothing fits any more: the reserve carries this payload to its end.
        assert!(reactor.step(&client, GUARANTEED).is_some_and(|waiting| waiting.granted.get()));
        assert!(reactor.step(&client, LONGEST - 2 * GUARANTEED).is_none());
        reactor.1.payload_ended(&client);
        let next = reactor.step(&client, GUARANTEED).unwrap();
        assert!(!next.granted.get());
        reactor.1.give_back(&client, LONGEST);
        assert!(next.granted.get());
        full.iter().for_each(|account| reactor.1.give_back(account, 32 * MB + GUARANTEED));
        reactor.1.give_back(&client, GUARANTEED);
        assert_eq!(reactor.1.shared.get(), 0);
    }
}
