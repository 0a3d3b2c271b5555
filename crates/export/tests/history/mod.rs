//! One history of a driver, a device and the memory between them. The history checks each step.

use std::collections::VecDeque;
use std::fs::File;
use std::rc::Rc;

use blockyard_driver::ring::{Buffer, Ring as Driver, RingOptions};
use blockyard_driver::{Memory, PackedRing, RingAddresses, SplitRing};
use blockyard_export::vhost_user::parts::{
    self, Desc, Head, Inflight, InflightRegion, Ring, RingError, allocate,
};
use blockyard_ring::{GuestMemory, Mapper, Region};

#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// The driver makes up to `count` chains available. `shape` determines the descriptors of the
    /// chains.
    Offer {
        count: usize,
        shape: u64,
    },
    /// The device takes at most this number of chains.
    Take(usize),
    /// The device pushes up to `count` of the chains that it has taken.
    Use {
        count: usize,
        which: u64,
    },
    Publish,
    /// The driver reaps at most this number of used chains.
    Reap(usize),
    DriverSleeps,
    DeviceSleeps,
    /// The device is stopped with nothing in flight. Another device continues from its base.
    HandOver,
    /// The device is killed after this number of steps of its next publication. Another device
    /// recovers from the in-flight region.
    Crash(u8),
}

/// The differences between the two ring layouts.
pub trait Layout: Driver {
    const PACKED: bool;

    fn device(
        memory: GuestMemory,
        at: RingAddresses,
        options: RingOptions,
        base: u32,
    ) -> Result<Ring, RingError>;
}

impl Layout for SplitRing {
    const PACKED: bool = false;

    fn device(
        memory: GuestMemory,
        at: RingAddresses,
        options: RingOptions,
        base: u32,
    ) -> Result<Ring, RingError> {
        let parts = (at.desc, at.avail, at.used);
        let ring = parts::SplitRing::new(
            Rc::new(memory),
            parts,
            options.size.into(),
            base as u16,
            options.event_idx,
        )?;
        Ok(Ring::Split(ring))
    }
}

impl Layout for PackedRing {
    const PACKED: bool = true;

    fn device(
        memory: GuestMemory,
        at: RingAddresses,
        options: RingOptions,
        base: u32,
    ) -> Result<Ring, RingError> {
        let parts = (at.desc, at.avail, at.used);
        let ring = parts::PackedRing::new(
            Rc::new(memory),
            parts,
            options.size.into(),
            base,
            options.event_idx,
        )?;
        Ok(Ring::Packed(ring))
    }
}

/// Maps the driver's memory a second time, as a back end does.
pub fn map(memory: &Memory) -> GuestMemory {
    let region = memory.region();
    let path = format!("/proc/self/fd/{}", region.mmap_handle);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mapped =
        Region::map(file, 0, region.guest_phys_addr, region.userspace_addr, region.memory_size)
            .unwrap();
    GuestMemory::default().with(mapped).unwrap()
}

/// A chain that the driver has not reaped yet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chain {
    slot: u16,
    descs: Vec<Desc>,
}

struct Taken {
    chain: Chain,
    head: Head,
    /// The chain's entry in the in-flight region.
    entry: u16,
}

pub struct History<R: Layout> {
    memory: Memory,
    options: RingOptions,
    driver: R,
    ring: Ring,
    region: Option<InflightRegion>,
    inflight: Option<Inflight>,
    free: Vec<u16>,
    /// Chains by state: available; taken, in the order of taking; pushed and not published;
    /// published and not reaped.
    waiting: VecDeque<Chain>,
    taken: Vec<Taken>,
    pushed: Vec<(Taken, u32)>,
    back: VecDeque<(u16, u32)>,
    driver_sleeps: bool,
    device_sleeps: bool,
    /// A signal without a new used element is allowed, because a new device does not know what the
    /// previous one has signalled.
    fresh: bool,
    pub offered: u64,
}

impl<R: Layout> History<R> {
    pub fn new(options: RingOptions, tracked: bool) -> Self {
        let mut memory = Memory::new(4 << 20).unwrap();
        let driver = R::new(&mut memory, options).unwrap();
        let ring =
            R::device(map(&memory), driver.addresses(), options, driver.fresh_base()).unwrap();
        let region = tracked.then(|| {
            let (fd, len) = allocate(1, options.size, R::PACKED).unwrap();
            InflightRegion::map(&Mapper::new(false), fd, (0, len), 1).unwrap()
        });
        let inflight = region.as_ref().and_then(|r| r.queue(0, R::PACKED).unwrap());
        History {
            memory,
            options,
            driver,
            ring,
            region,
            inflight,
            free: (0..options.slots).collect(),
            waiting: VecDeque::new(),
            taken: Vec::new(),
            pushed: Vec::new(),
            back: VecDeque::new(),
            driver_sleeps: false,
            device_sleeps: false,
            fresh: true,
            offered: 0,
        }
    }

    /// Runs the steps, and then completes all chains.
    pub fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.step(*step);
        }
        while !(self.waiting.is_empty()
            && self.taken.is_empty()
            && self.pushed.is_empty()
            && self.back.is_empty())
        {
            for step in
                [Step::Take(9), Step::Use { count: 9, which: 0 }, Step::Publish, Step::Reap(9)]
            {
                self.step(step);
            }
        }
        assert_eq!(self.free.len(), usize::from(self.options.slots));
        assert!(!self.ring.has_available() && self.driver.reap().is_none());
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Offer { count, shape } => self.offer(count, shape),
            Step::Take(count) => self.take(count),
            Step::Use { count, which } => self.use_some(count, which),
            Step::Publish => self.publish(),
            Step::Reap(count) => self.reap(count),
            Step::DriverSleeps => self.driver_sleeps(),
            Step::DeviceSleeps => self.device_sleeps(),
            Step::HandOver if self.taken.is_empty() && self.pushed.is_empty() => self.hand_over(),
            Step::HandOver => {}
            Step::Crash(_) if self.region.is_none() => {}
            Step::Crash(after) => self.crash(after),
        }
        assert_eq!(self.ring.has_available(), !self.waiting.is_empty());
        assert_eq!(self.driver.ready(), !self.back.is_empty());
    }

    fn offer(&mut self, count: usize, mut shape: u64) {
        for _ in 0..count {
            let Some(slot) = self.free.pop() else { break };
            shape = shape.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let (len, writable) = (1 + (shape >> 32) % 3, (shape >> 40) % 4);
            let buffers: Vec<_> = (0..len)
                .map(|at| Buffer {
                    addr: (shape ^ at).rotate_left(7),
                    len: (shape >> at) as u32,
                    device_writes: at >= writable,
                })
                .collect();
            self.driver.lay(slot, &buffers);
            self.driver.submit(slot);
            let descs = buffers.iter().map(|b| Desc {
                addr: b.addr,
                len: b.len,
                writable: b.device_writes,
            });
            self.waiting.push_back(Chain { slot, descs: descs.collect() });
            self.offered += 1;
        }
        let kick = self.driver.publish();
        if self.device_sleeps && !self.waiting.is_empty() {
            assert!(kick, "the device sleeps, and is not kicked");
            self.device_wakes();
        }
    }

    fn device_wakes(&mut self) {
        self.device_sleeps = false;
        self.ring.disable_kicks();
    }

    fn take(&mut self, count: usize) {
        if self.device_sleeps {
            assert!(self.waiting.is_empty());
            self.device_wakes();
        }
        let mut descs = Vec::new();
        for _ in 0..count {
            let popped = self.ring.pop(&mut descs).unwrap();
            let Some(chain) = self.waiting.pop_front() else {
                assert_eq!(popped, None);
                return;
            };
            let head = popped.expect("a chain is available");
            assert_eq!((head.id, &descs), (chain.slot, &chain.descs));
            let entry = match (&mut self.inflight, &self.ring) {
                (None, _) => head.id,
                (Some(inflight), Ring::Split(_)) => {
                    inflight.taken_split(head.id);
                    head.id
                }
                (Some(inflight), Ring::Packed(ring)) => inflight.taken_packed(ring.raw()),
            };
            assert_ne!(entry, u16::MAX, "the region is full");
            self.taken.push(Taken { chain, head, entry });
        }
    }

    fn use_some(&mut self, count: usize, which: u64) {
        for n in 0..count as u64 {
            if self.taken.is_empty() {
                return;
            }
            let at = (which.wrapping_mul(n + 1) % self.taken.len() as u64) as usize;
            let taken = self.taken.remove(at);
            let written = (which >> n) as u32 % 70_000;
            match (&mut self.inflight, &self.ring) {
                (None, _) => {}
                (Some(inflight), Ring::Split(_)) => inflight.pushed_split(taken.entry),
                (Some(inflight), Ring::Packed(_)) => inflight.pushed_packed(taken.entry),
            }
            self.ring.push_used(taken.head, written);
            self.pushed.push((taken, written));
        }
    }

    fn publish(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        self.publish_until(u8::MAX);
        let wants = self.ring.wants_signal();
        if self.driver_sleeps {
            assert!(wants, "the driver sleeps, and is not signalled");
            self.driver_sleeps = false;
            self.driver.disarm();
        } else {
            assert!(!wants || self.fresh, "a signal for a driver that is awake");
        }
        self.fresh = false;
    }

    /// Carries out the first `steps` steps of a publication.
    fn publish_until(&mut self, steps: u8) {
        if steps > 0
            && let (Some(inflight), Ring::Packed(ring)) = (&mut self.inflight, &self.ring)
        {
            let (index, wrap) = ring.used_position();
            inflight.publishing_packed(index, wrap);
        }
        if steps > 1 {
            self.ring.publish();
            self.back.extend(self.pushed.drain(..).map(|(t, written)| (t.chain.slot, written)));
        }
        if steps > 2 {
            match (&mut self.inflight, &self.ring) {
                (None, _) => {}
                (Some(inflight), Ring::Split(ring)) => inflight.published_split(ring.used_index()),
                (Some(inflight), Ring::Packed(_)) => inflight.published_packed(),
            }
        }
    }

    fn reap(&mut self, count: usize) {
        if self.driver_sleeps {
            return;
        }
        for _ in 0..count {
            let Some((slot, written)) = self.back.pop_front() else {
                assert_eq!(self.driver.reap(), None);
                return;
            };
            assert_eq!(self.driver.reap(), Some((slot.into(), written)));
            self.free.push(slot);
        }
        // After it has reaped, a driver disables notifications again.
        self.driver.disarm();
    }

    fn driver_sleeps(&mut self) {
        if !self.driver_sleeps {
            let ready = self.driver.arm();
            assert_eq!(ready, !self.back.is_empty());
            self.driver_sleeps = !ready;
            if ready {
                self.driver.disarm();
            }
        }
    }

    fn device_sleeps(&mut self) {
        if !self.device_sleeps {
            let may = self.ring.enable_kicks();
            assert_eq!(may, self.waiting.is_empty());
            self.device_sleeps = may;
            if !may {
                self.ring.disable_kicks();
            }
        }
    }

    /// Starts a new device, which signals a driver that may have missed a notification.
    fn begins(&mut self) {
        self.device_sleeps = false;
        self.fresh = true;
        if self.driver_sleeps {
            self.driver_sleeps = false;
            self.driver.disarm();
        }
    }

    fn hand_over(&mut self) {
        let base = self.ring.base();
        self.ring =
            R::device(map(&self.memory), self.driver.addresses(), self.options, base).unwrap();
        self.begins();
    }

    fn crash(&mut self, after: u8) {
        // The device is killed during a publication, or with nothing to publish.
        if !self.pushed.is_empty() {
            self.publish_until(after);
        }
        self.inflight = self.region.as_ref().and_then(|r| r.queue(0, R::PACKED).unwrap());
        let mut ring = R::device(
            map(&self.memory),
            self.driver.addresses(),
            self.options,
            self.driver.fresh_base(),
        )
        .unwrap();
        let inflight = self.inflight.as_mut().unwrap();
        let mut found = Vec::new();
        match &mut ring {
            Ring::Split(ring) => {
                let heads = inflight.recover_split(ring.used_index());
                ring.restore(heads.len() as u16);
                for head in heads {
                    let mut descs = Vec::new();
                    ring.chain(head, &mut descs).unwrap();
                    found.push(Taken {
                        chain: Chain { slot: head, descs },
                        head: Head { id: head, count: 1 },
                        entry: head,
                    });
                }
            }
            Ring::Packed(ring) if inflight.is_used() => {
                let (chains, used) =
                    inflight.recover_packed(|index, wrap| ring.was_used(index, wrap)).unwrap();
                ring.restore(used, chains.iter().map(|c| c.raw.len() as u16).sum()).unwrap();
                for chain in chains {
                    let mut descs = Vec::new();
                    let head = ring.retake(&chain.raw, &mut descs).unwrap();
                    found.push(Taken {
                        chain: Chain { slot: head.id, descs },
                        head,
                        entry: chain.entry,
                    });
                }
            }
            Ring::Packed(_) => assert!(self.taken.is_empty() && self.pushed.is_empty()),
        }
        // The chains that the driver has not seen as used are unanswered. Pushed chains that were
        // not published are unanswered too.
        self.taken.extend(self.pushed.drain(..).map(|(taken, _)| taken));
        let sorted = |list: &[Taken]| {
            let mut chains: Vec<_> =
                list.iter().map(|t| (t.chain.slot, t.chain.descs.clone())).collect();
            chains.sort_by_key(|c| c.0);
            chains
        };
        assert_eq!(sorted(&found), sorted(&self.taken));
        self.taken = found;
        self.ring = ring;
        self.begins();
    }
}
