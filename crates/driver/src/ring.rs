//! What both layouts of a virtqueue have in common, seen from the driver.
//!
//! In: slots, each with a chain of buffers that was laid out before. Out: slots that the device has
//! used. A slot is in the ring at most once; the caller sees to that.

use anyhow::Result;

/// Descriptor flags of both layouts.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The longest chain a slot can have: header, data, status.
pub const CHAIN_MAX: usize = 3;
/// Bytes of one descriptor, in either layout.
pub const DESCRIPTOR: u64 = 16;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    pub addr: u64,
    pub len: u32,
    /// The device writes it (else: reads it).
    pub device_writes: bool,
}

impl Buffer {
    pub(super) fn flags(&self) -> u16 {
        if self.device_writes { WRITE } else { 0 }
    }
}

/// Guest addresses of a ring's three parts. Packed: descriptor ring, driver's and device's event
/// suppression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
}

/// How a ring is made.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Entries of the ring.
    pub size: u16,
    /// Chains that can be in it at once.
    pub slots: u16,
    pub event_idx: bool,
    pub indirect: bool,
}

impl RingOptions {
    /// Whether the slots' chains always find room.
    pub fn check(&self) -> Result<()> {
        let need =
            if self.indirect { self.slots as usize } else { self.slots as usize * CHAIN_MAX };
        anyhow::ensure!(
            self.slots > 0 && self.size > 0,
            "a ring needs a size and a depth of at least 1"
        );
        anyhow::ensure!(
            need <= self.size as usize,
            "a depth of {} takes {need} descriptors, the ring has {}: give a larger --queue-size or --indirect",
            self.slots,
            self.size
        );
        Ok(())
    }
}

/// The driver's side of a virtqueue.
pub trait Ring: Send + Sized + 'static {
    /// The feature bits that this layout needs negotiated.
    const FEATURES: u64;

    fn new(memory: &mut super::Memory, options: RingOptions) -> Result<Self>;
    fn addresses(&self) -> RingAddresses;
    fn size(&self) -> u16;
    /// Sets a slot's chain (1 to `CHAIN_MAX` buffers); it stays for later submissions. Not while
    /// the slot is in the ring.
    fn lay(&mut self, slot: u16, chain: &[Buffer]);
    /// Makes the slot's chain available with the next `publish`.
    fn submit(&mut self, slot: u16);
    /// Shows the device what was submitted; true: it wants a kick for that.
    fn publish(&mut self) -> bool;
    /// The next used chain: its id as the device wrote it, unchecked, and the bytes it says it
    /// wrote.
    fn reap(&mut self) -> Option<(u32, u32)>;
    /// Whether `reap` would give something.
    fn ready(&self) -> bool;
    /// Asks for a signal at the next used chain; true: there is one already, do not wait.
    fn arm(&mut self) -> bool;
    /// Asks for no signals.
    fn disarm(&mut self);
    /// What SET_VRING_BASE says after the back end has crashed: the ring's own used index (see the
    /// implementations).
    fn base(&self) -> u32;
    /// SET_VRING_BASE of a ring that was just made or reset.
    fn fresh_base(&self) -> u32;
    /// Back to an empty ring. The device must not be running. Chains stay laid out.
    fn reset(&mut self);
}

/// Whether a step of an index from `old` to `new` passes the one at which the other side wants to
/// be told.
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_due_when_the_step_passes_them() {
        for (event, new, old, want) in [
            (0, 1, 0, true),
            (1, 1, 0, false),
            (5, 10, 5, true),
            (9, 10, 5, true),
            (10, 10, 5, false),
            (4, 10, 5, false),
            (0xffff, 1, 0xfffe, true),
            (0xffff, 0xffff, 0xfffe, false),
            (7, 7, 7, false),
        ] {
            assert_eq!(need_event(event, new, old), want, "event {event} new {new} old {old}");
        }
    }

    #[test]
    fn a_depth_must_fit_the_ring() {
        let mut options = RingOptions { size: 128, slots: 42, event_idx: true, indirect: false };
        options.check().unwrap();
        options.slots = 43;
        assert!(options.check().unwrap_err().to_string().contains("129 descriptors"));
        options.indirect = true;
        options.slots = 128;
        options.check().unwrap();
    }
}
