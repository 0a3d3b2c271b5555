//! Changes while a guest runs: the size of the disk, and the memory of the machine.

use std::time::Duration;

use serde_json::json;

use crate::common::GuestKind;
use crate::common::qmp::Qmp;
use crate::fixture::{GuestFixture, STEP, md5_of_first};

const MIB: u64 = 1 << 20;

/// `tell` waits for the new size. Then the script uses the new part.
const GROW: &str = r#"
read -r before </sys/block/vda/size
tell ready
read -r now </sys/block/vda/size
load --name=new --filename=/dev/vda --offset=$((before * 512)) --size=1M --rw=randwrite --bs=4k
echo "sectors $before $now"
"#;

#[test]
fn the_disk_grows_in_user_mode_linux() {
    let mut fixture = GuestFixture::new(8 * MIB, &[]);
    let mut guest = fixture.boot(GuestKind::Uml, "", &[], GROW, Duration::from_secs(600));
    guest.expect("tell ready");
    fixture.go_on();
    let sectors = guest.expect("sectors ");
    assert_eq!(sectors, format!("{} {}", 8 * MIB / 512, (8 * MIB + STEP) / 512));
    guest.finish();
    fixture.stop();
}

/// Plugs memory in and out under load. After plugging, uses the part by which `tell` has grown the
/// disk. Then one read is larger than the original memory.
const PLUG: &str = r#"
kilobytes() { sed -n "s/^$1: *\([0-9]*\) kB/\1/p" /proc/meminfo; }
until_total() { # COMPARISON
    for ((i = 0; i < 3000; i++)); do
        ! (($(kilobytes MemTotal) $1)) || return 0
        nap 0.02
    done
    echo "after 60 s not $1: $(kilobytes MemTotal) kB"
    return 1
}
echo online_movable >/sys/devices/system/memory/auto_online_blocks
total=$(kilobytes MemTotal)
(($(kilobytes MemAvailable) < BIG * 1024)) || { echo "there is room enough at first" && exit 1; }
(
    n=0
    while [[ ! -e /tmp/stop ]]; do
        echo >>/tmp/begun
        load --name=under --filename=/dev/vda --offset=${BIG}M --size=3M --rw=randwrite --bs=4k --randseed=$((n += 1))
    done
    echo "rounds $n"
) &
load=$!
read -r before </sys/block/vda/size
tell plug
read -r now </sys/block/vda/size
until_total ">= $total + 256 * 1024"
load --name=new --filename=/dev/vda --offset=$((before * 512)) --size=1M --rw=randwrite --bs=4k
echo "sectors $before $now"
sum=$(dd if=/dev/vda bs=${BIG}M count=1 iflag=direct status=none | md5sum)
echo "large $sum"
tell unplug
until_total "<= $total"
# A whole round without the memory.
mapfile -t before </tmp/begun
until mapfile -t now </tmp/begun && ((${#now[@]} > ${#before[@]})); do
    kill -0 $load
    nap 0.02
done
touch /tmp/stop
wait $load
"#;

#[test]
fn the_disk_grows_and_memory_is_plugged_in_and_out_under_load_in_qemu() {
    const MEMORY: &str = "256M,slots=1,maxmem=1G";
    const BIG: u64 = 208;
    const DISK: u64 = 216 * MIB;
    let mut fixture = GuestFixture::new(DISK, &[]);
    let sum = scatter(&fixture, BIG * MIB);
    let monitor = fixture.folder.join("qmp");
    let big = format!("BIG={BIG}");
    let options = ["--mem", MEMORY, "--qmp", monitor.to_str().unwrap(), "--env", &big];
    let mut guest = fixture.boot(GuestKind::Qemu, "", &options, PLUG, Duration::from_secs(600));
    guest.expect("tell plug");
    let mut qmp = Qmp::connect(&monitor);
    let size = 256 * MIB;
    qmp.execute(
        "object-add",
        json!({ "qom-type": "memory-backend-memfd", "id": "more", "size": size, "share": true }),
    );
    qmp.execute("device_add", json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }));
    fixture.go_on();
    let sectors = guest.expect("sectors ");
    assert_eq!(sectors, format!("{} {}", DISK / 512, (DISK + STEP) / 512));
    let seen = guest.expect("large ");
    assert!(
        seen.starts_with(&sum),
        "the guest read other bytes into its new memory: {seen}, not {sum}"
    );
    guest.expect("tell unplug");
    let unplugged = ["DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR", "MEM_UNPLUG_ERROR"];
    // The guest may still use a page of the memory to unplug. Request the removal again.
    for _ in 0..20 {
        qmp.execute("device_del", json!({ "id": "dimm" }));
        if qmp.event(&unplugged) == unplugged[0] {
            break;
        }
    }
    fixture.go_on();
    guest.expect("rounds");
    guest.finish();
    fixture.stop();
}

/// Writes random bytes at several offsets in the first `bytes` of the image. Returns the MD5 sum of
/// that part.
fn scatter(fixture: &GuestFixture, bytes: u64) -> String {
    use std::os::unix::fs::FileExt;
    let image = std::fs::File::options().write(true).open(&fixture.image).unwrap();
    let mut random = vec![0; 64 << 10];
    let mut source = std::fs::File::open("/dev/urandom").unwrap();
    for at in (0..bytes).step_by(3 * MIB as usize) {
        std::io::Read::read_exact(&mut source, &mut random).unwrap();
        image.write_all_at(&random, at).unwrap();
    }
    md5_of_first(bytes, &fixture.image, &fixture.folder.join("part"))
}
