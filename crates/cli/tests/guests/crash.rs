//! kill -9 of the daemon under a guest's verified load. The same guest, which has two processors,
//! then unbinds and binds a driver under load.

use std::time::Duration;

use crate::common::{Guest, GuestKind};
use crate::device::{Footprint, UNBIND};
use crate::fixture::{GuestFixture, script_with_prelude};

/// Number of kills of each daemon. Half of them must find requests in flight.
const KILLS: u32 = 20;
/// The next daemon logs this if a kill has found requests in flight.
const FOUND: &str = "in flight when the last back end ended";
/// Delay of each request. Without it most kills of a disk that is not drained would find no request
/// in flight, because an emulated guest is slower than the disk.
const DELAY: &str = "delay:read=30ms,write=30ms";

/// Two loads at once with checksums, repeated until both disks have grown, and a final verification
/// of everything.
const SCRIPT: &str = r#"
hammer() { # DISK ROUND...
    load --filename="$1" --randseed="$2" \
        --name=small --rw=randwrite --bs=4k --size=3M --offset=0 \
        --name=mixed --rw=randrw --bsrange=4k-64k --size=6M --offset=4M \
        --name=synced --rw=randwrite --bs=8k --size=1M --offset=12M --fsync=8 "${@:3}"
}
rounds() { # DISK: until it has grown
    local name=${1#/dev/} before now n=0
    read -r before </sys/block/$name/size
    now=$before
    while [[ $now == "$before" ]]; do
        hammer "$1" $((n += 1))
        read -r now </sys/block/$name/size
    done
    echo "rounds $n"
}
echo started
rounds /dev/vda &
first=$!
rounds /dev/vdb
wait $first
"#;

#[test]
fn a_guest_survives_twenty_kills_of_each_daemon_and_unbinds_a_driver_under_load_in_qemu() {
    let mut fixtures =
        [(); 2].map(|()| GuestFixture::with_api(16 << 20, &["--queues", "2", "--filter", DELAY]));
    let mut unbound = GuestFixture::new(32 << 20, &["--queues", "2"]);
    let disks = [",queues=2", ",queues=2,packed=on", ",queues=2"];
    let disks = fixtures.iter().chain([&unbound]).zip(disks);
    let disks = disks.flat_map(|(fixture, more)| Guest::vhost(&fixture.socket, more));
    let script = script_with_prelude(&format!("{SCRIPT}{UNBIND}"));
    let mut guest = Guest::start(GuestKind::Qemu, disks, &script, Duration::from_secs(600));
    guest.expect("started");
    let mut was_held = [false; 2];
    for n in 0..KILLS {
        for (i, fixture) in fixtures.iter_mut().enumerate() {
            // Each kill comes at a different moment of the load.
            fixture.daemon().until_served_more_than(u64::from(n % 4), "write", "");
            assert!(!was_held[i] || fixture.daemon().log().contains(FOUND), "after {n} kills");
            assert!(guest.running(), "the guest ended after {n} kills: {}", guest.finish());
            // The drain waits for requests at the disk, and holds new ones. So the disks are
            // drained by turns: the other kill may find requests at the disk.
            was_held[i] = n % 2 == i as u32;
            if was_held[i] {
                fixture.hold_a_request();
            }
            fixture.kill_and_restart();
        }
    }
    for (fixture, was_held) in fixtures.iter_mut().zip(was_held) {
        fixture.until_served("write");
        assert!(!was_held || fixture.daemon().log().contains(FOUND), "after the last kill");
        fixture.go_on();
    }
    guest.expect("rounds");
    guest.expect("rounds");
    guest.expect("tell bound 0");
    let before = Footprint::of(unbound.daemon());
    fixtures[0].go_on();
    guest.expect("tell bound 3");
    before.check(unbound.daemon());
    fixtures[0].go_on();
    guest.finish();
    unbound.stop();
    for fixture in &mut fixtures {
        fixture.stop();
    }
}
