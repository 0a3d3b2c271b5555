//! Ring memory as data: chains taken, parsed, used and published, while the memory changes in
//! between.
//!
//! Input: the ring's shape, a number of operations and their bytes, then the guest's memory.

#![no_main]

#[path = "guest.rs"]
mod guest;

use std::rc::Rc;

use blockyard_disk::Op;
use blockyard_export::vhost_user::parts::{
    Action, Head, Inflight, InflightRegion, MAX_CHAIN, ParseContext, Ring, allocate, parse,
};
use blockyard_ring::{GuestMemory, Mapper, Segments};
use guest::{Bytes, Shape, change, memory};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let shape = Shape::of(&mut bytes);
    let operations = usize::from(bytes.u8());
    let (script, content) = bytes.0.split_at(operations.min(bytes.0.len()));
    let memory = Rc::new(memory(content));
    let Ok(ring) = shape.ring(&memory) else { return };
    let inflight = shape.event_idx.then(|| {
        let (fd, len) = allocate(1, shape.size, shape.packed).unwrap();
        InflightRegion::map(&Mapper::new(false), fd, (0, len), 1)
            .unwrap()
            .queue(0, shape.packed)
            .unwrap()
            .unwrap()
    });
    let mut device = Device {
        ring,
        memory,
        size: shape.size,
        inflight,
        taken: Vec::new(),
        segments: Segments::default(),
    };
    device.run(&mut Bytes(script));
});

struct Device {
    ring: Ring,
    memory: Rc<GuestMemory>,
    size: u16,
    inflight: Option<Inflight>,
    /// Chains taken and not used, with their entries in the region.
    taken: Vec<(Head, u16)>,
    segments: Segments,
}

impl Device {
    fn run(&mut self, script: &mut Bytes<'_>) {
        let mut descs = Vec::new();
        // A script that has ended takes what there is, until the ring is empty or broken.
        for _ in 0..512 {
            match if script.0.is_empty() { 0 } else { script.u8() % 8 } {
                0..=2 => {
                    let Ok(popped) = self.ring.pop(&mut descs) else { return };
                    let Some(head) = popped else {
                        if script.0.is_empty() && self.taken.is_empty() {
                            return;
                        }
                        self.give(0);
                        continue;
                    };
                    assert!(head.id < self.size && head.count >= 1 && head.count <= self.size);
                    assert!(descs.len() <= 2 * MAX_CHAIN);
                    if self.taken.iter().any(|(h, _)| h.id == head.id) || !self.parse(head, &descs)
                    {
                        return;
                    }
                    assert!(self.taken.len() <= usize::from(self.size));
                }
                3 => self.give(script.u8()),
                4 => self.publish(),
                5 => {
                    let available = self.ring.has_available();
                    assert!(!self.ring.enable_kicks() == available);
                    self.ring.disable_kicks();
                }
                _ => change(&self.memory, script.u16(), script.u8()),
            }
        }
    }

    /// False: the ring is broken.
    fn parse(&mut self, head: Head, descs: &[blockyard_export::vhost_user::parts::Desc]) -> bool {
        let terms = ParseContext { memory: &self.memory, serial: "serial", fua: false };
        let Ok(parsed) = parse(head.id, descs, terms, &mut self.segments) else { return false };
        let entry = match (&mut self.inflight, &self.ring) {
            (None, _) => head.id,
            (Some(inflight), Ring::Split(_)) => {
                inflight.taken_split(head.id);
                head.id
            }
            (Some(inflight), Ring::Packed(ring)) => inflight.taken_packed(ring.raw()),
        };
        assert_ne!(entry, u16::MAX, "the region is full");
        self.taken.push((head, entry));
        match parsed.action {
            Action::One { op: op @ (Op::Read | Op::Write { .. }), offset, len } => {
                assert!(offset.is_multiple_of(512) && len.is_multiple_of(512) && len <= 256 << 20);
                assert_eq!(self.segments.len() as u64, len);
                assert!(self.segments.count() <= 1024);
                // The memory is there, whatever it is: also the ring itself.
                if len <= 1 << 16 {
                    let mut data = vec![0; len as usize];
                    self.segments.copy_out(0, &mut data);
                    if op == Op::Read {
                        self.segments.copy_in(0, &data);
                        self.segments.zero(0, data.len().min(64));
                    }
                }
            }
            Action::One { offset, len, .. } => {
                assert!(offset.is_multiple_of(512) && len <= 1 << 30)
            }
            Action::Ranges { ranges, .. } => {
                assert!((2..=64).contains(&ranges.len()));
                assert!(
                    ranges
                        .iter()
                        .all(|(offset, len)| offset.is_multiple_of(512) && *len <= 1 << 30)
                );
            }
            Action::Now { written, .. } => assert!((1..=21).contains(&written)),
        }
        // Checked when it was parsed.
        self.memory.write_byte(parsed.status, 0).unwrap();
        true
    }

    fn give(&mut self, which: u8) {
        if self.taken.is_empty() {
            return;
        }
        let (head, entry) = self.taken.swap_remove(usize::from(which) % self.taken.len());
        match (&mut self.inflight, &self.ring) {
            (None, _) => {}
            (Some(inflight), Ring::Split(_)) => inflight.pushed_split(entry),
            (Some(inflight), Ring::Packed(_)) => inflight.pushed_packed(entry),
        }
        self.ring.push_used(head, u32::from(which));
        if which & 1 == 0 {
            self.publish();
        }
    }

    fn publish(&mut self) {
        if let (Some(inflight), Ring::Packed(ring)) = (&mut self.inflight, &self.ring) {
            let (index, wrap) = ring.used_position();
            assert!(index < self.size);
            inflight.publishing_packed(index, wrap);
        }
        self.ring.publish();
        match (&mut self.inflight, &self.ring) {
            (None, _) => {}
            (Some(inflight), Ring::Split(ring)) => inflight.published_split(ring.used_index()),
            (Some(inflight), Ring::Packed(_)) => inflight.published_packed(),
        }
        self.ring.wants_signal();
    }
}
