//! A guest that writes arbitrary descriptors and indices into its rings, in both layouts.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::{Connection, Memory, RingAddresses, RingSetup, feature, request};
use blockyard_ring::SharedSlice;
use rustix::event::EventfdFlags;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use super::daemon::QUEUES;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

pub const SIZE: u16 = 64;
/// Value of a status byte before the device writes it.
pub const NONE: u8 = 0xff;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Split,
    Packed,
}

pub const BOTH: &[Layout] = &[Layout::Split, Layout::Packed];

/// A descriptor. `Ring::offer` sets the NEXT flags of a chain.
#[derive(Clone, Copy, Debug)]
pub struct D {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
}

/// A descriptor that the device reads.
pub fn out(addr: u64, len: u32) -> D {
    D { addr, len, flags: 0 }
}

pub fn into(addr: u64, len: u32) -> D {
    D { addr, len, flags: WRITE }
}

pub fn event() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

/// Returns how often an eventfd was signalled since the last call.
pub fn rung(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// A virtqueue to whose memory tests write directly.
pub struct Ring {
    pub layout: Layout,
    pub size: u16,
    pub desc: SharedSlice,
    pub avail: SharedSlice,
    pub used: SharedSlice,
    pub setup: RingSetup,
    pub error: Arc<OwnedFd>,
    /// Split ring: the available index. Packed ring: position and wrap counter of the next
    /// descriptor.
    pub at: u16,
    pub wrap: bool,
    /// Position of the next used element.
    used_at: u16,
    used_wrap: bool,
    next_id: u16,
}

impl Ring {
    fn new(memory: &mut Memory, layout: Layout, index: u16) -> Self {
        let size = u64::from(SIZE);
        let (desc_addr, desc) = memory.piece(16 * size, 4096).unwrap();
        let (avail_addr, avail) = memory.piece(6 + 2 * size, 4096).unwrap();
        let (used_addr, used) = memory.piece(6 + 8 * size, 4096).unwrap();
        let addresses = RingAddresses { desc: desc_addr, avail: avail_addr, used: used_addr };
        let setup = RingSetup { index, size: SIZE, addresses, kick: event(), call: event() };
        let mut ring = Ring {
            layout,
            size: SIZE,
            desc,
            avail,
            used,
            setup,
            error: event(),
            at: 0,
            wrap: true,
            used_at: 0,
            used_wrap: true,
            next_id: 0,
        };
        ring.clear();
        ring
    }

    /// Resets the ring to the state of a newly loaded driver.
    pub fn clear(&mut self) {
        for slice in [&self.desc, &self.avail, &self.used] {
            slice.write(0, &vec![0; slice.len()]);
        }
        (self.at, self.wrap, self.used_at, self.used_wrap, self.next_id) = (0, true, 0, true, 0);
    }

    pub fn base(&self) -> u32 {
        if self.layout == Layout::Split { 0 } else { 0x8000_8000 }
    }

    /// Split ring: writes any descriptor at any index.
    pub fn write_split(&self, index: u16, d: D, next: u16) {
        let at = usize::from(index) * 16;
        self.desc.copy_in(at, d.addr.to_le_bytes());
        self.desc.copy_in(at + 8, d.len.to_le_bytes());
        self.desc.copy_in(at + 12, d.flags.to_le_bytes());
        self.desc.copy_in(at + 14, next.to_le_bytes());
    }

    /// Split ring: makes `head` available to the device.
    pub fn push_split(&mut self, head: u16) {
        self.avail.store_u16(4 + 2 * usize::from(self.at % self.size), head, Ordering::Relaxed);
        self.at = self.at.wrapping_add(1);
        self.avail.store_u16(2, self.at, Ordering::Release);
    }

    /// Packed ring: writes the next descriptor. Makes it available, unless `flags` say otherwise.
    pub fn push_packed(&mut self, d: D, id: u16) {
        let at = usize::from(self.at) * 16;
        self.desc.copy_in(at, d.addr.to_le_bytes());
        self.desc.copy_in(at + 8, d.len.to_le_bytes());
        self.desc.copy_in(at + 12, id.to_le_bytes());
        let wrap = if self.wrap { AVAIL } else { USED };
        self.desc.store_u16(at + 14, d.flags | wrap, Ordering::Release);
        self.at += 1;
        if self.at == self.size {
            (self.at, self.wrap) = (0, !self.wrap);
        }
    }

    /// Offers a chain as a driver does, without a kick.
    pub fn offer(&mut self, chain: &[D]) -> u16 {
        let head = self.next_id;
        let last = chain.len() - 1;
        let with_next =
            |at: usize, d: &D| D { flags: d.flags | if at < last { NEXT } else { 0 }, ..*d };
        match self.layout {
            Layout::Split => {
                for (at, d) in chain.iter().enumerate() {
                    let index = (head + at as u16) % self.size;
                    self.write_split(index, with_next(at, d), (index + 1) % self.size);
                }
                self.next_id = (head + chain.len() as u16) % self.size;
                self.push_split(head);
            }
            Layout::Packed => {
                // The flags of the first descriptor are written last, because they make the chain
                // available.
                let (start, wrap) = (self.at, self.wrap);
                let step = |n: usize| (start + n as u16) % self.size;
                let places: Vec<u16> = (0..chain.len()).map(step).collect();
                for at in (0..chain.len()).rev() {
                    self.at = places[at];
                    self.wrap = if places[at] < start { !wrap } else { wrap };
                    self.push_packed(with_next(at, &chain[at]), head);
                }
                (self.at, self.wrap) = (start, wrap);
                for _ in 0..chain.len() {
                    self.at += 1;
                    if self.at == self.size {
                        (self.at, self.wrap) = (0, !self.wrap);
                    }
                }
                self.next_id = (head + 1) % self.size;
            }
        }
        head
    }

    pub fn kick(&self) {
        rustix::io::write(&*self.setup.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Returns the next used element: ID and bytes written. `taken`: number of descriptors of its
    /// chain.
    pub fn reap(&mut self, taken: u16) -> Option<(u16, u32)> {
        match self.layout {
            Layout::Split => {
                if self.used.load_u16(2, Ordering::Acquire) == self.used_at {
                    return None;
                }
                let at = 4 + 8 * usize::from(self.used_at % self.size);
                self.used_at = self.used_at.wrapping_add(1);
                Some((
                    self.used.load_u32(at, Ordering::Relaxed) as u16,
                    self.used.load_u32(at + 4, Ordering::Relaxed),
                ))
            }
            Layout::Packed => {
                let at = 16 * usize::from(self.used_at);
                let flags = self.desc.load_u16(at + 14, Ordering::Acquire);
                if (flags & AVAIL != 0) != self.used_wrap || (flags & USED != 0) != self.used_wrap {
                    return None;
                }
                self.used_at += taken;
                if self.used_at >= self.size {
                    (self.used_at, self.used_wrap) = (self.used_at - self.size, !self.used_wrap);
                }
                Some((
                    self.desc.load_u16(at + 12, Ordering::Relaxed),
                    self.desc.load_u32(at + 8, Ordering::Relaxed),
                ))
            }
        }
    }

    pub fn wait(&mut self, taken: u16) -> (u16, u32) {
        let start = Instant::now();
        loop {
            if let Some(used) = self.reap(taken) {
                return used;
            }
            let waited = start.elapsed();
            assert!(waited < PATIENCE, "no answer");
            // Some answers take seconds.
            let (least, most) = (Duration::from_micros(50), Duration::from_millis(1));
            std::thread::sleep((waited / 16).clamp(least, most));
        }
    }
}

pub struct Guest {
    pub connection: Connection,
    pub memory: Memory,
    pub rings: Vec<Ring>,
    pub layout: Layout,
    /// Buffers of `works`: 512 bytes in each direction, a header, a status.
    scratch: u64,
}

impl Guest {
    /// Connects and shares memory. No ring runs.
    pub fn connect(path: &Path, layout: Layout) -> Self {
        Self::connect_with(path, layout, PROTOCOL)
    }

    /// Connects like `connect`, and requests these vhost-user protocol features.
    pub fn connect_with(path: &Path, layout: Layout, protocol: VhostUserProtocolFeatures) -> Self {
        Self::connect_queues(path, layout, protocol, QUEUES)
    }

    fn connect_queues(
        path: &Path,
        layout: Layout,
        protocol: VhostUserProtocolFeatures,
        queues: u16,
    ) -> Self {
        let mut connection = Connection::open(path).unwrap();
        connection.socket().set_read_timeout(Some(PATIENCE)).unwrap();
        let ring = if layout == Layout::Packed { feature::RING_PACKED } else { 0 };
        let wanted = feature::GUEST & !feature::EVENT_IDX | feature::INDIRECT_DESC | ring;
        // A disk has either the first of these, or the others.
        let optional = feature::READ_ONLY | feature::DISCARD | feature::WRITE_ZEROES;
        connection.negotiate(wanted, wanted & !optional, protocol).unwrap();
        let mut memory = Memory::new(8 << 20).unwrap();
        connection.set_memory(&memory).unwrap();
        let rings = (0..queues).map(|q| Ring::new(&mut memory, layout, q)).collect();
        let scratch = memory.take(2048, 64).unwrap();
        Guest { connection, memory, rings, layout, scratch }
    }

    /// Connects and starts the rings.
    pub fn start(path: &Path, layout: Layout) -> Self {
        Self::start_queues(path, layout, QUEUES)
    }

    /// Like `start`, with this number of queues.
    pub fn start_queues(path: &Path, layout: Layout, queues: u16) -> Self {
        let mut guest = Self::connect_queues(path, layout, PROTOCOL, queues);
        for queue in 0..guest.rings.len() {
            guest.start_ring(queue).unwrap();
        }
        guest
    }

    pub fn start_ring(&mut self, queue: usize) -> anyhow::Result<()> {
        let ring = &self.rings[queue];
        let number = (queue as u64).to_le_bytes();
        self.connection.message(
            FrontendReq::SET_VRING_ERR as u32,
            &number,
            &[ring.error.as_fd()],
        )?;
        self.connection.set_ring(&ring.setup, ring.base(), &self.memory)?;
        Ok(self.connection.enable(queue as u16, true)?)
    }

    /// Resets a queue and starts it again, as a driver does with a failed device.
    pub fn reset_ring(&mut self, queue: usize) {
        self.connection.stop_ring(queue as u16).unwrap();
        self.rings[queue].clear();
        self.start_ring(queue).unwrap();
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> u64 {
        let (addr, slice) = self.memory.piece(bytes.len().max(1) as u64, 1).unwrap();
        slice.write(0, bytes);
        addr
    }

    /// Overwrites bytes at an address.
    pub fn bytes_at(&self, addr: u64, bytes: &[u8]) {
        self.memory.slice(addr, bytes.len() as u64, 1).unwrap().write(0, bytes);
    }

    pub fn header(&mut self, kind: u32, sector: u64) -> u64 {
        self.bytes(&(u128::from(kind) | u128::from(sector) << 64).to_le_bytes())
    }

    pub fn status(&mut self) -> u64 {
        self.bytes(&[NONE])
    }

    pub fn byte(&self, addr: u64) -> u8 {
        let [byte] = self.memory.slice(addr, 1, 1).unwrap().copy_out(0);
        byte
    }

    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.slice(addr, len as u64, 1).unwrap().read(0, &mut bytes);
        bytes
    }

    /// Returns an indirect descriptor. Its table has the descriptors of `chain`, linked as the
    /// ring's layout (split or packed) requires.
    pub fn table(&mut self, chain: &[D]) -> D {
        let mut bytes = Vec::new();
        for (at, d) in chain.iter().enumerate() {
            let last = at + 1 == chain.len();
            bytes.extend(d.addr.to_le_bytes());
            bytes.extend(d.len.to_le_bytes());
            let (flags, next) = if self.layout == Layout::Split && !last {
                (d.flags | NEXT, at as u16 + 1)
            } else {
                (d.flags, 0)
            };
            let (third, fourth) =
                if self.layout == Layout::Split { (flags, next) } else { (0, flags) };
            bytes.extend(third.to_le_bytes());
            bytes.extend(fourth.to_le_bytes());
        }
        let addr = self.memory.take(bytes.len() as u64, 16).unwrap();
        self.memory.slice(addr, bytes.len() as u64, 1).unwrap().write(0, &bytes);
        D { addr, len: bytes.len() as u32, flags: INDIRECT }
    }

    /// Offers a chain on a queue and kicks.
    pub fn offer(&mut self, queue: usize, chain: &[D]) -> u16 {
        let head = self.rings[queue].offer(chain);
        self.rings[queue].kick();
        head
    }

    /// Checks that a queue works, by a write and a read.
    pub fn works(&mut self, queue: usize, sector: u64) {
        let bytes: Vec<u8> = (0..512u32).map(|i| (i * 7 + sector as u32) as u8).collect();
        let (data, back, header, status) =
            (self.scratch, self.scratch + 512, self.scratch + 1024, self.scratch + 1088);
        let slice = self.memory.slice(self.scratch, 2048, 1).unwrap();
        slice.write(0, &bytes);
        slice.write(512, &[0; 512]);
        for (kind, data) in [(request::OUT, out(data, 512)), (request::IN, into(back, 512))] {
            slice.copy_in(1024, (u128::from(kind) | u128::from(sector) << 64).to_le_bytes());
            slice.copy_in(1088, [NONE]);
            let head = self.offer(queue, &[out(header, 16), data, into(status, 1)]);
            let (id, written) = self.rings[queue].wait(3);
            assert_eq!((id, self.byte(status)), (head, 0), "queue {queue}, type {kind}");
            assert_eq!(written, if kind == request::IN { 513 } else { 1 });
        }
        assert_eq!(self.read(back, 512), bytes);
    }
}
