//! A guest with the program under test, a disk for images and the ublk driver.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::common::{BLOCKYARD, Folder, Guest, Kind, TOOL, run};

/// Shell functions for the scripts.
const PRELUDE: &str = r#"
blockyard() { /host/blockyard "$@"; }
pid=

# Serves an image by ublk, in the background: $pid, the log in /tmp/log. Tried again while a server that was killed still
# holds its image.
serve() { # IMAGE OPTIONS...
    for ((try = 0; try < 100; try++)); do
        : >/tmp/out
        /host/blockyard serve "$@" >/tmp/out 2>>/tmp/log &
        pid=$!
        while kill -0 $pid 2>/dev/null; do
            if grep -q ready /tmp/out; then return 0; fi
            sleep 0.01
        done
        tail -n 1 /tmp/log | grep -q 'is in use by' || break
    done
    cat /tmp/log
    return 1
}

# SIGTERM, which must end it well.
stop() {
    kill -TERM $pid
    wait $pid || { cat /tmp/log && return 1; }
}

# What the last log line about a device's end says of a figure: requests, bytes, copied.
figure() { # NAME
    sed -n "s/.*served no more.* $1=\([0-9]*\).*/\1/p" /tmp/log | tail -n 1
}

# fio in short: random data with checksums, quiet unless it fails.
load() { # ARGUMENTS...
    fio --eta=never --output=/tmp/fio.log --ioengine=libaio --direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 \
        --group_reporting "$@" || { cat /tmp/fio.log && return 1; }
}

fails() { # STATUS WORD... -- COMMAND...: the command fails so, and its message has the words
    local status=$1 got=0 words=() word said
    shift
    while [[ $1 != -- ]]; do words+=("$1") && shift; done
    shift
    said=$("$@" 2>&1) || got=$?
    [[ $got == "$status" ]] || { echo "status $got, not $status: $*: $said" && return 1; }
    for word in "${words[@]}"; do
        [[ $said == *"$word"* ]] || { echo "no '$word': $*: $said" && return 1; }
    done
}

modprobe ublk_drv
modprobe virtio_blk
mkfs.ext4 -q /dev/vda
mkdir /tmp/images
mount /dev/vda /tmp/images
cd /tmp/images
case $(uname -r) in
6.*) zero_copy= ;;
*) zero_copy=1 ;;
esac
"#;

/// Boots a kernel (6 or 7), runs the script, ends well: the output.
#[track_caller]
pub fn on_kernel(kernel: &str, script: &str) -> String {
    let folder = Folder::new();
    let disk = folder.image("disk.img", 400 << 20);
    let options = [
        "--kernel".into(),
        kernel.into(),
        "--file".into(),
        program().to_string_lossy().into_owned(),
        "--disk".into(),
        format!("file={}", disk.display()),
    ];
    Guest::start(Kind::Qemu, options, &format!("{PRELUDE}{script}"), Duration::from_secs(120)).finish()
}

/// The program without what debuggers read: it is copied into each guest.
fn program() -> PathBuf {
    static STRIPPED: OnceLock<(Folder, PathBuf)> = OnceLock::new();
    let (_, path) = STRIPPED.get_or_init(|| {
        let folder = Folder::new();
        let path = folder.join("blockyard");
        run(Command::new("strip").arg("-o").arg(&path).arg(BLOCKYARD), TOOL).good();
        (folder, path)
    });
    path.clone()
}
