//! The guest resets the device under load: it unbinds and binds the driver, and resets the machine.

use std::time::Duration;

use serde_json::json;

use crate::common::qmp::Qmp;
use crate::common::{Daemon, GuestKind, SOON, until};
use crate::fixture::GuestFixture;

const MIB: u64 = 1 << 20;
/// Allowed growth of the daemon's memory in kilobytes. Allocators keep freed memory.
const GROWTH: u64 = 1024;

/// Unbinds and binds the driver of /dev/vdc. `crash` runs it.
pub const UNBIND: &str = r#"
device=$(basename "$(readlink -f /sys/block/vdc/device)")
driver=/sys/bus/virtio/drivers/virtio_blk
for n in 0 1 2 3; do
    # It must fail in the end.
    fio --eta=never --output=/dev/null --name=victim --filename=/dev/vdc --offset=16M --size=16M --ioengine=libaio --direct=1 \
        --iodepth=32 --rw=randrw --bs=16k --time_based --runtime=1000 2>/dev/null &
    fio=$!
    until read -r reads writes </sys/block/vdc/inflight && ((reads + writes)); do
        kill -0 $fio
        nap 0.02
    done
    echo "$device" >$driver/unbind
    wait $fio && echo "the victim saw nothing" && exit 1
    [[ ! -e /sys/block/vdc ]]
    echo "$device" >$driver/bind
    until [[ -b /dev/vdc ]]; do nap 0.02; done
    load --name=check --filename=/dev/vdc --rw=randwrite --bs=4k --size=512k --randseed=$n
    [[ $n == [12] ]] || tell "bound $n"
done
"#;

/// The driver of User Mode Linux frees its ring without GET_VRING_BASE, and begins at base 0.
const BIND: &str = r#"
device=$(basename "$(readlink -f /sys/block/vda/device)")
driver=/sys/bus/virtio/drivers/virtio_blk
for n in 0 1 2; do
    head -c 32k /dev/urandom >/tmp/data
    dd if=/tmp/data of=/dev/vda bs=4k seek=$((n * 8)) oflag=direct conv=fsync,notrunc status=none
    echo "$device" >$driver/unbind
    [[ ! -e /sys/block/vda ]]
    echo "$device" >$driver/bind
    until [[ -b /dev/vda ]]; do nap 0.02; done
    dd if=/dev/vda bs=4k skip=$((n * 8)) count=8 iflag=direct status=none | cmp - /tmp/data
done
"#;

#[test]
fn the_driver_of_user_mode_linux_can_be_unbound_and_bound() {
    let mut fixture = GuestFixture::new(32 * MIB, &[]);
    fixture.boot(GuestKind::Uml, "", &[], BIND, Duration::from_secs(600)).finish();
    fixture.stop();
}

const RESET: &str = r#"
written() { fio --eta=never --output=/tmp/fio.log --name=kept --filename=/dev/vda --offset=1M --size=4M --bs=64k --ioengine=libaio \
    --direct=1 --iodepth=32 --verify=crc32c --verify_fatal=1 "$@" || { cat /tmp/fio.log && return 1; }; }
if [[ $(head -c 6 /dev/vda) == second ]]; then
    written --rw=read
    load --name=again --filename=/dev/vda --offset=8M --rw=randwrite --bs=4k --size=2M
    tell again
    exit
fi
written --rw=write --do_verify=0
echo second >/tmp/mark
dd if=/tmp/mark of=/dev/vda bs=512 conv=sync,fsync,notrunc status=none
load --name=more --filename=/dev/vda --offset=8M --rw=randrw --bs=4k --size=8M --time_based --runtime=900 &
echo loaded
# The host resets the machine.
wait $!
"#;

/// One queue, because a second processor makes both boots take twice as long. The driver is unbound
/// with two queues.
#[test]
fn the_machine_can_be_reset_under_load() {
    let mut fixture = GuestFixture::new(32 * MIB, &[]);
    let monitor = fixture.folder.join("qmp");
    let options = ["--qmp", monitor.to_str().unwrap()];
    let mut guest = fixture.boot(GuestKind::Qemu, "", &options, RESET, Duration::from_secs(600));
    guest.expect("loaded");
    fixture.until_served("write");
    let before = Footprint::of(fixture.daemon());
    let mut qmp = Qmp::connect(&monitor);
    // By default the runner's option -no-reboot makes QEMU exit at a reset.
    qmp.execute("set-action", json!({ "reboot": "reset" }));
    qmp.execute("system_reset", json!({}));
    // The second boot reads its script again.
    let job = guest.job();
    let file = json!({ "type": "file", "data": { "in": job, "out": "/dev/null" } });
    qmp.execute("chardev-change", json!({ "id": "job", "backend": file }));
    guest.expect("tell again");
    before.check(fixture.daemon());
    qmp.execute("set-action", json!({ "reboot": "shutdown" }));
    fixture.go_on();
    guest.finish();
    fixture.stop();
}

/// Resources of the daemon. (Without guest memory, whose pages appear in the mapping as they are
/// used.)
pub struct Footprint {
    descriptors: Vec<String>,
    own: u64,
}

impl Footprint {
    pub fn of(daemon: &Daemon) -> Self {
        Footprint { descriptors: daemon.descriptors(), own: daemon.kilobytes("RssAnon") }
    }

    /// Panics if the daemon has more resources now.
    #[track_caller]
    pub fn check(&self, daemon: &Daemon) {
        // The daemon closes the descriptors of old connections asynchronously.
        until(
            &format!(
                "as many descriptors as before: {:?} {:?}",
                self.descriptors,
                daemon.descriptors()
            ),
            SOON,
            || daemon.descriptors().len() == self.descriptors.len(),
        );
        let now = daemon.kilobytes("RssAnon");
        assert!(now <= self.own + GROWTH, "{} kB of its own before, {now} kB now", self.own);
    }
}
