//! A hand-over, and a death, during a live migration: the next server marks the pages that it
//! writes in the log of the front end. With both layouts of rings.

use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockyard_driver::connection::PROTOCOL;
use blockyard_driver::{
    Data, PackedRing, Plan, Queue, Ring, Session, SplitRing, feature, request, status,
};
use blockyard_ring::SharedWords;
use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use crate::common::SOON;
use crate::guest::pattern;
use crate::handover::Case;
use crate::holder::{Keeper, end, keep};

const LOG_ALL: u64 = 1 << 26;
const PAGE: u64 = 4096;
const SLOTS: u16 = 8;
/// Entries of the ring.
const ENTRIES: u16 = 1024;
/// Address at which the used ring is logged. It is no memory of the guest.
const USED: u64 = 64 * PAGE;

/// A guest that is being migrated.
struct Migrating<R: Ring> {
    session: Session<R>,
    log: OwnedFd,
    words: usize,
}

impl<R: Ring> Migrating<R> {
    fn begin(case: &Case) -> Self {
        let migrating = Self::without_log(case);
        migrating.send_log();
        migrating
    }

    /// Starts a guest that asks for a log and has not sent one.
    fn without_log(case: &Case) -> Self {
        let protocol = PROTOCOL | VhostUserProtocolFeatures::LOG_SHMFD;
        let wanted = feature::GUEST | LOG_ALL;
        let plan = Plan { wanted, required: LOG_ALL, protocol, ..Plan::default() };
        let plan = Plan { queue_size: ENTRIES, ..plan };
        let session = Session::<R>::start(&case.socket, &plan).unwrap();
        session.link.connection.socket().set_read_timeout(Some(SOON)).unwrap();
        let (start, len) = session.link.memory.range();
        let bytes = ((start + len) / PAGE).div_ceil(8).next_multiple_of(8);
        let log = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&log, bytes).unwrap();
        Migrating { session, log, words: bytes as usize / 8 }
    }

    fn send_log(&self) {
        let Migrating { session, log, words } = self;
        ask(session, FrontendReq::SET_LOG_BASE, &[*words as u64 * 8, 0], &[log]);
        let addresses = session.queues[0].setup().addresses;
        let [desc, used, avail] = [addresses.desc, addresses.used, addresses.avail]
            .map(|address| session.link.memory.user_address(address));
        let with_log = 1 << 32;
        ask(session, FrontendReq::SET_VRING_ADDR, &[with_log, desc, used, avail, USED], &[]);
    }

    fn queue(&mut self) -> &mut Queue<R> {
        &mut self.session.queues[0]
    }

    /// Returns the pages of which one has the answers of the back end. A packed ring has them in
    /// its descriptors.
    fn answer_pages(&mut self) -> Range<u64> {
        if R::FEATURES & feature::RING_PACKED == 0 {
            return USED / PAGE..USED / PAGE + 1;
        }
        let start = self.queue().setup().addresses.desc;
        start / PAGE..(start + u64::from(ENTRIES) * 16).div_ceil(PAGE)
    }

    /// Returns the numbers of the marked pages, and clears their marks, as a front end does that
    /// sends these pages.
    fn take_marks(&self) -> Vec<u64> {
        let words = SharedWords::of_file(&self.log, self.words).unwrap();
        let words: Vec<u64> = words.iter().map(|word| word.swap(0, Ordering::SeqCst)).collect();
        let is_marked = |page: &u64| words[*page as usize / 64] >> (page % 64) & 1 == 1;
        (0..self.words as u64 * 64).filter(is_marked).collect()
    }

    fn submit(&mut self) {
        for slot in 0..SLOTS {
            let (sector, data) = (u64::from(slot) * 8, Data::FromDevice(PAGE as u32));
            self.queue().submit(slot, request::IN, sector, data);
        }
        self.queue().publish().unwrap();
    }

    fn answered(&mut self) {
        let (mut done, begin) = (0, Instant::now());
        while done < SLOTS {
            match self.queue().reap().unwrap() {
                Some((_, answer)) => {
                    assert_eq!(answer, status::OK);
                    done += 1;
                }
                None => {
                    assert!(begin.elapsed() < SOON, "{done} answers");
                    self.queue().sleep(Some(Duration::from_millis(20))).unwrap();
                }
            }
        }
    }

    /// The pages of all data and status bytes, and of the used ring, are marked.
    fn are_marked(&mut self, what: &str) {
        let (marks, answers) = (self.take_marks(), self.answer_pages());
        for slot in 0..SLOTS {
            let (data, answer) = self.queue().addresses(slot);
            for (name, address) in [("data", data), ("status", answer)] {
                let page = address / PAGE;
                assert!(marks.contains(&page), "{what}: {name} of slot {slot}: {marks:?}");
            }
        }
        assert!(marks.iter().any(|page| answers.contains(page)), "{what}: the ring: {marks:?}");
    }

    /// Requests that begin before `change`, and requests of the next server.
    fn goes_on(&mut self, what: &str, change: impl FnOnce()) {
        self.take_marks();
        self.submit();
        change();
        self.answered();
        self.are_marked(what);
        self.submit();
        self.answered();
        self.are_marked(&format!("{what}, later"));
    }
}

/// Sends a message, and expects a success.
fn ask<R: Ring>(session: &Session<R>, request: FrontendReq, body: &[u64], fds: &[&OwnedFd]) {
    let head = [request as u32, 1 | 8, body.len() as u32 * 8];
    let bytes = head.iter().flat_map(|word| word.to_le_bytes());
    let bytes: Vec<u8> = bytes.chain(body.iter().flat_map(|word| word.to_le_bytes())).collect();
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let connection = &session.link.connection;
    connection.send_bytes(&bytes, &fds).unwrap();
    let (mut socket, mut head) = (connection.socket(), [0; 12]);
    socket.read_exact(&mut head).unwrap();
    assert_eq!(head[..4], (request as u32).to_le_bytes());
    let mut answer = vec![0; usize::from(head[8])];
    socket.read_exact(&mut answer).unwrap();
    let expected = if request == FrontendReq::SET_LOG_BASE { body } else { &[0] };
    let expected: Vec<u8> = expected.iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(answer, expected, "{request:?}");
}

fn hand_overs<R: Ring>() {
    let case = Case::new();
    let mut daemon = Some(case.serve());
    let mut migrating = Migrating::<R>::begin(&case);
    for round in 0..3 {
        migrating.goes_on(&format!("hand-over {round}"), || {
            daemon = daemon.take().map(|old| case.replace(old));
        });
    }
    let (mut bytes, data) = (vec![0; PAGE as usize], Data::FromDevice(PAGE as u32));
    let answer = migrating.queue().call(request::IN, 8, data, &mut bytes, SOON).unwrap();
    assert!(answer == status::OK && bytes == pattern(77, 8192)[4096..]);
    // The migration is cancelled: the front end uses no log any more.
    let features = migrating.session.link.connection.features & !LOG_ALL;
    ask(&migrating.session, FrontendReq::SET_FEATURES, &[features], &[]);
    migrating.take_marks();
    daemon = daemon.take().map(|old| case.replace(old));
    migrating.submit();
    migrating.answered();
    let (data, _) = migrating.queue().addresses(0);
    assert!(!migrating.take_marks().contains(&(data / PAGE)));
    drop(migrating);
    daemon.unwrap().stop();
    case.is_clean();
}

fn deaths<R: Ring>() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let mut migrating = Migrating::<R>::begin(&case);
    for round in 0..3 {
        migrating.goes_on(&format!("death {round}"), || holder.kill_kept());
    }
    drop(migrating);
    end(holder, Keeper::Holder);
    case.is_clean();
}

#[test]
fn the_next_server_marks_pages_in_the_log_of_a_migration() {
    hand_overs::<SplitRing>();
}

#[test]
fn the_next_server_marks_pages_of_packed_rings() {
    hand_overs::<PackedRing>();
}

#[test]
fn the_server_after_a_death_marks_pages_in_the_log_of_a_migration() {
    deaths::<SplitRing>();
}

#[test]
fn the_server_after_a_death_marks_pages_of_packed_rings() {
    deaths::<PackedRing>();
}

/// The old server has written pages for which no log has a bit.
#[test]
fn a_log_that_comes_after_a_death_has_all_pages_marked() {
    let case = Case::new();
    let holder = keep(&case, Keeper::Holder);
    let mut migrating = Migrating::<SplitRing>::without_log(&case);
    migrating.submit();
    migrating.answered();
    holder.kill_kept();
    migrating.send_log();
    let marks = migrating.take_marks();
    for slot in 0..SLOTS {
        let (data, _) = migrating.queue().addresses(slot);
        assert!(marks.contains(&(data / PAGE)), "slot {slot}: {marks:?}");
    }
    drop(migrating);
    end(holder, Keeper::Holder);
    case.is_clean();
}
