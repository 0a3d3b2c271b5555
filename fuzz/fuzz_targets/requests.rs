//! A whole queue on a reactor, over a disk in memory: whatever the guest's memory holds, it stops
//! on command, and the next one starts.
//!
//! Input: the ring's shape, how long it runs, changes of memory meanwhile, then the guest's memory.

#![no_main]

#[path = "guest.rs"]
mod guest;

use std::sync::{Arc, OnceLock};

use blockyard_disk::{Disk, DiskOptions, Source};
use blockyard_export::vhost_user::parts::{Call, DeviceState, Marks, QueueHandle, QueueSetup};
use blockyard_export::{PollMode, Reactors};
use blockyard_image::{CacheMode, ChainOptions};
use blockyard_ring::{DirtyLog, Mapper};
use guest::{Bytes, PARTS, Shape, change, memory};
use libfuzzer_sys::fuzz_target;

struct World {
    reactors: Reactors,
    device: Arc<DeviceState>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let open = ChainOptions::new("ram:1M");
        let options = DiskOptions {
            name: "fuzz".into(),
            serial: "fuzz".into(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Arc::new(Disk::new(options, Source::open(&open).unwrap()));
        let device = DeviceState::new(disk, true);
        World { reactors: Reactors::start(1, &[]).unwrap(), device: Arc::new(device) }
    })
}

/// Returns a log that is too small for the memory, on every other input.
fn marks(turns: u8) -> Option<Marks> {
    const LEN: u64 = 5;
    if turns & 1 == 0 {
        return None;
    }
    let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, LEN).unwrap();
    let log = DirtyLog::map(&Mapper::new(false), &file, 0, LEN).unwrap();
    if turns & 8 != 0 {
        rustix::fs::ftruncate(&file, 0).unwrap();
    }
    let used = (turns & 4 == 0).then_some(u64::from(turns) << 58);
    let (data, missed, changed) = (turns & 2 == 0, Arc::default(), Call::None);
    Some(Marks { log: Some(Arc::new(log)), data, used, missed, changed })
}

fuzz_target!(|data: &[u8]| {
    let world = world();
    let mut bytes = Bytes(data);
    let shape = Shape::of(&mut bytes);
    let (turns, changes) = (bytes.u8() % 32, bytes.u8() % 8);
    let changes: Vec<_> = (0..changes).map(|_| (bytes.u16(), bytes.u8())).collect();
    let memory = memory(bytes.0);
    let remote = world.reactors.next();
    let setup = QueueSetup {
        index: 0,
        device: world.device.clone(),
        memory: memory.clone(),
        alarm: None,
        size: shape.size.into(),
        parts: PARTS,
        base: shape.base,
        packed: shape.packed,
        event_idx: shape.event_idx,
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
        marks: marks(turns),
        peer: None,
    };
    let Ok(queue) = QueueHandle::start(remote.clone(), setup) else { return };
    for turn in 0..turns {
        if let Some((at, byte)) = changes.get(usize::from(turn)) {
            change(&memory, *at, *byte);
        }
        queue.kick();
        // A turn of the reactor.
        remote.ask(|_, reply| reply.send(()));
    }
    queue.stop(false);
});
