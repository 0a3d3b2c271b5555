//! Invalid requests on a valid ring, and unusual valid ones. Each completes with its status, and
//! the log has no complaint.

use blockyard_driver::request::{DISCARD, FLUSH, ID, IN, OUT, WRITE_ZEROES};
use blockyard_driver::status::{IOERR, OK, UNSUPP};

use super::daemon::{CAPACITY, Daemon, OTHER, VICTIM};
use super::guest::{BOTH, D, Guest, into, out};

const SECTORS: u64 = CAPACITY / 512;

/// The chain of a case, and the address of its status.
struct Asked {
    chain: Vec<D>,
    status: u64,
}

struct Case {
    name: &'static str,
    make: fn(&mut Guest) -> Asked,
    want: u8,
}

const fn case(name: &'static str, want: u8, make: fn(&mut Guest) -> Asked) -> Case {
    Case { name, make, want }
}

/// Builds a chain with header, data and status, each in its own descriptor.
fn usual(guest: &mut Guest, kind: u32, sector: u64, data: &[D]) -> Asked {
    let (header, status) = (guest.header(kind, sector), guest.status());
    let chain = [&[out(header, 16)], data, &[into(status, 1)]].concat();
    Asked { chain, status }
}

/// Builds the same chain in an indirect descriptor table.
fn indirect(guest: &mut Guest, asked: Asked) -> Asked {
    Asked { chain: vec![guest.table(&asked.chain)], status: asked.status }
}

fn read(guest: &mut Guest, sector: u64, len: u32) -> Asked {
    let addr = guest.bytes(&vec![0; len as usize]);
    usual(guest, IN, sector, &[into(addr, len)])
}

fn write(guest: &mut Guest, sector: u64, len: u32) -> Asked {
    let addr = guest.bytes(&vec![0x55; len as usize]);
    usual(guest, OUT, sector, &[out(addr, len)])
}

/// Builds a discard or write-zeroes with ranges (sector, sectors, flags).
fn ranges(guest: &mut Guest, kind: u32, ranges: &[(u64, u32, u32)]) -> Asked {
    let bytes = ranges.iter().flat_map(|(sector, sectors, flags)| {
        (u128::from(*sector) | u128::from(*sectors) << 64 | u128::from(*flags) << 96).to_le_bytes()
    });
    let bytes: Vec<u8> = bytes.collect();
    let addr = guest.bytes(&bytes);
    usual(guest, kind, 0, &[out(addr, bytes.len() as u32)])
}

fn identify(guest: &mut Guest, len: u32) -> Asked {
    let addr = guest.bytes(&vec![0; len as usize]);
    usual(guest, ID, 0, &[into(addr, len)])
}

/// Returns the end of the guest's only region.
fn end(guest: &Guest) -> u64 {
    let (start, len) = guest.memory.range();
    start + len
}

/// Returns `count` descriptors of the same 1 MiB.
fn same(guest: &mut Guest, count: usize, make: fn(u64, u32) -> D) -> Vec<D> {
    let addr = guest.memory.take(1 << 20, 4096).unwrap();
    vec![make(addr, 1 << 20); count]
}

const TYPES: &[Case] = &[
    case("type 2 (SCSI)", UNSUPP, |g| usual(g, 2, 0, &[])),
    case("type 3", UNSUPP, |g| usual(g, 3, 0, &[])),
    case("type 10 (lifetime)", UNSUPP, |g| usual(g, 10, 0, &[])),
    case("type 14 (secure erase)", UNSUPP, |g| usual(g, 14, 0, &[])),
    case("type u32::MAX", UNSUPP, |g| usual(g, u32::MAX, u64::MAX, &[])),
    case("type read with the barrier bit of old", UNSUPP, |g| usual(g, 0x8000_0000, 0, &[])),
    case("flush", OK, |g| usual(g, FLUSH, 0, &[])),
    case("flush of a sector that is not", OK, |g| usual(g, FLUSH, u64::MAX, &[])),
];

const PLACES: &[Case] = &[
    case("read at sector u64::MAX", IOERR, |g| read(g, u64::MAX, 512)),
    case("read whose offset wraps to 0", IOERR, |g| read(g, 1 << 55, 512)),
    case("write whose offset wraps to 0", IOERR, |g| write(g, 1 << 55, 512)),
    case("read whose end wraps", IOERR, |g| read(g, (1 << 55) - 1, 1024)),
    case("read at the end", IOERR, |g| read(g, SECTORS, 512)),
    case("read over the end", IOERR, |g| read(g, SECTORS - 1, 1024)),
    case("write over the end", IOERR, |g| write(g, SECTORS - 1, 1024)),
    case("the last sector", OK, |g| read(g, SECTORS - 1, 512)),
];

const LENGTHS: &[Case] = &[
    case("read of 1 byte", IOERR, |g| read(g, 0, 1)),
    case("read of 511 bytes", IOERR, |g| read(g, 0, 511)),
    case("write of 513 bytes", IOERR, |g| write(g, 0, 513)),
    case("read of nothing", OK, |g| usual(g, IN, 0, &[])),
    case("write of nothing", OK, |g| usual(g, OUT, 0, &[])),
    case("read of a descriptor of nothing", OK, |g| usual(g, IN, 0, &[into(0, 0)])),
    case("read of 4 GiB - 1", IOERR, |g| usual(g, IN, 0, &[into(0, u32::MAX)])),
    case("read of 4 GiB - 512, in memory that is not", IOERR, |g| {
        usual(g, IN, 0, &[into(0, u32::MAX - 511)])
    }),
    case("read of 16 times 4 GiB - 1, 32 bits of which are 0 mod 512", IOERR, |g| {
        let data =
            [vec![into(0x1_0000_0000, u32::MAX); 16], vec![into(0x1_0000_0000, 16)]].concat();
        usual(g, IN, 0, &data)
    }),
    case("write of 4 GiB + 512, which is 512 in 32 bits", IOERR, |g| {
        let addr = g.bytes(&[0x55; 1024]);
        usual(g, OUT, 0, &[out(addr, u32::MAX - 511), out(addr, 1024)])
    }),
    case("read of 300 MiB, all in the same memory", IOERR, |g| {
        let data = same(g, 300, into);
        let asked = usual(g, IN, 0, &data);
        indirect(g, asked)
    }),
    case("write of 1 GiB, all in the same memory", IOERR, |g| {
        let data = same(g, 1024, out);
        let asked = usual(g, OUT, 0, &data);
        indirect(g, asked)
    }),
    case("read of the whole disk into the same memory", OK, |g| {
        let data = same(g, (CAPACITY >> 20) as usize, into);
        usual(g, IN, 0, &data)
    }),
    case("read in as many pieces as one operation takes", OK, |g| {
        let addr = g.memory.take(2 << 20, 4096).unwrap();
        let data: Vec<_> = (0..1024).map(|i| into(addr + i * 2048, 512)).collect();
        let asked = usual(g, IN, 0, &data);
        indirect(g, asked)
    }),
];

const DIRECTIONS: &[Case] = &[
    case("read into what the device may not write", IOERR, |g| {
        let addr = g.bytes(&[0x77; 512]);
        usual(g, IN, 0, &[out(addr, 512)])
    }),
    case("write of what the device may not read", IOERR, |g| {
        let addr = g.bytes(&[0x77; 512]);
        usual(g, OUT, 0, &[into(addr, 512)])
    }),
    case("write of both", IOERR, |g| {
        let addr = g.bytes(&[0x77; 1024]);
        usual(g, OUT, 0, &[out(addr, 512), into(addr + 512, 512)])
    }),
    case("discard whose ranges the device may not read", IOERR, |g| {
        let addr = g.bytes(&[0; 16]);
        usual(g, DISCARD, 0, &[into(addr, 16)])
    }),
    case("id that the device may not write", OK, |g| {
        let addr = g.bytes(&[0x77; 20]);
        usual(g, ID, 0, &[out(addr, 20)])
    }),
];

const ADDRESSES: &[Case] = &[
    case("read to address 0", IOERR, |g| usual(g, IN, 0, &[into(0, 512)])),
    case("read to the region's file offset", IOERR, |g| usual(g, IN, 0, &[into(0x1000, 512)])),
    case("read to the region's user address", IOERR, |g| {
        usual(g, IN, 0, &[into(0x7f00_0000_0000, 512)])
    }),
    case("write from the last byte of all", IOERR, |g| usual(g, OUT, 0, &[out(u64::MAX, 512)])),
    case("write that ends at 2^64", IOERR, |g| usual(g, OUT, 0, &[out(u64::MAX - 511, 512)])),
    case("write that wraps 2^64", IOERR, |g| usual(g, OUT, 0, &[out(u64::MAX - 255, 512)])),
    case("read to just behind the memory", IOERR, |g| usual(g, IN, 0, &[into(end(g), 512)])),
    case("read over the end of the memory", IOERR, |g| usual(g, IN, 0, &[into(end(g) - 256, 512)])),
    case("read to just before the memory", IOERR, |g| {
        let start = g.memory.range().0;
        usual(g, IN, 0, &[into(start - 256, 512)])
    }),
    case("read to the end of the memory", OK, |g| usual(g, IN, 0, &[into(end(g) - 512, 512)])),
    case("the second of two data descriptors is outside", IOERR, |g| {
        let addr = g.bytes(&[0; 512]);
        usual(g, IN, 0, &[into(addr, 512), into(end(g), 512)])
    }),
    case("id outside", IOERR, |g| usual(g, ID, 0, &[into(end(g), 20)])),
    case("discard of ranges outside", IOERR, |g| usual(g, DISCARD, 0, &[out(end(g), 16)])),
];

const FRAMING: &[Case] = &[
    case("a header in 16 descriptors", OK, |g| {
        let (header, status, data) = (g.header(IN, 3), g.status(), g.bytes(&[0; 512]));
        let mut chain: Vec<_> = (0..16).map(|i| out(header + i, 1)).collect();
        chain.extend([into(data, 512), into(status, 1)]);
        Asked { chain, status }
    }),
    case("header and data in one descriptor", OK, |g| {
        let (header, status) = (g.header(OUT, 3), g.status());
        g.bytes(&[0x55; 512]);
        Asked { chain: vec![out(header, 16 + 512), into(status, 1)], status }
    }),
    case("header and data in one descriptor too short", IOERR, |g| {
        let (header, status) = (g.header(OUT, 3), g.status());
        Asked { chain: vec![out(header, 16 + 511), into(status, 1)], status }
    }),
    case("data and status in one descriptor", OK, |g| {
        let (header, data) = (g.header(IN, 3), g.bytes(&[0xff; 513]));
        Asked { chain: vec![out(header, 16), into(data, 513)], status: data + 512 }
    }),
    case("data and status in one descriptor, less a byte", IOERR, |g| {
        let (header, data) = (g.header(IN, 3), g.bytes(&[0xff; 512]));
        Asked { chain: vec![out(header, 16), into(data, 512)], status: data + 511 }
    }),
    case("nothing behind the status", OK, |g| {
        let asked = read(g, 3, 512);
        Asked { chain: [asked.chain, vec![into(0, 0)]].concat(), status: asked.status }
    }),
    case("nothing before the header", OK, |g| {
        let asked = read(g, 3, 512);
        Asked { chain: [vec![out(u64::MAX, 0)], asked.chain].concat(), status: asked.status }
    }),
    case("a header of 17 bytes", IOERR, |g| {
        let (header, status, data) = (g.header(IN, 3), g.status(), g.bytes(&[0; 512]));
        Asked { chain: vec![out(header, 17), into(data, 512), into(status, 1)], status }
    }),
];

const RANGES: &[Case] = &[
    case("discard of no range", IOERR, |g| usual(g, DISCARD, 0, &[])),
    case("discard of 15 bytes of a range", IOERR, |g| {
        let addr = g.bytes(&[0; 15]);
        usual(g, DISCARD, 0, &[out(addr, 15)])
    }),
    case("discard of a range and a byte", IOERR, |g| {
        let addr = g.bytes(&[0; 17]);
        usual(g, DISCARD, 0, &[out(addr, 17)])
    }),
    case("discard of 64 ranges", OK, |g| ranges(g, DISCARD, &[(8, 8, 0); 64])),
    case("discard of 65 ranges", IOERR, |g| ranges(g, DISCARD, &[(8, 8, 0); 65])),
    case("discard of 4 GiB of ranges", IOERR, |g| {
        usual(g, DISCARD, 0, &[out(0x1_0000_0000, u32::MAX - 15)])
    }),
    case("discard of an empty range", OK, |g| ranges(g, DISCARD, &[(8, 0, 0)])),
    case("discard with the unmap flag", UNSUPP, |g| ranges(g, DISCARD, &[(8, 8, 1)])),
    case("discard with an unknown flag", UNSUPP, |g| {
        ranges(g, DISCARD, &[(8, 8, 0), (8, 8, 0x8000_0000)])
    }),
    case("discard over the end", IOERR, |g| ranges(g, DISCARD, &[(SECTORS - 8, 9, 0)])),
    case("discard beyond 2^64", IOERR, |g| ranges(g, DISCARD, &[(u64::MAX, 8, 0)])),
    case("discard whose offset wraps to 0", IOERR, |g| ranges(g, DISCARD, &[(1 << 55, 8, 0)])),
    case("discard of u32::MAX sectors", IOERR, |g| ranges(g, DISCARD, &[(0, u32::MAX, 0)])),
    case("one of several ranges is bad", IOERR, |g| {
        ranges(g, DISCARD, &[(8, 8, 0), (SECTORS, 8, 0), (16, 8, 0)])
    }),
    case("zeroes with unmap", OK, |g| ranges(g, WRITE_ZEROES, &[(8, 8, 1), (32, 8, 0)])),
    case("zeroes with an unknown flag", UNSUPP, |g| ranges(g, WRITE_ZEROES, &[(8, 8, 2)])),
    case("zeroes over the end", IOERR, |g| ranges(g, WRITE_ZEROES, &[(SECTORS, 1, 0)])),
    case("zeroes of u32::MAX sectors", IOERR, |g| ranges(g, WRITE_ZEROES, &[(0, u32::MAX, 1)])),
    case("zeroes of no range", IOERR, |g| usual(g, WRITE_ZEROES, 0, &[])),
];

const IDS: &[Case] = &[
    case("id of 0 bytes", OK, |g| identify(g, 0)),
    case("id of 1 byte", OK, |g| identify(g, 1)),
    case("id of 19 bytes", OK, |g| identify(g, 19)),
    case("id of 20 bytes", OK, |g| identify(g, 20)),
    case("id of 21 bytes", OK, |g| identify(g, 21)),
    case("id of 4096 bytes", OK, |g| identify(g, 4096)),
    case("id of 4 GiB", OK, |g| usual(g, ID, 0, &[into(end(g) - 20, u32::MAX)])),
];

/// Runs all cases of a table on one ring of each layout. A case must not affect the next one.
fn answered(cases: &[Case]) {
    for layout in BOTH {
        let daemon = Daemon::start();
        let mut other = Guest::start(&daemon.socket(OTHER), *layout);
        for case in cases {
            let mut guest = Guest::start(&daemon.socket(VICTIM), *layout);
            let what = format!("{layout:?}: {}", case.name);
            guest.works(0, 0);
            let before = sectors(&mut guest);
            let asked = (case.make)(&mut guest);
            let taken = asked.chain.len() as u16;
            let head = guest.offer(0, &asked.chain);
            let (id, written) = guest.rings[0].wait(taken);
            assert_eq!((id, guest.byte(asked.status)), (head, case.want), "{what}");
            let room: u64 =
                asked.chain.iter().filter(|d| d.flags != 0).map(|d| u64::from(d.len)).sum();
            assert!(
                written >= 1 && (case.want == OK || written == 1),
                "{what}: {written} bytes written"
            );
            assert!(
                taken == 1 || u64::from(written) <= room,
                "{what}: {written} of {room} bytes written"
            );
            if case.want != OK {
                assert_eq!(sectors(&mut guest), before, "{what}: the disk has changed");
            }
            assert_eq!(crate::guest::rung(&guest.rings[0].error), 0, "{what}");
            guest.works(0, 40);
            guest.works(1, 48);
        }
        other.works(0, 0);
        assert_eq!(daemon.end(), [""; 0]);
    }
}

/// Returns the first sectors of the disk, which bad writes and discards target.
fn sectors(guest: &mut Guest) -> Vec<u8> {
    let data = guest.bytes(&[0; 16384]);
    let asked = usual(guest, IN, 0, &[into(data, 16384)]);
    guest.offer(0, &asked.chain);
    guest.rings[0].wait(3);
    assert_eq!(guest.byte(asked.status), OK);
    guest.read(data, 16384)
}

#[test]
fn unknown_types_are_unsupported() {
    answered(TYPES);
}

#[test]
fn sectors_beyond_the_disk_are_errors() {
    answered(PLACES);
}

#[test]
fn wrong_lengths_are_errors() {
    answered(LENGTHS);
}

#[test]
fn wrong_directions_are_errors() {
    answered(DIRECTIONS);
}

#[test]
fn data_outside_the_memory_is_an_error() {
    answered(ADDRESSES);
}

#[test]
fn unusual_framing_is_accepted() {
    answered(FRAMING);
}

#[test]
fn bad_ranges_are_errors() {
    answered(RANGES);
}

#[test]
fn an_id_is_cut_to_the_buffer() {
    answered(IDS);
    let daemon = Daemon::start();
    let mut guest = Guest::start(&daemon.socket(VICTIM), BOTH[0]);
    for len in [0, 1, 6, 7, 20, 40] {
        let data = guest.bytes(&[0xaa; 48]);
        let asked = usual(&mut guest, ID, 0, &[into(data, len)]);
        guest.offer(0, &asked.chain);
        assert_eq!(guest.rings[0].wait(3).1, len.min(20) + 1);
        let mut want = b"victim".to_vec();
        want.resize(20, 0);
        want.truncate(len as usize);
        want.resize(48, 0xaa);
        assert_eq!(guest.read(data, 48), want, "{len}");
    }
    daemon.end();
}
