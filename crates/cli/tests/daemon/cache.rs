//! The write cache: what the guest reads of it, how it switches it, and when writes are durable.

use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_driver::{Data, feature, request, status};
use blockyard_ring::{GuestMemory, Region};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use crate::common::{Daemon, Folder};
use crate::guest::{ANSWER, Guest, pattern};

const PAGE: u64 = 4096;

/// Returns the kilobytes of a file's first `len` bytes that are dirty in the page cache.
///
/// Reads smaps of a mapping of the file: it counts the file's dirty pages.
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

    /// Returns whether all writes are on the disk.
    #[track_caller]
    fn durable(&self) -> bool {
        dirty(&self.folder.join("disk"), BYTES) == 0
    }

    /// Returns whether each of four writes is on the disk when it completes. One write would not
    /// prove durability, because the kernel may have written it back by chance.
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
fn each_cache_mode_has_its_durability() {
    // Columns: the guest sees a write cache; writes are durable at once; writes are durable after a
    // flush.
    for (mode, expected_wce, at_once, flushed) in [
        ("none", 1, true, true),
        ("writeback", 1, false, true),
        ("unsafe", 1, false, false),
        ("writethrough", 0, true, true),
        ("directsync", 0, true, true),
    ] {
        let fixture = CacheFixture::new(mode);
        let mut guest = fixture.guest(0);
        assert!(guest.has(feature::FLUSH) && guest.has(feature::CONFIG_WCE), "{mode}");
        assert_eq!(guest.session.link.config.wce, expected_wce, "{mode}");
        // `dirty` counts the page cache only. With O_DIRECT (none and directsync) the page cache
        // holds no written data.
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
fn zeroes_are_durable_as_writes_are() {
    for (mode, at_once) in [("writeback", false), ("writethrough", true)] {
        let fixture = CacheFixture::new(mode);
        let mut guest = fixture.guest(0);
        guest.write(0, &pattern(1, BYTES as usize));
        guest.flush();
        // The range includes half a page, which the file system zeroes in the page cache.
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
    // The next guest finds the cache mode of the configuration.
    let mut guest = fixture.guest(0);
    assert_eq!(guest.session.link.config.wce, 1);
    assert!(!fixture.writes_are_durable(&mut guest, 4));
    fixture.daemon.stop();
}

/// The guest does not notice the restart, and would not flush.
#[test]
fn the_guests_cache_setting_survives_a_killed_daemon() {
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
        // The next guest brings another in-flight region, and gets the configured mode.
        guest.leave();
        assert_eq!(wce(&mut fixture.guest(0)), 1 - switched, "{mode}");
        fixture.daemon.stop();
    }
}

#[test]
fn writes_in_flight_are_durable_when_the_cache_is_switched_off() {
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
        // The server has taken the request, which waits in the filter.
        let mut early = guest.all_taken(1);
        assert!(switch(&mut guest, 0));
        let start = Instant::now();
        let answer = loop {
            if let Some(answer) = early.pop().or_else(|| guest.queue().reap().unwrap()) {
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

/// Returns the range of a WRITE_ZEROES request.
fn zeroes_of(sector: u64, sectors: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
}

#[test]
fn a_guest_may_switch_a_writethrough_disk_to_writeback() {
    // As in QEMU, cache=writethrough is only the initial state.
    let fixture = CacheFixture::new("writethrough");
    let mut guest = fixture.guest(0);
    assert!(switch(&mut guest, 1));
    assert!(!fixture.writes_are_durable(&mut guest, 1));
    assert_eq!(guest.flush(), status::OK);
    assert!(fixture.durable());
    fixture.daemon.stop();
}

#[test]
fn guests_without_the_cache_features_get_the_virtio_defaults() {
    for (without, durable) in [
        // Without VIRTIO_BLK_F_FLUSH: virtio 1.2, 5.2.5.2, the cache begins in writethrough mode,
        // with or without VIRTIO_BLK_F_CONFIG_WCE.
        (feature::FLUSH | feature::CONFIG_WCE, true),
        (feature::FLUSH, true),
        // With VIRTIO_BLK_F_FLUSH, without VIRTIO_BLK_F_CONFIG_WCE.
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
fn a_boot_loader_without_flush_does_not_affect_the_next_driver() {
    let fixture = CacheFixture::new("writeback");
    let mut guest = fixture.guest(feature::FLUSH | feature::CONFIG_WCE);
    assert!(fixture.writes_are_durable(&mut guest, 1));
    // The operating system negotiates again on the same connection.
    let connection = &mut guest.session.link.connection;
    let loader = connection.features;
    let system = loader | feature::FLUSH | feature::CONFIG_WCE;
    let set = |guest: &mut Guest, features: u64| {
        guest.session.link.connection.message(2, &features.to_le_bytes(), &[]).unwrap();
    };
    set(&mut guest, system);
    assert_eq!(wce(&mut guest), 1);
    assert!(!fixture.writes_are_durable(&mut guest, 2));
    // A front end that repeats the same settings changes nothing.
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
