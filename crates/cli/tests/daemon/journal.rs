//! A killed server loses no answered write of a qcow2 or COW image: the next one replays the
//! journal. Other programs that change the image in between make the journal invalid.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::status;

use crate::common::{
    BLOCKYARD, Daemon, Finished, Folder, SOON, StateFolder, TOOL, blockyard, run, tool, until,
};
use crate::guest::{Guest, base_bytes, pattern, write_base};

const MIB: usize = 1 << 20;
const SIZE: usize = 32 * MIB;
/// Size of a write of these tests in bytes, and in sectors.
const BLOCK: usize = 4096;
const SECTORS: u64 = 8;

/// An overlay of a raw base with data everywhere.
struct Case {
    folder: Folder,
    state: StateFolder,
    top: PathBuf,
    socket: PathBuf,
}

impl Case {
    /// Each command that writes to the image fails with this text. `state`: the state folder.
    #[track_caller]
    fn writing_commands_fail(&self, state: &Path, text: &str) {
        let top = self.top.to_str().unwrap();
        for command in [
            &["snapshot", "-c", "one", top][..],
            &["amend", "-o", "lazy_refcounts=on", top],
            &["bitmap", "--add", top, "b"],
            &["rebase", "-u", "-b", "base.img", "-F", "raw", top],
            &["resize", top, "64M"],
            &["commit", top],
            &["check", "--repair", "leaks", top],
        ] {
            let mut image = Command::new(BLOCKYARD);
            image.arg("image").args(command).env("BLOCKYARD_STATE_FOLDER", state);
            let done = run(&mut image, SOON);
            assert_eq!(done.status.code(), Some(1), "{command:?}: {}", done.err);
            assert!(done.err.contains(text), "{command:?}: {}", done.err);
        }
    }

    /// `make`: arguments of `blockyard image create`, without base and file.
    fn new(name: &str, make: &[&str]) -> Self {
        let folder = Folder::new();
        let (base, top, socket) = (folder.join("base.img"), folder.join(name), folder.join("s"));
        write_base(&base, SIZE);
        let mut create = vec!["image", "create", "-q"];
        create.extend(make);
        create.extend(["-F", "raw", "-b", "base.img", top.to_str().unwrap()]);
        blockyard(create).good();
        Case { folder, state: StateFolder::new(), top, socket }
    }

    /// Clusters of 64 KiB without subclusters: first writes leave partial clusters.
    fn qcow2() -> Self {
        Self::new("disk.qcow2", &["-f", "qcow2", "-o", "cluster_size=64k"])
    }

    fn options(&self) -> [&str; 2] {
        ["--state-folder", self.state.path().to_str().unwrap()]
    }

    fn serve(&self) -> Daemon {
        Daemon::serve(&self.top, &self.socket, &self.options())
    }

    fn serve_again(&self, more: &[&str]) -> Daemon {
        Daemon::serve_again(&self.top, &self.socket, &[&self.options()[..], more].concat())
    }

    /// Runs `blockyard image COMMAND TOP` with the state folder.
    fn image(&self, command: &[&str]) -> Finished {
        let mut program = Command::new(BLOCKYARD);
        program.arg("image").args(command).arg(&self.top);
        run(program.env("BLOCKYARD_STATE_FOLDER", self.state.path()), TOOL)
    }

    /// Writes blocks without a flush, for each seed other ones, and kills the server.
    fn write_and_kill(&self, seed: u64) -> Vec<u64> {
        let daemon = self.serve();
        let mut guest = Guest::connect(&self.socket);
        let blocks: Vec<u64> =
            (0..200).map(|n| (seed * 200 + n) * 37 % (SIZE / BLOCK) as u64).collect();
        for &block in &blocks {
            let data = pattern(seed * 10_000 + block, BLOCK);
            assert_eq!(guest.write(block * SECTORS, &data), status::OK);
        }
        daemon.kill();
        blocks
    }

    /// Counts the blocks that have what was written with this seed.
    fn count(&self, guest: &mut Guest, seed: u64, blocks: &[u64]) -> usize {
        let has = |block: &&u64| {
            let found = guest.read(**block * SECTORS, BLOCK).unwrap();
            found == pattern(seed * 10_000 + **block, BLOCK)
        };
        blocks.iter().filter(has).count()
    }

    /// The lock of a killed server may remain for a moment.
    fn wait_for_the_lock(&self) {
        until("the killed server's lock is gone", SOON, || {
            tool("qemu-img", ["info", self.top.to_str().unwrap()]).status.success()
        });
    }
}

fn is_clean(image: &Path) {
    match image.extension().is_some_and(|extension| extension == "qcow2") {
        true => tool("qemu-img", ["check", image.to_str().unwrap()]).good(),
        false => blockyard(["image", "check", image.to_str().unwrap()]).good(),
    };
}

/// The image is not changed by another program between the death and the next start.
fn nothing_answered_is_lost(case: &Case) {
    for seed in 0..3 {
        let blocks = case.write_and_kill(seed);
        assert_eq!(case.state.journals(), 1);
        let daemon = case.serve_again(&[]);
        daemon.wait_log("replayed the journal of a server that died");
        let mut guest = Guest::connect(&case.socket);
        assert_eq!(case.count(&mut guest, seed, &blocks), blocks.len());
        // A write of the next server, and no flush: it dies too.
        let later = (SIZE - MIB) as u64 / 512 + seed * SECTORS;
        assert_eq!(guest.write(later, &pattern(seed, BLOCK)), status::OK);
        daemon.kill();
        let daemon = case.serve_again(&[]);
        let mut guest = Guest::connect(&case.socket);
        assert_eq!(guest.read(later, BLOCK).unwrap(), pattern(seed, BLOCK));
        let last = (SIZE - MIB) / BLOCK;
        let others: Vec<u64> = blocks.into_iter().filter(|b| *b < last as u64).collect();
        assert_eq!(case.count(&mut guest, seed, &others), others.len());
        daemon.stop();
        assert_eq!(case.state.journals(), 0, "a journal is left after a clean end");
        is_clean(&case.top);
    }
    let base = std::fs::read(case.folder.join("base.img")).unwrap();
    assert!(base == base_bytes(SIZE), "the base was changed");
}

#[test]
fn kill_9_loses_no_answered_write_of_a_qcow2_image() {
    nothing_answered_is_lost(&Case::qcow2());
    nothing_answered_is_lost(&Case::new("disk.qcow2", &["-f", "qcow2", "-o", "extended_l2=on"]));
}

#[test]
fn kill_9_loses_no_answered_write_of_a_cow_file() {
    nothing_answered_is_lost(&Case::new("disk.cow", &["-f", "cow"]));
}

/// A back end may be killed while it starts, after it has answered all requests. Its front end has
/// read the ring's position before that, and may give the old one to the next back end.
#[test]
fn an_old_ring_position_after_a_kill_repeats_no_request() {
    let case = Case::qcow2();
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert!(guest.session.link.inflight.is_some());
    for sector in 0..5 {
        assert_eq!(guest.write(sector, &pattern(sector, 512)), status::OK);
    }
    daemon.kill();
    let daemon = case.serve_again(&[]);
    let setup = guest.queue().setup();
    guest.session.link.reopen().unwrap();
    guest.session.link.start(&[(setup, 2)]).unwrap();
    guest.queue().kick().unwrap();
    // An answer to a request that is not in flight is an error here.
    assert_eq!(guest.write(5, &pattern(5, 512)), status::OK);
    assert_eq!(guest.read(4, 512).unwrap(), pattern(4, 512));
    daemon.stop();
}

/// Kills a server under verified load and restarts it, again and again. The client reads back
/// each write that was answered.
fn fifty_kills(case: &Case) {
    let load = LoadOptions {
        rw: Pattern::Randrw,
        depth: 16,
        runtime: 300.0,
        flush_every: 400,
        verify: true,
        reconnect: true,
        ..LoadOptions::for_socket(case.socket.clone())
    };
    let mut daemon = case.serve();
    let (report, daemon) = std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        for _ in 0..50 {
            daemon.until_goes_on(16);
            assert!(!client.is_finished(), "the load ended early");
            daemon.kill();
            daemon = case.serve_again(&[]);
        }
        daemon.until_goes_on(16);
        load.over.store(true, Ordering::Relaxed);
        (client.join().unwrap().unwrap(), daemon)
    });
    assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, 50));
    assert!(report.verified_blocks > 1000, "{} blocks: no load", report.verified_blocks);
    daemon.stop();
    assert_eq!(case.state.journals(), 0, "a journal is left after a clean end");
    is_clean(&case.top);
}

#[test]
fn fifty_kills_under_load_lose_nothing_of_a_qcow2_image() {
    fifty_kills(&Case::qcow2());
}

#[test]
fn fifty_kills_under_load_lose_nothing_of_a_cow_file() {
    fifty_kills(&Case::new("disk.cow", &["-f", "cow"]));
}

#[test]
fn commands_show_apply_and_discard_a_journal() {
    let case = Case::qcow2();
    let blocks = case.write_and_kill(1);
    case.wait_for_the_lock();
    let shown = case.image(&["info", "--json"]).good();
    let info: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert!(info["journal"].as_u64() >= Some(200), "{shown}");
    let checked = case.image(&["check"]);
    assert!(checked.err.contains("a server that died has left a journal"), "{}", checked.err);
    // A command that changes the structures applies the journal first.
    case.image(&["snapshot", "-c", "one"]).good();
    assert_eq!(case.state.journals(), 0);
    is_clean(&case.top);
    let daemon = case.serve();
    assert_eq!(case.count(&mut Guest::connect(&case.socket), 1, &blocks), blocks.len());
    daemon.stop();

    let blocks = case.write_and_kill(2);
    case.wait_for_the_lock();
    case.image(&["check", "--discard-journal"]);
    assert_eq!(case.state.journals(), 0);
    let daemon = case.serve();
    assert_eq!(case.count(&mut Guest::connect(&case.socket), 2, &blocks), 0);
    daemon.stop();
    is_clean(&case.top);
}

#[test]
fn a_journal_is_not_replayed_over_changes_of_another_program() {
    let case = Case::qcow2();
    let blocks = case.write_and_kill(1);
    case.wait_for_the_lock();
    // QEMU clears the mark when it opens the image for writing.
    let write = ["-c", "write -P 7 1M 64k", case.top.to_str().unwrap()];
    tool("qemu-io", write).good();
    let daemon = case.serve_again(&[]);
    daemon.wait_log("another program has written to the image");
    let mut guest = Guest::connect(&case.socket);
    let in_the_write = |block: &u64| (MIB..MIB + 65_536).contains(&(*block as usize * BLOCK));
    let others: Vec<u64> = blocks.into_iter().filter(|block| !in_the_write(block)).collect();
    assert_eq!(case.count(&mut guest, 1, &others), 0, "the journal is out of date");
    assert_eq!(guest.read(MIB as u64 / 512, BLOCK).unwrap(), [7; BLOCK]);
    daemon.stop();
    is_clean(&case.top);
}

#[test]
fn an_image_without_its_journal_is_refused() {
    let case = Case::qcow2();
    let blocks = case.write_and_kill(1);
    case.wait_for_the_lock();
    let other = StateFolder::new();
    case.writing_commands_fail(other.path(), "BLOCKYARD_STATE_FOLDER");
    let mut check = Command::new(BLOCKYARD);
    check
        .args(["image", "check", case.top.to_str().unwrap()])
        .env("BLOCKYARD_STATE_FOLDER", other.path());
    assert!(run(&mut check, SOON).err.contains("a server has a journal for the image"));
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(&case.top).arg("--vhost-user").arg(&case.socket);
    let done = run(command.arg("--state-folder").arg(other.path()), SOON);
    assert_eq!(done.status.code(), Some(1), "{}", done.err);
    assert!(done.err.contains("--discard-journal"), "{}", done.err);
    let daemon = case.serve();
    assert_eq!(case.count(&mut Guest::connect(&case.socket), 1, &blocks), blocks.len());
    daemon.stop();
}

/// Puts an overlay on the image of a dead server, with one write of its own.
fn overlay(case: &Case) -> PathBuf {
    let top = case.folder.join("over.qcow2");
    let create = ["image", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "disk.qcow2"];
    blockyard([&create[..], &[top.to_str().unwrap()]].concat()).good();
    let write = format!("write -P 9 {} 64k", SIZE - MIB);
    tool("qemu-io", ["-c", &write, top.to_str().unwrap()]).good();
    top
}

/// Returns the blocks that the overlay has not written.
fn below(blocks: Vec<u64>) -> Vec<u64> {
    blocks.into_iter().filter(|block| *block < ((SIZE - MIB) / BLOCK) as u64).collect()
}

#[test]
fn a_commit_applies_the_journal_of_its_target() {
    let case = Case::qcow2();
    let blocks = below(case.write_and_kill(1));
    case.wait_for_the_lock();
    let top = overlay(&case);
    let commit = |state: &StateFolder| {
        let mut commit = Command::new(BLOCKYARD);
        commit.args(["image", "commit"]).arg(&top).env("BLOCKYARD_STATE_FOLDER", state.path());
        run(&mut commit, TOOL)
    };
    // Without the journal nothing is changed.
    let done = commit(&StateFolder::new());
    assert_eq!(done.status.code(), Some(1), "{}", done.err);
    assert!(done.err.contains("disk.qcow2") && done.err.contains("--state-folder"), "{}", done.err);
    assert_eq!(case.state.journals(), 1);
    commit(&case.state).good();
    assert_eq!(case.state.journals(), 0);
    is_clean(&case.top);
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(case.count(&mut guest, 1, &blocks), blocks.len());
    assert_eq!(guest.read((SIZE - MIB) as u64 / 512, BLOCK).unwrap(), [9; BLOCK]);
    daemon.stop();
}

#[test]
fn a_commit_applies_the_journals_of_the_images_above_its_target() {
    let case = Case::qcow2();
    let blocks = below(case.write_and_kill(1));
    case.wait_for_the_lock();
    let top = overlay(&case);
    let mut commit = Command::new(BLOCKYARD);
    commit.args(["image", "commit", "-b", "base.img"]).arg(&top);
    run(commit.env("BLOCKYARD_STATE_FOLDER", case.state.path()), TOOL).good();
    assert_eq!(case.state.journals(), 0);
    let base = std::fs::read(case.folder.join("base.img")).unwrap();
    let block = |number: u64| &base[number as usize * BLOCK..][..BLOCK];
    let has = |number: &&u64| block(**number) == pattern(10_000 + **number, BLOCK);
    assert_eq!(blocks.iter().filter(has).count(), blocks.len());
    assert_eq!(base[SIZE - MIB..][..BLOCK], [9; BLOCK]);
}

/// A later replay would change the disk below the guest of the overlay.
#[test]
fn an_overlay_of_an_image_with_a_journal_is_served_only_for_reading() {
    for (name, make) in [
        ("disk.qcow2", &["-f", "qcow2", "-o", "cluster_size=64k"][..]),
        ("disk.cow", &["-f", "cow"][..]),
    ] {
        let case = Case::new(name, make);
        let blocks = case.write_and_kill(1);
        case.wait_for_the_lock();
        let top = case.folder.join("over.qcow2");
        let format = name.split_once('.').unwrap().1;
        let create = ["image", "create", "-q", "-f", "qcow2", "-F", format, "-b", name];
        blockyard([&create[..], &[top.to_str().unwrap()]].concat()).good();
        let serve = ["serve", top.to_str().unwrap(), "--vhost-user", case.socket.to_str().unwrap()];
        let refused = blockyard([&serve[..], &case.options()].concat());
        assert_eq!(refused.status.code(), Some(1), "{}", refused.err);
        let says = |text: &str| refused.err.contains(text);
        assert!(says(name) && says("journal") && says("--discard-journal"), "{}", refused.err);
        let reader = Daemon::serve(&top, &case.socket, &["--read-only"]);
        assert!(reader.stop().contains("missing from what is read"));
        assert_eq!(case.state.journals(), 1);
        // The image's own server applies the journal. Then the overlay can be written to.
        case.serve().stop();
        assert_eq!(case.state.journals(), 0);
        let daemon = Daemon::serve(&top, &case.socket, &case.options());
        assert_eq!(case.count(&mut Guest::connect(&case.socket), 1, &blocks), blocks.len());
        daemon.stop();
    }
}

/// The stream changes the image's header, which has the mark of the journal.
#[test]
fn kill_9_after_a_live_stream_loses_no_answered_write() {
    let case = Case::qcow2();
    let (api, top) = (case.folder.join("api"), case.top.to_str().unwrap());
    blockyard(["image", "resize", "-q", top, "64M"]).good();
    let options = [&case.options()[..], &["--api", api.to_str().unwrap()]].concat();
    let daemon = Daemon::serve(&case.top, &case.socket, &options);
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(10_000, BLOCK)), status::OK, "it begins the journal");
    blockyard(["ctl", "--api", api.to_str().unwrap(), "stream", "disk.qcow2"]).good();
    // The new half of the disk has no clusters yet.
    let half = (SIZE / 512) as u64;
    for block in 1..20 {
        let data = pattern(10_000 + block, BLOCK);
        assert_eq!(guest.write(half + block * 128, &data), status::OK);
    }
    daemon.kill();
    let daemon = case.serve_again(&[]);
    daemon.wait_log("replayed the journal of a server that died");
    let mut guest = Guest::connect(&case.socket);
    for block in 1..20 {
        let found = guest.read(half + block * 128, BLOCK).unwrap();
        assert!(found == pattern(10_000 + block, BLOCK), "block {block}");
    }
    assert_eq!(guest.read(0, BLOCK).unwrap(), pattern(10_000, BLOCK));
    daemon.stop();
    is_clean(&case.top);
}

#[test]
fn a_journal_that_cannot_be_read_stops_a_command() {
    let case = Case::qcow2();
    let blocks = case.write_and_kill(1);
    case.wait_for_the_lock();
    let (journal, hidden) = (case.state.file(), case.state.path().join("hidden"));
    std::fs::rename(&journal, &hidden).unwrap();
    // A journal is not opened through a symbolic link.
    std::os::unix::fs::symlink(&hidden, &journal).unwrap();
    case.writing_commands_fail(case.state.path(), "opening a journal");
    std::fs::rename(&hidden, &journal).unwrap();
    let daemon = case.serve();
    assert_eq!(case.count(&mut Guest::connect(&case.socket), 1, &blocks), blocks.len());
    daemon.stop();
    is_clean(&case.top);
}

#[test]
fn a_folder_that_cannot_hold_journals_is_named_once() {
    let case = Case::qcow2();
    let on_disk = case.folder.join("state");
    std::fs::create_dir(&on_disk).unwrap();
    let options = ["--state-folder", on_disk.to_str().unwrap()];
    let log = Daemon::serve(&case.top, &case.socket, &options).stop();
    assert_eq!(log.matches("it is not on tmpfs").count(), 1, "{log}");
    let missing = case.folder.join("missing");
    let options = ["--state-folder", missing.to_str().unwrap()];
    let log = Daemon::serve(&case.top, &case.socket, &options).stop();
    assert!(log.contains("missing: it is not on tmpfs") && !missing.exists(), "{log}");
}

/// Until the journal can be created, each change of metadata is durable before its answer.
fn a_journal_begins_late(case: &Case) {
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    let hidden = StateFolder::new();
    std::fs::rename(case.state.path(), hidden.path()).unwrap();
    for block in 0..3 {
        assert_eq!(guest.write(block * 128, &pattern(10_000 + block, BLOCK)), status::OK);
    }
    daemon.wait_log("no journal of changed metadata");
    std::fs::rename(hidden.path(), case.state.path()).unwrap();
    for block in 3..9 {
        assert_eq!(guest.write(block * 128, &pattern(10_000 + block, BLOCK)), status::OK);
    }
    daemon.wait_log("changed metadata are in a journal from now on");
    assert_eq!(case.state.journals(), 1);
    let log = daemon.log();
    assert_eq!(log.matches("no journal of changed metadata").count(), 1, "{log}");
    daemon.kill();
    let daemon = case.serve_again(&[]);
    daemon.wait_log("replayed the journal of a server that died");
    let mut guest = Guest::connect(&case.socket);
    for block in 0..9 {
        assert_eq!(guest.read(block * 128, BLOCK).unwrap(), pattern(10_000 + block, BLOCK));
    }
    daemon.stop();
    assert_eq!(case.state.journals(), 0);
    is_clean(&case.top);
}

#[test]
fn a_journal_begins_when_it_can_be_created() {
    a_journal_begins_late(&Case::qcow2());
    a_journal_begins_late(&Case::new("disk.cow", &["-f", "cow"]));
}

/// The runtime directory of a user is removed when the last session of the user ends. After the
/// next flush each change of metadata is durable before its answer.
fn a_journal_is_removed(case: &Case) {
    let daemon = case.serve();
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(guest.write(0, &pattern(10_000, BLOCK)), status::OK);
    assert_eq!(case.state.journals(), 1);
    for file in std::fs::read_dir(case.state.path()).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    assert_eq!(guest.flush(), status::OK);
    daemon.wait_log("something has removed the journal of changed metadata");
    for block in 1..9 {
        assert_eq!(guest.write(block * 128, &pattern(10_000 + block, BLOCK)), status::OK);
    }
    daemon.kill();
    case.wait_for_the_lock();
    // Allocated clusters that nothing refers to may be left.
    case.image(&["check", "--discard-journal"]);
    let daemon = case.serve_again(&[]);
    let mut guest = Guest::connect(&case.socket);
    for block in 0..9 {
        assert_eq!(guest.read(block * 128, BLOCK).unwrap(), pattern(10_000 + block, BLOCK));
    }
    daemon.stop();
    is_clean(&case.top);
}

#[test]
fn a_journal_that_is_removed_loses_no_answered_write() {
    a_journal_is_removed(&Case::qcow2());
    a_journal_is_removed(&Case::new("disk.cow", &["-f", "cow"]));
}

/// Without a journal each change of metadata is durable before its answer.
#[test]
fn flushed_metadata_survive_a_kill_without_a_journal() {
    let case = Case::qcow2();
    let daemon = case.serve_again(&["--crash-safety", "flush"]);
    let mut guest = Guest::connect(&case.socket);
    for block in 0..20 {
        assert_eq!(guest.write(block * 64 * SECTORS, &pattern(block, BLOCK)), status::OK);
    }
    daemon.kill();
    assert_eq!(case.state.journals(), 0);
    let daemon = case.serve_again(&["--crash-safety", "off"]);
    let mut guest = Guest::connect(&case.socket);
    for block in 0..20 {
        assert_eq!(guest.read(block * 64 * SECTORS, BLOCK).unwrap(), pattern(block, BLOCK));
    }
    daemon.stop();
    is_clean(&case.top);
}

/// Live migration: each server has the image open while rings run. One of them is killed.
#[test]
fn servers_of_one_image_take_turns_also_after_a_kill() {
    let case = Case::qcow2();
    let other = case.folder.join("t");
    let options = [&case.options()[..], &["--activation", "rings"]].concat();
    let source = Daemon::serve(&case.top, &case.socket, &options);
    let target = Daemon::serve(&case.top, &other, &options);
    let blocks: Vec<u64> = (0..100).map(|n| n * 37 % (SIZE / BLOCK) as u64).collect();
    let write = |guest: &mut Guest, seed: u64| {
        for &block in &blocks {
            let data = pattern(seed * 10_000 + block, BLOCK);
            assert_eq!(guest.write(block * SECTORS, &data), status::OK);
        }
    };
    let mut guest = Guest::connect(&case.socket);
    write(&mut guest, 1);
    drop(guest);
    let mut guest = Guest::connect(&other);
    assert_eq!(case.count(&mut guest, 1, &blocks), blocks.len());
    write(&mut guest, 2);
    target.kill();
    drop(guest);
    let mut guest = Guest::connect(&case.socket);
    assert_eq!(case.count(&mut guest, 2, &blocks), blocks.len());
    drop(guest);
    source.stop();
    assert_eq!(case.state.journals(), 0);
    is_clean(&case.top);
}
