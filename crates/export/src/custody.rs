//! Which server may end what two servers have during a hand-over: connections of front ends, and
//! the files of sockets.
//!
//! ```text
//!   old server:  Owner ───────────────► Gone      (the new server is ready)
//!   new server:  Waiting ─► Owner                 (the old server has confirmed that)
//!                   └────► Gone                   (one of them has failed)
//! ```
//! What must hold
//! - A process that is not the owner shuts no connection down and removes no file of a socket,
//!   because the other server has the same open files.
//! - A process that waits asks no program of an `exec:` image anything.
//! - A process that waits reads no message of a front end and accepts no client. So the state that
//!   the old server has handed over stays true until one of them is the owner.

use blockyard_disk::Disk;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What this process may do with the sockets that it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Custody {
    /// The sockets are this process's alone. Every server is the owner unless it takes over.
    Owner,
    /// This process takes over from another one, which has not confirmed it.
    Waiting,
    /// Another process has the sockets.
    Gone,
}

static CUSTODY: Mutex<Custody> = Mutex::new(Custody::Owner);
static CHANGED: Condvar = Condvar::new();
/// Whether no disk takes requests while this process waits.
static HOLDS_ALL: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, Custody> {
    CUSTODY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes what this process may do.
pub fn set(custody: Custody) {
    *lock() = custody;
    CHANGED.notify_all();
}

pub fn is_owner() -> bool {
    *lock() == Custody::Owner
}

/// Waits until this process is the owner, and lets no disk take requests before. A process without
/// journals does that: what it changed would be lost if it ended before it is the owner.
pub fn wait_with_all_disks() {
    HOLDS_ALL.store(true, Ordering::SeqCst);
    set(Custody::Waiting);
}

/// Returns whether the disk must take no requests yet: a target decides where its data lie, and
/// another process may be the owner. An answer changes the state of the target. If this process
/// ended then, the other one would not know what was placed.
pub(crate) fn must_wait(disk: &Disk) -> bool {
    let has_target = || Some(disk.source().file()?.opened()?.is_target());
    !is_owner() && (HOLDS_ALL.load(Ordering::SeqCst) || has_target().unwrap_or(false))
}

/// Waits while it is not decided which process is the owner. Returns whether this one is.
pub(crate) fn decided() -> bool {
    let mut custody = lock();
    while *custody == Custody::Waiting {
        custody = CHANGED.wait(custody).unwrap_or_else(PoisonError::into_inner);
    }
    *custody == Custody::Owner
}
