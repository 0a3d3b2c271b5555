//! Memory regions: address space that one front end uses up, files whose pages can be withheld,
//! in-flight regions after a reset.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vhost::vhost_user::message::FrontendReq;

use super::beside::beside;
use super::daemon::{Daemon, OTHER, VICTIM};
use super::guest::{BOTH, Guest, Layout};
use super::messages::{Fate, send};

/// Adds sparse regions of maximum size, then smaller ones, until the server accepts no more.
/// Returns the accepted bytes.
fn take_all(guest: &Guest) -> u64 {
    let file = rustix::fs::memfd_create("vast", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 47).unwrap();
    // New regions begin above the guest's own memory.
    let (mut at, mut size) = (1u64 << 40, 1u64 << 46);
    let start = at;
    while size >= 4096 {
        match add(guest, [at, size, at, 0], file.as_fd()) {
            Fate::Done => at += size,
            _ => size /= 2,
        }
    }
    at - start
}

pub fn add(guest: &Guest, region: [u64; 4], file: BorrowedFd<'_>) -> Fate {
    let body: Vec<u8> = [0].iter().chain(&region).flat_map(|word| word.to_le_bytes()).collect();
    send(&guest.connection, FrontendReq::ADD_MEM_REG, &body, &[file])
}

#[test]
fn a_front_end_cannot_use_up_the_address_space_of_others() {
    let daemon = Daemon::start();
    let attacker = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    let taken = take_all(&attacker);
    assert!(((1 << 40)..=(16 << 40)).contains(&taken), "{taken:#x} bytes");
    // A front end with a large guest connects to another disk.
    let mut other = Guest::start(&daemon.socket(OTHER), Layout::Split);
    let vast: OwnedFd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&vast, 4 << 40).unwrap();
    assert_eq!(add(&other, [1 << 44, 4 << 40, 1 << 44, 0], vast.as_fd()), Fate::Done);
    other.works(0, 0);
    let complaints = daemon.complained();
    assert!(
        complaints.iter().any(|line| line.contains("one front end may map at most")),
        "{complaints:#?}"
    );
    // When the attacker disconnects, the next front end has address space.
    drop(attacker);
    let again = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    assert_eq!(take_all(&again), taken);
    daemon.end();
}

#[test]
fn beside_a_front_end_that_takes_address_space() {
    let daemon = Daemon::start();
    beside("a front end that takes address space", &daemon, |attack| {
        while attack.goes_on() {
            let guest = Guest::connect(&attack.socket(VICTIM), Layout::Split);
            take_all(&guest);
        }
    });
    daemon.end();
}

#[test]
fn memory_in_files_that_can_be_withheld_is_refused() {
    let daemon = Daemon::start();
    let guest = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    // Files of procfs stand for all file systems that are neither memory nor a known local file
    // system.
    let file = File::options().read(true).write(true).open("/proc/self/comm").unwrap();
    assert_eq!(add(&guest, [1 << 40, 4096, 1 << 40, 0], file.as_fd()), Fate::Refused);
    let zero = File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert_eq!(add(&guest, [1 << 40, 4096, 1 << 40, 0], zero.as_fd()), Fate::Refused);
    let complaints = daemon.end();
    let expected = |line: &String| line.contains("--allow-any-memory-file");
    assert!(!complaints.is_empty() && complaints.iter().all(expected), "{complaints:#?}");
}

/// The front end keeps the in-flight region after RESET_DEVICE. The driver initializes its ring
/// again.
#[test]
fn a_reset_device_serves_a_fresh_ring_with_the_same_in_flight_region() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut guest = Guest::connect(&daemon.socket(VICTIM), *layout);
        let inflight = guest.connection.inflight(1, 64).unwrap().unwrap();
        guest.connection.set_inflight(&inflight).unwrap();
        guest.start_ring(0).unwrap();
        for sector in 0..5 {
            guest.works(0, sector);
        }
        guest.connection.message(FrontendReq::RESET_DEVICE as u32, &[], &[]).unwrap();
        guest.rings[0].clear();
        let features = guest.connection.features.to_le_bytes();
        guest.connection.message(FrontendReq::SET_FEATURES as u32, &features, &[]).unwrap();
        guest.start_ring(0).unwrap();
        for sector in 0..50 {
            guest.works(0, sector);
        }
        assert_eq!(daemon.end(), [""; 0]);
    }
}
