//! fio's nbd engine (libnbd): verified writes on several connections.

use crate::common::{Folder, run, tool_command};
use crate::fixture::{COPY, MB, NbdServer};

/// Runs jobs with a connection and a part of the disk each. fio reads back and checks the checksum
/// in each block.
fn verified(uri: &str, rw: &str, bs: &str) {
    let mut command = tool_command("fio");
    command.args([
        "--name=verify",
        "--ioengine=nbd",
        "--numjobs=4",
        "--iodepth=32",
        "--group_reporting",
    ]);
    command.args([
        "--size=12m",
        "--offset_increment=16m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--end_fsync=1",
    ]);
    command.arg(format!("--uri={uri}")).arg(format!("--rw={rw}")).arg(format!("--bsrange={bs}"));
    let out = run(&mut command, COPY).good();
    let errors = out.lines().filter(|l| l.contains("err=")).collect::<Vec<_>>();
    assert!(!errors.is_empty() && errors.iter().all(|l| l.contains("err= 0")), "{out}");
    assert!(out.contains("READ:") && out.contains("WRITE:"), "it has not read back: {out}");
}

#[test]
fn fio_verifies_writes_to_a_raw_disk() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &["--reactors", "2"]);
    verified(&disk.uri(), "randwrite", "4k-4k");
    verified(&disk.uri(), "write", "1m-1m");
    // These sizes are not multiples of a sector, which O_DIRECT does not support.
    verified(&disk.uri(), "randwrite", "1k-70k");
    disk.daemon.stop();
}

#[test]
fn fio_verifies_writes_to_a_qcow2_disk() {
    let folder = Folder::new();
    let image = folder.join("disk.qcow2");
    crate::common::blockyard(["image", "create", "-f", "qcow2", image.to_str().unwrap(), "64M"])
        .good();
    let disk = NbdServer::start(&image, folder.join("s"), &["--reactors", "2"]);
    verified(&disk.uri(), "randwrite", "4k-64k");
    disk.daemon.stop();
    crate::common::tool("qemu-img", ["check", "-q", image.to_str().unwrap()]).good();
}
