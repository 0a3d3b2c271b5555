//! A mutex for the methods of a target, which run concurrently on one thread.

use std::cell::{RefCell, RefMut};
use std::ops::{Deref, DerefMut};

use blockyard_ring::semaphore::{Permit, Semaphore};

/// A mutex that a method of a target may hold while it waits, such as for a file. Waiting for it
/// does not block the target's thread. Methods get it in the order in which they asked for it.
pub struct Lock<T> {
    turn: Semaphore,
    value: RefCell<T>,
}

/// A locked [`Lock`]. The drop unlocks it.
pub struct Locked<'a, T> {
    // The value is free before the next method gets its turn, so it comes first.
    value: RefMut<'a, T>,
    _turn: Permit<'a>,
}

impl<T> Lock<T> {
    /// Makes an unlocked one.
    pub fn new(value: T) -> Self {
        Lock { turn: Semaphore::new(1), value: value.into() }
    }

    /// Waits for the turn, and locks.
    pub async fn lock(&self) -> Locked<'_, T> {
        let turn = self.turn.acquire().await;
        Locked { value: self.value.borrow_mut(), _turn: turn }
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lock").field("value", &self.value).finish_non_exhaustive()
    }
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
