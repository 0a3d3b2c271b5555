//! What the parts of a client share: the one that sends, the one that receives, and the one that
//! watches.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_nbd::link::Link;
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::wire::{self, cmd};
use blockyard_ring::{Handle, Signal};

use super::export::Export;
use super::slots::{Ask, Slots};

/// Sent at a time, in bytes; and what counts as progress of a long transfer.
pub(super) const SENT_AT_A_TIME: usize = 256 << 10;
/// Pieces of a request's memory that are sent, or filled, as they are.
pub(super) const PIECES: usize = 448;

pub(super) struct Inner {
    pub(super) export: Arc<Export>,
    pub(super) handle: Handle,
    pub(super) slots: RefCell<Slots>,
    pub(super) socket: RefCell<Option<(Link, Terms)>>,
    /// There is something to send; to receive; to watch; to connect for.
    pub(super) send: Signal,
    pub(super) receive: Signal,
    pub(super) watch: Signal,
    pub(super) work: Signal,
    /// The connection in use is of no more use.
    pub(super) broken: Cell<bool>,
    /// Something was answered over it.
    pub(super) used: Cell<bool>,
    pub(super) ended: Cell<bool>,
    /// When an answer (or much of one) last came, or a request when there was none.
    pub(super) progress: Cell<Instant>,
    /// Since when there is no progress; how long to pause before the next try.
    pub(super) trouble: Cell<Option<Instant>>,
    pub(super) pause: Cell<Duration>,
    /// Requests fail at once: why, and when to try again.
    pub(super) down: RefCell<Option<(String, Instant)>>,
    pub(super) try_again: Cell<bool>,
    /// A connection is made that nobody waits for: the last one was of use, and ended between two
    /// requests.
    pub(super) unasked: Cell<bool>,
    /// That was told already.
    pub(super) given_up: Cell<bool>,
    /// Writes that were acknowledged, and those of them that a flush covered.
    pub(super) acknowledged: Cell<u64>,
    pub(super) flushed: Cell<u64>,
}

/// Whether a command changes the export.
pub(super) fn changes(command: u16) -> bool {
    matches!(command, cmd::WRITE | cmd::WRITE_ZEROES | cmd::TRIM)
}

impl Inner {
    /// Who sends and receives is to stop.
    pub(super) fn break_off(&self) {
        self.broken.set(true);
        self.send.ring();
        self.receive.ring();
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Much of a long answer has come.
    pub(super) fn note_progress(&self) {
        self.progress.set(Instant::now());
    }

    /// A request was answered in full.
    pub(super) fn answered(&self, index: u32) {
        self.note_progress();
        self.used.set(true);
        self.tell_connected();
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
            Some(Ask { command: cmd::FLUSH, .. }) => match &slot.error {
                None => self.flushed.set(self.flushed.get().max(slot.covers)),
                Some(e) => self.export.lose(&format!("a flush failed ({e})")),
            },
            _ => {}
        }
        slots.finish(index);
    }

    pub(super) fn tell_connected(&self) {
        if let Some(since) = self.trouble.take() {
            self.pause.set(Duration::ZERO);
            self.given_up.set(false);
            tracing::info!(
                "image {}: connected again after {:.1} s",
                self.export.uri,
                since.elapsed().as_secs_f32()
            );
        }
    }
}
