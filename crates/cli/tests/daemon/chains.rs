//! qcow2 images and their backing images under the server, also when it ends or is killed.
//! `qemu-img` checks them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Instant;

use blockyard_bench::client::workload::Pattern;
use blockyard_bench::client::{LoadOptions, measure};
use blockyard_driver::{request, status};

use crate::common::{BLOCKYARD, Daemon, Folder, SOON, allocated, run, tool};
use crate::guest::{Guest, base_bytes, bytes_of, pattern, write_base};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A raw base with data everywhere, and overlays. Each overlay has its own options of `qemu-img
/// create`.
struct Stack {
    folder: Folder,
    overlays: Vec<PathBuf>,
    socket: PathBuf,
}

impl Stack {
    fn new(overlays: &[&str]) -> Self {
        let folder = Folder::new();
        write_base(&folder.join("base.img"), SIZE as usize);
        let (mut below, mut format) = (String::from("base.img"), "raw");
        let mut paths = Vec::new();
        for (number, options) in overlays.iter().enumerate() {
            let name = format!("o{number}.qcow2");
            let path = folder.join(&name);
            let create = [
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                options,
                "-F",
                format,
                "-b",
                &below,
                text(&path),
            ];
            tool("qemu-img", create).good();
            paths.push(path);
            (below, format) = (name, "qcow2");
        }
        let socket = folder.join("s");
        Stack { folder, overlays: paths, socket }
    }

    fn top(&self) -> &Path {
        self.overlays.last().unwrap()
    }

    fn serve(&self, options: &[&str]) -> Daemon {
        Daemon::serve(self.top(), &self.socket, options)
    }

    #[track_caller]
    fn base_is_unchanged(&self) {
        let base = bytes_of(&self.folder.join("base.img"), 0, SIZE as usize);
        assert!(base == base_bytes(SIZE as usize));
    }

    /// Checks that the image has no errors. `leaks`: leaks are allowed, because a daemon was
    /// killed.
    #[track_caller]
    fn check(&self, leaks: bool) {
        for path in &self.overlays {
            let start = Instant::now();
            let done = loop {
                let done = tool("qemu-img", ["check", text(path)]);
                // The lock of a killed daemon may remain for a moment.
                if !done.err.contains("lock") || start.elapsed() > SOON {
                    break done;
                }
            };
            let good = done.status.success() || leaks && done.status.code() == Some(3);
            assert!(good, "{}: {}{}", path.display(), done.out, done.err);
        }
    }
}

#[test]
fn overlays_hold_their_data_in_all_cache_modes() {
    for (number, mode) in
        ["none", "writeback", "writethrough", "directsync", "unsafe"].into_iter().enumerate()
    {
        let overlays =
            [&["extended_l2=on,cluster_size=128k"][..], &["compat=0.10", "cluster_size=64k"]]
                [number % 2];
        let stack = Stack::new(overlays);
        let options = ["--cache", mode, "--queues", "4", "--reactors", "2"];
        let daemon = stack.serve(&options);
        let report = measure(&LoadOptions {
            rw: Pattern::Randrw,
            queues: 4,
            depth: 16,
            ops: Some(6000),
            flush_every: 100,
            verify: true,
            size: Some(SIZE / 2),
            ..LoadOptions::for_socket(stack.socket.clone())
        });
        let report = report.unwrap();
        assert_eq!((report.errors, report.first_error), (0, None), "{mode}");
        assert!(
            report.verified_blocks > 1000,
            "{mode}: {} blocks: no load",
            report.verified_blocks
        );
        let mut guest = Guest::connect(&stack.socket);
        let at = SIZE / 2 / 512;
        assert_eq!(guest.write(at + 3, &pattern(number as u64, 5000 / 512 * 512)), status::OK);
        assert_eq!(
            guest.read(at, 512).unwrap(),
            bytes_of(&stack.folder.join("base.img"), SIZE / 2, 512),
            "{mode}"
        );
        drop(guest);
        let log = daemon.stop();
        let chain: Vec<_> =
            stack.overlays.iter().rev().map(|p| format!("{} (qcow2) over ", p.display())).collect();
        let chain = format!(
            "serving {}{} (raw) on ",
            chain.concat(),
            stack.folder.join("base.img").display()
        );
        assert!(log.contains(&chain), "{chain}: {log}");
        stack.check(false);
        stack.base_is_unchanged();
        // Another daemon reads the data of the overlay and of its backing images.
        let daemon = stack.serve(&["--cache", mode, "--read-only", "--prime"]);
        let mut guest = Guest::connect(&stack.socket);
        assert_eq!(guest.read(at + 3, 4608).unwrap(), pattern(number as u64, 4608), "{mode}");
        assert_eq!(
            guest.read(at + 12, 512).unwrap(),
            base_bytes(SIZE as usize)[(SIZE / 2) as usize + 6144..][..512]
        );
        daemon.stop();
    }
}

#[test]
fn a_guest_sees_size_and_features_of_a_chain() {
    for (options, unit, cluster) in [
        ("cluster_size=64k", 128, 128),
        ("extended_l2=on,cluster_size=128k", 8, 256),
        ("cluster_size=512", 8, 8),
    ] {
        let stack = Stack::new(&[options]);
        let daemon = stack.serve(&[]);
        let guest = Guest::connect(&stack.socket);
        let config = &guest.session.link.config;
        assert_eq!((config.capacity_sectors, config.blk_size), (SIZE / 512, 512), "{options}");
        assert!(
            u64::from(config.min_io_blocks) >= unit && u64::from(config.opt_io_blocks) >= cluster,
            "{options}"
        );
        assert_eq!(config.opt_io_blocks % u32::from(config.min_io_blocks), 0, "{options}");
        let discard = if unit == 8 && cluster == 8 { 1 } else { unit };
        assert_eq!(u64::from(config.discard_sector_alignment), discard, "{options}");
        daemon.stop();
    }
}

#[test]
fn a_discarded_overlay_gives_space_back_and_reads_as_zeroes() {
    let stack = Stack::new(&["cluster_size=64k"]);
    let daemon = stack.serve(&[]);
    let mut guest = Guest::connect(&stack.socket);
    for at in 0..32 {
        assert_eq!(guest.write(at * 512, &pattern(at, 256 << 10)), status::OK);
    }
    assert_eq!(guest.flush(), status::OK);
    let full = allocated(stack.top());
    assert_eq!(guest.ranges(request::DISCARD, &[(0, 16 * 512, 0)]), status::OK);
    // Flush twice, because a freed cluster is released only when no request can use it any more.
    assert_eq!((guest.flush(), guest.flush()), (status::OK, status::OK));
    assert!(allocated(stack.top()) + 4 * MIB <= full, "{} of {full} bytes", allocated(stack.top()));
    assert_eq!(guest.read(0, 256 << 10).unwrap(), vec![0; 256 << 10], "not what the base has");
    assert_eq!(guest.ranges(request::WRITE_ZEROES, &[(20 * 512 + 1, 3, 0)]), status::OK);
    let mut expected = pattern(20, 256 << 10);
    expected[512..2048].fill(0);
    assert_eq!(guest.read(20 * 512, 256 << 10).unwrap(), expected);
    daemon.stop();
    stack.check(false);
    stack.base_is_unchanged();
}

#[test]
fn copy_on_read_writes_data_into_the_image() {
    let stack = Stack::new(&["cluster_size=64k"]);
    let daemon = stack.serve(&["--copy-on-read"]);
    let mut guest = Guest::connect(&stack.socket);
    let base = base_bytes(SIZE as usize);
    for at in [0, 5, 100] {
        assert_eq!(guest.read(at * 128, 64 << 10).unwrap(), base[at as usize * 65536..][..65536]);
    }
    daemon.stop();
    let map = tool("qemu-img", ["map", "--output=json", text(stack.top())]).good();
    let top: u64 = serde_json::from_str::<Vec<serde_json::Value>>(&map)
        .unwrap()
        .iter()
        .filter(|e| e["depth"] == 0 && e["data"] == true)
        .map(|e| e["length"].as_u64().unwrap())
        .sum();
    assert_eq!(top, 3 * 65536, "{map}");
    stack.check(false);
    stack.base_is_unchanged();
}

/// Writes blocks one by one with a flush after every `batch` blocks, and kills the daemon in the
/// middle. Returns the blocks that must survive.
fn killed(stack: &Stack, options: &[&str], seed: u64, batch: u64) -> Vec<u64> {
    let daemon = stack.serve(options);
    let mut guest = Guest::connect(&stack.socket);
    let (mut written, mut durable) = (Vec::new(), 0);
    for n in 0..300 {
        let block = n * 31 % (SIZE / 8192);
        assert_eq!(guest.write(block * 16, &pattern(seed * 1000 + block, 8192)), status::OK);
        written.push(block);
        if (n + 1) % batch == 0 {
            assert_eq!(guest.flush(), status::OK);
            durable = written.len();
        }
    }
    daemon.kill();
    if batch == u64::MAX {
        durable = written.len();
    }
    written.truncate(durable);
    written
}

#[test]
fn kill_9_keeps_flushed_writes() {
    // There is no flush at the end, so the last blocks are not durable in the modes with a batch.
    for (number, (mode, batch)) in
        [("none", 7), ("writeback", 16), ("writethrough", u64::MAX), ("directsync", u64::MAX)]
            .into_iter()
            .enumerate()
    {
        let stack = Stack::new(&["extended_l2=on,cluster_size=128k", "cluster_size=64k"]);
        let seed = number as u64;
        for round in 0..2 {
            let blocks = killed(&stack, &["--cache", mode], seed + round, batch);
            assert!(blocks.len() > 250);
            stack.check(true);
            let daemon = Daemon::serve_again(stack.top(), &stack.socket, &["--cache", mode]);
            let mut guest = Guest::connect(&stack.socket);
            for block in blocks {
                let found = guest.read(block * 16, 8192).unwrap();
                assert!(
                    found == pattern((seed + round) * 1000 + block, 8192),
                    "{mode}: block {block} was lost"
                );
            }
            daemon.stop();
        }
        stack.base_is_unchanged();
    }
}

/// Every write is durable when it completes, so a guest that survives its server loses nothing.
#[test]
fn kill_9_keeps_durable_writes_under_load() {
    let stack = Stack::new(&["extended_l2=on,cluster_size=128k"]);
    let options = ["--queues", "2", "--reactors", "2", "--cache", "directsync"];
    let mut daemon = stack.serve(&options);
    let load = LoadOptions {
        rw: Pattern::Randrw,
        queues: 2,
        depth: 16,
        runtime: 600.0,
        verify: true,
        reconnect: true,
        ..LoadOptions::for_socket(stack.socket.clone())
    };
    let (report, daemon) = std::thread::scope(|scope| {
        let client = scope.spawn(|| measure(&load));
        for _ in 0..4 {
            daemon.until_goes_on(500);
            assert!(!client.is_finished(), "the load ended early");
            daemon.kill();
            stack.check(true);
            daemon = Daemon::serve_again(stack.top(), &stack.socket, &options);
        }
        daemon.until_goes_on(16);
        load.over.store(true, Ordering::Relaxed);
        (client.join().unwrap().unwrap(), daemon)
    });
    assert_eq!((report.errors, report.first_error, report.reconnects), (0, None, 4));
    assert!(report.verified_blocks > 500, "{} blocks: no load", report.verified_blocks);
    daemon.stop();
    stack.check(true);
    stack.base_is_unchanged();
}

/// Checks that an image is refused with one line that has all of `parts`.
#[track_caller]
fn refused(image: &Path, more: &[&str], parts: &[&str]) {
    let mut command = Command::new(BLOCKYARD);
    command.arg("serve").arg(image).args(["--vhost-user", "/nonexistent/s"]).args(more);
    let done = run(&mut command, SOON);
    assert!(
        matches!(done.status.code(), Some(1 | 2)) && done.err.lines().count() == 1,
        "{}",
        done.err
    );
    for part in parts {
        assert!(done.err.contains(part), "{part:?} is not in it: {}", done.err);
    }
}

#[test]
fn an_image_that_cannot_be_opened_is_refused_with_one_line() {
    let stack = Stack::new(&["cluster_size=64k", "cluster_size=64k"]);
    let (folder, top, middle) = (&stack.folder, stack.top(), &stack.overlays[0]);
    let base = folder.join("base.img");
    refused(&base, &["--format", "qcow2"], &["base.img: qcow2 header at offset 0", "magic"]);
    for option in [&["--prime"][..], &["--copy-on-read"], &["--l2-cache", "1M"]] {
        refused(&base, option, &["base.img", option[0], "is raw"]);
    }
    refused(top, &["--copy-on-read", "--read-only"], &["--copy-on-read writes"]);
    refused(&folder.image("x.vmdk", 512), &[], &["vmdk", "--format raw"]);

    // A backing file in another folder must be allowed.
    std::fs::create_dir(folder.join("sub")).unwrap();
    let below = folder.join("sub/below.qcow2");
    let name = format!("../{}", base.file_name().unwrap().to_str().unwrap());
    tool("qemu-img", ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &name, text(&below)])
        .good();
    refused(&below, &[], &["base.img", "lies outside", "--backing-folder"]);
    Daemon::serve(&below, &stack.socket, &["--backing-folder", text(folder)]).stop();

    // The base is shared with other readers, but nothing writes to it.
    let holder = Daemon::serve(&base, &folder.join("t"), &[]);
    refused(top, &[], &["base.img is in use by blockyard", "any number of readers"]);
    holder.stop();
    let daemon = stack.serve(&[]);
    refused(&base, &[], &["is in use by blockyard"]);
    Daemon::serve(&below, &folder.join("t"), &["--backing-folder", text(folder)]).stop();
    daemon.stop();

    tool("qemu-img", ["rebase", "-u", "-F", "qcow2", "-b", "o1.qcow2", text(middle)]).good();
    refused(top, &[], &["o0.qcow2", "the chain is a circle"]);
    tool("qemu-img", ["rebase", "-u", "-F", "qcow2", "-b", "gone.qcow2", text(middle)]).good();
    refused(top, &[], &["gone.qcow2", "is missing"]);
    std::fs::write(middle, vec![0; 65536]).unwrap();
    refused(top, &[], &["o0.qcow2", "qcow2 header at offset 0"]);
}

#[test]
fn a_reload_handles_disks_with_chains() {
    let stack = Stack::new(&["cluster_size=64k"]);
    let config = stack.folder.join("disks.toml");
    let write = |more: &str| {
        let disk =
            format!("[[disk]]\nimage = {:?}\nvhost-user = {:?}\n{more}", stack.top(), stack.socket);
        std::fs::write(&config, disk).unwrap();
    };
    write("format = \"qcow2\"\nl2-cache = \"1M\"\nprime = true\n");
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    let mut guest = Guest::connect(&stack.socket);
    assert_eq!(guest.write(8, &pattern(1, 4096)), status::OK);
    let from = daemon.log().len();
    let folder = &*stack.folder;
    write(&format!("l2-cache = 65536\nbacking-folders = [{folder:?}]\ncopy-on-read = true\n"));
    daemon.signal(crate::common::Signal::HUP);
    daemon.wait_log_after(from, "reloaded: disks added 0, changed 1");
    stack.base_is_unchanged();
    let mut guest = Guest::connect(&stack.socket);
    assert_eq!(
        guest.read(8, 4096).unwrap(),
        pattern(1, 4096),
        "what was not flushed is, when the disk is closed"
    );
    drop(guest);
    daemon.stop();
    stack.check(false);
}
