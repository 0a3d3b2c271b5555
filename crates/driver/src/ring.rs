//! The interface of both virtqueue layouts, on the driver's side.
//!
//! In: slots, each with a chain of buffers that the caller has set with `lay`. Out: slots, after
//! the device has used their chains. The caller ensures that a slot is in the ring at most once.

use crate::error::{Result, ensure};

/// Descriptor flags of both layouts.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Longest chain of a slot: header, data, status.
pub const CHAIN_MAX: usize = 3;
/// Size of a descriptor in bytes, in either layout.
pub const DESCRIPTOR: u64 = 16;

/// A buffer of a descriptor chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    pub addr: u64,
    pub len: u32,
    /// Whether the device writes the buffer. If false, the device reads the buffer.
    pub device_writes: bool,
}

impl Buffer {
    pub(super) fn flags(&self) -> u16 {
        if self.device_writes { WRITE } else { 0 }
    }
}

/// Guest addresses of a ring's three parts. In a packed ring the parts are the descriptor ring, and
/// the event suppression structures of driver and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
}

/// Parameters of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Number of entries of the ring.
    pub size: u16,
    /// Number of chains that can be in the ring at once.
    pub slots: u16,
    pub event_idx: bool,
    pub indirect: bool,
}

impl RingOptions {
    /// Checks that the chains of all slots fit into the ring.
    pub fn check(&self) -> Result<()> {
        let need =
            if self.indirect { self.slots as usize } else { self.slots as usize * CHAIN_MAX };
        ensure!(
            self.slots > 0 && self.size > 0,
            Usage,
            "a ring needs a size and a depth of at least 1"
        );
        ensure!(
            need <= self.size as usize,
            Usage,
            "a depth of {} needs {need} descriptors, but the ring has {}: use a larger \
             --queue-size, or --indirect",
            self.slots,
            self.size
        );
        Ok(())
    }
}

/// The driver's side of a virtqueue.
pub trait Ring: Send + Sized + 'static {
    /// The feature bits that this layout requires.
    const FEATURES: u64;

    fn new(memory: &mut super::Memory, options: RingOptions) -> Result<Self>;
    fn addresses(&self) -> RingAddresses;
    fn size(&self) -> u16;
    /// Sets a slot's chain (1 to `CHAIN_MAX` buffers) for this submission and later ones. The slot
    /// must not be in the ring.
    fn lay(&mut self, slot: u16, chain: &[Buffer]);
    /// Adds the slot's chain to the ring. The next `publish` makes the chain available.
    fn submit(&mut self, slot: u16);
    /// Makes submitted chains visible to the device. Returns whether the device wants a kick.
    fn publish(&mut self) -> bool;
    /// Returns the next used chain: its id as the device wrote it, unchecked, and the number of
    /// bytes that the device claims to have written.
    fn reap(&mut self) -> Option<(u32, u32)>;
    /// Returns whether `reap` would return a chain.
    fn ready(&self) -> bool;
    /// Requests a call for the next used chain. Returns true if a used chain is already in the
    /// ring, so that the caller must not wait.
    fn arm(&mut self) -> bool;
    /// Suppresses calls.
    fn disarm(&mut self);
    /// Returns the SET_VRING_BASE value after the back end has crashed. It comes from the ring's
    /// used index (see the implementations).
    fn base(&self) -> u32;
    /// Returns the SET_VRING_BASE value of a ring that was just created or reset.
    fn fresh_base(&self) -> u32;
    /// Empties the ring. The device must not be running. The slots keep their chains.
    fn reset(&mut self);
}

/// Returns whether an index that goes from `old` to `new` passes `event`, the index at which the
/// other side wants a notification (virtio 1.2, section 2.7.10).
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_due_if_the_step_passes_it() {
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
    fn all_slots_must_fit_into_the_ring() {
        let mut options = RingOptions { size: 128, slots: 42, event_idx: true, indirect: false };
        options.check().unwrap();
        options.slots = 43;
        assert!(options.check().unwrap_err().to_string().contains("129 descriptors"));
        options.indirect = true;
        options.slots = 128;
        options.check().unwrap();
    }
}
