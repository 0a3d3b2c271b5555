//! Rings that no driver makes: the queue stops, logs the reason once, and works again after the
//! guest resets it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use blockyard_driver::request::{FLUSH, IN, OUT};

use super::daemon::{Daemon, OTHER, SLOW, VICTIM};
use super::guest::{BOTH, D, Guest, INDIRECT, Layout, NEXT, SIZE, WRITE, into, out, rung};

const SPLIT: &[Layout] = &[Layout::Split];
const PACKED: &[Layout] = &[Layout::Packed];
const PATIENCE: Duration = Duration::from_secs(60);

struct Case {
    name: &'static str,
    on: &'static [Layout],
    /// Breaks the ring of queue 0.
    act: fn(&mut Guest),
    /// Expected part of the log line.
    says: &'static str,
}

const fn case(
    name: &'static str,
    on: &'static [Layout],
    says: &'static str,
    act: fn(&mut Guest),
) -> Case {
    Case { name, on, act, says }
}

/// Returns the chain of a valid read.
fn good(guest: &mut Guest) -> Vec<D> {
    let (header, data, status) = (guest.header(IN, 0), guest.bytes(&[0; 512]), guest.status());
    vec![out(header, 16), into(data, 512), into(status, 1)]
}

fn offer(guest: &mut Guest, chain: &[D]) {
    guest.offer(0, chain);
}

fn indirect(addr: u64, len: u32) -> D {
    D { addr, len, flags: INDIRECT }
}

/// Offers a descriptor that refers to an indirect table.
fn table(guest: &mut Guest, addr: u64, len: u32) {
    offer(guest, &[indirect(addr, len)]);
}

fn end(guest: &Guest) -> u64 {
    let (start, len) = guest.memory.range();
    start + len
}

const LOOPS: &[Case] = &[
    case("a descriptor that is its own next", SPLIT, "loops", |g| {
        let header = g.header(IN, 0);
        g.rings[0].write_split(5, D { addr: header, len: 16, flags: NEXT }, 5);
        g.rings[0].push_split(5);
        g.rings[0].kick();
    }),
    case("two descriptors in a ring", SPLIT, "loops", |g| {
        let header = g.header(IN, 0);
        g.rings[0].write_split(5, D { addr: header, len: 16, flags: NEXT }, 9);
        g.rings[0].write_split(9, D { addr: header, len: 16, flags: NEXT }, 5);
        g.rings[0].push_split(5);
        g.rings[0].kick();
    }),
    case("a good chain whose status leads back", SPLIT, "loops", |g| {
        let data = g.bytes(&[0; 512]);
        for index in 0..SIZE {
            g.rings[0].write_split(
                index,
                D { addr: data, len: 8, flags: NEXT | WRITE },
                (index + 1) % SIZE,
            );
        }
        g.rings[0].push_split(0);
        g.rings[0].kick();
    }),
    case("a chain round the whole ring", PACKED, "loops", |g| {
        let header = g.header(IN, 0);
        for _ in 0..SIZE {
            g.rings[0].push_packed(D { addr: header, len: 16, flags: NEXT }, 1);
        }
        g.rings[0].kick();
    }),
    case("a loop in an indirect table", SPLIT, "loops", |g| {
        let header = g.header(IN, 0);
        let table = g.table(&[out(header, 1), out(header, 1)]);
        // The second descriptor's next index is the first descriptor.
        let slice = g.memory.slice(table.addr, 32, 1).unwrap();
        slice.copy_in(16 + 12, (u32::from(NEXT)).to_le_bytes());
        offer(g, &[table]);
    }),
];

const INDICES: &[Case] = &[
    case("a head beyond the table", SPLIT, "beyond the table of 64", |g| {
        g.rings[0].push_split(SIZE);
        g.rings[0].kick();
    }),
    case("head 65535", SPLIT, "beyond the table of 64", |g| {
        g.rings[0].push_split(u16::MAX);
        g.rings[0].kick();
    }),
    case("a next beyond the table", SPLIT, "descriptor index 64 is beyond", |g| {
        let header = g.header(IN, 0);
        g.rings[0].write_split(0, D { addr: header, len: 16, flags: NEXT }, SIZE);
        g.rings[0].push_split(0);
        g.rings[0].kick();
    }),
    case("an available index that jumps by more than the ring", SPLIT, "available index 65", |g| {
        g.rings[0].avail.store_u16(2, SIZE + 1, Ordering::Release);
        g.rings[0].kick();
    }),
    case("an available index that goes back", SPLIT, "available index 65535", |g| {
        g.rings[0].avail.store_u16(2, u16::MAX, Ordering::Release);
        g.rings[0].kick();
    }),
    case("an available index half round", SPLIT, "available index 32768", |g| {
        g.rings[0].avail.store_u16(2, 32768, Ordering::Release);
        g.rings[0].kick();
    }),
    case("an id beyond the ring", PACKED, "buffer id 64", |g| {
        for d in good(g) {
            let flags = d.flags | if d.len == 1 { 0 } else { NEXT };
            g.rings[0].push_packed(D { flags, ..d }, SIZE);
        }
        g.rings[0].kick();
    }),
    case("id 65535", PACKED, "buffer id 65535", |g| {
        let table = good(g);
        let table = g.table(&table);
        g.rings[0].push_packed(table, u16::MAX);
        g.rings[0].kick();
    }),
    case(
        "a next beyond the indirect table",
        SPLIT,
        "descriptor index 7 is beyond the table of 3",
        |g| {
            let chain = good(g);
            let table = g.table(&chain);
            g.memory.slice(table.addr, 48, 1).unwrap().copy_in(14, 7u16.to_le_bytes());
            offer(g, &[table]);
        },
    ),
];

const TABLES: &[Case] = &[
    case("an empty table", BOTH, "not a multiple of 16", |g| table(g, 0x1_0000_0000, 0)),
    case("a table of 15 bytes", BOTH, "not a multiple of 16", |g| table(g, 0x1_0000_0000, 15)),
    case("a table of 17 bytes", BOTH, "not a multiple of 16", |g| table(g, 0x1_0000_0000, 17)),
    case("a table of 4 GiB", BOTH, "more than 1026", |g| table(g, 0x1_0000_0000, !15)),
    case("a table of one too many", BOTH, "more than 1026", |g| {
        let header = g.header(IN, 0);
        let table = g.table(&vec![out(header, 1); 1027]);
        offer(g, &[table]);
    }),
    case("a table at 0", BOTH, "outside the guest's memory", |g| table(g, 0, 48)),
    case("a table that wraps 2^64", BOTH, "outside the guest's memory", |g| {
        table(g, u64::MAX - 15, 48)
    }),
    case("a table over the end of the memory", BOTH, "outside the guest's memory", |g| {
        table(g, end(g) - 32, 48)
    }),
    case("a table in a table", BOTH, "inside an indirect table", |g| {
        let chain = good(g);
        let inner = g.table(&chain);
        let outer = g.table(&[inner]);
        offer(g, &[outer]);
    }),
    case("a table that has itself in it", BOTH, "inside an indirect table", |g| {
        let table = g.table(&[out(0, 0)]);
        let again = g.table(&[D { len: 16, ..table }]);
        g.memory.slice(table.addr, 16, 1).unwrap().write(0, &g.read(again.addr, 16));
        offer(g, &[table]);
    }),
    case("a table with a next", BOTH, "indirect descriptor at 0", |g| {
        let chain = good(g);
        let (table, status) = (g.table(&chain[..2]), chain[2]);
        offer(g, &[table, status]);
    }),
    case("a descriptor and then a table", PACKED, "one of several", |g| {
        let chain = good(g);
        let table = g.table(&chain[1..]);
        offer(g, &[chain[0], table]);
    }),
];

const FRAMES: &[Case] = &[
    case("no header", BOTH, "no room for the request header", |g| {
        let status = g.status();
        offer(g, &[into(status, 1)]);
    }),
    case("a header of 15 bytes", BOTH, "no room for the request header", |g| {
        let (header, status) = (g.header(IN, 0), g.status());
        offer(g, &[out(header, 15), into(status, 1)]);
    }),
    case("a header that the device may write", BOTH, "no room for the request header", |g| {
        let (header, status) = (g.header(IN, 0), g.status());
        offer(g, &[into(header, 16), into(status, 1)]);
    }),
    case("a header outside the memory", BOTH, "outside the guest's memory", |g| {
        let status = g.status();
        offer(g, &[out(end(g), 16), into(status, 1)]);
    }),
    case("a header over the end of the memory", BOTH, "outside the guest's memory", |g| {
        let status = g.status();
        offer(g, &[out(end(g) - 8, 16), into(status, 1)]);
    }),
    case("a header that wraps 2^64", BOTH, "outside the guest's memory", |g| {
        let status = g.status();
        offer(g, &[out(u64::MAX - 7, 16), into(status, 1)]);
    }),
    case("no status", BOTH, "no writable byte for the status", |g| {
        let (header, data) = (g.header(OUT, 0), g.bytes(&[0; 512]));
        offer(g, &[out(header, 16), out(data, 512)]);
    }),
    case("a status that the device may not write", BOTH, "no writable byte for the status", |g| {
        let (header, status) = (g.header(OUT, 0), g.status());
        offer(g, &[out(header, 16), out(status, 1)]);
    }),
    case("a status of no bytes", BOTH, "no writable byte for the status", |g| {
        let (header, status) = (g.header(OUT, 0), g.status());
        offer(g, &[out(header, 16), into(status, 0)]);
    }),
    case("a status outside the memory", BOTH, "outside the guest's memory", |g| {
        let header = g.header(OUT, 0);
        offer(g, &[out(header, 16), into(end(g), 1)]);
    }),
    case("a status in 4 GiB that end outside", BOTH, "outside the guest's memory", |g| {
        let chain = good(g);
        offer(g, &[chain[0], into(chain[1].addr, u32::MAX)]);
    }),
    case("a status beyond 2^64", BOTH, "beyond 64 bits", |g| {
        let header = g.header(OUT, 0);
        offer(g, &[out(header, 16), into(u64::MAX, 2)]);
    }),
    case(
        "a readable descriptor after a writable one",
        BOTH,
        "a readable descriptor follows",
        |g| {
            let (header, data, status) = (g.header(OUT, 0), g.bytes(&[0; 512]), g.status());
            offer(g, &[out(header, 16), into(status, 1), out(data, 512)]);
        },
    ),
    case(
        "a readable descriptor after a writable one, in a table",
        BOTH,
        "a readable descriptor follows",
        |g| {
            let (header, data, status) = (g.header(OUT, 0), g.bytes(&[0; 512]), g.status());
            let table = g.table(&[out(header, 16), into(status, 1), out(data, 512)]);
            offer(g, &[table]);
        },
    ),
];

/// Runs each case with its own daemon, whose log lines are counted.
fn breaks(cases: &[Case]) {
    for case in cases {
        for layout in case.on {
            let daemon = Daemon::start();
            let what = format!("{layout:?}: {}", case.name);
            let mut other = Guest::start(&daemon.socket(OTHER), *layout);
            let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
            (case.act)(&mut guest);
            stopped(&daemon, VICTIM, &mut guest, &what, case.says);
            assert_eq!(guest.rings[0].reap(1), None, "{what}: answered");
            other.works(0, 0);
            guest.works(1, 8);
            guest.reset_ring(0);
            guest.works(0, 16);
            assert_eq!(daemon.end().len(), 1, "{what}");
        }
    }
}

/// Checks that queue 0 of this guest of a disk has stopped: the error eventfd was signalled once,
/// the log has one line, and kicks change nothing.
fn stopped(daemon: &Daemon, disk: &str, guest: &mut Guest, what: &str, says: &str) {
    let error = guest.rings[0].error.clone();
    let mut poll = [rustix::event::PollFd::new(&*error, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as _, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut poll, Some(&limit)).unwrap(),
        1,
        "{what}: no sign of an error"
    );
    assert_eq!(rung(&error), 1, "{what}");
    for _ in 0..10 {
        guest.rings[0].kick();
    }
    daemon.has_handled_all(disk);
    let log = daemon.complaints();
    assert_eq!(log.len(), 1, "{what}: {log:#?}");
    assert!(
        log[0].contains(says) && log[0].contains("queue=0") && log[0].contains(" WARN "),
        "{what}: {log:#?}"
    );
    assert_eq!(rung(&error), 0, "{what}: rung again");
}

#[test]
fn loops_stop_the_queue() {
    breaks(LOOPS);
}

#[test]
fn invalid_indices_stop_the_queue() {
    breaks(INDICES);
}

#[test]
fn bad_indirect_tables_stop_the_queue() {
    breaks(TABLES);
}

#[test]
fn chains_without_a_status_stop_the_queue() {
    breaks(FRAMES);
}

/// Offers the same chain again while the disk processes it.
#[test]
fn a_chain_offered_twice_stops_the_queue_after_its_answer() {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        let mut guest = Guest::start(&daemon.socket(SLOW), *layout);
        let chain = good(&mut guest);
        // One kick announces both chains. The disk has the first one when the server checks the
        // second one.
        let head = guest.rings[0].offer(&chain);
        match layout {
            Layout::Split => guest.rings[0].push_split(head),
            Layout::Packed => {
                for (at, d) in chain.iter().enumerate() {
                    let flags = d.flags | if at < 2 { NEXT } else { 0 };
                    guest.rings[0].push_packed(D { flags, ..*d }, head);
                }
            }
        }
        guest.rings[0].kick();
        stopped(&daemon, SLOW, &mut guest, "twice", "in flight already");
        other.works(0, 0);
        // Valid requests are still completed.
        assert_eq!(guest.rings[0].wait(3), (head, 513));
        assert_eq!(guest.byte(chain[2].addr), 0);
        guest.reset_ring(0);
        guest.works(0, 8);
        daemon.end();
    }
}

/// The guest of a packed ring makes all descriptors available again while they are in flight.
#[test]
fn a_packed_ring_that_overtakes_itself_stops() {
    let daemon = Daemon::slow("6s");
    let mut guest = Guest::start(&daemon.socket(SLOW), Layout::Packed);
    let chain = good(&mut guest);
    let reads = SIZE / 3;
    let read = |guest: &mut Guest, id: u16| {
        for (at, d) in chain.iter().enumerate() {
            let flags = d.flags | if at < 2 { NEXT } else { 0 };
            guest.rings[0].push_packed(D { flags, ..*d }, id);
        }
    };
    (0..reads).for_each(|id| read(&mut guest, id));
    // One descriptor is left. A completed flush shows that the server has taken all requests before
    // it.
    let (flush, flushed) = (guest.header(FLUSH, 0), guest.status());
    let flush = guest.table(&[out(flush, 16), into(flushed, 1)]);
    guest.rings[0].push_packed(flush, reads);
    guest.rings[0].kick();
    assert_eq!(guest.rings[0].wait(1).0, reads);
    // The chain has three descriptors, but only one is free.
    read(&mut guest, reads);
    guest.rings[0].kick();
    stopped(&daemon, SLOW, &mut guest, "overtaken", "made available again");
    for _ in 0..reads {
        assert_eq!(guest.rings[0].wait(3).1, 513);
    }
    guest.reset_ring(0);
    guest.works(0, 8);
    daemon.end();
}
