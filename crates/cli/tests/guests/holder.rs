//! kill -9 and upgrades of the server under a guest that cannot connect again: User Mode Linux.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::common::{GuestKind, TOOL, blockyard, until};
use crate::fixture::GuestFixture;

const KILLS: usize = 10;
/// Delay of each request, so that upgrades find requests in flight.
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

/// Returns the figures of the disk.
#[track_caller]
fn figures(api: &Path) -> Value {
    let mut stream = UnixStream::connect(api).unwrap();
    stream.write_all(b"GET /v1/figures HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    let figures: Value = serde_json::from_str(body).unwrap();
    figures["disks"][0].clone()
}

/// A drained server holds each request that comes. So a kill after one has come finds it in flight,
/// at whatever point of its load the guest is. The drain ends with the server.
#[test]
fn a_guest_that_cannot_connect_again_survives_kills_and_upgrades_of_the_server() {
    let api = std::env::temp_dir().join(format!("by-api-{}", std::process::id()));
    let ctl = |arguments: &[&str]| {
        blockyard(["ctl", "--api", api.to_str().unwrap(), "--json"].iter().chain(arguments)).good()
    };
    let options = ["--keep-sessions", "--filter", DELAY, "--api", api.to_str().unwrap()];
    let mut fixture = GuestFixture::new(16 << 20, &options);
    let limit = Duration::from_secs(120);
    let mut guest = fixture.boot(GuestKind::Uml, "", &[], SCRIPT, limit);
    guest.expect("started");
    for n in 0..KILLS {
        let writes = || figures(&api)["operations"]["write"]["requests"].as_u64();
        until("a write is answered", TOOL, || writes() > Some(0));
        std::thread::sleep(Duration::from_millis(n as u64 * 37 % 100));
        assert!(guest.running(), "the guest ended after {n} kills: {}", guest.finish());
        let holder = fixture.daemon();
        holder.upgrade_kept(|| ctl(&["upgrade"]));
        ctl(&["drain", "disk.img"]);
        until("a request is held", TOOL, || figures(&api)["in_flight"].as_u64() > Some(0));
        holder.kill_kept();
    }
    fixture.until_served("write");
    fixture.go_on();
    guest.expect("rounds");
    guest.finish();
    let log = fixture.stop();
    let repeats = log.matches("in flight when the last back end ended: repeating them").count();
    assert_eq!(repeats, KILLS, "{log}");
}
