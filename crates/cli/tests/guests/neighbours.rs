//! Two guests on one server and one slow device. One has less memory than it uses, and swaps. The
//! data of the other is verified.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{BLOCKYARD, Daemon, Folder, Guest, GuestKind};
use crate::fixture::{Statistics, script_with_prelude};

const LIMIT: Duration = Duration::from_secs(600);

/// The guest writes to its memory, most of which is swapped out, and reads the same data again.
const THRASHER: &str = r#"
    mkswap /dev/vda >/dev/null
    swapon /dev/vda
    for ((i = 0; i < 8; i++)); do
        gawk -v seed=$i -v n=100000 '
            BEGIN {
                srand(seed)
                for (i = 0; i < n; i++) a[i] = i
                print "filled"
                while ((getline line < "/share/enough") < 0)
                    for (k = 0; k < 1000; k++) { ++touched; a[int(rand() * n)] += n }
                for (i = 0; i < n; i++) { if (a[i] % n != i) wrong++; sum += (a[i] - i) / n }
                if (wrong || sum != touched) { print wrong " wrong of " n ", " sum " of " touched; exit 1 }
            }' &
        processes+=($!)
    done
    # Several times its memory, in both directions.
    swapped() {
        local key value read=0 written=0
        while read -r key value; do
            case $key in
            pswpin) read=$value ;;
            pswpout) written=$value ;;
            esac
        done </proc/vmstat
        ((read > 20000 && written > 20000))
    }
    until swapped; do nap 0.2; done
    echo swapped
    for process in "${processes[@]}"; do wait $process; done
"#;

const WORKER: &str = r#"
    mkfs.ext4 -q /dev/vda
    mount /dev/vda /mnt
    load --directory=/mnt --end_fsync=1 \
        --name=small --rw=randwrite --bs=4k --size=8M --fsync=32 --name=mixed --rw=randrw --bsrange=4k-64k --size=16M
    umount /mnt
    e2fsck -fn /dev/vda >/tmp/fsck 2>&1 || { cat /tmp/fsck && exit 1; }
"#;

#[test]
fn one_swaps_and_the_other_finds_its_data() {
    let folder = Folder::new();
    let disk = |name: &str, size: u64| {
        let (image, socket) = (folder.image(name, size), folder.join(name).with_extension("sock"));
        let model = "parallel=4,read=500us,write=500us,flush=1ms,bandwidth=256M,device=slow";
        let text = format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"delay:file={},{model}\"\nvhost-user = \"{}\"\ndevice = \"slow\"\n",
            image.display(),
            socket.display()
        );
        (socket, text)
    };
    let (worker, thrasher) = (disk("worker", 128 << 20), disk("thrasher", 512 << 20));
    let config = folder.join("config.toml");
    std::fs::write(&config, format!("reactors = 2\n{}{}", worker.1, thrasher.1)).unwrap();
    let mut daemon =
        Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(&config));
    daemon.wait_ready();
    let share = folder.join("share");
    std::fs::create_dir(&share).unwrap();
    let boot = |socket: &Path, script: &str, more: &[&str]| {
        let options = Guest::vhost(socket, "").into_iter().chain(more.iter().map(|o| o.into()));
        Guest::start(GuestKind::Uml, options, &script_with_prelude(script), LIMIT)
    };
    let mut thrasher =
        boot(&thrasher.0, THRASHER, &["--mem", "80M", "--share", share.to_str().unwrap()]);
    for _ in 0..8 {
        thrasher.expect("filled");
    }
    boot(&worker.0, WORKER, &[]).finish();
    thrasher.expect("swapped");
    std::fs::write(share.join("enough"), "").unwrap();
    thrasher.finish();
    let figures = Statistics(daemon.stop());
    assert_eq!(
        (figures.figure("read", "errors"), figures.figure("write", "errors")),
        (0, 0),
        "{}",
        figures.0
    );
}
