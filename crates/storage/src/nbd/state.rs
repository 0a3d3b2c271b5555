//! State that the sender, the receiver and the watcher of a client share.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_nbd::link::Link;
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::wire::{self, cmd};
use blockyard_ring::{Handle, Signal};

use super::export::Export;
use super::slots::{Ask, Slots};

/// Maximum number of bytes in one send. A long transfer counts as progress each time that it has
/// moved this number of bytes.
pub(super) const SENT_AT_A_TIME: usize = 256 << 10;
/// Maximum number of memory pieces of a request that are sent or filled without a copy.
pub(super) const PIECES: usize = 448;

pub(super) struct Inner {
    pub(super) export: Arc<Export>,
    pub(super) handle: Handle,
    pub(super) slots: RefCell<Slots>,
    pub(super) socket: RefCell<Option<(Link, Terms)>>,
    /// Signals that wake a part of the client because there is something to send, to receive, to
    /// watch, or to connect for.
    pub(super) send: Signal,
    pub(super) receive: Signal,
    pub(super) watch: Signal,
    pub(super) work: Signal,
    /// Whether the present connection is unusable.
    pub(super) broken: Cell<bool>,
    /// Whether the present connection has delivered an answer.
    pub(super) used: Cell<bool>,
    pub(super) ended: Cell<bool>,
    /// Time of the last answer, of the last large part of a long one, or of the first request after
    /// an idle time.
    pub(super) progress: Cell<Instant>,
    /// Time since which there is no progress, and the pause before the next attempt to connect.
    pub(super) trouble: Cell<Option<Instant>>,
    pub(super) pause: Cell<Duration>,
    /// While requests fail at once: the reason, and the time of the next attempt to connect.
    pub(super) down: RefCell<Option<(String, Instant)>>,
    pub(super) try_again: Cell<bool>,
    /// Whether to reconnect although no request waits. It is set when a connection that has served
    /// requests ends while no request is in flight.
    pub(super) reconnect_idle: Cell<bool>,
    /// Whether the log already says that requests fail.
    pub(super) given_up: Cell<bool>,
    /// Number of acknowledged writes, and how many of them a flush covered.
    pub(super) acknowledged: Cell<u64>,
    pub(super) flushed: Cell<u64>,
}

/// Returns whether a command changes the export.
pub(super) fn changes(command: u16) -> bool {
    matches!(command, cmd::WRITE | cmd::WRITE_ZEROES | cmd::TRIM)
}

/// Returns whether a server that answers a durable write with this error may have lost other
/// writes, too. The flush that such a write ends in may report their loss, and no later one does.
fn may_lose_others(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported | io::ErrorKind::StorageFull
    )
}

impl Inner {
    /// Stops the sender and the receiver.
    pub(super) fn break_off(&self) {
        self.broken.set(true);
        self.send.ring();
        self.receive.ring();
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Records that a large part of a long answer has arrived.
    pub(super) fn note_progress(&self) {
        self.progress.set(Instant::now());
    }

    /// Ends a request that was answered in full.
    pub(super) fn answered(&self, index: u32) {
        self.note_progress();
        self.used.set(true);
        self.log_connected();
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get(index);
        match slot.ask {
            Some(ask)
                if slot.error.is_none()
                    && changes(ask.command)
                    && ask.flags & wire::flag::FUA == 0 =>
            {
                self.acknowledged.set(self.acknowledged.get() + 1);
            }
            Some(ask) if changes(ask.command) && ask.flags & wire::flag::FUA != 0 => {
                if let Some(e) = slot.error.as_ref().filter(|e| may_lose_others(e))
                    && self.has_unflushed()
                {
                    self.export.lose(&format!("a durable write failed ({e})"));
                }
            }
            Some(Ask { command: cmd::FLUSH, .. }) => match &slot.error {
                None => self.flushed.set(self.flushed.get().max(slot.covers)),
                Some(e) => self.export.lose(&format!("a flush failed ({e})")),
            },
            _ => {}
        }
        slots.finish(index);
    }

    /// Returns whether a write was acknowledged that no flush has covered. False for a server
    /// without flushes, because each write that it acknowledges counts as durable.
    pub(super) fn has_unflushed(&self) -> bool {
        let flushes = self.export.terms.has(wire::export::SEND_FLUSH);
        flushes && self.acknowledged.get() > self.flushed.get()
    }

    pub(super) fn log_connected(&self) {
        if let Some(since) = self.trouble.take() {
            self.given_up.set(false);
            tracing::info!(
                "image {}: connected again after {:.1} s",
                self.export.uri,
                since.elapsed().as_secs_f32()
            );
        }
    }
}
