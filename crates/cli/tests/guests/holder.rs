//! kill -9 and upgrades of the server under a guest that cannot connect again: User Mode Linux.

use std::process::Command;
use std::time::Duration;

use crate::common::{
    BLOCKYARD, Daemon, Folder, Guest, GuestKind, Signal, StateFolder, TOOL, blockyard, until,
};
use crate::fixture::{figures, hold_a_request, script_with_prelude};

const KILLS: usize = 50;
/// Number of kills after which an upgrade comes.
const UPGRADE_EACH: usize = 5;

/// A load with checksums, repeated until the second disk has grown, and then a file system.
const SCRIPT: &str = r#"
echo started
read -r before </sys/block/vdb/size
now=$before n=0
while [[ $now == "$before" ]]; do
    load --filename=/dev/vda --randseed=$((n += 1)) \
        --name=small --rw=randwrite --bs=4k --size=2M --offset=0 \
        --name=mixed --rw=randrw --bsrange=4k-64k --size=4M --offset=4M \
        --name=synced --rw=randwrite --bs=8k --size=512k --offset=12M --fsync=8
    read -r now </sys/block/vdb/size
done
echo "rounds $n"
mkfs.ext4 -q /dev/vda
e2fsck -fn /dev/vda
"#;

/// The disk is a COW file. Its changed metadata are in the journal.
#[test]
fn a_guest_that_cannot_connect_again_survives_kills_and_upgrades_of_the_server() {
    let folder = Folder::new();
    folder.image("base.img", 16 << 20);
    let (image, flag) = (folder.join("disk.cow"), folder.image("flag.img", 1 << 20));
    let path = |name: &str| folder.join(name).into_os_string().into_string().unwrap();
    blockyard(["image", "create", "-q", "-f", "cow", "-b", "base.img", &path("disk.cow")]).good();
    // The delay lets upgrades find requests in flight. It is long, because the guest would keep a
    // processor busy otherwise.
    let disks = format!(
        "[[disk]]\nimage = '{}'\nvhost-user = '{}'\nfilters = ['delay:read=30ms,write=30ms']\n\
         [[disk]]\nimage = '{}'\nvhost-user = '{}'\n",
        path("disk.cow"),
        path("disk.sock"),
        path("flag.img"),
        path("flag.sock")
    );
    std::fs::write(folder.join("disks.toml"), disks).unwrap();
    let api = folder.join("api");
    let ctl = |arguments: &[&str]| {
        blockyard(["ctl", "--api", &path("api"), "--json"].iter().chain(arguments)).good()
    };
    let mut serve = Command::new(BLOCKYARD);
    serve.args(["serve", "--keep-sessions", "--config", &path("disks.toml"), "--api"]).arg(&api);
    let state = StateFolder::new();
    serve.arg("--state-folder").arg(state.path());
    let mut holder = Daemon::start(&mut serve);
    holder.wait_ready();
    let sockets = ["disk.sock", "flag.sock"].map(|name| folder.join(name));
    let options = sockets.iter().flat_map(|socket| Guest::vhost(socket, ""));
    let limit = Duration::from_secs(900);
    let mut guest = Guest::start(GuestKind::Uml, options, &script_with_prelude(SCRIPT), limit);
    guest.expect("started");
    for n in 0..KILLS {
        let writes = || figures(&api)["operations"]["write"]["requests"].as_u64();
        // Each kill comes at a different moment of the load.
        until("writes are answered", TOOL, || writes() > Some(n as u64 * 3 % 8));
        assert!(guest.running(), "the guest ended after {n} kills: {}", guest.finish());
        if n % UPGRADE_EACH == 0 {
            holder.upgrade_kept(|| ctl(&["upgrade"]));
        }
        hold_a_request(&api, "disk.cow");
        holder.kill_kept();
    }
    std::fs::File::options().write(true).open(&flag).unwrap().set_len(2 << 20).unwrap();
    holder.signal(Signal::HUP);
    guest.expect("rounds");
    guest.finish();
    let log = holder.stop();
    let repeats = log.matches("in flight when the last back end ended: repeating them").count();
    assert!(repeats >= KILLS, "{repeats}: {log}");
    assert_eq!(state.journals(), 0, "a journal is left after a clean end");
    blockyard(["image", "check", "-q", image.to_str().unwrap()]).good();
}
