//! kill -9 and upgrades of the server under a guest that cannot connect again: User Mode Linux.

use std::time::Duration;

use crate::common::{GuestKind, blockyard};
use crate::fixture::GuestFixture;

const KILLS: u32 = 10;
/// Delay of each request, so that most kills find requests in flight.
const DELAY: &str = "delay:read=4ms,write=4ms";

/// A load with checksums, repeated until the disk has grown, and then a file system.
const SCRIPT: &str = r#"
echo started
read -r before </sys/block/vda/size
now=$before n=0
while [[ $now == "$before" ]]; do
    load --filename=/dev/vda --randseed=$((n += 1)) \
        --name=small --rw=randwrite --bs=4k --size=2M --offset=0 \
        --name=mixed --rw=randrw --bsrange=4k-64k --size=4M --offset=4M \
        --name=synced --rw=randwrite --bs=8k --size=512k --offset=12M --fsync=8
    read -r now </sys/block/vda/size
done
echo "rounds $n"
mkfs.ext4 -q /dev/vda
e2fsck -fn /dev/vda
"#;

#[test]
fn a_guest_that_cannot_connect_again_survives_kills_and_upgrades_of_the_server() {
    let api = std::env::temp_dir().join(format!("by-api-{}", std::process::id()));
    let options = ["--keep-sessions", "--filter", DELAY, "--api", api.to_str().unwrap()];
    let mut fixture = GuestFixture::new(16 << 20, &options);
    let limit = Duration::from_secs(120);
    let mut guest = fixture.boot(GuestKind::Uml, "", &[], SCRIPT, limit);
    guest.expect("started");
    for n in 0..KILLS {
        fixture.until_served("write");
        std::thread::sleep(Duration::from_millis(u64::from(n * 37 % 100)));
        assert!(guest.running(), "the guest ended after {n} kills: {}", guest.finish());
        let holder = fixture.daemon();
        let upgrade = ["ctl", "--api", api.to_str().unwrap(), "--json", "upgrade"];
        holder.upgrade_kept(|| blockyard(upgrade).good());
        holder.kill_kept();
    }
    fixture.until_served("write");
    fixture.go_on();
    guest.expect("rounds");
    guest.finish();
    let log = fixture.stop();
    assert!(log.contains("in flight when the last back end ended"), "{log}");
}
