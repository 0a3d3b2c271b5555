//! The chains that a queue takes in one iteration of its reactor while one of its requests is in
//! flight.
//!
//! A guest makes many chains available at once, after a slow read. A task on the same reactor reads
//! the used index once in each iteration. The task may run before the queue in one iteration and
//! after it in the next one, so two iterations may pass between two checks. What must hold: the
//! queue takes a bounded number of chains in an iteration, however many are available.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_disk::{Disk, DiskOptions, LocalDisk, Source};
use blockyard_export::vhost_user::parts::{Call, DeviceState, MAX_CHAIN, QueueHandle, QueueSetup};
use blockyard_export::{PollMode, Reactors};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{GuestMemory, Region, SharedSlice};

const SIZE: u16 = 1024;
const AVAIL: u64 = 0x1_0000;
const USED: u64 = 0x2_0000;
/// Guest addresses of headers, of a status, and of an indirect table.
const SLOW: u64 = 0x3_0000;
const HEADER: u64 = 0x3_0100;
const STATUS: u64 = 0x3_0200;
const TABLE: u64 = 0x4_0000;
const DATA: u64 = 0x10_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Longest wait for an event. The event itself ends the wait.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of chains after the slow read, and the head of the first one.
const CHAINS: u16 = 500;
const FIRST: u16 = 20;

fn device() -> Arc<DeviceState> {
    let options = DiskOptions {
        name: "test".into(),
        serial: String::new(),
        read_only: false,
        cache: CacheMode::None,
        filters: vec!["delay:read=100ms".parse().unwrap()],
        on_enospc: Default::default(),
    };
    let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new("ram:16M")).unwrap()));
    Arc::new(DeviceState::new(disk, true))
}

struct Guest {
    memory: GuestMemory,
    all: SharedSlice,
}

impl Guest {
    fn new() -> Self {
        let region = Region::memfd("guest", 0, 0, 4 << 20).unwrap().0;
        let memory = GuestMemory::default().with(region).unwrap();
        let all = memory.slice(0, 4 << 20, 16).unwrap();
        let guest = Guest { memory, all };
        // A read of 512 bytes. The disk's filter delays it.
        guest.descriptor(10, SLOW, 16, NEXT, 11);
        guest.descriptor(11, DATA, 512, NEXT | WRITE, 12);
        guest.descriptor(12, SLOW + 16, 1, WRITE, 0);
        guest
    }

    fn descriptor(&self, index: u64, addr: u64, len: u32, flags: u16, next: u16) {
        let at = 16 * index as usize;
        self.all.copy_in(at, addr.to_le_bytes());
        self.all.copy_in(at + 8, len.to_le_bytes());
        self.all.copy_in(at + 12, flags.to_le_bytes());
        self.all.copy_in(at + 14, next.to_le_bytes());
    }

    /// Makes all chains after the slow read use one indirect table: a header of type `kind`,
    /// `data`, and a status.
    fn chain(&self, kind: u32, data: &[(u64, u32, u16)]) {
        self.all.copy_in(HEADER as usize, kind.to_le_bytes());
        let all =
            [(HEADER, 16, 0)].into_iter().chain(data.iter().copied()).chain([(STATUS, 1, WRITE)]);
        let last = data.len() as u16 + 1;
        for (index, (addr, len, flags)) in (0..).zip(all) {
            let next = if index < last { NEXT } else { 0 };
            self.descriptor(TABLE / 16 + u64::from(index), addr, len, flags | next, index + 1);
        }
        for chain in 0..CHAINS {
            let head = FIRST + chain;
            self.descriptor(head.into(), TABLE, 16 * (u32::from(last) + 1), INDIRECT, 0);
            self.all.copy_in(AVAIL as usize + 6 + 2 * usize::from(chain), head.to_le_bytes());
        }
    }

    fn setup(&self) -> QueueSetup {
        QueueSetup {
            index: 0,
            device: device(),
            memory: self.memory.clone(),
            alarm: None,
            size: SIZE.into(),
            parts: (0, AVAIL, USED),
            base: 0,
            packed: false,
            event_idx: false,
            inflight: None,
            is_base_lost: false,
            is_base_valid: false,
            kick: None,
            in_band: true,
            call: Call::None,
            error: None,
            enabled: true,
            poll: PollMode::Off,
            held: false,
            marks: None,
            peer: None,
        }
    }

    /// Makes the slow read and then the other chains available. Returns the maximum number of
    /// chains that were used between two checks.
    fn most_between_checks(&self) -> u16 {
        let reactors = Reactors::start(1, &[]).unwrap();
        let remote = reactors.next();
        let queue = QueueHandle::start(remote.clone(), self.setup()).unwrap();
        self.all.copy_in(AVAIL as usize + 4, 10u16.to_le_bytes());
        self.all.store_u16(AVAIL as usize + 2, CHAINS + 1, Ordering::Release);
        let used = self.memory.slice(USED, 4, 4).unwrap();
        let (sender, most) = std::sync::mpsc::channel();
        // Start the task before the kick.
        remote.run(move |handle| {
            let tasks = handle.clone();
            handle.spawn(async move {
                let (mut most, mut before, mut iterations) = (0, 0, 0);
                while before < CHAINS {
                    tasks.yield_now().await;
                    assert!(iterations < 10_000_000, "{before} chains were used");
                    iterations += 1;
                    let now = used.load_u16(2, Ordering::Acquire);
                    most = most.max(now - before);
                    before = now;
                }
                sender.send(most).unwrap();
            });
        });
        queue.kick();
        let most = most.recv_timeout(LIMIT).unwrap();
        queue.stop(false);
        most
    }
}

/// Each chain has the maximum length, and its last segment is outside guest memory. The queue
/// refuses such a chain at once.
#[test]
fn chains_that_are_answered_at_once_leave_time_to_others() {
    let guest = Guest::new();
    let mut data = vec![(DATA, 512, WRITE); MAX_CHAIN - 3];
    data.push((1 << 40, 512, WRITE));
    guest.chain(0, &data);
    let most = guest.most_between_checks();
    assert!(most <= 2 * 3, "{most} chains of {MAX_CHAIN} descriptors between two checks");
    assert_eq!(guest.all.copy_out(STATUS as usize), [1]);
}

/// Storage that answers at once copies the bytes within the iteration.
#[test]
fn bytes_that_are_copied_at_once_leave_time_to_others() {
    let guest = Guest::new();
    guest.chain(1, &[(DATA, 256 << 10, 0)]);
    let most = guest.most_between_checks();
    assert!(most <= 2 * 5, "{most} writes of 256 KiB between two checks");
    assert_eq!(guest.all.copy_out(STATUS as usize), [0]);
}

/// The keeper of sessions gets the state of a ring before the ring takes a request.
#[test]
fn a_held_queue_takes_chains_after_its_release() {
    let guest = Guest::new();
    guest.all.copy_in(AVAIL as usize + 4, 10u16.to_le_bytes());
    let reactors = Reactors::start(1, &[]).unwrap();
    let setup = QueueSetup { held: true, ..guest.setup() };
    let mut queue = QueueHandle::start(reactors.next(), setup).unwrap();
    guest.all.store_u16(AVAIL as usize + 2, 1, Ordering::Release);
    let used = guest.memory.slice(USED, 4, 4).unwrap();
    let used = || used.load_u16(2, Ordering::Acquire);
    let turn = |queue: &QueueHandle| {
        queue.kick();
        reactors.next().ask(|_, reply| reply.send(()));
    };
    for _ in 0..100 {
        turn(&queue);
    }
    assert_eq!(used(), 0, "it is held");
    queue.release();
    let start = Instant::now();
    while used() == 0 {
        assert!(start.elapsed() < LIMIT, "it is not released");
        turn(&queue);
    }
    assert_eq!(queue.stop(false), Some(1), "the base after one chain");
}

/// A device whose session is blocked has no other way to stop its queues.
#[test]
fn the_queues_of_one_device_stop_together() {
    let reactors = Reactors::start(2, &[]).unwrap();
    let remotes: Vec<_> = reactors.all().cloned().collect();
    let (guest, idle, neighbour) = (Guest::new(), Guest::new(), Guest::new());
    for guest in [&guest, &neighbour] {
        guest.all.copy_in(AVAIL as usize + 4, 10u16.to_le_bytes());
        guest.all.store_u16(AVAIL as usize + 2, 1, Ordering::Release);
    }
    let device = device();
    let of_device = |guest: &Guest| QueueSetup { device: device.clone(), ..guest.setup() };
    let starts = |at: usize, setup| QueueHandle::start(remotes[at].clone(), setup).unwrap();
    let queues = [starts(0, of_device(&guest)), starts(1, of_device(&idle))];
    let other = starts(0, neighbour.setup());
    // A task on the same reactor looks in each iteration. It runs before the kicks, so it sees the
    // request however slow the machine is: the end of the read takes at least one more iteration.
    let (sender, in_flight) = std::sync::mpsc::channel();
    let disk = device.disk.clone();
    remotes[0].run(move |handle| {
        let tasks = handle.clone();
        handle.spawn(async move {
            let counted =
                || LocalDisk::known(&tasks, &disk).map_or(0, |disk| disk.counts().in_flight);
            while counted() == 0 {
                tasks.yield_now().await;
            }
            let _ = sender.send(counted());
        });
    });
    for queue in queues.iter().chain([&other]) {
        queue.kick();
    }
    assert_eq!(in_flight.recv_timeout(LIMIT), Ok(1), "the queue takes the request");
    QueueHandle::stop_all(&device, &reactors);
    let used = guest.memory.slice(USED, 4, 4).unwrap();
    assert_eq!(used.load_u16(2, Ordering::Acquire), 1, "its request in flight is answered");
    for queue in queues {
        assert_eq!(queue.stop(false), None, "a queue of the device runs");
    }
    assert_eq!(other.stop(false), Some(1), "the queue of the other device has run");
}
