//! Fast zeroes of ranges that take several operations, and of disks on another server.

use crate::common::{Folder, SOON, complaints, listens, tool, until};
use crate::fixture::{MB, NbdServer, python, script, start_in_background, uri};

/// If zeroing a range takes several operations, the server refuses the request before the first
/// one.
#[test]
fn a_refused_long_range_changes_nothing() {
    let folder = Folder::new();
    let image = folder.join("disk.qcow2");
    tool("qemu-img", ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "4G"]).good();
    let disk = NbdServer::start(&image, folder.join("s"), &[]);
    let code = r#"
h = nbd.NBD()
h.connect_uri(URI)
GB = 1 << 30
for at in (0, 3 * GB):
    h.pwrite(b"x" * 65536, at)
for length in (512, 3 * GB + 512, 3 * GB + 65536 - 512):
    try:
        h.zero(length, 0, nbd.CMD_FLAG_FAST_ZERO)
        raise SystemExit(f"{length} bytes were not refused")
    except nbd.Error as e:
        assert e.errno == "ENOTSUP", e
    for at in (0, 3 * GB):
        assert h.pread(65536, at) == b"x" * 65536, at
h.zero(3 * GB + 65536, 0, nbd.CMD_FLAG_FAST_ZERO)
for at in (0, 3 * GB):
    assert h.pread(65536, at) == bytes(65536), at
"#;
    python(&disk.uri(), code).good();
    let log = disk.daemon.stop();
    // A refusal is not an error of the disk.
    assert_eq!(complaints(&log), [""; 0]);
    tool("qemu-img", ["check", "-q", image.to_str().unwrap()]).good();
}

/// A disk on another server has fast zeroes if that server has them. The other server makes fast
/// zeroes, refuses each, or does not advertise them.
#[test]
fn a_remote_disk_has_the_fast_zeroes_of_its_server() {
    for (mode, fast) in [("ignore", true), ("slow", false), ("none", false)] {
        let folder = Folder::new();
        let (base, behind) = (folder.join("base.raw"), folder.join("kit"));
        std::fs::write(&base, vec![7; 32 * MB as usize]).unwrap();
        let (path, socket) = (base.to_str().unwrap(), behind.to_str().unwrap());
        let args = ["-f", "-U", socket, "--filter=nozero", "file", path, "zeromode=plugin"];
        let mode = format!("fastzeromode={mode}");
        let mut kit = start_in_background("nbdkit", args.iter().copied().chain([mode.as_str()]));
        until("nbdkit listens", SOON, || listens(&behind) || !kit.running());
        let disk = NbdServer::start(uri(&behind, ""), folder.join("s"), &[]);
        script(if fast { "fast_zeroes" } else { "slow_zeroes" }, &disk.uri());
        let log = disk.daemon.stop();
        assert!(!log.contains("ERROR"), "{mode}: {log}");
        drop(kit);
    }
}
