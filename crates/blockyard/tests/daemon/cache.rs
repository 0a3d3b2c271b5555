//! The write cache: what a guest is told of it, how it switches it, and what is durable when.

use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_driver::{Data, feature, request, status};
use blockyard_ring::{GuestMemory, Region};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use crate::common::{Daemon, Folder};
use crate::guest::{ANSWER, Guest, pattern};

const PAGE: u64 = 4096;

/// Kilobytes of a file's first `len` bytes that are in the page cache and not on the disk.
///
/// As a mapping of it sees them: the kernel counts a page as dirty in smaps when the file's own
/// page is.
#[track_caller]
pub fn dirty(path: &Path, len: u64) -> u64 {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let memory = GuestMemory::default().with(Region::map(&file, 0, 0, 0, len).unwrap()).unwrap();
    let slice = memory.slice(0, len, 1).unwrap();
    for page in 0..len.div_ceil(PAGE) {
        slice.copy_out::<1>((page * PAGE) as usize);
    }
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = smaps.split_once(path.to_str().unwrap()).expect("it is mapped").1;
    let field = |name: &str| {
        let line = mapping.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    field("Shared_Dirty:") + field("Private_Dirty:")
}

const SECTORS: u64 = 128;
const BYTES: u64 = SECTORS * 512;

struct CacheFixture {
    folder: Folder,
    daemon: Daemon,
}

impl CacheFixture {
    fn new(mode: &str) -> Self {
        let folder = Folder::new();
        let image = folder.image("disk", 1 << 20);
        let daemon = Daemon::serve(image, &folder.join("s"), &["--cache", mode]);
        CacheFixture { folder, daemon }
    }

    fn guest(&self, without: u64) -> Guest {
        Guest::without(&self.folder.join("s"), without)
    }

    /// Whether what was written just now is on the disk.
    #[track_caller]
    fn durable(&self) -> bool {
        dirty(&self.folder.join("disk"), BYTES) == 0
    }

    /// Whether each of some writes is on the disk when it is answered. (Where none has to be, the
    /// kernel may have written one back for reasons of its own.)
    #[track_caller]
    fn writes_are_durable(&self, guest: &mut Guest, seed: u64) -> bool {
        (0..4).all(|n| {
            assert_eq!(guest.write(0, &pattern(seed + n * 100, BYTES as usize)), status::OK);
            self.durable()
        })
    }
}

fn wce(guest: &mut Guest) -> u8 {
    guest.session.link.connection.config().unwrap().wce
}

fn switch(guest: &mut Guest, wce: u8) -> bool {
    let flags = VhostUserConfigFlags::WRITABLE;
    guest.session.link.connection.frontend().set_config(32, flags, &[wce]).is_ok()
}

#[test]
fn modes() {
    // Told of a write cache; writes durable at once; writes durable after a flush.
    for (mode, told, at_once, flushed) in [
        ("none", 1, true, true),
        ("writeback", 1, false, true),
        ("unsafe", 1, false, false),
        ("writethrough", 0, true, true),
        ("directsync", 0, true, true),
    ] {
        let fixture = CacheFixture::new(mode);
        let mut guest = fixture.guest(0);
        assert!(guest.has(feature::FLUSH) && guest.has(feature::CONFIG_WCE), "{mode}");
        assert_eq!(guest.session.link.config.wce, told, "{mode}");
        // `dirty` sees the page cache, and O_DIRECT leaves nothing there: for these two modes it
        // says just that.
        assert_eq!(fixture.writes_are_durable(&mut guest, 3), at_once, "{mode}: a write");
        let flushes = (0..4).all(|seed| {
            assert_eq!(guest.write(0, &pattern(seed, BYTES as usize)), status::OK);
            assert_eq!(guest.flush(), status::OK);
            fixture.durable()
        });
        assert_eq!(flushes, flushed, "{mode}: a flush");
        fixture.daemon.stop();
    }
}

#[test]
fn zeroes_and_the_cache() {
    for (mode, at_once) in [("writeback", false), ("writethrough", true)] {
        let fixture = CacheFixture::new(mode);
        let mut guest = fixture.guest(0);
        guest.write(0, &pattern(1, BYTES as usize));
        guest.flush();
        // Half a page: the file system zeroes that in its cache.
        let zeroes = (0..4).all(|page| {
            assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(page * 8 + 1, 2, 0)]), status::OK);
            fixture.durable()
        });
        assert_eq!(zeroes, at_once, "{mode}");
        assert_eq!(guest.flush(), status::OK);
        assert!(fixture.durable(), "{mode}");
        fixture.daemon.stop();
    }
}

#[test]
fn a_guest_switches_the_cache() {
    let fixture = CacheFixture::new("writeback");
    let mut guest = fixture.guest(0);
    assert!(!fixture.writes_are_durable(&mut guest, 1));
    assert!(switch(&mut guest, 0));
    assert!(fixture.durable(), "what was written before is owed too");
    assert_eq!(wce(&mut guest), 0);
    assert!(fixture.writes_are_durable(&mut guest, 2), "no write cache: durable at once");
    assert!(switch(&mut guest, 1));
    assert_eq!(wce(&mut guest), 1);
    assert!(!fixture.writes_are_durable(&mut guest, 3));
    switch(&mut guest, 0);
    guest.leave();
    // The next guest finds the disk as its owner set it up.
    let mut guest = fixture.guest(0);
    assert_eq!(guest.session.link.config.wce, 1);
    assert!(!fixture.writes_are_durable(&mut guest, 4));
    fixture.daemon.stop();
}

/// Its guest knows nothing of the restart, and would not flush.
#[test]
fn a_switched_cache_outlives_a_killed_daemon() {
    for (mode, switched) in [("writeback", 0), ("writethrough", 1)] {
        let mut fixture = CacheFixture::new(mode);
        let mut guest = fixture.guest(0);
        assert!(switch(&mut guest, switched));
        let image = fixture.folder.join("disk");
        for life in 0..2 {
            fixture.daemon.kill();
            fixture.daemon =
                Daemon::serve_again(&image, &fixture.folder.join("s"), &["--cache", mode]);
            guest.session.restart().unwrap();
            assert_eq!(wce(&mut guest), switched, "{mode}, life {life}");
            assert_eq!(
                fixture.writes_are_durable(&mut guest, life),
                switched == 0,
                "{mode}, life {life}"
            );
        }
        // The next guest brings a region of its own, and gets what the disk's owner set up.
        guest.leave();
        assert_eq!(wce(&mut fixture.guest(0)), 1 - switched, "{mode}");
        fixture.daemon.stop();
    }
}

#[test]
fn writes_in_flight_when_the_cache_is_switched_off() {
    let folder = Folder::new();
    let (image, socket) = (folder.image("disk", 1 << 20), folder.join("s"));
    let daemon = Daemon::serve(
        &image,
        &socket,
        &["--cache", "writeback", "--filter", "delay:write=2s,write-zeroes=2s"],
    );
    let mut guest = Guest::connect(&socket);
    for (kind, bytes) in
        [(request::OUT, pattern(1, BYTES as usize)), (request::WRITE_ZEROES, zeroes_of(0, 5))]
    {
        assert!(switch(&mut guest, 1));
        guest.queue().write_data(0, &bytes);
        guest.queue().submit(0, kind, 0, Data::ToDevice(bytes.len() as u32));
        // It is taken, and waits in the filter.
        guest.all_taken(1);
        assert!(switch(&mut guest, 0));
        assert!(guest.queue().reap().unwrap().is_none(), "it is still on its way");
        let start = Instant::now();
        let answer = loop {
            if let Some(answer) = guest.queue().reap().unwrap() {
                break answer;
            }
            assert!(start.elapsed() < ANSWER);
            guest.queue().sleep(Some(Duration::from_millis(100))).unwrap();
        };
        assert_eq!(answer, (0, status::OK));
        assert_eq!(
            dirty(&image, BYTES),
            0,
            "type {kind}: answered after the switch, and not durable"
        );
    }
    daemon.stop();
}

/// The one range of a WRITE_ZEROES.
fn zeroes_of(sector: u64, sectors: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
}

#[test]
fn a_guest_may_take_a_cache_that_its_owner_did_not_mean_it_to_have() {
    // As in QEMU: cache=writethrough is where a guest begins.
    let fixture = CacheFixture::new("writethrough");
    let mut guest = fixture.guest(0);
    assert!(switch(&mut guest, 1));
    assert!(!fixture.writes_are_durable(&mut guest, 1));
    assert_eq!(guest.flush(), status::OK);
    assert!(fixture.durable());
    fixture.daemon.stop();
}

#[test]
fn guests_that_know_less() {
    for (without, durable) in [
        // Cannot flush: virtio 1.2, 5.2.5.2, the cache begins as off. Whether it could switch it
        // makes no difference.
        (feature::FLUSH | feature::CONFIG_WCE, true),
        (feature::FLUSH, true),
        // Flushes, and has no word for the cache's state.
        (feature::CONFIG_WCE, false),
    ] {
        let fixture = CacheFixture::new("writeback");
        let mut guest = fixture.guest(without);
        let names = feature::names(without);
        assert_eq!(fixture.writes_are_durable(&mut guest, 5), durable, "without {names}");
        assert_eq!(wce(&mut guest), u8::from(!durable), "without {names}");
        assert_eq!(guest.flush(), status::OK);
        if without & feature::CONFIG_WCE != 0 {
            assert!(!switch(&mut guest, 1), "what was not negotiated is refused");
            assert_eq!(fixture.writes_are_durable(&mut guest, 6), durable, "without {names}");
        }
        fixture.daemon.stop();
    }
}

#[test]
fn a_boot_loader_without_flushes_leaves_no_trace() {
    let fixture = CacheFixture::new("writeback");
    let mut guest = fixture.guest(feature::FLUSH | feature::CONFIG_WCE);
    assert!(fixture.writes_are_durable(&mut guest, 1));
    // The operating system comes next, on the same connection: it negotiates anew.
    let connection = &mut guest.session.link.connection;
    let loader = connection.features;
    let system = loader | feature::FLUSH | feature::CONFIG_WCE;
    let set = |guest: &mut Guest, features: u64| {
        guest.session.link.connection.message(2, &features.to_le_bytes(), &[]).unwrap();
    };
    set(&mut guest, system);
    assert_eq!(wce(&mut guest), 1);
    assert!(!fixture.writes_are_durable(&mut guest, 2));
    // A front end that says the same again, for reasons of its own, changes nothing.
    assert!(switch(&mut guest, 0));
    set(&mut guest, system);
    assert_eq!(wce(&mut guest), 0);
    assert!(fixture.writes_are_durable(&mut guest, 3));
    fixture.daemon.stop();
}

#[test]
fn only_the_cache_byte_can_be_written() {
    let fixture = CacheFixture::new("writeback");
    let mut guest = fixture.guest(0);
    let flags = VhostUserConfigFlags::WRITABLE;
    let connection = &mut guest.session.link.connection;
    let before = connection.config().unwrap();
    assert!(
        connection.frontend().set_config(0, flags, &[0xff; 8]).is_err(),
        "the capacity is not the guest's"
    );
    assert_eq!(connection.config().unwrap(), before);
    assert_eq!(guest.read(0, 512).unwrap(), [0; 512]);
    fixture.daemon.stop();
}
