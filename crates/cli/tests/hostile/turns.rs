//! A hostile guest must not starve other guests on the same reactor: endless chains, and
//! descriptors that block.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::request::IN;

use rustix::event::EventfdFlags;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use super::beside::beside;
use super::daemon::{CAPACITY, Daemon, MANY_QUEUES, SLOW, VICTIM};
use super::guest::{BOTH, D, Guest, Layout, NEXT, NONE, WRITE, into, out};
use super::messages::{Fate, send};
use super::moving::{EXTRA, extra};
use crate::common::SOON;

/// A front end with split rings. Each ring has a slow request in flight, and after it the same
/// chain of 1,026 descriptors again and again. The device refuses that chain at once, because a
/// part of its data is outside guest memory.
struct Endless {
    guest: Guest,
    /// Address of the slow request's status, for each ring.
    slow_status: Vec<u64>,
    /// The available index that the device reads, for each ring.
    shown: Vec<u16>,
}

const SLOW_HEAD: u16 = 60;

impl Endless {
    /// `regions`: number of additional memory regions, which hold the data of the chains.
    fn start(path: &Path, queues: u16, regions: u64) -> Self {
        let mut guest = Guest::start_queues(path, Layout::Split, queues);
        let more: Vec<_> = (0..regions).map(|n| extra(EXTRA + 8192 * n, 4096)).collect();
        for region in &more {
            guest.connection.frontend().add_mem_region(&region.info).unwrap();
        }
        let slow = guest.header(IN, 0);
        let slow_status: Vec<_> = (0..queues).map(|_| guest.bytes(&[0])).collect();
        let data = guest.memory.take(4096, 4096).unwrap();
        let (header, status) = (guest.header(IN, 0), guest.status());
        let mut chain = vec![out(header, 16)];
        let place = |n: u64| {
            if regions == 0 { data + 1024 * (n % 4) } else { EXTRA + 8192 * (n * 101 % regions) }
        };
        chain.extend((0..1023).map(|n| into(place(n), 512)));
        chain.extend([into(0x7fff_0000_0000, 512), into(status, 1)]);
        let table = guest.table(&chain);
        for (ring, slow_status) in guest.rings.iter().zip(&slow_status) {
            ring.write_split(0, table, 0);
            ring.write_split(SLOW_HEAD, D { flags: NEXT, ..out(slow, 16) }, SLOW_HEAD + 1);
            ring.write_split(
                SLOW_HEAD + 1,
                D { flags: WRITE | NEXT, ..out(data, 4096) },
                SLOW_HEAD + 2,
            );
            ring.write_split(SLOW_HEAD + 2, into(*slow_status, 1), 0);
        }
        Endless { guest, slow_status, shown: vec![0; queues.into()] }
    }

    /// Fills the rings again. Returns how many chains of each the device has completed so far.
    fn refill(&mut self) -> Vec<u16> {
        (0..self.shown.len()).map(|queue| self.refill_ring(queue)).collect()
    }

    fn refill_ring(&mut self, queue: usize) -> u16 {
        let (ring, slow_status) = (&self.guest.rings[queue], self.slow_status[queue]);
        let used = ring.used.load_u16(2, Ordering::Acquire);
        let until = used.wrapping_add(ring.size - 1);
        let shown = &mut self.shown[queue];
        while *shown != until {
            let answered = self.guest.byte(slow_status) != NONE;
            let head = if answered { SLOW_HEAD } else { 0 };
            if answered {
                self.guest.bytes_at(slow_status, &[NONE]);
            }
            let place = usize::from(*shown % ring.size);
            ring.avail.store_u16(4 + 2 * place, head, Ordering::Relaxed);
            *shown = shown.wrapping_add(1);
        }
        ring.avail.store_u16(2, *shown, Ordering::Release);
        ring.kick();
        used
    }
}

#[test]
fn beside_chains_without_end() {
    endless("chains without end", Daemon::slow("200ms"), 1, 0);
}

#[test]
fn beside_chains_in_many_regions() {
    endless("chains in 400 memory regions", Daemon::slow("200ms"), 1, 400);
}

#[test]
fn beside_chains_of_many_queues() {
    let daemon = Daemon::crowded(|_, _| format!("ram:{CAPACITY}"));
    endless("chains of many queues", daemon, MANY_QUEUES, 0);
}

fn endless(what: &str, daemon: Daemon, queues: u16, regions: u64) {
    beside(what, &daemon, |attack| {
        let mut endless = Endless::start(&attack.socket(SLOW), queues, regions);
        let mut answered = Vec::new();
        while attack.goes_on() {
            let start = Instant::now();
            while std::mem::replace(&mut answered, endless.refill()) == answered {
                assert!(start.elapsed() < SOON, "the ring stands still");
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(daemon.end(), [""; 0]);
}

/// Returns an eventfd that blocks a writer: its counter is at the maximum, and O_NONBLOCK is clear.
fn blocking() -> OwnedFd {
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    event
}

/// Sets call and error descriptors that block for queue 0, makes the device use both, and
/// disconnects.
fn breaks_with_blocking_descriptors(path: &Path, layout: Layout) {
    let mut guest = Guest::start(path, layout);
    let (call, error) = (blocking(), blocking());
    for (request, fd) in
        [(FrontendReq::SET_VRING_CALL, &call), (FrontendReq::SET_VRING_ERR, &error)]
    {
        assert_eq!(send(&guest.connection, request, &[0; 8], &[fd.as_fd()]), Fate::Done);
        // A back end may have set O_NONBLOCK. The front end shares the open file description.
        rustix::io::ioctl_fionbio(fd, false).unwrap();
    }
    guest.works(0, 0);
    match layout {
        Layout::Split => guest.rings[0].push_split(u16::MAX),
        Layout::Packed => guest.rings[0].push_packed(out(0, 16), u16::MAX),
    }
    guest.rings[0].kick();
    // The other queue of the same reactor continues, and so does the session.
    guest.works(1, 8);
    guest.reset_ring(0);
}

#[test]
fn beside_descriptors_that_would_block() {
    for layout in BOTH {
        let daemon = Daemon::start();
        beside("descriptors that would block", &daemon, |attack| {
            while attack.goes_on() {
                breaks_with_blocking_descriptors(&attack.socket(VICTIM), *layout);
            }
        });
        // One front end with such descriptors is still connected when the daemon ends.
        let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
        let call = blocking();
        assert_eq!(
            send(&guest.connection, FrontendReq::SET_VRING_CALL, &[0; 8], &[call.as_fd()]),
            Fate::Done
        );
        rustix::io::ioctl_fionbio(&call, false).unwrap();
        guest.works(0, 0);
        daemon.end();
    }
}

/// The front end receives calls as messages, and neither acknowledges nor reads them.
#[test]
fn beside_calls_by_messages_that_are_not_acknowledged() {
    let daemon = Daemon::start();
    beside("calls by messages that are not acknowledged", &daemon, |attack| {
        let by_messages = VhostUserProtocolFeatures::INBAND_NOTIFICATIONS
            | VhostUserProtocolFeatures::BACKEND_REQ;
        let mut guest =
            Guest::connect_with(&attack.socket(VICTIM), Layout::Split, PROTOCOL | by_messages);
        let (channel, _unread) = UnixStream::pair().unwrap();
        let sent =
            send(&guest.connection, FrontendReq::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]);
        assert_eq!(sent, Fate::Done);
        guest.start_ring(0).unwrap();
        // A message without a descriptor for calls.
        let none = 0x100u64.to_le_bytes();
        assert_eq!(send(&guest.connection, FrontendReq::SET_VRING_CALL, &none, &[]), Fate::Done);
        while attack.goes_on() {
            guest.works(0, 0);
        }
    });
    assert_eq!(daemon.end(), [""; 0]);
}
