//! The device side of both ring layouts, as simple as the specification allows. For tests only.

use std::sync::atomic::Ordering;

use blockyard_ring::SharedSlice;

use super::ring::{Buffer, DESCRIPTOR, INDIRECT, NEXT, Ring, RingAddresses, WRITE, need_event};
use super::{Memory, PackedRing, SplitRing};

/// A descriptor chain as the device sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub id: u16,
    pub buffers: Vec<Buffer>,
    /// Number of the chain's descriptors in a packed ring.
    length: u16,
}

pub trait Device: Sized {
    type Ring: Ring;

    fn new(memory: &Memory, ring: &Self::Ring, event_idx: bool) -> Self;
    fn take(&mut self, memory: &Memory) -> Option<Chain>;
    /// Returns a chain to the driver. The result is true if the driver wants a call.
    fn give(&mut self, chain: &Chain, len: u32) -> bool;
    /// Requests a kick for the next chain.
    fn want_kick(&mut self);
    /// Suppresses kicks.
    fn want_none(&mut self);
}

struct Descriptor {
    addr: u64,
    len: u32,
    /// Third and fourth field of a descriptor. Split ring: flags, next. Packed ring: id, flags.
    third: u16,
    fourth: u16,
}

fn descriptor(slice: &SharedSlice, index: u64) -> Descriptor {
    let at = (index * DESCRIPTOR) as usize;
    let half = |at| u16::from_le_bytes(slice.copy_out(at));
    Descriptor {
        addr: u64::from_le_bytes(slice.copy_out(at)),
        len: u32::from_le_bytes(slice.copy_out(at + 8)),
        third: half(at + 12),
        fourth: half(at + 14),
    }
}

fn buffer(d: &Descriptor, flags: u16) -> Buffer {
    Buffer { addr: d.addr, len: d.len, device_writes: flags & WRITE != 0 }
}

fn table(memory: &Memory, d: &Descriptor) -> (SharedSlice, u64) {
    assert_eq!(d.len as u64 % DESCRIPTOR, 0);
    (memory.slice(d.addr, d.len.into(), 16).unwrap(), d.len as u64 / DESCRIPTOR)
}

fn slices(memory: &Memory, at: RingAddresses, lens: [u64; 3]) -> [SharedSlice; 3] {
    let slice = |addr, len| memory.slice(addr, len, 4).unwrap();
    [slice(at.desc, lens[0]), slice(at.avail, lens[1]), slice(at.used, lens[2])]
}

pub struct SplitDevice {
    parts: [SharedSlice; 3],
    size: u16,
    event_idx: bool,
    avail: u16,
    used: u16,
}

impl Device for SplitDevice {
    type Ring = SplitRing;

    fn new(memory: &Memory, ring: &SplitRing, event_idx: bool) -> Self {
        let n = u64::from(ring.size());
        let parts = slices(memory, ring.addresses(), [16 * n, 6 + 2 * n, 6 + 8 * n]);
        SplitDevice { parts, size: ring.size(), event_idx, avail: 0, used: 0 }
    }

    fn take(&mut self, memory: &Memory) -> Option<Chain> {
        let [desc, avail, _] = &self.parts;
        if avail.load_u16(2, Ordering::Acquire) == self.avail {
            return None;
        }
        let id = avail.load_u16(4 + 2 * (self.avail % self.size) as usize, Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
        let mut next = descriptor(desc, id.into());
        let mut slice = desc.clone();
        if next.third & INDIRECT != 0 {
            assert_eq!(next.third, INDIRECT);
            slice = table(memory, &next).0;
            next = descriptor(&slice, 0);
        }
        let mut buffers = vec![buffer(&next, next.third)];
        while next.third & NEXT != 0 {
            next = descriptor(&slice, next.fourth.into());
            buffers.push(buffer(&next, next.third));
        }
        Some(Chain { id, buffers, length: 0 })
    }

    fn give(&mut self, chain: &Chain, len: u32) -> bool {
        let [_, avail, used] = &self.parts;
        let at = 4 + 8 * (self.used % self.size) as usize;
        used.store_u32(at, chain.id.into(), Ordering::Relaxed);
        used.store_u32(at + 4, len, Ordering::Relaxed);
        let old = self.used;
        self.used = old.wrapping_add(1);
        used.store_u16(2, self.used, Ordering::Release);
        if self.event_idx {
            need_event(
                avail.load_u16(4 + 2 * self.size as usize, Ordering::Relaxed),
                self.used,
                old,
            )
        } else {
            avail.load_u16(0, Ordering::Relaxed) == 0
        }
    }

    fn want_kick(&mut self) {
        self.parts[2].store_u16(0, 0, Ordering::Relaxed);
        self.parts[2].store_u16(4 + 8 * self.size as usize, self.avail, Ordering::Relaxed);
    }

    fn want_none(&mut self) {
        self.parts[2].store_u16(0, 1, Ordering::Relaxed);
        self.parts[2].store_u16(
            4 + 8 * self.size as usize,
            self.avail.wrapping_sub(1),
            Ordering::Relaxed,
        );
    }
}

pub struct PackedDevice {
    parts: [SharedSlice; 3],
    size: u16,
    event_idx: bool,
    /// Position and wrap counter of the next descriptors to take, and of the next ones to return.
    avail: (u16, bool),
    used: (u16, bool),
}

fn step((at, wrap): (u16, bool), by: u16, size: u16) -> (u16, bool) {
    if at + by >= size { (at + by - size, !wrap) } else { (at + by, wrap) }
}

impl Device for PackedDevice {
    type Ring = PackedRing;

    fn new(memory: &Memory, ring: &PackedRing, event_idx: bool) -> Self {
        let parts = slices(memory, ring.addresses(), [16 * u64::from(ring.size()), 4, 4]);
        PackedDevice { parts, size: ring.size(), event_idx, avail: (0, true), used: (0, true) }
    }

    fn take(&mut self, memory: &Memory) -> Option<Chain> {
        let (mut buffers, mut length) = (Vec::new(), 0);
        loop {
            let d = descriptor(&self.parts[0], self.avail.0.into());
            let (available, used) = (d.fourth & 1 << 7 != 0, d.fourth & 1 << 15 != 0);
            if available != self.avail.1 || used == self.avail.1 {
                assert!(buffers.is_empty(), "a chain's tail must be available before its head");
                return None;
            }
            self.avail = step(self.avail, 1, self.size);
            length += 1;
            if d.fourth & INDIRECT != 0 {
                let (slice, entries) = table(memory, &d);
                let entry = |i| descriptor(&slice, i);
                buffers = (0..entries).map(entry).map(|d| buffer(&d, d.fourth)).collect();
            } else {
                buffers.push(buffer(&d, d.fourth));
            }
            if d.fourth & NEXT == 0 {
                return Some(Chain { id: d.third, buffers, length });
            }
        }
    }

    fn give(&mut self, chain: &Chain, len: u32) -> bool {
        let [desc, driver, _] = &self.parts;
        let (at, wrap) = self.used;
        let place = at as usize * DESCRIPTOR as usize;
        desc.copy_in(place + 8, len.to_le_bytes());
        desc.copy_in(place + 12, chain.id.to_le_bytes());
        desc.store_u16(place + 14, if wrap { 1 << 7 | 1 << 15 } else { 0 }, Ordering::Release);
        self.used = step(self.used, chain.length, self.size);
        let event = driver.load_u32(0, Ordering::Relaxed);
        match event >> 16 & 3 {
            0 => true,
            2 if self.event_idx => {
                // The chain covers the descriptors from `at` on. Check whether the driver's event
                // is among them.
                let requested = ((event & 0x7fff) as u16, event & 0x8000 != 0);
                (0..chain.length).any(|i| step((at, wrap), i, self.size) == requested)
            }
            _ => false,
        }
    }

    fn want_kick(&mut self) {
        let bits = u32::from(self.avail.0) | u32::from(self.avail.1) << 15;
        let event = if self.event_idx { bits | 2 << 16 } else { 0 };
        self.parts[2].store_u32(0, event, Ordering::Relaxed);
    }

    fn want_none(&mut self) {
        self.parts[2].store_u32(0, 1 << 16, Ordering::Relaxed);
    }
}

mod tests {
    use super::super::queue::{Data, Queue};
    use super::super::ring::RingOptions;
    use super::super::{request, status};
    use super::*;
    use blockyard_storage::sim::Rng;

    fn queue<D: Device>(options: RingOptions) -> (Memory, Queue<D::Ring>, D) {
        let mut memory = Memory::new(Queue::<D::Ring>::memory_needed(options, 4096)).unwrap();
        let queue = Queue::new(&mut memory, 0, options, 4096).unwrap();
        let device = D::new(&memory, &queue.ring, options.event_idx);
        (memory, queue, device)
    }

    /// Returns the request type, the sector and the slice of the status byte of a chain.
    fn header(memory: &Memory, chain: &Chain) -> (u32, u64, SharedSlice) {
        let (first, last) = (chain.buffers[0], chain.buffers[chain.buffers.len() - 1]);
        assert!(
            (first.len, first.device_writes, last.len, last.device_writes) == (16, false, 1, true)
        );
        let header = memory.slice(first.addr, 16, 1).unwrap();
        let status = memory.slice(last.addr, 1, 1).unwrap();
        (header.load_u32(0, Ordering::Relaxed), u64::from_le_bytes(header.copy_out(8)), status)
    }

    fn options(size: u16, slots: u16) -> RingOptions {
        RingOptions { size, slots, event_idx: true, indirect: false }
    }

    /// Completes thousands of requests in random order, over many wraps of the ring.
    fn completes<D: Device>(options: RingOptions) {
        let (memory, mut queue, mut device) = queue::<D>(options);
        let mut random = Rng::new(1);
        let mut free: Vec<u16> = (0..options.slots).collect();
        let (mut with_device, mut wanted) = (Vec::new(), vec![None; options.slots.into()]);
        for round in 0..20_000u64 {
            if let Some(slot) = free.pop() {
                let (kind, data) = match random.below(3) {
                    0 => (request::IN, Data::FromDevice(4096)),
                    1 => (request::OUT, Data::ToDevice(512)),
                    _ => (request::FLUSH, Data::None),
                };
                queue.submit(slot, kind, round, data);
                queue.publish().unwrap();
                wanted[slot as usize] = Some((kind, round, data));
            }
            with_device.extend(device.take(&memory));
            if with_device.len() > random.below(options.slots.into()) as usize {
                let chain: Chain =
                    with_device.swap_remove(random.below(with_device.len() as u64) as usize);
                let (kind, sector, status) = header(&memory, &chain);
                let data = match chain.buffers[1..chain.buffers.len() - 1] {
                    [] => Data::None,
                    [b] if b.device_writes => Data::FromDevice(b.len),
                    [b] => Data::ToDevice(b.len),
                    _ => panic!("{chain:?}"),
                };
                assert_eq!(wanted[chain.id as usize].take(), Some((kind, sector, data)));
                status.copy_in(0, [(sector % 3) as u8]);
                device.give(&chain, 1);
                assert_eq!(queue.reap().unwrap(), Some((chain.id, (sector % 3) as u8)));
                free.push(chain.id);
            }
        }
        assert_eq!(queue.reap().unwrap(), None);
        assert_eq!(queue.in_flight(), with_device.len());
    }

    #[test]
    fn requests_complete_in_every_layout() {
        for indirect in [false, true] {
            completes::<SplitDevice>(RingOptions { indirect, ..options(32, 10) });
            completes::<PackedDevice>(RingOptions { indirect, ..options(32, 10) });
            completes::<PackedDevice>(RingOptions { indirect, ..options(37, 12) });
        }
        completes::<SplitDevice>(RingOptions { indirect: true, ..options(8, 8) });
        completes::<PackedDevice>(RingOptions { indirect: true, ..options(7, 7) });
    }

    fn notifies<D: Device>(event_idx: bool) {
        let (memory, mut queue, mut device) =
            queue::<D>(RingOptions { event_idx, ..options(16, 5) });
        let flush = |queue: &mut Queue<D::Ring>, slot| {
            queue.submit(slot, request::FLUSH, 0, Data::None);
            queue.ring.publish()
        };
        for lap in 0..50 {
            device.want_kick();
            assert!(flush(&mut queue, 0), "lap {lap}: the device wants a kick");
            let first = device.take(&memory).unwrap();
            device.want_none();
            assert!(!flush(&mut queue, 1), "lap {lap}: the device suppresses kicks");
            let second = device.take(&memory).unwrap();
            assert!(!device.give(&first, 1), "lap {lap}: the driver suppresses calls");
            assert!(queue.reap().unwrap().is_some());
            assert!(!queue.ring.arm(), "lap {lap}: no chain is used");
            assert!(device.give(&second, 1), "lap {lap}: the driver wants a call");
            assert!(queue.ring.ready() && queue.ring.arm(), "lap {lap}: a chain is used");
            queue.ring.disarm();
            assert!(queue.reap().unwrap().is_some());
        }
    }

    #[test]
    fn each_side_is_notified_only_if_it_requested_that() {
        for event_idx in [false, true] {
            notifies::<SplitDevice>(event_idx);
            notifies::<PackedDevice>(event_idx);
        }
    }

    fn resumes<D: Device>() {
        let (memory, mut queue, mut device) = queue::<D>(options(16, 5));
        for slot in 0..5 {
            queue.submit(slot, request::IN, u64::from(slot), Data::FromDevice(512));
        }
        queue.publish().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| device.take(&memory)).collect();
        device.give(&taken[3], 1);
        assert_eq!(queue.reap().unwrap(), Some((3, status::NONE)), "no status was written");
        // A back end with an in-flight buffer continues the ring unchanged.
        let known = queue.resume_base(true);
        assert_ne!(known, queue.ring.fresh_base());
        assert_eq!(queue.resume_base(false), queue.ring.fresh_base());
        queue.publish().unwrap();
        let mut device = D::new(&memory, &queue.ring, true);
        let again: Vec<_> =
            std::iter::from_fn(|| device.take(&memory)).map(|c| header(&memory, &c).1).collect();
        assert_eq!(again, [0, 1, 2, 4]);
    }

    #[test]
    fn requests_in_flight_go_to_the_next_back_end() {
        resumes::<SplitDevice>();
        resumes::<PackedDevice>();
    }

    fn distrusts<D: Device>() {
        let (memory, mut queue, mut device) = queue::<D>(options(16, 5));
        queue.submit(2, request::FLUSH, 0, Data::None);
        queue.publish().unwrap();
        let chain = device.take(&memory).unwrap();
        device.give(&Chain { id: 4, ..chain }, 1);
        assert!(
            queue.reap().unwrap_err().to_string().contains("descriptor 4, which is not in flight")
        );
    }

    #[test]
    fn a_used_chain_that_is_not_in_flight_is_an_error() {
        distrusts::<SplitDevice>();
        distrusts::<PackedDevice>();
    }
}
