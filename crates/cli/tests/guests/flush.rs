//! Effects of a guest's sync on the image, as the host's kernel sees them.
//!
//! io_uring operations are not visible as system calls. So the test uses the kernel's trace events:
//! operations that the daemon submits to its io_uring, and, if the image is on ext4, each sync of
//! the image.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{Daemon, GuestKind, TOOL, run};
use crate::fixture::{GuestFixture, Statistics};

/// Number of rounds. Each has four writes and a sync.
const ROUNDS: usize = 5;
const SCRIPT: &str = "
    cat /sys/block/vda/queue/write_cache
    for i in 1 2 3 4 5; do
        dd if=/dev/urandom of=/dev/vda bs=4k count=4 seek=$((i * 4)) oflag=direct conv=fsync,notrunc status=none
    done";

#[test]
fn a_guests_sync_is_an_fdatasync_of_the_image() {
    let Seen { cache, operations, syncs, log } = watch(&[]);
    assert_eq!(cache, "write back");
    let flushes = Statistics(log.clone()).figure("flush", "requests") as usize;
    let fsyncs = operations.iter().filter(|o| *o == "FSYNC").count();
    assert!(
        flushes >= ROUNDS && fsyncs == flushes,
        "{fsyncs} fsync operations for {flushes} flushes: {log}"
    );
    if let Some(syncs) = syncs {
        // 1: fdatasync (data, and the metadata to find it); 0 would be fsync.
        assert_eq!(syncs, vec![1; fsyncs], "the file system saw other syncs of the image");
    }
}

/// With one write at a time, each write has its own sync before its completion.
#[test]
fn without_a_write_cache_writes_are_durable_and_the_guest_syncs_nothing() {
    for mode in ["directsync", "writethrough"] {
        let Seen { cache, operations, syncs, log } = watch(&["--cache", mode]);
        assert_eq!(cache, "write through", "{mode}");
        assert_eq!(Statistics(log.clone()).figure("flush", "requests"), 0, "{mode}: {log}");
        let writes = Statistics(log.clone()).figure("write", "requests") as usize;
        assert!(writes >= 4 * ROUNDS, "{mode}: {log}");
        let of = |name: &str| operations.iter().filter(|o| o.starts_with(name)).count();
        // Without the page cache each write is durable by itself. With it, an fdatasync that
        // several writes may share makes it durable.
        let fsyncs = if mode == "directsync" { 0 } else { writes };
        assert_eq!(of("FSYNC"), fsyncs, "{mode}: {operations:?}");
        // (The kernel may refuse a write that allocates space at submission. The daemon submits it
        // again then.)
        assert!(mode == "writethrough" || of("WRITE") >= writes, "{mode}: {operations:?}");
        if let Some(syncs) = syncs {
            assert_eq!(
                syncs,
                vec![1; writes],
                "{mode}: each write is to be durable before its answer"
            );
        }
    }
}

struct Seen {
    /// What the guest reads of the disk's write cache.
    cache: String,
    /// Names of the operations that the daemon submitted while the guest ran.
    operations: Vec<String>,
    /// The file system's syncs of the image: 1 means data only. `None` if it is not ext4.
    syncs: Option<Vec<u32>>,
    /// The daemon's whole log.
    log: String,
}

fn watch(options: &[&str]) -> Seen {
    let mut fixture = GuestFixture::new(16 << 20, options);
    let trace = {
        let image = fixture.image.clone();
        Trace::start(fixture.daemon(), &image)
    };
    let guest = fixture.boot(GuestKind::Uml, "", &[], SCRIPT, Duration::from_secs(600));
    let cache = guest.finish().trim().to_string();
    let (operations, syncs) = trace.read();
    let log = fixture.stop();
    let on_ext4 =
        run(Command::new("stat").args(["-f", "-c", "%T"]).arg(&fixture.image), TOOL).good();
    let syncs = on_ext4.starts_with("ext").then_some(syncs);
    Seen { cache, operations, syncs, log }
}

/// A trace instance of its own, which does not disturb other tracing.
struct Trace {
    mounted: PathBuf,
    instance: PathBuf,
}

impl Trace {
    /// Traces the submissions of the daemon's threads to their io_uring, and all syncs of the
    /// image.
    fn start(daemon: &Daemon, image: &Path) -> Self {
        let mounted = std::env::temp_dir().join(format!(
            "blockyard-trace-{}-{}",
            daemon.pid(),
            std::process::id()
        ));
        std::fs::create_dir(&mounted).unwrap();
        let mount = run(Command::new("mount").args(["-t", "tracefs", "none"]).arg(&mounted), TOOL);
        assert!(
            mount.status.success(),
            "this test reads the kernel's trace, and needs to be root for that: {}",
            mount.err
        );
        let name = mounted.file_name().unwrap().to_os_string();
        let trace = Trace { instance: mounted.join("instances").join(name), mounted };
        std::fs::create_dir(&trace.instance).unwrap();
        trace.set("buffer_size_kb", "4096");
        let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
        let threads =
            threads.map(|t| format!("common_pid == {}", t.unwrap().file_name().to_str().unwrap()));
        trace.enable("io_uring/io_uring_submit_req", &threads.collect::<Vec<_>>().join(" || "));
        if trace.instance.join("events/ext4").exists() {
            let number = std::fs::metadata(image).unwrap().ino();
            trace.enable("ext4/ext4_sync_file_enter", &format!("ino == {number}"));
        }
        trace
    }

    fn enable(&self, event: &str, filter: &str) {
        self.set(&format!("events/{event}/filter"), filter);
        self.set(&format!("events/{event}/enable"), "1");
    }

    fn set(&self, file: &str, text: &str) {
        let path = self.instance.join(file);
        std::fs::write(&path, text)
            .unwrap_or_else(|e| panic!("writing {text:?} to {}: {e}", path.display()));
    }

    fn read(&self) -> (Vec<String>, Vec<u32>) {
        let text = std::fs::read_to_string(self.instance.join("trace")).unwrap();
        let after = |mark: &str| -> Vec<String> {
            let parts = text.lines().filter_map(|l| Some(l.split_once(mark)?.1));
            parts.map(|p| p.split([',', ' ']).next().unwrap_or_default().to_string()).collect()
        };
        let syncs = after(" datasync ").iter().map(|n| n.parse().unwrap()).collect();
        (after("opcode "), syncs)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = std::fs::write(self.instance.join("events/enable"), "0");
        let _ = std::fs::remove_dir(&self.instance);
        run(Command::new("umount").arg(&self.mounted), TOOL);
        let _ = std::fs::remove_dir(&self.mounted);
    }
}
