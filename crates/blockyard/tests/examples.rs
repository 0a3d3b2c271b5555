//! The examples, served to a guest.

use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use blockyard::{Access, CacheMode, Disk, Yard};
use blockyard_storage::Opened;

#[path = "../examples/cached.rs"]
#[allow(dead_code)]
mod cached;
mod common;
#[path = "../examples/cowd.rs"]
#[allow(dead_code)]
mod cowd;
#[path = "../examples/dedup.rs"]
#[allow(dead_code)]
mod dedup;
#[path = "../examples/generated.rs"]
#[allow(dead_code)]
mod generated;
/// The program of the guide. Its `main` is private.
mod joined {
    include!("../examples/joined.rs");

    pub fn run() {
        main().unwrap();
    }
}
#[path = "../examples/mirror.rs"]
#[allow(dead_code)]
mod mirror;
#[path = "../examples/stripe.rs"]
#[allow(dead_code)]
mod stripe;

use common::{Guest, Loop, Scratch, find_line, lines, wait};

const MIB: usize = 1 << 20;
/// Bytes of a slot in the log of `cached`.
const SLOT: usize = 512 + 4096;

/// Serves a disk to a guest. The guest must be dropped before the yard.
fn served(scratch: &Scratch, disk: Disk) -> (Guest, Yard) {
    let yard = Yard::start(1).unwrap();
    let socket = scratch.path("socket");
    yard.serve(disk.vhost_user(&socket)).unwrap();
    (Guest::connect(&socket), yard)
}

fn bytes(len: usize, tag: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ (at % 251) as u8 ^ tag).collect()
}

#[test]
fn every_example_has_at_most_100_lines_without_blank_ones() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().filter(|line| !line.is_empty()).count();
        assert!(lines <= 100, "{}: {lines} lines", path.display());
    }
}

#[test]
fn a_stripe_has_the_size_of_its_block_devices() {
    let scratch = Scratch::new("stripe-devices");
    let devices = ["a", "b"].map(|name| Loop::new(&scratch.file(name, &vec![0; MIB]), 512));
    let names = devices.each_ref().map(|device| device.0.clone());
    let disk = Disk::target("stripe", stripe::target(&names).unwrap());
    let (mut guest, _yard) = served(&scratch, disk);
    guest.write(2 * MIB - 4096, &[7; 4096]);
    assert_eq!(guest.read(2 * MIB - 4096, 4096), [7; 4096]);
    drop(guest);
}

#[test]
fn a_stripe_spreads_its_data_over_all_files() {
    let scratch = Scratch::new("stripe");
    let names = ["a", "b", "c"].map(|name| scratch.file(name, &vec![0; MIB]));
    let disk = Disk::target("stripe", stripe::target(&names).unwrap());
    let (mut guest, yard) = served(&scratch, disk);
    let data = bytes(3 * MIB, 1);
    guest.write(0, &data);
    guest.flush();
    assert!(guest.read(0, data.len()) == data);
    drop(guest);
    assert!(yard.remove("stripe").unwrap().is_flushed);
    let files = names.map(|name| std::fs::read(name).unwrap());
    for (number, chunk) in data.chunks(stripe::CHUNK as usize).enumerate() {
        let (file, at) = (&files[number % 3], number / 3 * stripe::CHUNK as usize);
        assert!(file[at..at + chunk.len()] == *chunk, "chunk {number}");
    }
}

#[test]
fn a_mirror_goes_on_with_one_half() {
    let scratch = Scratch::new("mirror");
    let (one, other) = (scratch.file("one", &vec![0; MIB]), scratch.file("other", &vec![0; MIB]));
    let serve = |first| {
        let target = mirror::target([&one, &other], [first, Access::Write]).unwrap();
        served(&scratch, Disk::target("mirror", target))
    };
    let (mut guest, yard) = serve(Access::Write);
    let data = bytes(MIB / 2, 3);
    guest.write(0, &data);
    guest.flush();
    drop(guest);
    assert!(yard.remove("mirror").unwrap().is_flushed);
    let read = |name: &str| std::fs::read(name).unwrap();
    assert!(read(&one)[..data.len()] == data && read(&one) == read(&other));
    // The first half refuses each write, because it is open for reading.
    let (mut guest, yard) = serve(Access::Read);
    let newer = bytes(MIB / 2, 5);
    guest.write(0, &newer);
    guest.flush();
    assert!(guest.read(0, newer.len()) == newer);
    drop(guest);
    assert!(yard.remove("mirror").unwrap().is_flushed);
    assert!(read(&one)[..data.len()] == data && read(&other)[..data.len()] == newer);
    // The half is out of date, so it is not used again.
    let (mut guest, _yard) = serve(Access::Write);
    assert!(guest.read(0, newer.len()) == newer);
    drop(guest);
}

#[test]
fn a_mirror_starts_without_a_lost_half_and_with_no_note_that_it_cannot_read() {
    let scratch = Scratch::new("lost");
    let data = bytes(MIB, 3);
    let (one, other) = (scratch.file("one", &[]), scratch.file("other", &data));
    let note = |bytes: &[u8]| drop(scratch.file("one.failed", bytes));
    let target = || mirror::target([&one, &other], [Access::Write; 2]);
    for bytes in [&b"2"[..], b"\xff", b"0 1"] {
        note(bytes);
        assert!(target().is_err(), "{bytes:?}");
    }
    note(b"0\n");
    let (mut guest, _yard) = served(&scratch, Disk::target("mirror", target().unwrap()));
    assert!(guest.read(0, MIB) == data);
    drop(guest);
}

/// Its disk has a share of the device on which the files are.
#[test]
fn a_target_without_data_files_is_on_the_device_of_its_own_files() {
    let scratch = Scratch::new("device");
    let (slow, fast) = (scratch.file("slow", &[0; 8192]), scratch.file("fast", &[0; 8192]));
    let map = cowd::target(&slow, &fast, &scratch.file("table", &[])).unwrap();
    let device = map.open(CacheMode::Writeback).unwrap().device().unwrap();
    assert!(device.is_some());
    let cached = cached::target(&slow, &fast).unwrap();
    assert_eq!(cached.open(CacheMode::Writeback).unwrap().device().unwrap(), device);
}

#[test]
fn a_mirror_makes_its_note_beside_a_relative_path() {
    // The files are in the folder in which the test runs.
    let name = format!("blockyard-note-{}", std::process::id());
    std::fs::write(&name, [0; 4096]).unwrap();
    let target = mirror::target([&name, &name], [Access::Write; 2]).map(drop);
    let noted = std::fs::read(format!("{name}.failed"));
    for file in [format!("{name}.failed"), name] {
        std::fs::remove_file(file).unwrap();
    }
    target.unwrap();
    assert_eq!(noted.unwrap(), b"");
}

#[test]
fn a_cache_writes_back_and_keeps_its_log_over_a_restart() {
    let scratch = Scratch::new("cached");
    let mut expected = bytes(MIB, 9);
    let slow = scratch.file("slow", &expected);
    let fast = scratch.file("fast", &vec![0; 40 * SLOT]);
    for round in 0..3u8 {
        let target = cached::target(&slow, &fast).unwrap();
        let (mut guest, yard) = served(&scratch, Disk::target("cached", target));
        assert!(guest.read(0, MIB) == expected, "round {round}");
        // More blocks than the log holds.
        for number in 0..100 {
            let at = (number * 37 + usize::from(round)) % 200 * 512 * 10;
            guest.write(at, &[number as u8; 1536]);
            expected[at..at + 1536].fill(number as u8);
        }
        guest.flush();
        assert!(guest.read(0, MIB) == expected, "round {round}");
        drop(guest);
        assert!(yard.remove("cached").unwrap().is_flushed);
        assert!(std::fs::read(&slow).unwrap() != expected, "the log has the rest");
    }
    // Slots that a power cut tore do not count.
    let mut log = std::fs::read(&fast).unwrap();
    log.chunks_mut(SLOT).skip(1).for_each(|slot| slot[512] ^= 1);
    std::fs::write(&fast, &log).unwrap();
    let old = std::fs::read(&slow).unwrap();
    let target = cached::target(&slow, &fast).unwrap();
    let (mut guest, _yard) = served(&scratch, Disk::target("cached", target));
    assert!(guest.read(0, MIB) == old);
    drop(guest);
}

/// A cache with two blocks in its log, which has room for three: block 0 and block 5.
fn cache_of_two_blocks(scratch: &Scratch) -> ([String; 2], Guest, Yard) {
    let files = [scratch.file("slow", &vec![1; MIB]), scratch.file("fast", &vec![0; 4 * SLOT])];
    let target = cached::target(&files[0], &files[1]).unwrap();
    let (mut guest, yard) = served(scratch, Disk::target("cached", target));
    guest.write(0, &[2; 4096]);
    guest.write(5 * 4096, &[3; 4096]);
    guest.flush();
    (files, guest, yard)
}

/// Another program damages the log while it is in use: data, and each part of a header.
#[test]
fn a_cache_writes_no_damaged_slot_to_its_slow_file() {
    for at in [SLOT + 512, SLOT, SLOT + 8, SLOT + 16, 0] {
        let scratch = Scratch::new(&format!("cached-damage-{at}"));
        let ([slow, fast], mut guest, yard) = cache_of_two_blocks(&scratch);
        let file = std::fs::File::options().read(true).write(true).open(&fast).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at as u64).unwrap();
        // The second write finds the log full.
        guest.write(7 * 4096, &[4; 4096]);
        assert_ne!(guest.try_write(8 * 4096, &[5; 4096]), 0, "damage at {at}");
        assert_ne!(guest.try_flush(), 0, "damage at {at}");
        drop(guest);
        assert!(!yard.remove("cached").unwrap().is_flushed, "damage at {at}");
        assert!(std::fs::read(&slow).unwrap() == vec![1; MIB], "damage at {at}");
    }
}

/// With another number, slots of an earlier log would count again.
#[test]
fn a_cache_without_the_number_of_its_log_is_not_opened() {
    let scratch = Scratch::new("cached-number");
    let ([slow, fast], guest, yard) = cache_of_two_blocks(&scratch);
    drop(guest);
    assert!(yard.remove("cached").unwrap().is_flushed);
    let log = std::fs::read(&fast).unwrap();
    for sector in [vec![0; 512], log[SLOT..SLOT + 512].to_vec(), vec![0xff; 512]] {
        std::fs::write(&fast, [&sector[..], &log[512..]].concat()).unwrap();
        let target = cached::target(&slow, &fast).unwrap();
        let error = Yard::start(1).unwrap().serve(Disk::target("cached", target)).unwrap_err();
        assert!(error.to_string().contains("FAST is damaged"), "{error}");
        assert!(std::fs::read(&slow).unwrap() == vec![1; MIB]);
    }
    std::fs::write(&fast, log).unwrap();
    let target = cached::target(&slow, &fast).unwrap();
    let (mut guest, _yard) = served(&scratch, Disk::target("cached", target));
    assert_eq!((guest.read(0, 4096), guest.read(5 * 4096, 4096)), (vec![2; 4096], vec![3; 4096]));
    drop(guest);
}

#[test]
fn a_generated_disk_reads_as_its_function_and_refuses_writes() {
    let scratch = Scratch::new("generated");
    let (mut guest, _yard) = served(&scratch, generated::disk(1 << 30));
    for at in [0, 4096 * 7, (1 << 30) - 8192] {
        let read = guest.read(at, 8192);
        let words = (0..8192 / 8).flat_map(|number| generated::word((at + number * 8) as u64));
        assert!(words.eq(read), "at {at}");
    }
    assert_ne!(guest.try_write(0, &[0; 512]), 0);
    drop(guest);
}

#[test]
fn nbd_clients_read_a_target_and_an_image_of_it() {
    let scratch = Scratch::new("nbd");
    let (yard, socket) = (Yard::start(1).unwrap(), scratch.path("nbd"));
    yard.serve(generated::disk(1 << 30).nbd_unix(&socket).iops(1 << 20).weight(200)).unwrap();
    let image = format!("nbd+unix:///generated?socket={}", socket.display());
    let (mut guest, client) = served(&scratch, Disk::image("client", image).read_only());
    let words = (0..8192 / 8).flat_map(|number| generated::word(4096 + number * 8));
    assert!(words.eq(guest.read(4096, 8192)));
    drop(guest);
    assert!(client.remove("client").unwrap().is_flushed);
    assert!(yard.statistics("generated").unwrap().read.bytes >= 8192);
    let unknown = yard.remove("other").unwrap_err();
    assert_eq!(unknown.kind(), blockyard::ErrorKind::NotFound);
}

#[test]
fn bases_share_the_blocks_of_one_store() {
    let scratch = Scratch::new("dedup");
    let (mut first, mut second) = (bytes(MIB, 0), bytes(MIB, 0));
    first[4096 * 9..4096 * 10].fill(0);
    second[4096 * 5..4096 * 6].fill(7);
    let store = scratch.path("store");
    // An earlier run was cut off: two of its blocks are zeroes, and one is a part.
    std::fs::write(&store, [0; 2 * 4096 + 100]).unwrap();
    let odd = scratch.file("odd", &[1; 4097]);
    dedup::pack(odd.as_ref(), &scratch.path("odd.index"), &store).unwrap_err();
    assert!(!scratch.path("odd.index").exists());
    for (name, image, new) in [("one", &first, None), ("two", &second, Some(2))] {
        let image = scratch.file(name, image);
        let index = scratch.path(&format!("{name}.index"));
        let added = dedup::pack(image.as_ref(), &index, &store).unwrap();
        assert!(new.is_none_or(|new| new == added), "{name}: {added}");
    }
    let yard = Yard::start(1).unwrap();
    for (name, image) in [("one", first), ("two", second)] {
        let disk = dedup::disk(name, &scratch.path(&format!("{name}.index")), &store).unwrap();
        yard.serve(disk.vhost_user(scratch.path(name).with_extension("sock"))).unwrap();
        let mut guest = Guest::connect(&scratch.path(name).with_extension("sock"));
        assert!(guest.read(0, image.len()) == image, "{name}");
    }
    assert_eq!(yard.disks(), ["one", "two"]);
    assert_eq!(yard.close().len(), 2);
}

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Returns the first block of the guide with this fence.
fn guide(fence: &str) -> String {
    let text = std::fs::read_to_string(format!("{REPOSITORY}/docs/own-target.md")).unwrap();
    let (_, rest) = text.split_once(&format!("\n{fence}\n")).unwrap();
    rest.split_once("```\n").unwrap().0.into()
}

/// Runs a command. Returns its output.
fn output(command: &mut Command) -> String {
    let output = common::output(command);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// `scripts/soak.d/guide` also builds the project, which takes minutes of a processor.
#[test]
fn the_commands_of_the_guide_make_a_project() {
    let scratch = Scratch::new("project");
    symlink(REPOSITORY, scratch.path("blockyard")).unwrap();
    std::fs::create_dir(scratch.path("bin")).unwrap();
    symlink(env!("CARGO"), scratch.path("bin").join("cargo")).unwrap();
    let commands = guide("```sh cargo") + "cargo tree --depth 1\n";
    let path = format!("{}:{}", scratch.path("bin").display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["-ec", &commands]).current_dir(scratch.path("")).env("PATH", path);
    // What the build of this test has downloaded is enough.
    bash.env("CARGO_NET_OFFLINE", "true").env_remove("RUSTC_WORKSPACE_WRAPPER");
    let tree = output(&mut bash);
    assert!(tree.contains("\n└── blockyard v"), "{tree}");
}

/// The environment variable that makes this program that of the guide.
const IS_GUIDE: &str = "BLOCKYARD_TEST_GUIDE";

/// The program of the guide. It is killed if a test fails.
struct Guide(Child);

impl Guide {
    /// Starts this program again, as that of the guide. Returns when it serves its disk.
    fn start(scratch: &Scratch) -> Self {
        let test = "the_program_of_the_guide_serves_its_files";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(IS_GUIDE, "1");
        command.current_dir(scratch.path("")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guide = Guide(command.spawn().unwrap());
        let lines = lines(guide.0.stdout.take().unwrap());
        let is_served = find_line(&lines, |line| line.ends_with("None")).is_some();
        assert!(is_served, "it has ended, or has a device");
        guide
    }

    fn ends(mut self) {
        self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(wait(&mut self.0).success());
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_program_of_the_guide_serves_its_files() {
    if std::env::var_os(IS_GUIDE).is_some() {
        joined::run();
        std::process::exit(0);
    }
    let program = include_str!("../examples/joined.rs");
    assert!(program.split_once("\n\n").unwrap().1 == guide("```rust,no_run"), "they differ");
    let scratch = Scratch::new("guide");
    let (old, new) = (bytes(3 * MIB, 1), bytes(3 * MIB, 2));
    scratch.file("first.img", &old[..MIB]);
    scratch.file("second.img", &old[MIB..]);
    scratch.file("new", &new);
    let guide = Guide::start(&scratch);
    let copy = |from: &str, to: &str| {
        let mut nbdcopy = Command::new(format!("{REPOSITORY}/guests/tool"));
        nbdcopy.args(["nbdcopy", "--flush", from, to]).current_dir(scratch.path(""));
        output(&mut nbdcopy);
    };
    let disk = "nbd+unix:///joined?socket=nbd.sock";
    copy(disk, "copy");
    assert!(std::fs::read(scratch.path("copy")).unwrap() == old);
    copy("new", disk);
    let mut guest = Guest::connect(&scratch.path("vm.sock"));
    assert!(guest.read(0, new.len()) == new);
    drop(guest);
    guide.ends();
    let files = ["first.img", "second.img"].map(|name| std::fs::read(scratch.path(name)).unwrap());
    assert!(files.concat() == new);
}
