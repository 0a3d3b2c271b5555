//! Single requests: the end of the disk, ranges, the serial number, and every status.

use std::path::Path;

use blockyard_driver::{
    Buffer, Data, PackedRing, Plan, Ring, Session, SplitRing, feature, request, status,
};

use crate::common::{Daemon, Folder, allocated};
use crate::guest::{ANSWER, Guest, bytes_of, pattern};

const MIB: usize = 1 << 20;
const UNMAP: u32 = 1;

/// Length of a file of 10 sectors and 100 bytes.
const ODD: u64 = 10 * 512 + 100;

#[test]
fn a_partial_last_sector_reads_as_zeroes_after_the_end_of_the_file() {
    for mode in ["none", "writeback", "writethrough", "directsync"] {
        let folder = Folder::new();
        let (image, socket) = (folder.join("disk"), folder.join("s"));
        std::fs::write(&image, pattern(1, ODD as usize)).unwrap();
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.capacity(), 11 * 512, "{mode}");
        let mut content = pattern(1, ODD as usize);
        content.resize(11 * 512, 0);
        assert_eq!(guest.read(10, 512).unwrap(), content[10 * 512..], "{mode}: zeroes fill it up");
        assert_eq!(guest.read(0, 11 * 512).unwrap(), content, "{mode}");
        assert_eq!(guest.read(11, 512), Err(status::IOERR), "{mode}: beyond it is nothing");
        // A write to another sector does not change the length.
        assert_eq!(guest.write(9, &pattern(2, 512)), status::OK);
        assert_eq!(std::fs::metadata(&image).unwrap().len(), ODD, "{mode}");
        assert_eq!(guest.write(10, &pattern(3, 512)), status::OK);
        assert_eq!(
            guest.read(9, 1024).unwrap(),
            [pattern(2, 512), pattern(3, 512)].concat(),
            "{mode}"
        );
        assert_eq!(
            (guest.flush(), std::fs::metadata(&image).unwrap().len()),
            (status::OK, 11 * 512),
            "{mode}"
        );
        daemon.stop();
        assert_eq!(
            bytes_of(&image, 10 * 512, 512),
            pattern(3, 512),
            "{mode}: the file has grown to its sector's end"
        );
    }
}

#[test]
fn zeroes_and_discards_work_at_an_unaligned_end() {
    let folder = Folder::new();
    let (image, socket) = (folder.join("disk"), folder.join("s"));
    std::fs::write(&image, pattern(1, ODD as usize)).unwrap();
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    for (kind, flags) in
        [(request::WRITE_ZEROES, 0), (request::WRITE_ZEROES, UNMAP), (request::DISCARD, 0)]
    {
        assert_eq!(guest.write(8, &pattern(2, 3 * 512)), status::OK);
        assert_eq!(guest.ranges(kind, &[(10, 1, flags)]), status::OK);
        assert_eq!(guest.read(10, 512).unwrap(), [0; 512]);
        assert_eq!(guest.read(8, 1024).unwrap(), pattern(2, 3 * 512)[..1024]);
    }
    daemon.stop();
}

/// Submits a request whose data begins `skew` bytes into a page, after a header in two descriptors.
fn skewed(guest: &mut Guest, kind: u32, sector: u64, skew: u64, data: &mut [u8]) -> u8 {
    let memory = &mut guest.session.link.memory;
    let (addr, slice) = memory.piece(8192, 4096).unwrap();
    let header = u128::from(kind) | u128::from(sector) << 64;
    slice.write(0, &header.to_le_bytes());
    let at = 64 + skew as usize;
    slice.write(at, data);
    let status = at + data.len();
    slice.write(status, &[status::NONE]);
    let in_data = kind == request::IN;
    let queue = guest.queue();
    let first = Buffer { addr, len: 16, device_writes: false };
    // For reads, data and status share one buffer, because virtio guarantees no framing (virtio
    // 1.2, 2.7.4.1).
    if in_data {
        let answer =
            Buffer { addr: addr + at as u64, len: data.len() as u32 + 1, device_writes: true };
        queue.ring.lay(40, &[first, answer]);
    } else {
        let given = Buffer { addr: addr + at as u64, len: data.len() as u32, device_writes: false };
        queue.ring.lay(
            40,
            &[first, given, Buffer { addr: addr + status as u64, len: 1, device_writes: true }],
        );
    }
    queue.ring.submit(40);
    queue.ring.publish();
    queue.kick().unwrap();
    let start = std::time::Instant::now();
    while queue.ring.reap().is_none() {
        assert!(start.elapsed() < ANSWER);
        std::thread::yield_now();
    }
    slice.read(at, data);
    slice.copy_out::<1>(status)[0]
}

#[test]
fn unaligned_memory_works_with_o_direct() {
    for mode in ["none", "writeback"] {
        let folder = Folder::new();
        let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
        let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
        for skew in [0, 1, 2, 16, 511] {
            let mut guest =
                Guest::with(&socket, &blockyard_driver::Plan { slots: 64, ..Default::default() });
            let mut data = pattern(skew, 1024);
            assert_eq!(
                skewed(&mut guest, request::OUT, 5, skew, &mut data),
                status::OK,
                "{mode}, skew {skew}"
            );
            assert_eq!(bytes_of(&image, 5 * 512, 1024), pattern(skew, 1024), "{mode}, skew {skew}");
            let mut read = vec![0; 1024];
            assert_eq!(
                skewed(&mut guest, request::IN, 5, skew, &mut read),
                status::OK,
                "{mode}, skew {skew}"
            );
            assert_eq!(read, pattern(skew, 1024), "{mode}, skew {skew}");
        }
        daemon.stop();
    }
}

#[test]
fn serial_numbers_are_cut_to_the_buffer() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("a-name-of-more-than-20-bytes", 1 << 20), folder.join("s"));
    for (more, serial) in [
        (&[][..], "a-name-of-more-than-"),
        (&["--name", "root"], "root"),
        (&["--name", "root", "--serial", "WD-1234"], "WD-1234"),
        (&["--serial", "12345678901234567890"], "12345678901234567890"),
        (&["--serial", ""], ""),
    ] {
        let daemon = Daemon::serve(&image, &socket, more);
        let mut guest = Guest::connect(&socket);
        let mut id = [0xee; 20];
        assert_eq!(guest.ask(request::ID, 0, Data::FromDevice(20), &mut id), status::OK);
        let mut padded = serial.as_bytes().to_vec();
        padded.resize(20, 0);
        assert_eq!(id, padded[..], "{more:?}");
        // A shorter buffer gets a part of the serial number. A longer buffer gets no more than
        // that.
        let (mut short, mut long) = ([0xee; 6], [0xee; 32]);
        assert_eq!(guest.ask(request::ID, 0, Data::FromDevice(6), &mut short), status::OK);
        assert_eq!(short, padded[..6]);
        guest.queue().write_data(0, &[0x55; 32]);
        assert_eq!(guest.ask(request::ID, 0, Data::FromDevice(32), &mut long), status::OK);
        assert_eq!(long, [&padded[..], &[0x55; 12]].concat()[..]);
        daemon.stop();
    }
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let folder = Folder::new();
    let (image, socket) = (folder.join("disk"), folder.join("s"));
    std::fs::write(&image, pattern(1, 4096)).unwrap();
    let daemon = Daemon::serve(&image, &socket, &["--read-only"]);
    let mut guest = Guest::connect(&socket);
    assert!(guest.has(feature::READ_ONLY));
    assert!(!guest.has(feature::DISCARD) && !guest.has(feature::WRITE_ZEROES));
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    assert_eq!(guest.write(0, &pattern(2, 512)), status::IOERR);
    assert_eq!(guest.ranges(request::DISCARD, &[(0, 1, 0)]), status::IOERR);
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(0, 1, 0), (1, 1, 0)]), status::IOERR);
    assert_eq!(guest.flush(), status::OK);
    assert_eq!(guest.read(0, 4096).unwrap(), pattern(1, 4096));
    daemon.stop();
    assert_eq!(std::fs::read(&image).unwrap(), pattern(1, 4096));

    let daemon = Daemon::serve(&image, &socket, &[]);
    assert!(!Guest::connect(&socket).has(feature::READ_ONLY));
    daemon.stop();
}

/// Fills a disk of 8 MiB with data, and returns the data.
fn full(guest: &mut Guest) -> Vec<u8> {
    let content = pattern(9, 8 * MIB);
    for (at, piece) in content.chunks(256 << 10).enumerate() {
        assert_eq!(guest.write(at as u64 * 512, piece), status::OK);
    }
    assert_eq!(guest.flush(), status::OK);
    content
}

fn whole(guest: &mut Guest) -> Vec<u8> {
    (0..32).flat_map(|at| guest.read(at * 512, 256 << 10).unwrap()).collect()
}

fn mib(n: usize) -> u64 {
    (n * MIB / 512) as u64
}

#[test]
fn discarded_ranges_free_space() {
    // Columns: the request, and whether the space of 3 MiB is freed.
    for (kind, flags, freed) in [
        (request::DISCARD, [0, 0, 0], true),
        (request::WRITE_ZEROES, [UNMAP; 3], true),
        (request::WRITE_ZEROES, [0; 3], false),
    ] {
        for mode in ["none", "writeback"] {
            let folder = Folder::new();
            let (image, socket) = (folder.image("disk", 8 * MIB as u64), folder.join("s"));
            let daemon = Daemon::serve(&image, &socket, &["--cache", mode]);
            let mut guest = Guest::connect(&socket);
            let mut content = full(&mut guest);
            let before = allocated(&image);
            assert!(before >= 8 * MIB as u64);
            let ranges = [
                (mib(1), mib(1) as u32, flags[0]),
                (mib(3), mib(1) as u32, flags[1]),
                (mib(6), mib(1) as u32, flags[2]),
            ];
            assert_eq!(guest.ranges(kind, &ranges), status::OK);
            for at in [1, 3, 6] {
                content[at * MIB..(at + 1) * MIB].fill(0);
            }
            assert!(whole(&mut guest) == content, "kind {kind}, {mode}: the rest is as it was");
            assert_eq!(guest.flush(), status::OK);
            let back = before.saturating_sub(allocated(&image));
            assert_eq!(
                back,
                if freed { 3 * MIB as u64 } else { 0 },
                "kind {kind}, {mode}: bytes given back"
            );
            daemon.stop();
            assert!(std::fs::read(&image).unwrap() == content, "kind {kind}, {mode}: in the file");
        }
    }
}

#[test]
fn ranges_need_no_alignment() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 8 * MIB as u64), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    let mut guest = Guest::connect(&socket);
    let mut content = full(&mut guest);
    // The request has the maximum number of ranges, each of one unaligned sector.
    let most = guest.session.link.config.max_write_zeroes_seg;
    assert_eq!(guest.session.link.config.max_discard_seg, most);
    let ranges: Vec<_> = (0..most).map(|n| (u64::from(n) * 3 + 1, 1, n % 2)).collect();
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &ranges), status::OK);
    for (sector, ..) in &ranges {
        content[*sector as usize * 512..][..512].fill(0);
    }
    assert!(whole(&mut guest) == content);
    // These requests have too many ranges, none, an empty one, or overlapping ones.
    let more: Vec<_> = (0..=most).map(|n| (u64::from(n) * 3, 1, 0)).collect();
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &more), status::IOERR);
    assert_eq!(guest.ranges(request::DISCARD, &more), status::IOERR);
    assert_eq!(guest.ask(request::DISCARD, 0, Data::None, &mut []), status::IOERR);
    assert_eq!(guest.ask(request::DISCARD, 0, Data::ToDevice(15), &mut [0; 15]), status::IOERR);
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(5, 0, 0)]), status::OK);
    assert!(whole(&mut guest) == content, "a request that is refused does nothing");
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(0, 8, 0), (4, 8, 0)]), status::OK);
    content[..12 * 512].fill(0);
    assert!(whole(&mut guest) == content);
    daemon.stop();
}

#[test]
fn unknown_flags_are_refused() {
    let folder = Folder::new();
    let daemon = Daemon::serve(folder.image("disk", 1 << 20), &folder.join("s"), &[]);
    let mut guest = Guest::connect(&folder.join("s"));
    guest.write(0, &pattern(1, 1024));
    // virtio 1.2, 5.2.6.2: unmap is reserved in a discard, and all other bits always are.
    assert_eq!(guest.ranges(request::DISCARD, &[(0, 1, UNMAP)]), status::UNSUPP);
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(0, 1, 2)]), status::UNSUPP);
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(0, 1, 0), (1, 1, 1 << 31)]), status::UNSUPP);
    assert_eq!(guest.read(0, 1024).unwrap(), pattern(1, 1024));
    daemon.stop();
}

fn refuses_what_lies_outside(image: &Path, mode: &str) {
    let folder = Folder::new();
    let daemon = Daemon::serve(image, &folder.join("s"), &["--cache", mode]);
    let mut guest = Guest::connect(&folder.join("s"));
    let end = guest.capacity() / 512;
    assert_eq!(guest.write(end - 2, &pattern(1, 1024)), status::OK);
    for sector in
        [end - 1, end, end + 1, u64::MAX / 512, u64::MAX / 512 + 1, u64::MAX - 1, u64::MAX]
    {
        assert_eq!(guest.read(sector, 1024), Err(status::IOERR), "{mode}: read at {sector}");
        assert_eq!(
            guest.write(sector, &pattern(2, 1024)),
            status::IOERR,
            "{mode}: write at {sector}"
        );
        assert_eq!(
            guest.ranges(request::DISCARD, &[(sector, 2, 0)]),
            status::IOERR,
            "{mode}: discard at {sector}"
        );
        let pair = [(0, 0, 0), (sector, 2, 0)];
        assert_eq!(
            guest.ranges(request::WRITE_ZEROES, &pair),
            status::IOERR,
            "{mode}: zeroes at {sector}"
        );
    }
    assert_eq!(guest.ranges(request::DISCARD, &[(0, u32::MAX, 0)]), status::IOERR);
    // Lengths that are not whole sectors.
    for len in [1, 511, 513] {
        assert_eq!(guest.read(0, len), Err(status::IOERR), "{mode}: {len} bytes");
        assert_eq!(guest.write(0, &pattern(2, len)), status::IOERR, "{mode}: {len} bytes");
    }
    assert_eq!(guest.read(end - 2, 1024).unwrap(), pattern(1, 1024));
    daemon.stop();
}

#[test]
fn requests_beyond_the_end_are_refused() {
    let folder = Folder::new();
    let image = folder.image("disk", 1 << 20);
    for mode in ["none", "writeback"] {
        refuses_what_lies_outside(&image, mode);
        assert_eq!(std::fs::metadata(&image).unwrap().len(), 1 << 20);
    }
    for image in ["ram:1M", "null:1M"] {
        let daemon = Daemon::serve(image, &folder.join("s"), &[]);
        let mut guest = Guest::connect(&folder.join("s"));
        assert_eq!(guest.read(2047, 1024), Err(status::IOERR), "{image}");
        assert_eq!(guest.write(u64::MAX, &pattern(2, 512)), status::IOERR, "{image}");
        daemon.stop();
    }
    refuses_what_lies_outside(Path::new("ram:1M"), "none");
}

#[test]
fn unknown_request_types_are_refused() {
    let folder = Folder::new();
    let daemon = Daemon::serve("ram:1M", &folder.join("s"), &[]);
    let mut guest = Guest::connect(&folder.join("s"));
    // Unsupported kinds. They include SCSI, lifetime, secure erase and zones.
    for kind in [2, 3, 5, 7, 10, 12, 14, 15, 16, 18, 99, 1 << 31, u32::MAX] {
        assert_eq!(guest.ask(kind, 0, Data::None, &mut []), status::UNSUPP, "type {kind}");
        assert_eq!(
            guest.ask(kind, 0, Data::ToDevice(512), &mut [1; 512]),
            status::UNSUPP,
            "type {kind}"
        );
        let mut read = [7; 512];
        assert_eq!(
            guest.ask(kind, 0, Data::FromDevice(512), &mut read),
            status::UNSUPP,
            "type {kind}"
        );
    }
    assert_eq!(guest.read(0, 512).unwrap(), [0; 512]);
    daemon.stop();
}

/// Boots a guest again: it stops the ring, and starts an empty one on the same connection. The
/// in-flight region still has the position of the old ring.
fn boots_again<R: Ring>(socket: &Path) {
    let mut session = Session::<R>::start(socket, &Plan::default()).unwrap();
    assert!(session.link.inflight.is_some());
    for boot in 0..3 {
        for at in 0..5 {
            let (mut bytes, len) = (pattern(boot, 512), 512);
            let data = Data::ToDevice(len);
            let status = session.queues[0].call(request::OUT, at, data, &mut bytes, ANSWER);
            assert_eq!(status.unwrap(), status::OK, "boot {boot}, request {at}");
        }
        let Session { link, queues } = &mut session;
        link.connection.stop_ring(0).unwrap();
        let (setup, base) = (queues[0].setup(), queues[0].resume_base(false));
        link.connection.set_ring(&setup, base, &link.memory).unwrap();
        link.connection.enable(0, true).unwrap();
    }
}

#[test]
fn a_guest_boots_again_on_the_same_connection() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(&image, &socket, &[]);
    boots_again::<SplitRing>(&socket);
    boots_again::<PackedRing>(&socket);
    daemon.stop();
}
