//! What a server does whose client asks for nothing: it sleeps, or looks for a while (`--poll`).

use std::time::Duration;

use crate::common::{Folder, TOOL, until};
use crate::fixture::{NbdServer, beside, python};

/// How often the reactor went to sleep.
fn sleeps(disk: &NbdServer) -> u64 {
    let switches = disk.daemon.switches();
    switches
        .iter()
        .filter(|(name, _)| name.ends_with(" reactor-0"))
        .map(|(_, (slept, _))| slept)
        .sum()
}

#[test]
fn a_client_that_has_gone_quiet_costs_nothing() {
    let folder = Folder::new();
    // As long a look as may be asked for: it has an end, too.
    for poll in ["auto", "100000"] {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        // Enough for looking to be tried, and kept.
        let code = "import nbd, sys, time\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\n\
                    for i in range(20000): h.pread(4096, i % 1000 * 4096)\nprint('ready', flush=True)\ntime.sleep(600)";
        let mut client = beside("python3", ["-B", "-c", code, &disk.uri()]);
        until("the client has asked", TOOL, || client.out().contains("ready") || !client.running());
        let before = disk.daemon.quiet();
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(disk.daemon.switches(), before, "--poll {poll}: a thread has been awake");
        drop(client);
        disk.daemon.stop();
    }
}

#[test]
fn it_looks_for_as_long_as_it_is_told() {
    let folder = Folder::new();
    let slept = ["off", "100000"].map(|poll| {
        let disk = NbdServer::start("ram:64M", folder.join("s"), &["--poll", poll]);
        let code = "import time\nh = nbd.NBD()\nh.connect_uri(URI)\n\
                    for i in range(300):\n    h.pwrite(b'x' * 4096, i * 4096)\n    time.sleep(0.003)\nh.shutdown()";
        let before = sleeps(&disk);
        python(&disk.uri(), code).good();
        let slept = sleeps(&disk) - before;
        disk.daemon.stop();
        slept
    });
    let [off, looking] = slept;
    // (Of 300: on a busy machine it may find the next request there before it sleeps.)
    assert!(off >= 200, "without looking it sleeps before each request: {off}");
    assert!(looking < 100, "a request every 3 ms is waited for awake: {looking} sleeps");
}
