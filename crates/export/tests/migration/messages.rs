//! Messages of a migration that come too early, do not fit, or are hostile.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use blockyard_driver::{Data, SplitRing, request, status};
use rustix::event::EventfdFlags;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq as R, VhostUserProtocolFeatures as P};

use crate::front::*;

const REFUSED: u64 = 1;

fn started() -> Front<SplitRing> {
    let mut front = Front::connect(true);
    front.start();
    front
}

/// Makes a request, which must succeed.
fn works(front: &mut Front<SplitRing>) {
    let mut bytes = vec![0; 4096];
    let done = front.queue.call(request::IN, 0, Data::FromDevice(4096), &mut bytes, LIMIT);
    assert_eq!(done.unwrap(), status::OK);
}

/// The answer has no place for an error, so the session ends.
#[test]
fn logs_that_cannot_be_used_end_the_session() {
    let fits = Log::covering(&Front::<SplitRing>::connect(true).memory).len;
    let file = memfd(1 << 20);
    let sealed = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    for (what, len, offset, file) in [
        ("too small for memory", fits - 1, 0, &file),
        ("beyond its file", fits, (1 << 20) - fits + 1, &file),
        ("an offset that overflows", fits, u64::MAX - 5, &file),
        ("empty", 0, 0, &file),
        ("more than a front end may map", 1 << 60, 0, &file),
        ("sealed", fits, 0, &sealed),
        ("a pipe", fits, 0, &reader),
    ] {
        let mut front = started();
        works(&mut front);
        assert_eq!(front.log_base(len, offset, file), None, "{what}");
    }
    let front = started();
    assert_eq!(front.ask(R::SET_LOG_BASE, &words(&[0x1000]), &[]), None, "no descriptor");
    let mut front = started();
    let without = front.connection.protocol - P::LOG_SHMFD;
    front.ask(R::SET_PROTOCOL_FEATURES, &words(&[without.bits()]), &[]).unwrap();
    assert_eq!(front.log_base(fits, 0, &file), None, "LOG_SHMFD is not negotiated");
}

#[test]
fn a_ring_that_is_logged_beyond_the_log_is_refused() {
    let mut front = started();
    let log = front.new_log();
    for at in [log.len * 8 * PAGE - 100, u64::MAX - 10, u64::MAX, 1 << 63] {
        assert_eq!(front.log_used(true, at), Some(words(&[REFUSED])), "{at:#x}");
        works(&mut front);
    }
    // The address comes before a log that is too small for it.
    let mut front = started();
    assert_eq!(front.log_used(true, 1 << 60), Some(words(&[0])));
    assert_eq!(front.log_base(log.len, Log::OFFSET, &log.file), None);
}

/// QEMU shares one log among all its devices, and chooses its length.
#[test]
fn a_long_log_takes_memory_only_for_what_is_logged() {
    const LEN: u64 = 512 << 20;
    let file = memfd(LEN);
    let allocated = || rustix::fs::fstat(&file).unwrap().st_blocks as u64 * 512;
    let mut front = started();
    assert_eq!(front.log_base(LEN, 0, &file), Some(words(&[LEN, 0])));
    // The host may allocate huge pages.
    let for_memory = allocated();
    assert!((PAGE..=16 << 20).contains(&for_memory), "{for_memory} bytes");
    // These addresses have their bits far from those of the memory.
    let ring = 8 << 40;
    assert_eq!(front.log_used(true, ring), Some(words(&[0])));
    let for_ring = allocated();
    assert!((for_memory + 1..=32 << 20).contains(&for_ring), "{for_memory}, then {for_ring}");
    let (more, guest_phys_addr) = (memfd(PAGE), 12 << 40);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size: PAGE,
        userspace_addr: guest_phys_addr,
        mmap_offset: 0,
        mmap_handle: more.as_raw_fd(),
    };
    front.connection.frontend().add_mem_region(&region).unwrap();
    let for_region = allocated();
    assert!((for_ring + 1..=48 << 20).contains(&for_region), "{for_ring}, then {for_region}");
    works(&mut front);
}

#[test]
fn what_is_written_before_the_log_comes_is_made_up_for() {
    let mut front = Front::<SplitRing>::connect(true);
    front.features(true, true);
    front.start();
    works(&mut front);
    let log = front.new_log();
    let (start, len) = front.memory.range();
    let all: Vec<u64> = (start / PAGE..(start + len) / PAGE).collect();
    assert_eq!(log.take(), all);
    // After that, only what is written.
    works(&mut front);
    front.connection.stop_ring(0).unwrap();
    let marked = log.take();
    assert!(!marked.is_empty() && marked.len() < 5, "{marked:?}");
}

#[test]
fn a_front_end_that_truncates_its_log_loses_only_the_log() {
    let mut front = started();
    front.features(true, true);
    let log = front.new_log();
    front.log_used(true, USED_LOG).unwrap();
    works(&mut front);
    rustix::fs::ftruncate(&log.file, 0).unwrap();
    for _ in 0..10 {
        works(&mut front);
    }
    let log = front.new_log();
    works(&mut front);
    front.connection.stop_ring(0).unwrap();
    assert!(!log.take().is_empty());
}

#[test]
fn changes_of_the_log_are_signalled() {
    let mut front = started();
    let event = rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    assert_eq!(front.ask(R::SET_LOG_FD, &[], &[&event]), Some(words(&[0])));
    works(&mut front);
    assert!(rustix::io::read(&event, &mut [0; 8]).is_err(), "nothing is logged yet");
    front.features(true, true);
    front.new_log();
    works(&mut front);
    front.connection.stop_ring(0).unwrap();
    rustix::io::read(&event, &mut [0; 8]).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(front.ask(R::SET_LOG_FD, &[], &[&pipe]), Some(words(&[REFUSED])));
}

/// Body of SET_DEVICE_STATE_FD: direction (0: save, 1: load), phase (0: stopped).
fn state(direction: u64) -> Vec<u8> {
    words(&[direction])
}

/// A success without a descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;

#[test]
fn the_state_of_the_device_is_empty() {
    let mut front = started();
    let pipe = || rustix::pipe::pipe().unwrap();
    let (reader, writer) = pipe();
    let running = front.ask(R::SET_DEVICE_STATE_FD, &state(0), &[&writer]).unwrap();
    assert_eq!(running[0], 1, "rings run");
    front.connection.stop_ring(0).unwrap();
    assert_eq!(
        front.ask(R::SET_DEVICE_STATE_FD, &state(0), &[&writer]),
        Some(words(&[NO_DESCRIPTOR]))
    );
    drop(writer);
    assert_eq!(rustix::io::read(&reader, &mut [0; 8]).unwrap(), 0, "the state ends at once");
    assert_eq!(front.ask(R::CHECK_DEVICE_STATE, &[], &[]), Some(words(&[0])));
    for (content, answer) in [(&b""[..], 0), (b"other", REFUSED)] {
        let (reader, writer) = pipe();
        let loads = front.ask(R::SET_DEVICE_STATE_FD, &state(1), &[&reader]);
        assert_eq!(loads, Some(words(&[NO_DESCRIPTOR])));
        std::fs::File::from(writer).write_all(content).unwrap();
        assert_eq!(front.ask(R::CHECK_DEVICE_STATE, &[], &[]), Some(words(&[answer])));
    }
    let file: OwnedFd = memfd(4096);
    let refused = front.ask(R::SET_DEVICE_STATE_FD, &state(1), &[&file]).unwrap();
    assert_eq!(refused[0], 1, "a file is no pipe");
    front.start();
    works(&mut front);
}

#[test]
fn postcopy_ends_the_session() {
    for request in [R::POSTCOPY_ADVISE, R::POSTCOPY_LISTEN, R::POSTCOPY_END] {
        let mut front = started();
        works(&mut front);
        assert_eq!(front.ask(request, &[], &[]), None, "{request:?}");
    }
}
