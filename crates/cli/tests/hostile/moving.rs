//! Memory that changes under the device: rings rewritten during use, kicks in a loop, regions
//! removed while requests use them, truncated files.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockyard_driver::request::{FLUSH, IN, OUT};
use blockyard_ring::SharedSlice;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::FrontendReq;

use super::beside::End;
use super::daemon::{CAPACITY, Daemon, OTHER, SLOW, VICTIM, are_few};
use super::guest::{BOTH, Guest, Layout, into, out, rung};
use crate::common::{self, BLOCKYARD, Folder, SOON, until, until_disconnected};

/// A small random number generator. It returns the same numbers in each run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Number of rounds of a test with changing memory.
const ROUNDS: u64 = 60;
/// Number of kicks in a round, unless the ring breaks before, and of changes for each of them.
const KICKS: u64 = 50;
const CHANGES: u64 = 100;

/// Writes plausible random values all over a ring, until it is stopped. `changes`: their number.
fn rewrite(
    desc: &SharedSlice,
    avail: &SharedSlice,
    addresses: [u64; 4],
    layout: Layout,
    (stop, changes): (&AtomicBool, &AtomicU64),
    seed: u64,
) {
    let mut random = Random::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let index = random.below(64) as usize * 16;
        let addr = addresses[random.below(4) as usize] + random.below(64);
        let len = [1, 16, 48, 512, 1024, u32::MAX][random.below(6) as usize];
        let (flags, other) = (random.below(8) as u16, random.below(66) as u16);
        desc.copy_in(index, addr.to_le_bytes());
        desc.copy_in(index + 8, len.to_le_bytes());
        match layout {
            Layout::Split => {
                desc.store_u16(index + 12, flags, Ordering::Relaxed);
                desc.store_u16(index + 14, other, Ordering::Relaxed);
                avail.store_u16(4 + random.below(64) as usize * 2, other, Ordering::Relaxed);
                if random.below(16) == 0 {
                    let now = avail.load_u16(2, Ordering::Relaxed);
                    avail.store_u16(2, now.wrapping_add(random.below(3) as u16), Ordering::Release);
                }
            }
            Layout::Packed => {
                desc.store_u16(index + 12, other, Ordering::Relaxed);
                let wrap = [1 << 7, 1 << 15][random.below(2) as usize];
                desc.store_u16(index + 14, flags | wrap, Ordering::Release);
            }
        }
        changes.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_ring_that_changes_during_use_affects_no_other_queue() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let data = guest.memory.take(64 << 10, 4096).unwrap();
        let header = guest.header(IN, 0);
        let table = guest.table(&[out(header, 16), into(data, 512), into(data + 512, 1)]);
        let addresses = [header, data, table.addr, 0];
        let mut breaks = 0;
        for round in 1..=ROUNDS {
            let (stop, changes) = (AtomicBool::new(false), AtomicU64::new(0));
            let (desc, avail) = (guest.rings[0].desc.clone(), guest.rings[0].avail.clone());
            std::thread::scope(|scope| {
                let _end = End(&stop);
                let rewriter = scope.spawn(|| {
                    let (desc, avail) = (desc, avail);
                    rewrite(&desc, &avail, addresses, *layout, (&stop, &changes), round);
                });
                for kick in 1..=KICKS {
                    guest.rings[0].kick();
                    while changes.load(Ordering::Relaxed) < kick * CHANGES {
                        assert!(!rewriter.is_finished(), "the thread has ended");
                        std::thread::yield_now();
                    }
                    if rung(&guest.rings[0].error) > 0 {
                        breaks += 1;
                        break;
                    }
                }
            });
            other.works(0, 0);
            guest.connection.stop_ring(0).unwrap();
            breaks += u64::from(rung(&guest.rings[0].error) > 0);
            guest.rings[0].clear();
            guest.start_ring(0).unwrap();
            guest.works(0, 8);
        }
        let log = daemon.complaints();
        // The log has at most a line for each broken ring, and far fewer for many.
        let few = log.len() as u64 <= breaks.max(ROUNDS) && are_few(&log, breaks as usize);
        assert!(few, "{breaks} broken rings, and {log:#?}");
        assert!(log.iter().all(|l| l.contains("the guest broke its ring")), "{log:#?}");
        daemon.end();
    }
}

#[test]
fn endless_kicks_starve_no_other_queue() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let before = daemon.own_memory();
        let (stop, kicks) = (AtomicBool::new(false), AtomicU64::new(0));
        let kick = guest.rings[0].setup.kick.clone();
        std::thread::scope(|scope| {
            let _end = End(&stop);
            let kicker = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // The write fails if the counter is full because nothing reads it. Reset the
                    // counter then.
                    if rustix::io::write(&*kick, &1u64.to_ne_bytes()).is_err() {
                        rung(&kick);
                    }
                    kicks.fetch_add(1, Ordering::Relaxed);
                }
            });
            // Each round of the other disk has its own time limit.
            let mut rounds = 0;
            while rounds < 200 || kicks.load(Ordering::Relaxed) < 100_000 {
                assert!(!kicker.is_finished(), "the thread has ended");
                other.works(0, rounds % 1000);
                rounds += 1;
            }
        });
        guest.works(0, 0);
        let grown = daemon.own_memory().saturating_sub(before);
        assert!(grown < 2 << 20, "{grown} bytes more after {} kicks", kicks.into_inner());
        assert_eq!(daemon.end(), [""; 0]);
    }
}

/// The server uses the in-flight region only for its successor. Changes of it must not affect this
/// server.
#[test]
fn a_changed_in_flight_region_affects_no_request() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut guest = Guest::connect(&daemon.socket(VICTIM), *layout);
        let inflight = guest.connection.inflight(1, 64).unwrap().unwrap();
        guest.connection.set_inflight(&inflight).unwrap();
        guest.start_ring(0).unwrap();
        let (stop, changes) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let _end = End(&stop);
            let changer = scope.spawn(|| {
                let mut random = Random::new(3);
                while !stop.load(Ordering::Relaxed) {
                    let at = random.below(2100);
                    rustix::io::pwrite(&inflight.file, &random.next().to_le_bytes(), at).unwrap();
                    changes.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut rounds = 0;
            while rounds < 500 || changes.load(Ordering::Relaxed) < 10_000 {
                assert!(!changer.is_finished(), "the thread has ended");
                guest.works(0, rounds % 1000);
                rounds += 1;
            }
        });
        guest.connection.stop_ring(0).unwrap();
        assert_eq!(daemon.end(), [""; 0]);
    }
}

/// A region of guest memory in addition to the first one.
pub struct Extra {
    pub info: VhostUserMemoryRegionInfo,
    slice: SharedSlice,
    fd: OwnedFd,
}

pub fn extra(guest_addr: u64, len: u64) -> Extra {
    let user = 0x7e00_0000_0000 + guest_addr;
    let (region, fd) = blockyard_ring::Region::memfd("extra", guest_addr, user, len).unwrap();
    let memory = blockyard_ring::GuestMemory::default().with(region).unwrap();
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: guest_addr,
        memory_size: len,
        userspace_addr: user,
        mmap_offset: 0,
        mmap_handle: fd.as_raw_fd(),
    };
    Extra { info, slice: memory.slice(guest_addr, len, 1).unwrap(), fd }
}

pub const EXTRA: u64 = 0x9_0000_0000;

#[test]
fn memory_can_be_removed_while_requests_use_it() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(SLOW), *layout);
        let mappings = daemon.mappings();
        for round in 0..3 {
            let extra = extra(EXTRA, 1 << 20);
            guest.connection.frontend().add_mem_region(&extra.info).unwrap();
            let (header, status) = (guest.header(IN, 0), guest.status());
            // The data of both chains is in the new region, and for one of them also the status.
            let chain = [out(header, 16), into(EXTRA, 4096), into(status, 1)];
            guest.offer(0, &chain);
            guest.offer(0, &[out(header, 16), into(EXTRA + 8192, 4096 + 1)]);
            // The flush was submitted after them. Its completion shows that the server has taken
            // both, which wait for the disk.
            let (flush, flushed) = (guest.header(FLUSH, 0), guest.status());
            guest.offer(0, &[out(flush, 16), into(flushed, 1)]);
            guest.rings[0].wait(2);
            guest.connection.frontend().remove_mem_region(&extra.info).unwrap();
            drop(extra.fd);
            other.works(0, 0);
            guest.rings[0].wait(3);
            guest.rings[0].wait(2);
            assert_eq!(guest.byte(status), 0, "round {round}");
            // The region is gone for requests from now on.
            let (header, status) = (guest.header(OUT, 0), guest.status());
            guest.offer(0, &[out(header, 16), out(EXTRA, 512), into(status, 1)]);
            guest.rings[0].wait(3);
            assert_eq!(guest.byte(status), 1, "round {round}");
        }
        daemon.keeps_mappings(mappings);
        assert_eq!(daemon.end(), [""; 0]);
    }
}

#[test]
fn added_memory_may_hold_all_parts_of_a_request() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let extra = extra(EXTRA, 1 << 20);
        guest.connection.frontend().add_mem_region(&extra.info).unwrap();
        // Table, header and status are in the new region.
        let table = guest.table(&[out(EXTRA + 64, 16), into(EXTRA + 128, 1)]);
        extra.slice.write(0, &guest.read(table.addr, table.len as usize));
        extra.slice.write(64, &u128::from(FLUSH).to_le_bytes());
        extra.slice.write(128, &[0xff]);
        guest.offer(0, &[super::guest::D { addr: EXTRA, ..table }]);
        guest.rings[0].wait(1);
        assert_eq!(extra.slice.copy_out::<1>(128), [0]);
        daemon.end();
    }
}

#[test]
fn buffers_may_span_adjacent_regions_but_not_holes() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let parts = [extra(EXTRA, 4096), extra(EXTRA + 4096, 4096), extra(EXTRA + 12288, 4096)];
        for part in &parts {
            guest.connection.frontend().add_mem_region(&part.info).unwrap();
        }
        for (at, len, want) in
            [(0, 8192, 0), (3584, 1024, 0), (7680, 1024, 1), (11776, 1024, 1), (0, 16384, 1)]
        {
            let (header, status) = (guest.header(IN, 0), guest.status());
            guest.offer(0, &[out(header, 16), into(EXTRA + at, len), into(status, 1)]);
            guest.rings[0].wait(3);
            assert_eq!(guest.byte(status), want, "{len} bytes at {at}");
        }
        // The request's header is in two regions.
        parts[0].slice.write(4088, &[IN as u8, 0, 0, 0, 0, 0, 0, 0]);
        parts[1].slice.write(0, &[0; 8]);
        let (data, status) = (guest.bytes(&[0; 512]), guest.status());
        guest.offer(0, &[out(EXTRA + 4088, 16), into(data, 512), into(status, 1)]);
        guest.rings[0].wait(3);
        assert_eq!(guest.byte(status), 0);
        assert_eq!(daemon.end(), [""; 0]);
    }
}

#[test]
fn a_new_kick_descriptor_keeps_the_other_settings() {
    let daemon = Daemon::start();
    let mut guest = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    guest.works(0, 0);
    rung(&guest.rings[0].setup.call);
    let kick: Arc<OwnedFd> = super::guest::event();
    guest.connection.message(FrontendReq::SET_VRING_KICK as u32, &[0; 8], &[kick.as_fd()]).unwrap();
    guest.rings[0].setup.kick = kick;
    guest.works(0, 8);
    assert!(rung(&guest.rings[0].setup.call) > 0, "no signal after a new kick");
    guest.rings[0].push_split(u16::MAX);
    guest.rings[0].kick();
    daemon.complained();
    // Another thread signals the descriptor, after the line of log.
    until("the front end gets the error", SOON, || rung(&guest.rings[0].error) == 1);
    daemon.end();
}

/// A front end that truncates its memory file. Access to the missing pages is a bus error.
#[test]
fn truncated_memory_ends_only_its_own_session() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        guest.works(0, 0);
        let extra = extra(EXTRA, 1 << 40);
        guest.connection.frontend().add_mem_region(&extra.info).unwrap();
        rustix::fs::ftruncate(&extra.fd, 0).unwrap();
        let status = guest.status();
        guest.offer(0, &[out(EXTRA, 16), into(status, 1)]);
        until_disconnected(guest.connection.socket());
        other.works(0, 0);
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        guest.works(1, 8);
        // Truncate the rings.
        let region = guest.memory.region();
        let path = format!("/proc/self/fd/{}", region.mmap_handle);
        std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
        rustix::io::write(&*guest.rings[0].setup.kick, &1u64.to_ne_bytes()).unwrap();
        rustix::io::write(&*guest.rings[1].setup.kick, &1u64.to_ne_bytes()).unwrap();
        until_disconnected(guest.connection.socket());
        other.works(0, 8);
        let mut again = Guest::start(&daemon.socket(VICTIM), *layout);
        again.works(0, 0);
        let ends = |line: &String| line.contains("it truncated memory that it shares");
        let sessions = || daemon.complaints().into_iter().filter(ends).count();
        until("the log has two truncations", SOON, || sessions() >= 2);
        assert_eq!(sessions(), 2);
        daemon.end();
    }
}

/// A reactor receives from an NBD server directly into guest memory. Lost memory must not look like
/// a lost server, because other front ends of the disk need the connection.
#[test]
fn truncated_memory_does_not_cost_the_connection_to_an_nbd_server() {
    let folder = Folder::new();
    let (image, socket) = (folder.join("far.img"), folder.join("nbd"));
    std::fs::write(&image, vec![7; CAPACITY as usize]).unwrap();
    let mut serve = Command::new(BLOCKYARD);
    serve.args(["serve", "--read-only"]).arg(&image);
    serve.arg("--nbd").arg(format!("unix:{}", socket.display()));
    let mut server = common::Daemon::start(&mut serve);
    server.wait_ready();
    let uri = format!("nbd+unix:///far.img?socket={}", socket.display());
    let daemon = Daemon::read_only(|_, disk| match disk {
        VICTIM => uri.clone(),
        _ => format!("ram:{CAPACITY}"),
    });
    let mut guest = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    let extra = extra(EXTRA, 1 << 20);
    guest.connection.frontend().add_mem_region(&extra.info).unwrap();
    rustix::fs::ftruncate(&extra.fd, 0).unwrap();
    let (header, status) = (guest.header(IN, 0), guest.status());
    guest.offer(0, &[out(header, 16), into(EXTRA, 1 << 20), into(status, 1)]);
    until_disconnected(guest.connection.socket());
    let mut again = Guest::start(&daemon.socket(VICTIM), Layout::Split);
    let (header, status, data) = (again.header(IN, 0), again.status(), again.bytes(&[1; 512]));
    again.offer(0, &[out(header, 16), into(data, 512), into(status, 1)]);
    again.rings[0].wait(3);
    assert_eq!((again.byte(status), again.read(data, 512)), (0, vec![7; 512]));
    let complaints = daemon.end();
    let of_server = |line: &String| line.contains("connecting again");
    assert!(!complaints.iter().any(of_server), "{complaints:#?}");
}

/// The status byte is in lost memory. The guest cannot see the answer, so the next session must
/// repeat the request.
#[test]
fn an_answer_to_lost_memory_leaves_the_request_in_the_in_flight_region() {
    let daemon = Daemon::start();
    let mut guest = Guest::connect(&daemon.socket(VICTIM), Layout::Split);
    let inflight = guest.connection.inflight(1, 64).unwrap().unwrap();
    guest.connection.set_inflight(&inflight).unwrap();
    guest.start_ring(0).unwrap();
    guest.works(0, 0);
    // The flag of each entry, after a header of 16 bytes.
    let in_flight = || {
        let mut region = [0; 16 + 64 * 16];
        rustix::io::pread(&inflight.file, &mut region, 0).unwrap();
        region[16..].chunks(16).filter(|entry| entry[0] != 0).count()
    };
    assert_eq!(in_flight(), 0);
    let extra = extra(EXTRA, 1 << 40);
    guest.connection.frontend().add_mem_region(&extra.info).unwrap();
    rustix::fs::ftruncate(&extra.fd, 0).unwrap();
    let (header, data) = (guest.header(IN, 0), guest.bytes(&[0; 512]));
    guest.offer(0, &[out(header, 16), into(data, 512), into(EXTRA, 1)]);
    until_disconnected(guest.connection.socket());
    assert_eq!(in_flight(), 1);
    daemon.end();
}
